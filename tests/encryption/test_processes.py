"""Tasks in processes of their own: what comes back from a child is encrypted as everything is."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from tests.encryption.conftest import Dump, key
from tests.encryption.test_encrypted import CANARY, LARGE, forms, stored
from tests.support.patience import patient

from holdfast import Secret


@pytest.fixture
def vault(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("HOLDFAST_URL", url)
    monkeypatch.setenv("HOLDFAST_ENCRYPTION_KEYS", key("k1"))
    module = importlib.import_module("tests.encryption.vault")
    with module.app:
        yield module
    del sys.modules["tests.encryption.vault"]


@pytest.mark.slow
def test_arguments_results_and_errors_of_children_are_encrypted(vault: ModuleType, dump: Dump) -> None:
    small, large = vault.charge.submit(CANARY, ""), vault.charge.submit(CANARY, LARGE)
    failed, token = vault.fail.submit(CANARY), vault.token.submit(CANARY)
    with vault.app.runner(concurrency=2):
        assert small.result(timeout=patient(60)) == f"charged {CANARY} "
        assert token.result(timeout=patient(60)) == Secret(f"token of {CANARY}")
        assert large.result(timeout=patient(60)) == f"charged {CANARY} {LARGE}"
        with pytest.raises(ValueError, match=CANARY):
            failed.result(timeout=patient(60))
    names = stored(vault.app, large.id).payloads
    bare = vault.app.runtime.codec.encode(f"charged {CANARY} {LARGE}")
    assert len(names) == 2, "its arguments and its result"
    assert hashlib.sha256(bare).hexdigest() not in names
    there = dump(vault.app)
    assert [form for form in forms(CANARY) if form in there] == []
