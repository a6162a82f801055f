"""The read model: what commands, the HTTP API and pages ask the store, each question in one place.

An answer is a small value with its records and its document. Commands print the records for people and the document
with ``--json``; the API sends the document. Everything here runs on the engine's loop; a document is made on the
caller's thread, since values may run user code when they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast.access.audit import AuditFilter, AuditLog, AuditRecord
from holdfast.clock import Duration
from holdfast.codec import Codec, Payloads, references
from holdfast.errors import UsageError
from holdfast.groups.looking import Family, family_of
from holdfast.ids import InvocationId
from holdfast.model.explain import Explanation
from holdfast.model.notes import NO_NOTES
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.listing import listed
from holdfast.runtime.runs import LogEvent, StepRecord, Stored
from holdfast.runtime.streams import Chunk, StreamInfo
from holdfast.runtime.wait import get_all, get_readable
from holdfast.showing import describe, fields
from holdfast.stats import Stats
from holdfast.stats.api import Since, moment_of, stats_of
from holdfast.store.contract import Filter
from holdfast.streams.reader import LogReader, StreamReading
from holdfast.streams.rules import ALL, first_index
from holdfast.web.documents import (
    Document,
    audit_document,
    chunk_document,
    chunk_value,
    error_document,
    errors_document,
    event_document,
    history_document,
    hook_document,
    invocation_document,
    notes_document,
    origin_document,
    run_document,
    stats_document,
    step_document,
    stored_document,
)
from holdfast.web.reading.finding import IdFinder
from holdfast.web.reading.health import HealthReading
from holdfast.web.reading.runners import RunnerReading
from holdfast.web.reading.searching import Searching
from holdfast.web.reading.store import StoreReading
from holdfast.workflows.hooks_records import address_of, resume_id_of
from holdfast.workflows.hooks_resuming import HookAccess, HookRecord, looked_up

_RERUNS = 10
_LARGEST = 64 * 1024 * 1024  # bytes of values in an answer


class InvocationPage(NamedTuple):
    """Invocations, newest first, and the cursor of the next page; None if there is none."""

    records: Sequence[InvocationRecord]
    before: str | None

    def document(self) -> Document:
        return {"invocations": [invocation_document(record) for record in self.records], "before": self.before}


class WholeInvocation(NamedTuple):
    """Everything about one invocation: what holds it back, the calls of a workflow's body, and its last reruns."""

    record: InvocationRecord
    why: Explanation
    calls: Sequence[StepRecord]
    reruns: Sequence[InvocationRecord]

    def document(self, codec: Codec) -> Document:
        record = self.record
        result = None if record.result is None else Stored(record.result, codec)
        return invocation_document(record) | {
            "explanation": self.why.text,
            "arguments": stored_document(codec, Stored(record.arguments, codec), call_of=record.task),
            "result": stored_document(codec, result),
            "error": error_document(record.error),
            "errors": errors_document(record),
            "retries": record.terms.retries,
            "reruns": [again.id for again in self.reruns],
            "origin": origin_document(record.origin),
            "run": run_document(record, self.calls),
            **notes_document(codec, record),
            "history": history_document(record.history),
        }


class WholeValues(NamedTuple):
    """The arguments and the result of an invocation with all that is stored apart, and its checkpoint."""

    record: InvocationRecord
    payloads: Payloads

    def document(self, codec: Codec) -> Document:
        record, notes = self.record, self.record.notes or NO_NOTES
        values = {"result": record.result, "checkpoint": notes.checkpoint}
        found = {
            name: stored_document(codec, None if data is None else Stored(data, codec, self.payloads))
            for name, data in values.items()
        }
        arguments = stored_document(codec, Stored(record.arguments, codec, self.payloads), call_of=record.task)
        return fields(record, "id", "task", "status") | {"arguments": arguments, **found}


class ExplainedInvocation(NamedTuple):
    """What an invocation waits for, or how it ended."""

    record: InvocationRecord
    why: Explanation

    def document(self) -> Document:
        facts = fields(self.record, "id", "task", "status", "queue")
        return facts | {"reasons": list(self.why.reasons), "explanation": self.why.text}


class CallPage(NamedTuple):
    """Steps, children and waits of a run, in the order of its log."""

    record: InvocationRecord
    calls: Sequence[StepRecord]
    after: str | None

    def document(self, codec: Codec) -> Document:
        steps = [step_document(codec, call) for call in self.calls]
        return fields(self.record, "id", "task", "status") | {"steps": steps, "after": self.after}


