"""Replay the runs of a test that have ended: a body that is not deterministic fails the test.

Each is replayed once in this process, at the end of a drain; and once more in another process with another hash seed,
at the end of the test: a loop over a set of texts goes in another order there. That process imports the modules of the
bodies again, and lives as long as the tests do. A body that it cannot find (a function inside of another one) is
replayed here only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import ReplayMismatch
from holdfast.executors.declared import MAINS, Unreachable, address_of
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.testing.other_process import Request, replayed_elsewhere, warm_up
from holdfast.workflows.replaying import StoredRun, code_of, read_run, replayed

if TYPE_CHECKING:
    from holdfast.app import App
    from holdfast.runtime.engine import Engine

_MAX_ELSEWHERE = 20  # runs of one workflow in a test


class FinishedRuns:
    """The runs of a test that have ended and are to be replayed."""

    def __init__(self, app: App, *, replays: bool, other_process: bool) -> None:
        self._app = app
        self._replays = replays
        self._other_process = other_process and replays
        self._waiting: dict[str, InvocationRecord] = {}
        self._elsewhere: list[Request] = []
        self._counts: Counter[str] = Counter()

    def note(self, record: InvocationRecord) -> None:
        """Note a run that has ended, or was parked."""
        if self._replays and (record.status in FINAL or record.status is Status.PARKED):
            self._waiting[record.id] = record

    async def to_replay(self, engine: Engine) -> Callable[[], None] | None:
        """Return what replays the runs that have ended since the last time; it raises `ReplayMismatch`."""
        noted, self._waiting = list(self._waiting.values()), {}
        if not noted:
            return None
        stored = [await read_run(engine, record) for record in noted]

        def replay_all() -> None:
            for each in stored:
                self._replay(each, engine)

        return replay_all

    def _replay(self, stored: StoredRun, engine: Engine) -> None:
        record = stored.record
        if record.status is Status.PARKED:
            raise ReplayMismatch(f"{record.task} {record.id} was parked: {record.reason}")
        definition = self._app.get_task(record.task).definition
        replayed(stored, definition, engine).raise_mismatch()
        self._counts[record.task] += 1
        if not self._other_process or self._counts[record.task] > _MAX_ELSEWHERE:
            return
        try:
            address = address_of(definition.name, definition.function, engine.codec)
        except Unreachable:
            return
        if MAINS & {address.module, address.declared_in}:
            return  # the program itself would run there once more
        self._elsewhere.append(Request.of(address, stored, code_of(definition), self._app.settings))
        warm_up()

    def replay_elsewhere(self) -> None:
        """Replay in another process what can be replayed there. Raises `ReplayMismatch`."""
        requests, self._elsewhere = self._elsewhere, []
        for request in requests:
            report = replayed_elsewhere(request)
            if report is not None and not report.fits:
                raise ReplayMismatch(
                    f"{report.mismatch}. That was in another process, with another hash seed: does the body loop over "
                    "a set, or use what this test has changed in its modules? "
                    "testing_app(app, other_process=False) turns this off"
                )
