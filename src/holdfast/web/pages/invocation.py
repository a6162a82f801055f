"""One invocation: why it stands where it stands, its life, its values, its family, and what one can do about it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.codec import references
from holdfast.groups.looking import Family, drawn
from holdfast.ids import is_id
from holdfast.model.eligibility import Reason
from holdfast.model.records import InvocationRecord, left_out
from holdfast.model.status import AVAILABLE, FINAL, Status
from holdfast.rates.labels import label_of
from holdfast.runtime.runs import StepRecord, is_world, span_of
from holdfast.showing import plain
from holdfast.web.documents import Document, hook_document, step_document
from holdfast.web.pages.as_pytest import as_pytest
from holdfast.web.pages.filters import tone
from holdfast.web.pages.lifelines import lifeline_of, machine_of, waterfall_of
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.problems import Problem
from holdfast.web.reading.model import WholeInvocation
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked
from holdfast.workflows.hooks_resuming import HookRecord

_LONGEST_EDITED = 20_000  # characters of arguments that a page lets edit
_EVENTS, _STEPS, _STREAMS, _CHUNKS, _HOOKS = 50, 100, 5, 30, 20
_STUCK = frozenset(Reason) - {Reason.NOT_IN_QUEUE, Reason.NOT_DUE, Reason.IN_BACKOFF, Reason.NO_SLOT, Reason.NO_START}
_CAN_WAKE = frozenset({Status.PARKED, Status.SUSPENDED})


class Looked(NamedTuple):
    """What the page has read."""

    whole: WholeInvocation
    family: Family
    hooks: Sequence[HookRecord]
    streams: Sequence[tuple[Any, Any]]  # each with its last chunks
    events: Any


async def invocation_page(asked: Asked) -> Callable[[], Context]:
    id = asked.path["id"]
    if not is_id(id):
        whole_id = await asked.runtime.arun(asked.reading.ids.find(id))
        root = str(asked.request.scope.get("root_path", "")).rstrip("/")
        raise Problem(303, "SeeOther", "the whole id", headers={"location": f"{root}/invocations/{whole_id}"})
    record = await asked.record()
    looked = await asked.runtime.arun(_looked(asked, record))
    now = (await asked.runtime.aready()).store.now()
    return lambda: _context(asked, looked, now)


async def _looked(asked: Asked, record: InvocationRecord) -> Looked:
    """Read what the page shows: a bounded number of records."""
    reading = asked.reading
    whole, family = await reading.whole(record), await reading.family(record)
    streams = []
    if record.has_streams or record.run is not None:
        for each in (await reading.streams(record)).streams[:_STREAMS]:
            streams.append((each, await reading.chunks(record, each.name, start=-_CHUNKS, limit=_CHUNKS)))
    hooks, events = [], None
    if record.run is not None:
        hooks = [each for each in (await reading.hooks(run=record.id, limit=_HOOKS)).hooks if each.is_open]
        events = await reading.events(record, after=asked.query["events"], limit=_EVENTS)
    return Looked(whole, family, hooks, streams, events)


def _context(asked: Asked, looked: Looked, now: float) -> Context:
    record, codec = looked.whole.record, asked.codec
    document = looked.whole.document(codec)
    calls = looked.whole.calls
    return {
        "call": document,
        "record": record,
        "tone": "warn"
        if record.status in AVAILABLE and _STUCK & set(looked.whole.why.reasons)
        else tone(record.status),
        "limit": None if record.limit_key is None else label_of(asked.runtime, record, record.limit_key),
        "is_ended": record.status in FINAL,
        "can_wake": record.status in _CAN_WAKE,
        "is_world": is_world(record),
        "machine": machine_of(record.history),
        "lifeline": lifeline_of(record, now),
        "failures": _failures(document),
        "edited": None if references(record.arguments) else _edited(document),
        "has_payloads": bool(record.payloads),
        "pytest": as_pytest(document, _module(asked, record), has_payloads=bool(references(record.arguments))),
        "family": [] if looked.family.is_alone else list(drawn(looked.family.lines)),
        "left_out": left_out(record.history),
        "waterfall": waterfall_of(calls, span_of(record, calls, now), record.queue) if calls else None,
        "steps": _steps(asked, calls[:_STEPS]),
        "more_steps": max(0, len(calls) - _STEPS),
        "hooks": [_hook(each) for each in looked.hooks],
        "streams": [_stream(info, chunks) for info, chunks in looked.streams],
        "events": None if looked.events is None else looked.events.document(codec),
        "is_long": is_long,
    }


def _failures(document: Document) -> list[Document]:
    """Return the errors of all attempts; the last one is that of the invocation itself."""
    found = list(document["errors"])
    if document["error"] is not None:
        last = {"number": None, "attempt": document["attempt"], "at": document["changed_at"]}
        found.append(last | document["error"])
    return found


def _edited(document: Document) -> Document | None:
    """Return the arguments for a form; None if they cannot be edited as JSON."""
    arguments = document["arguments"]
    if arguments is None or "unreadable" in arguments:
        return None
    values: Document = plain(arguments)
    return values if len(json.dumps(values)) <= _LONGEST_EDITED else None


def _module(asked: Asked, record: InvocationRecord) -> str | None:
    task = asked.runtime.tasks.get(record.task)
    return None if task is None else getattr(inspect.unwrap(task.definition.function), "__module__", None)


def _steps(asked: Asked, calls: Sequence[StepRecord]) -> list[Document]:
    return [step_document(asked.codec, call) for call in calls]


def _hook(hook: HookRecord) -> Document:
    return hook_document(hook) | {"title": hook.token or hook.call, "schema": dict(hook.schema)}


def _stream(info: Any, page: Any) -> Document:
    document = page.document()
    texts = [_chunk_text(item) for item in document["items"]]
    return {"name": info.name, "texts": texts, "next": page.next, "is_closed": page.is_closed}


def _chunk_text(item: Mapping[str, Any]) -> str:
    value = item["value"]
    if item["kind"] != "chunk":
        return f"[{item['kind']}]"
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def is_long(value: Any, longest: int = 4000) -> bool:
    """Return whether a page cuts a value."""
    return len(json.dumps(plain(value), ensure_ascii=False, indent=2)) > longest


PAGES = (
    WebPage(
        "/invocations/{id}",
        "Invocation",
        "invocation.html",
        invocation_page,
        {"events": Parameter("only events after this one: a cursor")},
        nav="invocations",
        topics=("invocation:{id}",),
    ),
)