class LogPage(NamedTuple):
    """Events of a run, in the order of its log."""

    record: InvocationRecord
    events: Sequence[LogEvent]
    after: str | None

    def document(self, codec: Codec) -> Document:
        events = [event_document(codec, event) for event in self.events]
        return fields(self.record, "id", "task", "status") | {"events": events, "after": self.after}


class HookPage(NamedTuple):
    """Hooks, in the order of their names, and the cursor of the next page."""

    hooks: Sequence[HookRecord]
    before: str | None

    def document(self) -> Document:
        return {"hooks": [hook_document(hook) for hook in self.hooks], "before": self.before}


class WholeHook(NamedTuple):
    """A hook, the status of its run, and the ids of payloads that the run has not taken yet."""

    hook: HookRecord
    status: str
    waiting: Sequence[str]

    def document(self) -> Document:
        more = {"schema": dict(self.hook.schema), "run_status": self.status, "waiting": list(self.waiting)}
        return hook_document(self.hook) | more


class StreamList(NamedTuple):
    """The streams of an invocation, by name."""

    record: InvocationRecord
    streams: Sequence[StreamInfo]

    def document(self) -> Document:
        return fields(self.record, "id", "task", "status") | {"streams": [fields(each) for each in self.streams]}


class ChunkPage(NamedTuple):
    """Items of a stream that are there now, and the index of the next one; no more will come if it `is_closed`."""

    record: InvocationRecord
    stream: str
    items: Sequence[Chunk]
    next: int
    is_closed: bool

    def document(self) -> Document:
        items = [chunk_document(chunk) for chunk in self.items]
        more = {"stream": self.stream, "items": items, "next": self.next, "is_closed": self.is_closed}
        return fields(self.record, "id", "task", "status") | more


class StatsAnswer(NamedTuple):
    """Statistics of a time."""

    stats: Stats

    def document(self) -> Document:
        return stats_document(self.stats)


class AuditList(NamedTuple):
    """Audit records, newest first, and the cursor of the next page; None if there is none."""

    records: Sequence[AuditRecord]
    before: str | None

    def document(self) -> Document:
        return {"records": [audit_document(record) for record in self.records], "before": self.before}


