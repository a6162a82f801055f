"""A test that hangs fails, says where, and the others go on. A run with several processes would else never end.

The signal of a timer raises in the main thread, which runs the test. Where that is of no use, `faulthandler_timeout` of
pytest ends the process: then its other tests are given to another one, by `Scheduling`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest
from xdist.scheduler.loadgroup import LoadGroupScheduling
from xdist.workermanage import WorkerController

SECONDS = int(os.environ.get("HOLDFAST_TEST_SECONDS", "600"))


def _give_up(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback()
    pytest.fail(f"it has not ended within {SECONDS} s: where all threads are is in the output")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Scheduling(LoadGroupScheduling):
    """That of ``--dist loadgroup``, where processes die. xdist 3.8 gives the next process one group, for which it may
    wait for ever: if its tests are done, or if it is one test, since a process begins a test when it knows the next
    one, or that there is none. The test that ended the process is not run again.
    """

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        groups = {name: tests for name, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not groups:
            return None
        tests = next(iter(groups.values()))
        crashed = next(name for name, is_done in tests.items() if not is_done)
        tests[crashed] = True
        self.workqueue.update({name: tests for name, tests in groups.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
