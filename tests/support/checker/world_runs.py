"""I1, I5, I11 and I12 for the runs of a World: their logs as stored, against what witnesses in the application wrote.

A World run has no owner and no epoch, so a step's attempt takes the place of the epoch. The pages are read without the
World's own fold and guards: what is judged here does not judge itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import NamedTuple

import msgspec
from tests.support.checker.evidence import Faults, StreamLine, Violation, WorldLine
from tests.support.witness import Event, Ledgers, What, digest_of

from holdfast.codec import references
from holdfast.executors.chunks import CHUNK, CLOSE
from holdfast.ids import InvocationId
from holdfast.model.log import Page
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import is_world
from holdfast.store.contract import Filter
from holdfast.streams import records as streams
from holdfast.world.logs import asked
from holdfast.world.projection import STATUSES
from holdfast.world.records import decode, run_name
from holdfast.world.rules import HOOK_CREATED, HOOK_RECEIVED, RUN_CREATED, RUN_ENDS, STEP_CREATED, STEP_ENDS
from holdfast.world.rules import STEP_COMPLETED as COMPLETED
from holdfast.world.rules import STEP_STARTED as STARTED
from holdfast.world.storage import WorldStorage

_PAGE = 500


class RunLeft(msgspec.Struct, frozen=True):
    """A World run as the store was left: the status of its invocation, its log, and its streams by name."""

    status: Status
    log: tuple[WorldLine, ...] = ()
    streams: Mapping[str, tuple[StreamLine, ...]] = {}

    def of(self, *kinds: str) -> list[WorldLine]:
        return [line for line in self.log if line.event.type in kinds]


async def dump_worlds(engine: Engine) -> dict[str, RunLeft]:
    """Read the World runs of an app, by run id. Invocations that lag are repaired first, as a server does by itself."""
    while await engine.part(WorldStorage).sweep():
        pass
    found, before = dict[str, RunLeft](), None
    while records := await engine.store.find(engine.app, Filter(before_id=before), _PAGE):
        for record in records:
            if is_world(record):
                found[run_name(record.id)] = RunLeft(
                    record.status,
                    await _log(engine, record.id),
                    await _streams(engine, record.id),
                )
        before = records[-1].id
    return found


async def _pages(engine: Engine, log: str) -> list[Page]:
    found: list[Page] = []
    while pages := await engine.store.read_log(
        engine.app, InvocationId(log), after=found[-1].last if found else 0, limit=_PAGE
    ):
        found += pages
    return found


async def _digest(engine: Engine, data: bytes) -> str | None:
    if not data:
        return None
    return digest_of(engine.codec.decode(data, await engine.payloads.fetch(references(data))))


async def _log(engine: Engine, id: str) -> tuple[WorldLine, ...]:
    return tuple(
        [
            WorldLine(position, asked(page.operation), event, await _digest(engine, event.data))
            for page in await _pages(engine, id)
            for position, event in enumerate(decode(page), page.first)
        ]
    )


async def _streams(engine: Engine, id: str) -> dict[str, tuple[StreamLine, ...]]:
    found: dict[str, tuple[StreamLine, ...]] = {}
    for entry in await engine.store.entries(engine.app, streams.KIND, subject=id):
        found[entry.name.partition("/")[2]] = tuple(
            [
                StreamLine(
                    position=position,
                    epoch=page.epoch,
                    digest=await _digest(engine, event.data) or "closed",
                    kind=event.kind,
                )
                for page in await _pages(engine, entry.name)
                for position, event in enumerate(streams.decode(page), page.first)
            ]
        )
    return found


class WorldCase:
    """Runs, and what witnesses wrote of them."""

    def __init__(self, runs: Mapping[str, RunLeft], ledgers: Ledgers) -> None:
        self.runs = runs
        self.faults = Faults.of(ledgers)
        self._events: dict[What, list[Event]] = defaultdict(list)
        for event in sorted(ledgers.events, key=lambda event: event.at):
            self._events[event.what].append(event)

    def events(self, kind: What) -> list[Event]:
        return self._events.get(kind, [])


# --- I1


def accepted_runs_end(case: WorldCase) -> Iterator[Violation]:
    """I1: a run that was acknowledged is there and has ended once, and its invocation has the same end."""
    for event in case.events(What.SUBMIT_OK):
        if event.id not in case.runs or not case.runs[event.id].log:
            yield Violation("I1", event.id, "it was acknowledged, and is not there", (event,))
    for run, left in case.runs.items():
        ends = left.of(*RUN_ENDS)
        if left.log and not ends:
            yield Violation("I1", run, "it has not ended", left.log[-1:])
        elif len(ends) > 1:
            yield Violation("I1", run, "it has ended twice", tuple(ends))
        elif ends and left.status is not STATUSES[RUN_ENDS[ends[0].event.type]]:
            is_open = "" if left.status in FINAL else ", which is not final"
            yield Violation("I1", run, f"its log has an end, and its invocation is {left.status}{is_open}", (ends[0],))


def no_event_is_lost(case: WorldCase) -> Iterator[Violation]:
    """I1: a log begins with its creation, has no gap, and has each start of a step that was acknowledged."""
    for run, left in case.runs.items():
        for expected, line in enumerate(left.log, 1):
            if line.position != expected or (line.event.type == RUN_CREATED) != (expected == 1):
                yield Violation("I1", run, f"its log has another event where position {expected} is to be", (line,))
                break
    starts = {run: Counter(line.event.call for line in left.of(STARTED)) for run, left in case.runs.items()}
    for event in case.events(What.STEP_START):
        if event.id in starts and (event.attempt or 0) > starts[event.id][event.step]:
            sentence = f"the start of attempt {event.attempt} of {event.step} was acknowledged, and is not in the log"
            yield Violation("I1", event.id, sentence, (event,))


# --- I5


def a_step_ends_once(case: WorldCase) -> Iterator[Violation]:
    """I5: a step is created once and ends once, and nothing of it comes behind its end."""
    for run, left in case.runs.items():
        made, ended = dict[str, WorldLine](), dict[str, WorldLine]()
        for line in left.of(STEP_CREATED, STARTED, *STEP_ENDS):
            call = line.event.call
            if call in ended:
                yield Violation("I5", run, f"{call} has {line.event.type} behind its end", (ended[call], line))
            elif line.event.type == STEP_CREATED and made.setdefault(call, line) is not line:
                yield Violation("I5", run, f"{call} was created twice", (made[call], line))
            elif line.event.type in STEP_ENDS:
                ended[call] = line


def a_recorded_result_is_that_of_an_execution(case: WorldCase) -> Iterator[Violation]:
    """I5: what is recorded of a step is what one of its executions returned. Steps without witnesses are left out."""
    returned: dict[tuple[str | None, str], set[str | None]] = defaultdict(set)
    for event in case.events(What.STEP_END):
        if not event.raised:
            returned[event.id, event.step].add(event.digest)
    witnessed = {event.id for event in case.events(What.STEP_START)}
    for run, left in case.runs.items():
        for line in left.of(COMPLETED) if run in witnessed else ():
            if line.digest not in returned[run, line.event.call]:
                yield Violation("I5", run, f"no execution of {line.event.call} returned what is recorded", (line,))


def no_step_runs_again_without_a_fault(case: WorldCase) -> Iterator[Violation]:
    """I5: an attempt is executed once, and each further attempt has a fault before it to blame."""
    executions: dict[tuple[str | None, str], list[Event]] = defaultdict(list)
    for event in case.events(What.STEP_START):
        executions[event.id, event.step].append(event)
    for (run, step), starts in executions.items():
        by_attempt: dict[int | None, Event] = {}
        for again, event in enumerate(starts):
            if (first := by_attempt.setdefault(event.attempt, event)) is not event:
                yield Violation("I5", run, f"attempt {event.attempt} of {step} was executed twice", (first, event))
            blamed = [each for each in case.faults.all if each.kind.explains_reruns and each.at <= event.at]
            if again > len(blamed):
                sentence = f"{step} was executed {again + 1} times, with {len(blamed)} faults to blame"
                yield Violation("I5", run, sentence, (starts[0], event, *blamed))
                break


# --- I11


def _said(case: WorldCase) -> dict[tuple[str | None, str | None], list[Event]]:
    """Return the chunks that were written to each stream. A write that was repeated has the name of the first."""
    found: dict[tuple[str | None, str | None], dict[str | None, Event]] = defaultdict(dict)
    for event in case.events(What.CHUNK_SAID):
        found[event.id, event.key].setdefault(event.idempotency_key, event)
    return {stream: list(events.values()) for stream, events in found.items()}


def streams_are_as_they_were_said(case: WorldCase) -> Iterator[Violation]:
    """I11: a stream has no gap, and each chunk once, in the order of writing; nothing comes behind its close."""
    said = _said(case)
    for run, left in case.runs.items():
        for name, lines in left.streams.items():
            if [line.position for line in lines] != list(range(1, len(lines) + 1)):
                yield Violation("I11", run, f"the stream {name} has a gap", lines)
            if any(line.kind == CLOSE for line in lines[:-1]):
                yield Violation("I11", run, f"the stream {name} goes on behind its close", lines[-1:])
            chunks, words = [line for line in lines if line.kind == CHUNK], said.get((run, name), [])
            for number, line in enumerate(chunks if words else ()):
                if number >= len(words) or words[number].digest != line.digest:
                    sentence = f"the stream {name} has another chunk where number {number} was written"
                    yield Violation("I11", run, sentence, (*words[number : number + 1], line))
                    break


def ended_steps_have_their_chunks(case: WorldCase) -> Iterator[Violation]:
    """I11: a step whose success is recorded has lost no chunk."""
    for (run, name), words in _said(case).items():
        left = case.runs.get(run or "")
        if left is None:
            continue
        ended = {line.event.call for line in left.of(COMPLETED)}
        there = {line.digest for line in left.streams.get(name or "", ())}
        lost = [word for word in words if word.step in ended and word.digest not in there]
        if lost:
            sentence = f"{len(lost)} chunks are not in the stream {name}, and their steps have ended"
            yield Violation("I11", run, sentence, tuple(lost[:1]))


def readers_saw_each_chunk(case: WorldCase) -> Iterator[Violation]:
    """I11: what a reader was given is in the stream at that index, and no reader has missed or doubled one."""
    last: dict[str, Event] = {}
    for event in case.events(What.CHUNK_READ):
        left, index = case.runs.get(event.id or ""), event.index or 0
        lines = () if left is None else left.streams.get(event.key or "", ())
        if index >= len(lines) or lines[index].digest != event.digest:
            yield Violation("I11", event.id, f"a reader was given an item {index} that is not there", (event,))
        if (before := last.get(event.span)) is not None and index != (before.index or 0) + 1:
            yield Violation("I11", event.id, f"a reader was given {index} after {before.index}", (before, event))
        last[event.span] = event


# --- I12


class Given(NamedTuple):
    """A payload in a log: its hook's token, and which payload of that hook it is, from 0."""

    run: str
    token: str
    index: int
    line: WorldLine


