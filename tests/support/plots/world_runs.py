"""World runs in which something went wrong, and close calls: each a change of a run that is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from tests.support.checker.evidence import StreamLine, Violation, WorldLine
from tests.support.checker.world_runs import RunLeft, WorldCase, check_worlds
from tests.support.plots.material import saw
from tests.support.plots.streams import line as chunk
from tests.support.plots.streams import marker
from tests.support.witness import Event, Ledgers, What, digest_of

from holdfast.executors.chunks import CLOSE
from holdfast.model.status import Status
from holdfast.world.rules import WorldEvent

RUN = "run"
Lines = Sequence[WorldLine]


class WorldPlot(NamedTuple):
    """Runs as the store was left, what witnesses wrote, and the invariant that is broken."""

    name: str
    breaks: str
    runs: Mapping[str, RunLeft]
    events: Sequence[Event] = ()

    def judged(self) -> list[Violation]:
        return check_worlds(self.runs, Ledgers(tuple(self.events)))

    def case(self) -> WorldCase:
        return WorldCase(self.runs, Ledgers(tuple(self.events)))


def log(*events: tuple[Any, ...]) -> tuple[WorldLine, ...]:
    """Make a log of types, calls and the values that user code gave; hooks are named after their tokens."""
    lines = []
    for position, (kind, call, *value) in enumerate(events, 1):
        facts = {"token": call} if kind == "hook_created" else {}
        event = WorldEvent(type=kind, call=call, at=float(position), facts=facts)
        lines.append(WorldLine(position, f"op {position}", event, digest_of(value[0]) if value else None))
    return tuple(lines)


CREATED, STARTED, ENDED = ("run_created", ""), ("run_started", ""), ("run_completed", "")
MADE, BEGUN, CHARGED = ("step_created", "charge"), ("step_started", "charge"), ("step_completed", "charge", "paid")
HOOK, FIRST, SECOND = ("hook_created", "t"), ("hook_received", "t", "yes"), ("hook_received", "t", "no")
WHOLE = (CREATED, STARTED, MADE, BEGUN, CHARGED, HOOK, FIRST, SECOND, ENDED)
CHUNKS = (chunk(1, "a"), chunk(2, "b"), marker(3, CLOSE))


def left(
    *events: tuple[Any, ...], chunks: Sequence[StreamLine] = CHUNKS, status: Status = Status.SUCCESS
) -> dict[str, RunLeft]:
    return {RUN: RunLeft(status, log(*(events or WHOLE)), {"out": tuple(chunks)})}


def logged(change: Callable[[Lines], Lines]) -> dict[str, RunLeft]:
    whole = left()[RUN]
    return {RUN: replace(whole, log=tuple(change(whole.log)))}


def without(*events: tuple[Any, ...]) -> dict[str, RunLeft]:
    return left(*[each for each in WHOLE if each not in events])


def behind(event: tuple[Any, ...], *more: tuple[Any, ...]) -> dict[str, RunLeft]:
    place = WHOLE.index(event) + 1
    return left(*WHOLE[:place], *more, *WHOLE[place:])


def execution(at: float, attempt: int = 1, value: object = "paid") -> list[Event]:
    facts: dict[str, Any] = {"id": RUN, "step": "charge", "attempt": attempt, "epoch": 0, "span": f"charge {at}"}
    said = [
        saw(What.CHUNK_SAID, at + number / 100, **facts, key="out", idempotency_key=name, digest=digest_of(name))
        for number, name in enumerate("ab", 1)
    ]
    return [
        saw(What.STEP_START, at, **facts),
        *said,
        saw(What.STEP_END, at + 0.1, **facts, digest=digest_of(value)),
    ]


def sent(at: float, value: str, outcome: What = What.RESUME_OK, until: float | None = None) -> list[Event]:
    facts: dict[str, Any] = {"key": "t", "idempotency_key": value, "digest": digest_of(value), "span": f"{value} {at}"}
    return [saw(What.RESUME_INVOKE, at, **facts), saw(outcome, at + 0.1 if until is None else until, **facts)]


def seen(at: float, *values: str) -> list[Event]:
    return [
        saw(What.PAYLOAD_SEEN, at, id=RUN, key="t", index=index, digest=digest_of(value))
        for index, value in enumerate(values)
    ]


def read(*items: tuple[int, object]) -> list[Event]:
    return [
        saw(What.CHUNK_READ, 9 + index / 10, id=RUN, key="out", span="reader", index=index, digest=digest_of(value))
        for index, value in items
    ]


def fault(at: float, kind: str = "kill") -> list[Event]:
    return [saw(What.FAULT_START, at, kind=kind, span=f"fault {at}"), saw(What.FAULT_END, at, span=f"fault {at}")]


MADE_IT = [saw(What.SUBMIT_OK, 0.1, token=RUN, id=RUN)]
STORY = [*MADE_IT, *execution(1), *sent(3, "yes"), *seen(3.5, "yes"), *sent(4, "no"), *seen(5, "yes", "no")]
READ = read((0, "a"), (1, "b"))
AGAIN = behind(BEGUN, BEGUN)  # a second attempt is in the log

PLANTED = [
    # --- I1
    WorldPlot("an acknowledged run that is not there", "I1", {}, MADE_IT),
    WorldPlot("a run without its log", "I1", {RUN: RunLeft(Status.SUSPENDED)}, MADE_IT),
    WorldPlot("an end that never came", "I1", left(*WHOLE[:-1], status=Status.SUSPENDED), STORY),
    WorldPlot("two ends", "I1", behind(ENDED, ("run_failed", "")), STORY),
    WorldPlot("an invocation that does not know the end", "I1", left(status=Status.SUSPENDED), STORY),
    WorldPlot("an invocation with another end", "I1", left(status=Status.FAILED), STORY),
    WorldPlot("a log with a gap", "I1", logged(lambda lines: [*lines[:1], *lines[2:]]), STORY),
    WorldPlot("a log without its creation", "I1", without(CREATED), STORY),
    WorldPlot("two creations", "I1", behind(CREATED, CREATED), STORY),
    WorldPlot("an acknowledged start that was lost", "I1", left(), [*STORY, *fault(1.5), *execution(2, attempt=2)]),
    # --- I5
    WorldPlot("two ends of a step", "I5", behind(CHARGED, CHARGED), STORY),
    WorldPlot("a failure behind the success", "I5", behind(CHARGED, ("step_failed", "charge")), STORY),
    WorldPlot("a start behind the end", "I5", behind(CHARGED, BEGUN), STORY),
    WorldPlot("a step that was created twice", "I5", behind(MADE, MADE), STORY),
    WorldPlot("a result that nobody returned", "I5", left(), [*MADE_IT, *execution(1, value="not paid")]),
    WorldPlot("a step that ran again, and nothing had happened", "I5", AGAIN, [*STORY, *execution(2, attempt=2)]),
    WorldPlot("a fault behind it is none to blame", "I5", AGAIN, [*STORY, *execution(2, attempt=2), *fault(2.5)]),
    WorldPlot(
        "an application that is down is none to blame",
        "I5",
        AGAIN,
        [*STORY, *fault(1.5, "outage"), *execution(2, attempt=2)],
    ),
    WorldPlot("one attempt that was given out twice", "I5", left(), [*STORY, *fault(1.5), *execution(2)]),
    # --- I11
    WorldPlot("a stream with a gap", "I11", left(chunks=[chunk(1, "a"), chunk(3, "b")]), STORY),
    WorldPlot("a chunk that is there twice", "I11", left(chunks=[chunk(1, "a"), chunk(2, "a"), chunk(3, "b")]), STORY),
    WorldPlot("chunks in another order", "I11", left(chunks=[chunk(1, "b"), chunk(2, "a")]), STORY),
    WorldPlot("a chunk of a recorded step that was lost", "I11", left(chunks=CHUNKS[:1]), STORY),
    WorldPlot("a stream of a recorded step that was lost", "I11", {RUN: replace(left()[RUN], streams={})}, STORY),
    WorldPlot("a chunk that nobody wrote", "I11", left(chunks=[*CHUNKS[:2], chunk(3, "c")]), STORY),
    WorldPlot("a chunk behind the close", "I11", left(chunks=[CHUNKS[0], marker(2, CLOSE), chunk(3, "b")]), STORY),
    WorldPlot("a reader that missed one", "I11", left(), [*STORY, *read((1, "b")), *read((3, "b"))]),
    WorldPlot("a reader that was given other bytes", "I11", left(), [*STORY, *read((0, "b"))]),
    # --- I12
    WorldPlot("an acknowledged payload that was lost", "I12", without(SECOND), STORY[:-2]),
    WorldPlot("a payload that was delivered twice", "I12", behind(SECOND, SECOND), STORY),
    WorldPlot(
        "a payload that came to another hook",
        "I12",
        left(CREATED, STARTED, ("hook_created", "u"), ("hook_received", "u", "yes"), ENDED),
        [*MADE_IT, *sent(3, "yes")],
    ),
    WorldPlot("a refused payload that is there", "I12", left(), [*STORY[:-4], *sent(4, "no", What.RESUME_FAIL)]),
    WorldPlot(
        "payloads in another order than they were sent in",
        "I12",
        left(),
        [*MADE_IT, *execution(1), *sent(3, "no"), *sent(4, "yes")],
    ),
    WorldPlot("replays that saw different orders", "I12", left(), [*STORY, *seen(6, "no", "yes")]),
    WorldPlot(
        "a replay that saw a payload that is not there",
        "I12",
        without(SECOND),
        [*MADE_IT, *execution(1), *sent(3, "yes"), *seen(6, "yes", "no")],
    ),
]

CLEAN = [
    WorldPlot("a run as it was lived", "I1", left(), [*STORY, *READ]),
    WorldPlot(
        "a run whose creation was not acknowledged, and is not there",
        "I1",
        {},
        [saw(What.SUBMIT_INVOKE, 0.1, token=RUN)],
    ),
    WorldPlot("a run that failed", "I1", left(*WHOLE[:-1], ("run_failed", ""), status=Status.FAILED), STORY),
    WorldPlot("a step that ran again after a kill", "I5", AGAIN, [*STORY, *fault(1.5), *execution(2, attempt=2)]),
    WorldPlot(
        "a start that was recorded, and never reached the application",
        "I5",
        AGAIN,
        [*MADE_IT, *execution(1, attempt=2)],
    ),
    WorldPlot(
        "a chunk whose step has not ended, and which is not there",
        "I11",
        left(*[each for each in WHOLE if each is not CHARGED], chunks=CHUNKS[:1]),
        STORY,
    ),
    WorldPlot("a stream that nobody watched", "I11", left(), MADE_IT),
    WorldPlot("a payload without an answer, which is there", "I12", left(), [*STORY[:-4], sent(4, "no")[0]]),
    WorldPlot(
        "a payload without an answer, which is not there", "I12", without(SECOND), [*STORY[:-4], sent(4, "no")[0]]
    ),
    WorldPlot("a refused payload that was sent again", "I12", left(), [*STORY, *sent(3.2, "no", What.RESUME_FAIL)]),
    WorldPlot(
        "payloads that were sent at once",
        "I12",
        left(),
        [*MADE_IT, *execution(1), *sent(3, "no", until=3.9), *sent(3.5, "yes")],
    ),
]
