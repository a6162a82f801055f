"""The report of a drain."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Self

from holdfast.ids import InvocationId
from holdfast.invocation import Invocation
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.triggers.evaluation import EVALUATES


class Ran:
    """One attempt of one call. `status` is its outcome (RETRY: another attempt follows), `error` the exception that it
    raised.
    """

    def __init__(self, invocation: Invocation[Any], task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.invocation = invocation
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.status: Status | None = None
        self.error: BaseException | None = None

    @property
    def id(self) -> InvocationId:
        return self.invocation.id

    @property
    def call(self) -> str:
        return as_call(self.task, self.args, self.kwargs)

    def __repr__(self) -> str:
        error = "" if self.error is None else f" ({type(self.error).__name__}: {self.error})"
        return f"{self.call} → {'running' if self.status is None else self.status}{error}"


class RanStep:
    """One attempt of a step of a workflow. `id` is its address in the run (``charge#2``)."""

    def __init__(
        self, run: Invocation[Any], id: str, attempt: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run = run
        self.id = id
        self.attempt = attempt
        self.args = args
        self.kwargs = kwargs
        self.error: BaseException | None = None

    @property
    def call(self) -> str:
        return as_call(self.id.partition("#")[0].partition("@")[0], self.args, self.kwargs)

    def __repr__(self) -> str:
        error = "" if self.error is None else f" ({type(self.error).__name__}: {self.error})"
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.id}: {self.call}{attempt}{error}"


class Report:
    """The attempts of a drain in the order of their starts, the steps of its workflows, and the calls that have not
    ended. A run of a workflow is one entry, however often it was suspended.
    """

    def __init__(
        self,
        ran: Sequence[Ran],
        records: Sequence[InvocationRecord | None],
        left: Sequence[InvocationRecord],
        now: float,
        *,
        steps: Sequence[RanStep] = (),
    ) -> None:
        self.ran = list(ran)
        self.steps = list(steps)
        self.left = sorted(left, key=lambda record: record.due_at)
        self._ends = {record.id: record for record in records if record is not None and record.status in FINAL}
        self._now = now

    def __len__(self) -> int:
        return len(self.ran)

    @property
    def succeeded(self) -> list[Ran]:
        return [ran for ran in self.ran if ran.status is Status.SUCCESS]

    @property
    def failed(self) -> list[Ran]:
        """Return attempts that ended a call without a result."""
        return [ran for ran in self.ran if ran.status in FINAL and ran.status is not Status.SUCCESS]

    @property
    def retried(self) -> list[Ran]:
        """Return attempts that failed and were followed by another, or will be."""
        return [ran for ran in self.ran if ran.status is Status.RETRY]

    @property
    def waiting(self) -> list[Ran]:
        """Return runs of workflows that sleep, or wait for a child."""
        return [ran for ran in self.ran if ran.status is Status.SUSPENDED]

    def raise_errors(self) -> None:
        """Raise the error of the failed call itself; of several, an `ExceptionGroup`."""
        errors = []
        for ran in self.failed:
            error = ran.error
            if error is None:
                end = self._ends.get(ran.id)
                error = AssertionError(f"it ended as {ran.status}: {end.reason if end else ''}")
            error.add_note(f"in {ran.call}, {ran.id}")
            errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} of {len(self)} calls failed", errors)

    def checked(self, check: bool) -> Self:
        if check:
            self.raise_errors()
        return self

    def __repr__(self) -> str:
        lines: list[str] = []
        for ran in self.ran:
            lines += [repr(ran), *[f"  {step!r}" for step in self.steps if step.run.id == ran.id]]
        lines = lines or ["nothing was due"]
        for record in self.left:
            at = record.due_at if record.wake_at is None else record.wake_at
            due = dt.timedelta(seconds=round(max(0.0, at - self._now), 3))
            lines.append(f"left: {record.task} {record.id} is {record.status}" + (f", due in {due}" if due else ""))
        return "\n".join(lines)


def as_call(task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Write a call as code: ``charge(1, amount=20)``."""
    parts = [_short(value) for value in args] + [f"{name}={_short(value)}" for name, value in kwargs.items()]
    name = task if task.startswith(EVALUATES) else task.rpartition(":")[2].rpartition(".")[2]
    return f"{name}({', '.join(parts)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