def _given(case: WorldCase) -> Iterator[Given]:
    for run, left in case.runs.items():
        tokens, counts = dict[str, str](), Counter[str]()
        for line in left.of(HOOK_CREATED, HOOK_RECEIVED):
            call = line.event.call
            if line.event.type == HOOK_CREATED:
                tokens[call] = str(line.event.facts.get("token"))
            else:
                yield Given(run, tokens.get(call, ""), counts[call], line)
                counts[call] += 1


def payloads_are_there_once_or_refused(case: WorldCase) -> Iterator[Violation]:
    """I12: a payload that was acknowledged is in one log once, for the hook of its token; a refused one is nowhere."""
    places: dict[str | None, list[Given]] = defaultdict(list)
    for given in _given(case):
        places[given.line.digest].append(given)
    for digest, there in places.items():
        sent = next((event for event in case.events(What.RESUME_INVOKE) if event.digest == digest), None)
        if sent is None:
            continue
        if len(there) > 1:
            sentence = f"the payload {sent.idempotency_key} was delivered {len(there)} times"
            yield Violation("I12", there[0].run, sentence, (sent, *[given.line for given in there]))
        elif there[0].token != sent.key:
            sentence = f"the payload {sent.idempotency_key} for '{sent.key}' came to '{there[0].token}'"
            yield Violation("I12", there[0].run, sentence, (sent, there[0].line))
    acknowledged, refused = case.events(What.RESUME_OK), case.events(What.RESUME_FAIL)
    for event in acknowledged:
        if not places[event.digest]:
            sentence = f"the payload {event.idempotency_key} for '{event.key}' is lost"
            yield Violation("I12", None, sentence, (event,))
    known = {event.span for event in (*acknowledged, *refused)}
    open_ends = [event for event in case.events(What.RESUME_INVOKE) if event.span not in known]
    maybe = {event.digest for event in (*acknowledged, *open_ends)}
    for event in refused:
        if event.digest not in maybe and places[event.digest]:
            sentence = f"the payload {event.idempotency_key} for '{event.key}' was refused, and is there"
            yield Violation("I12", places[event.digest][0].run, sentence, (event,))


