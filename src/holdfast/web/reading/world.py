"""Questions about a World: runs of Workflow DevKit, the messages that are delivered for them, and the servers that
deliver. Runs are invocations of this app, in a queue that no runner serves; messages are those of an app beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.errors import InvocationNotFound
from holdfast.model.explain import living
from holdfast.model.records import InvocationRecord, RunnerRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.foreign import Message, MessageContent
from holdfast.runtime.listing import filter_of
from holdfast.runtime.runs import WORLD_QUEUE, WORLD_TASK, is_world
from holdfast.showing import fields, moment
from holdfast.web.documents import Document, invocation_document


class ForeignRun(NamedTuple):
    """A run of a World, with the id that it has there."""

    name: str
    record: InvocationRecord

    def document(self) -> Document:
        facts = {"run": self.name, "workflow": self.record.task.removeprefix(WORLD_TASK)}
        return facts | invocation_document(self.record)


class WorldRunPage(NamedTuple):
    """Runs of a World, newest first, and the cursor of the next page; None if there is none."""

    runs: Sequence[ForeignRun]
    before: str | None

    def document(self) -> Document:
        return {"runs": [each.document() for each in self.runs], "before": self.before}


class MessagePage(NamedTuple):
    """Messages of a World, newest first, and the cursor of the next page."""

    messages: Sequence[Message]
    before: str | None
    now: float

    def document(self) -> Document:
        return {"messages": [message_document(each) for each in self.messages], "before": self.before}


class WholeMessage(NamedTuple):
    """A message with what it carries."""

    message: Message
    content: MessageContent
    now: float

    def document(self) -> Document:
        return message_document(self.message) | {"content": self.content.plain}


class WorldServers(NamedTuple):
    """The servers that deliver messages, and which of them are alive."""

    servers: Sequence[RunnerRecord]
    alive: Sequence[RunnerRecord]

    def document(self) -> Document:
        ids = {each.id for each in self.alive}
        facts = [fields(each, "id", "host", "pid", "version", "heartbeat_at") for each in self.servers]
        return {"servers": [each | {"alive": each["id"] in ids} for each in facts]}


class WorldReading:
    """Ask for the World of an app. Each method runs on the engine's loop, and reads a page at most."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def runs(self, *, status: Iterable[str] = (), before: str | None = None, limit: int = 50) -> WorldRunPage:
        """Return runs. Raises `UsageError` for an unknown status."""
        engine = await self._runtime.engine()
        where = filter_of(status=status, queue=WORLD_QUEUE, before=before)
        found = await engine.store.find(engine.app, where, limit)
        after = found[-1].id if found and len(found) == limit else None
        return WorldRunPage([ForeignRun(engine.foreign.name_of(each), each) for each in found if is_world(each)], after)

    async def messages(
        self, *, run: str | None = None, ended: bool = False, before: str | None = None, limit: int = 50
    ) -> MessagePage:
        """Return messages that are to be delivered; of a run, and with `ended`, also those that were."""
        engine = await self._runtime.engine()
        found, after = await engine.foreign.messages(run=run, ended=ended, limit=limit, before=before)
        return MessagePage(found, after, engine.store.now())

    async def message(self, id: str) -> WholeMessage:
        """Return one message. Raises `InvocationNotFound`."""
        engine = await self._runtime.engine()
        found = await engine.foreign.message(id)
        if found is None:
            raise InvocationNotFound(
                f"the store has no message {id:.80}; holdfast world messages list --ended has them"
            )
        message, content = found
        return WholeMessage(message, content, engine.store.now())

    async def servers(self) -> WorldServers:
        engine = await self._runtime.engine()
        roster = await engine.store.roster(engine.foreign.app)
        return WorldServers(roster, living(roster, engine.store.now(), engine.settings.dead_after_seconds))


def message_document(message: Message) -> Document:
    times = ("created_at", "due_at", "ended_at", "owned_at")
    facts: Document = msgspec.to_builtins(message)
    return facts | {name: None if facts[name] is None else moment(facts[name]) for name in times}
