"""Questions about a World: runs of Workflow DevKit, the messages that are delivered for them, and the servers that
deliver. Runs are invocations of this app, in a queue that no runner serves; messages are those of an app beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import InvocationNotFound
from holdfast.model.explain import living
from holdfast.model.records import InvocationRecord, RunnerRecord
from holdfast.model.status import Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.listing import filter_of
from holdfast.runtime.runs import is_world
from holdfast.showing import fields, moment
from holdfast.web.documents import Document, invocation_document
from holdfast.world import wire
from holdfast.world.queue import OPEN, Message, Messages, as_message
from holdfast.world.records import QUEUE, TASK, invocation_of, run_name


class WorldRunPage(NamedTuple):
    """Runs of a World, newest first, and the cursor of the next page; None if there is none."""

    records: Sequence[InvocationRecord]
    before: str | None

    def document(self) -> Document:
        return {"runs": [run_facts(each) for each in self.records], "before": self.before}


class MessagePage(NamedTuple):
    """Messages of a World, newest first, and the cursor of the next page."""

    messages: Sequence[Message]
    before: str | None
    now: float

    def document(self) -> Document:
        return {"messages": [message_document(each) for each in self.messages], "before": self.before}


class WholeMessage(NamedTuple):
    """A message with what it carries; nothing if that cannot be read any more."""

    message: Message
    record: InvocationRecord
    call: Mapping[str, Any]
    now: float

    @property
    def content(self) -> Any:
        return wire.decode(self.call["body"]) if self.call else None

    def document(self) -> Document:
        content = msgspec.json.decode(self.call["body"]) if self.call else None
        return message_document(self.message) | {"content": content}


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
        found = await engine.store.find(engine.app, filter_of(status=status, queue=QUEUE, before=before), limit)
        after = found[-1].id if found and len(found) == limit else None
        return WorldRunPage([each for each in found if is_world(each)], after)

    async def messages(
        self, *, run: str | None = None, ended: bool = False, before: str | None = None, limit: int = 50
    ) -> MessagePage:
        """Return messages that are to be delivered; of a run, and with `ended`, also those that were."""
        engine = await self._runtime.engine()
        statuses = frozenset[Status]() if ended or run else OPEN
        found = await engine.part(Messages).find(run=run, statuses=statuses, limit=limit, before=before)
        after = min(each.id for each in found) if found and len(found) == limit else None
        return MessagePage([as_message(each) for each in found], after, engine.store.now())

    async def message(self, id: str) -> WholeMessage:
        """Return one message. Raises `InvocationNotFound`."""
        engine = await self._runtime.engine()
        messages = engine.part(Messages)
        record = await messages.get(id)
        if record is None:
            raise InvocationNotFound(
                f"the store has no message {id:.80}; holdfast world messages list --ended has them"
            )
        return WholeMessage(as_message(record), record, await messages.content(record), engine.store.now())

    async def servers(self) -> WorldServers:
        engine = await self._runtime.engine()
        roster = await engine.store.roster(engine.part(Messages).engine.app)
        return WorldServers(roster, living(roster, engine.store.now(), engine.settings.dead_after_seconds))


def run_facts(record: InvocationRecord) -> Document:
    """Return a run as an invocation, with its id and the name of its workflow in a World."""
    return {"run": run_name(record.id), "workflow": record.task.removeprefix(TASK)} | invocation_document(record)


def message_document(message: Message) -> Document:
    times = ("created_at", "due_at", "ended_at", "owned_at")
    facts: Document = msgspec.to_builtins(message)
    facts["invocation"] = invocation_of(message.run)
    return facts | {name: None if facts[name] is None else moment(facts[name]) for name in times}
