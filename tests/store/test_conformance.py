"""Every store of ours passes the suite that it ships with."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.conformance import StoreConformance


class TestMemory(StoreConformance):
    @pytest.fixture
    def store_url(self) -> str:
        return "memory://"


class TestSqlite(StoreConformance):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"
