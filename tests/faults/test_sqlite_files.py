"""Code of the user drops SQLite's locks all the time, while other processes open and close the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.scenarios.programs import LOOK, a_program, assert_found
from tests.support.patience import patient

HAMMERING = """
def hammer():
    while not over.is_set():
        {code}
        time.sleep(0.0005)
over = threading.Event()
thread = threading.Thread(target=hammer)
thread.start()
"""
KINDS = {
    "open-and-close": "open(path, 'rb').read(100)",
    "open-and-close-the-index": "open(path + '-shm', 'rb').read(100)",
    "a-second-library": "its = pysqlite3.connect(path); its.execute('SELECT * FROM sqlite_master'); its.close()",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has locks that belong to an open file")
@pytest.mark.faults
@pytest.mark.parametrize("code", KINDS.values(), ids=KINDS)
def test_what_is_acknowledged_is_found_while_locks_are_dropped(tmp_path: Path, code: str) -> None:
    path = tmp_path / "shop.db"
    ids: list[str] = []
    with a_program(tmp_path, "program") as program:
        if "pysqlite3" in code:
            pytest.importorskip("pysqlite3")
            program.do("import pysqlite3")
        program.do(f"path = {str(path)!r}; app, task = opened(path); task.submit(0)")
        program.do(HAMMERING.format(code=code))
        for _ in range(15):
            looker = subprocess.Popen([sys.executable, "-c", LOOK, str(path)], stdout=subprocess.DEVNULL)
            ids += program.submit(100)
            assert looker.wait(timeout=patient(30)) == 0
            assert_found(path, ids)
        program.do("over.set(); thread.join(); app.close()")
    assert_found(path, ids)