def payloads_have_one_order(case: WorldCase) -> Iterator[Violation]:
    """I12: payloads come in the order of their senders, and every replay saw them in the order of the log."""
    began, known = dict[str | None, float](), dict[str | None, float]()
    for event in case.events(What.RESUME_INVOKE):
        began.setdefault(event.digest, event.at)
    for event in case.events(What.RESUME_OK):
        known.setdefault(event.digest, event.at)
    there: dict[tuple[str, str], list[WorldLine]] = defaultdict(list)
    for given in _given(case):
        for earlier in there[given.run, given.token]:
            if known.get(given.line.digest, inf) < began.get(earlier.digest, -inf):
                sentence = f"'{given.token}' got its payloads in another order than they were sent in"
                yield Violation("I12", given.run, sentence, (earlier, given.line))
        there[given.run, given.token].append(given.line)
    for event in case.events(What.PAYLOAD_SEEN):
        lines, index = there[event.id or "", event.key or ""], event.index or 0
        if index >= len(lines) or lines[index].digest != event.digest:
            sentence = f"a replay saw another payload as number {index} of '{event.key}' than its log has"
            yield Violation("I12", event.id, sentence, (event, *lines[index : index + 1]))


WORLD_CHECKS: tuple[Callable[[WorldCase], Iterator[Violation]], ...] = (
    accepted_runs_end,
    no_event_is_lost,
    a_step_ends_once,
    a_recorded_result_is_that_of_an_execution,
    no_step_runs_again_without_a_fault,
    streams_are_as_they_were_said,
    ended_steps_have_their_chunks,
    readers_saw_each_chunk,
    payloads_are_there_once_or_refused,
    payloads_have_one_order,
)


def check_worlds(runs: Mapping[str, RunLeft], ledgers: Ledgers) -> list[Violation]:
    """Return every invariant of World runs that does not hold, in the order of their numbers."""
    case = WorldCase(runs, ledgers)
    return [violation for judge in WORLD_CHECKS for violation in judge(case)]