class ReadModel:
    """Ask the store of one app. Each method runs on the engine's loop (`AppRuntime.run`, `AppRuntime.arun`)."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        assert runtime.looks is not None
        self._looking = runtime.looks
        self._hooks = HookAccess(runtime)
        self.runners = RunnerReading(runtime)
        self.health = HealthReading(runtime)
        self.store = StoreReading(runtime)
        self.ids = IdFinder(runtime)
        self.searching = Searching(runtime)

    async def record(self, id: str) -> InvocationRecord:
        """Return one invocation. Raises `InvocationNotFound`, `CorruptRecord`."""
        engine = await self._runtime.engine()
        (record,) = await get_all(engine.store, engine.app, [InvocationId(id)])
        return record

    async def invocations(
        self,
        where: Filter,
        limit: int,
        keep: Callable[[InvocationRecord], bool] | None = None,
        *,
        core: bool = False,
    ) -> InvocationPage:
        """Return the invocations that `keep` wants; see `listed`. With `core`, those of Holdfast's own tasks."""
        engine = await self._runtime.engine()
        return InvocationPage(*await listed(engine.core if core else engine, where, limit, keep))

    async def whole(self, record: InvocationRecord) -> WholeInvocation:
        engine = await self._runtime.engine()
        calls = [] if record.run is None else await self._looking.calls(engine, record)
        return WholeInvocation(record, await self._runtime.explain(record), calls, await self.reruns(record.id))

    async def values(self, record: InvocationRecord) -> WholeValues:
        """Return the values of an invocation whole. Raises `UsageError` for over 64 MB, `PayloadLost`."""
        engine = await self._runtime.engine()
        wanted = {
            each.digest: each
            for data in (record.arguments, record.result, (record.notes or NO_NOTES).checkpoint)
            if data is not None
            for each in references(data)
        }
        size = sum(each.size for each in wanted.values())
        if size > _LARGEST:
            raise UsageError(f"its values have {size:,} bytes, and here up to {_LARGEST:,}: ask in Python")
        return WholeValues(record, await engine.payloads.fetch(list(wanted.values())))

    async def reruns(self, id: str) -> Sequence[InvocationRecord]:
        """Return the last few reruns of an invocation."""
        engine = await self._runtime.engine()
        return await engine.store.find(engine.app, Filter(rerun_of=id), _RERUNS)

    async def family(self, record: InvocationRecord) -> Family:
        """Return its parents, chain, group, callback and children."""
        return await family_of(await self._runtime.engine(), record)

    async def why(self, record: InvocationRecord) -> ExplainedInvocation:
        return ExplainedInvocation(record, await self._runtime.explain(record))

    async def steps(self, record: InvocationRecord, *, after: str | None = None, limit: int | None = None) -> CallPage:
        """Return the calls of a run; `after` is the id of the last one of the page before. Raises `UsageError`."""
        calls = await self._looking.calls(await self._runtime.engine(), record)
        if after is not None:
            places = [number for number, call in enumerate(calls, 1) if call.id == after]
            if not places:
                raise UsageError(f"after={after[:80]!r} is no step of this run: give the id of the last step of a page")
            calls = calls[places[0] :]
        page = calls if limit is None else calls[:limit]
        return CallPage(record, page, page[-1].id if page and len(page) < len(calls) else None)

    async def step(self, record: InvocationRecord, step: str) -> CallPage:
        """Return one call of a run. Raises `UsageError` for a task, `StepNotFound`."""
        engine = await self._runtime.engine()
        return CallPage(record, [await self._looking.step(engine, record, step, fetch=False)], None)

    async def events(
        self, record: InvocationRecord, *, correlation: str | None = None, after: str | None = None, limit: int = 100
    ) -> LogPage:
        """Return events of a run; `after` is the cursor of the last one of the page before."""
        engine = await self._runtime.engine()
        events = await self._looking.events(
            engine, record, correlation=correlation, generation=None, after=after, limit=limit, fetch=False
        )
        return LogPage(record, events, events[-1].cursor if events and len(events) == limit else None)

    async def stats(
        self,
        since: Since = "1h",
        until: Since | None = None,
        *,
        step: Duration | None = None,
        task: str | Iterable[str] = (),
        queue: str | Iterable[str] = (),
    ) -> StatsAnswer:
        """Return what ended over a time, how long it took, and what failed. Raises `UsageError`."""
        engine = await self._runtime.engine()
        found = await stats_of(self._runtime, engine, since, until, step=step, task=task, queue=queue)
        return StatsAnswer(found)

    async def audit(
        self,
        *,
        who: str | None = None,
        action: str | None = None,
        target: str | None = None,
        since: Since | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> AuditList:
        """Return audit records; `before` is the cursor of the page before. Raises `UsageError`."""
        engine = await self._runtime.engine()
        start = None if since is None else moment_of("since", since, engine.store.now())
        where = AuditFilter(who or "", action or "", target or "", start)
        return AuditList(*await engine.part(AuditLog).page(where, limit, before))

    async def hooks(self, *, run: str | None = None, before: str | None = None, limit: int = 100) -> HookPage:
        """Return stored hooks, or those of a run; `before` is the name of the last one of the page before."""
        found = await self._hooks.ahooks(run=run, before=before, limit=limit)
        return HookPage(found, found[-1].name if found and len(found) == limit else None)

    async def hook(self, name: str) -> WholeHook | None:
        """Return a hook by its name, the hash of its token; None if there is none, or its run has ended."""
        engine = await self._runtime.engine()
        found = await looked_up(engine, name)
        if found is None:
            return None
        (run,) = await get_readable(engine.store, engine.app, [found.run])
        if run is None:
            return WholeHook(found, "removed", ())
        wanted = [entry for entry in run.run.inbox if entry.call == address_of(name)] if run.run is not None else []
        return WholeHook(found, str(run.status), [describe(resume_id_of(entry.id)) for entry in wanted])

    async def streams(self, record: InvocationRecord) -> StreamList:
        return StreamList(record, await StreamReading().streams(await self._runtime.engine(), record.id))

    def stream(self, id: str, name: str, start: int = 0, stop: int | None = None, attempts: str = ALL) -> LogReader:
        """Return a reader, which needs no code: a value of a class that is not imported is the data that it holds.
        Raises `UsageError`.
        """

        def decode(data: bytes, payloads: Payloads) -> object:
            return chunk_value(self._runtime.codec, data, payloads)

        return LogReader(self._runtime, InvocationId(id), name, start, stop, attempts, decode=decode)

    async def chunks(
        self, record: InvocationRecord, name: str, *, start: int, limit: int, attempts: str = ALL
    ) -> ChunkPage:
        """Return items of a stream from an index on; below 0 it counts from the end. Large values are left out. Raises
        `StreamGone`.
        """
        tail = await self.stream(record.id, name).atail()
        first = first_index(start, tail.index + 1)
        behind = max(first, min(first + limit, tail.index + 1))
        reader = self.stream(record.id, name, first, behind, attempts)
        items = [chunk async for batch in reader.batches(fetch=False) for chunk in batch] if behind > first else []
        return ChunkPage(record, name, items, behind, tail.is_closed and behind > tail.index)
