"""Streams: some in which something went wrong, and close calls."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.support.checker import StreamLine
from tests.support.checker.evidence import Dump
from tests.support.plots.material import RERUN, Plot, done, kill, left, saw
from tests.support.plots.runs import as_run, step
from tests.support.witness import Event, What, digest_of

from holdfast.executors.chunks import CLOSE, RESTART
from holdfast.model.records import InvocationRecord


def line(position: int, value: object, *, epoch: int = 1, **facts: Any) -> StreamLine:
    return StreamLine(position=position, epoch=epoch, digest=digest_of(value), **facts)


def marker(position: int, kind: int, *, epoch: int = 1, **facts: Any) -> StreamLine:
    digest = {RESTART: "restart", CLOSE: "closed"}[kind]
    return StreamLine(position=position, epoch=epoch, digest=digest, kind=kind, **facts)


def said(*values: object, since: float = 1.2, epoch: int = 1, attempt: int = 1, step: str = "") -> list[Event]:
    facts: dict[str, Any] = {"id": "a", "key": "tokens", "step": step, "attempt": attempt, "epoch": epoch}
    return [
        saw(What.CHUNK_SAID, since + number / 100, **facts, digest=digest_of(value))
        for number, value in enumerate(values)
    ]


def read(*values: object, first: int = 0, since: float = 1.5, span: str = "reader") -> list[Event]:
    return [
        saw(
            What.CHUNK_READ,
            since + number / 100,
            span=span,
            id="a",
            key="tokens",
            index=first + number,
            digest=value if isinstance(value, str) else digest_of(value),
        )
        for number, value in enumerate(values)
    ]


def streamed(*lines: StreamLine, record: InvocationRecord | None = None, **facts: Any) -> Dump:
    return left(record or done(), streams={"a/tokens": lines}, **facts)


DIED = [kill(2, owner="r1")]
AGAIN: dict[str, Any] = {"epoch": 2, "attempt": 2}
STEP = as_run(done())
STEP_LOG = [replace(each, event=replace(each.event, attempt=1)) for each in step(1)]

PLANTED = [
    Plot("a stream with a gap", "I11", streamed(line(1, 1), line(3, 2))),
    Plot("a stream that does not begin at the start", "I11", streamed(line(2, 1))),
    Plot(
        "a chunk of a zombie behind its successor, which was not fenced",
        "I11",
        streamed(line(1, 1), marker(2, RESTART, **AGAIN), line(3, 2), record=RERUN),
        faults=DIED,
    ),
    Plot(
        "a zombie of a step on another queue",
        "I11",
        streamed(line(1, 1, writer="s", epoch=2), line(2, 1, epoch=7), line(3, 2, writer="s", epoch=1)),
    ),
    Plot("chunks in the order of their times", "I11", streamed(line(1, 2), line(2, 1), line(3, 3)), said(1, 2, 3)),
    Plot("a chunk that was written twice", "I11", streamed(line(1, 1), line(2, 1), line(3, 2)), said(1, 2)),
    Plot("a chunk that nobody wrote", "I11", streamed(line(1, 1), line(2, 2)), said(1)),
    Plot("a chunk that was lost at the end", "I11", streamed(line(1, 1)), said(1, 2)),
    Plot("a chunk that was lost in the middle", "I11", streamed(line(1, 1), line(2, 3)), said(1, 2, 3)),
    Plot(
        "a recorded step without its last chunk",
        "I11",
        streamed(line(1, 1, call="charge#1"), record=STEP, logs={"a": STEP_LOG}),
        said(1, 2, step="charge#1"),
    ),
    Plot("a reader that missed one", "I11", streamed(line(1, 1), line(2, 2), line(3, 3)), read(1) + read(3, first=2)),
    Plot("a reader that was given one twice", "I11", streamed(line(1, 1), line(2, 2)), read(1) + read(1, since=1.6)),
    Plot("a reader that was given other bytes", "I11", streamed(line(1, 1), line(2, 2)), read(1, 3)),
    Plot("a reader that was given what is not there", "I11", streamed(line(1, 1)), read(1, 2)),
]

CLEAN = [
    Plot("a stream as it was said and read", "I11", streamed(line(1, 1), line(2, 2)), [*said(1, 2), *read(1, 2)]),
    Plot(
        "a call that died before its last chunks were durable, and began anew",
        "I11",
        streamed(line(1, 1), marker(2, RESTART, **AGAIN), line(3, 1, **AGAIN), line(4, 2, **AGAIN), record=RERUN),
        [*said(1, 2), *said(1, 2, since=4.2, **AGAIN), *read(1, "restart", 1, 2, since=5)],
        faults=DIED,
    ),
    Plot(
        "two writers, each with its own epochs",
        "I11",
        streamed(line(1, 1, epoch=7), line(2, 1, writer="s"), line(3, 2, epoch=7), line(4, 2, writer="s", epoch=2)),
    ),
    Plot(
        "a reader that begins in the middle", "I11", streamed(line(1, 1), line(2, 2), line(3, 3)), read(2, 3, first=1)
    ),
    Plot(
        "two readers, one after the other",
        "I11",
        streamed(line(1, 1), line(2, 2)),
        [*read(1), *read(1, 2, since=1.6, span="other")],
    ),
    Plot("a stream that nobody watched", "I11", streamed(line(1, 1), marker(2, CLOSE))),
]
