"""Runs whose code and whose log are not ours, and the messages by which they go on: those of a World, as others see
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.model.records import InvocationRecord

MAX_DELIVERIES = 48  # of a message


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as people see it. `attempt` counts its deliveries, with the next or the present one; `owner` has it
    since `owned_at`.
    """

    id: str
    queue: str
    run: str
    invocation: str | None = None  # of the run, if `run` is the id of one
    status: str  # waiting, delivering, done, failed or cancelled
    attempt: int
    created_at: float
    due_at: float
    ended_at: float | None = None
    owner: str | None = None
    owned_at: float | None = None
    key: str = ""
    error: str = ""
    http_status: int | None = None
    refusals: int = 0  # connections in a row that were refused
    sent_to: str = ""
    reason: str = ""


class MessageContent(NamedTuple):
    """What a message carries: as a value, and as JSON has it; both None if it cannot be read any more."""

    value: Any
    plain: Any


class ForeignRuns(Protocol):
    """Runs whose code and whose log are not ours to change as an owner would: those of a World."""

    @property
    def app(self) -> str:
        """Return the app that messages lie in."""
        ...

    def has(self, record: InvocationRecord) -> bool: ...

    def name_of(self, record: InvocationRecord) -> str:
        """Return the id that a run has in its World."""
        ...

    async def cancel(self, record: InvocationRecord, *, by: str, reason: str) -> InvocationRecord:
        """Return the record as it is then."""
        ...

    async def rerun(self, record: InvocationRecord, request: str) -> str:
        """Return the id of the new run. Raises `UsageError`, `PayloadLost`."""
        ...

    async def messages(
        self, *, run: str | None, ended: bool, limit: int, before: str | None
    ) -> tuple[Sequence[Message], str | None]:
        """Return messages that are to be delivered, with `ended` others too; and the cursor of the next page."""
        ...

    async def message(self, id: str) -> tuple[Message, MessageContent] | None: ...

    async def redeliver(self, id: str, request: str) -> str:
        """Have a message delivered at once; return the id of the message that is. Raises `UsageError`."""
        ...
