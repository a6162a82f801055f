"""The workflows of Vercel's Python SDK on our store, in a process of their own: the SDK has one World in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App
from holdfast.errors import MissingExtra
from holdfast.world import vercel

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("url", ["mongodb", pytest.param("sqlite", marks=pytest.mark.faults)], indirect=True)
def test_workflows_of_the_sdk_run_on_our_store(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.world.vercel_program", url],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "WORKFLOW_"))},
        capture_output=True,
        text=True,
        timeout=patient(90),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["value"] == {"total": 3, "pair": [3, 7], "attempts": 2, "approved": True}
    assert found["words"] == ["a", "b"]
    assert found["status"] == ["completed", "failed"]
    assert "no customer" in found["error"]
    assert found["attributes"] == {"customer": "cus_1", "phase": "waiting"}
    kinds = found["kinds"]
    assert (kinds[:2], kinds[-1]) == (["run_created", "run_started"], "run_completed")
    counted = {kind: kinds.count(kind) for kind in ("step_completed", "step_retrying", "wait_completed", "attr_set")}
    assert counted == {"step_completed": 7, "step_retrying": 1, "wait_completed": 1, "attr_set": 2}


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vercel, "_SDK", "vercel.workflow.not_there")
    with App("memory://") as app, pytest.raises(MissingExtra, match="vercel-workflow"):
        vercel.use(app, "http://127.0.0.1:8000")
