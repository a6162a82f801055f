"""A witness's word survives the witness."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import witness
from tests.support.checker import FaultKind, Faults
from tests.support.witness import Event, Reader, What, Witness, digest_of, digest_of_error

from holdfast.clock import SystemClock
from holdfast.codec import Codec
from holdfast.errors import NotEncodable, StoreUnavailable, TaskFailed, UsageError
from holdfast.testing import FakeClock


@pytest.fixture
def log(tmp_path: Path) -> Witness:
    return Witness(tmp_path / "me.jsonl", clock=FakeClock())


def lines(log: Witness) -> list[Event]:
    return list(witness.read(log.path).events)


WRITER = """
import itertools, sys
from tests.support.witness import Witness
log = Witness(sys.argv[1])
for number in itertools.count():
    with log.execution(str(number), epoch=number) as run:
        run.returns("x" * number)
"""


@pytest.mark.slow
def test_lines_survive_a_kill(tmp_path: Path) -> None:
    """Whatever the reader saw before the kill is there after it, and every line but the last is whole."""
    path = tmp_path / "victim.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        reader, deadline = Reader(path), time.monotonic() + 60
        while len(reader.ledgers().events) < 500:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        seen = reader.ledgers().events
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    after = witness.read(path).events
    assert after[: len(seen)] == seen
    assert {event.pid for event in after} == {process.pid}
    starts = [event.token for event in after if event.what is What.EXEC_START]
    assert starts == [str(number) for number in range(len(starts))]
    assert len(after) - 2 * len(starts) in (0, -1)
    assert [event.at for event in after] == sorted(event.at for event in after)


def test_a_torn_last_line_is_left_out_and_a_torn_other_one_is_an_error(tmp_path: Path, log: Witness) -> None:
    log.fenced("a", epoch=1)
    log.fenced("b", epoch=2)
    whole = log.path.read_bytes()
    torn = tmp_path / "torn.jsonl"
    for cut in range(len(whole) + 1):
        torn.write_bytes(whole[:cut])
        assert len(witness.read(torn).events) == whole[:cut].count(b"\n")
    torn.write_bytes(whole[:30] + b"\n" + whole)
    with pytest.raises(ValueError, match=r"torn\.jsonl is no ledger, or is damaged"):
        witness.read(torn)


def test_a_ledger_is_read_while_it_grows(log: Witness) -> None:
    reader = Reader(log.path, log.path.with_name("not there yet.jsonl"))
    assert reader.ledgers().events == ()
    log.fenced("a", epoch=1)
    with log.path.open("ab") as file:
        file.write(b'{"what":"fenced","at":1,"pid":1')
    assert [event.id for event in reader.ledgers().events] == ["a"]
    with log.path.open("ab") as file:
        file.write(b',"id":"b"}\n')
    assert [event.id for event in reader.ledgers().events] == ["a", "b"]


def test_a_folder_of_ledgers_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    clock = FakeClock()
    logs = [Witness(tmp_path / f"{name}.jsonl", clock=clock) for name in "ab"]
    (tmp_path / "store.db").write_bytes(b"\0")
    for number in range(6):
        clock.advance(1)
        logs[number % 2].fenced(str(number), epoch=1)
    assert [event.id for event in witness.read(tmp_path).events] == list("012345")


def test_one_file_for_each_process(log: Witness) -> None:
    """Somebody who died may have left half a line at its end."""
    with pytest.raises(FileExistsError):
        Witness(log.path)


def test_many_in_one_folder(tmp_path: Path) -> None:
    for number in range(3):
        Witness.in_folder(tmp_path, "client", clock=FakeClock()).fenced(str(number), epoch=1)
    assert len(list(tmp_path.glob(f"client-{os.getpid()}-*.jsonl"))) == 3
    assert {event.id for event in witness.read(tmp_path).events} == {"0", "1", "2"}


def test_threads_do_not_mix_their_lines(log: Witness) -> None:
    def write(name: str) -> None:
        for number in range(200):
            log.write(What.FENCED, id=name, epoch=number, why="x" * (number * 10))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(log)
    for name in "abcd":
        assert [event.epoch for event in found if event.id == name] == list(range(200))


def test_a_line_that_does_not_fit_is_an_error(log: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda file, data: len(data) - 1)
    with pytest.raises(OSError, match="takes no more"):
        log.fenced("a", epoch=1)


def test_the_clock_is_the_one_that_all_processes_share(tmp_path: Path) -> None:
    log = Witness(tmp_path / "me.jsonl")
    before = SystemClock().monotonic()
    log.fenced("a", epoch=1)
    (event,) = lines(log)
    assert before <= event.at <= SystemClock().monotonic()
    assert event.pid == os.getpid()


# --- what is written


def test_a_submit_that_is_acknowledged(log: Witness) -> None:
    with log.submission("t", key="k") as accepted:
        accepted("a")
    assert [(event.what, event.token, event.id, event.key) for event in lines(log)] == [
        (What.SUBMIT_INVOKE, "t", None, "k"),
        (What.SUBMIT_OK, "t", "a", "k"),
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UsageError("no"), What.SUBMIT_FAIL),
        (NotEncodable("no"), What.SUBMIT_FAIL),
        (StoreUnavailable("away"), What.SUBMIT_UNKNOWN),
        (TimeoutError(), What.SUBMIT_UNKNOWN),
        (KeyboardInterrupt(), What.SUBMIT_UNKNOWN),
    ],
)
def test_a_submit_that_raises_is_refused_only_if_nothing_can_have_been_written(
    log: Witness, error: BaseException, outcome: What
) -> None:
    with pytest.raises(type(error)):
        with log.submission("t"):
            raise error
    assert [event.what for event in lines(log)] == [What.SUBMIT_INVOKE, outcome]


@pytest.mark.parametrize("error", [StoreUnavailable("later"), UsageError("later")])
def test_what_happens_after_an_acknowledgement_does_not_change_it(log: Witness, error: Exception) -> None:
    with pytest.raises(type(error)):
        with log.submission("t") as accepted:
            accepted("a")
            raise error
    assert [event.what for event in lines(log)] == [What.SUBMIT_INVOKE, What.SUBMIT_OK]


def test_a_submit_of_which_nobody_says_anything_is_unknown(log: Witness) -> None:
    with log.submission("t"):
        pass
    assert lines(log)[-1].what is What.SUBMIT_UNKNOWN


def test_an_execution_and_what_it_returned(log: Witness) -> None:
    with log.execution("t", id="a", attempt=2, epoch=3) as run:
        assert run.returns(["x", run.stamp]) == ["x", run.stamp]
    start, end = lines(log)
    assert (start.what, end.what) == (What.EXEC_START, What.EXEC_END)
    assert (start.token, start.id, start.attempt, start.epoch) == ("t", "a", 2, 3)
    assert start.span == end.span == run.stamp
    assert start.digest is None
    assert end.digest == digest_of(["x", run.stamp])
    assert not end.raised


def test_an_execution_that_raises(log: Witness) -> None:
    with pytest.raises(KeyboardInterrupt):
        with log.execution("t"):
            raise KeyboardInterrupt("now")
    assert (lines(log)[-1].raised, lines(log)[-1].digest) == (True, digest_of_error("now"))


def test_stamps_are_unlike(log: Witness) -> None:
    stamps = set()
    for _ in range(100):
        with log.execution("t") as run:
            stamps.add(run.stamp)
    assert len(stamps) == 100


def test_what_a_client_saw(log: Witness) -> None:
    log.saw("a", result=7)
    log.saw(token="t", error=ValueError("no"))
    log.saw("b", status="cancelled")
    log.saw("c", result=None)
    assert [(event.id, event.token, event.status, event.digest) for event in lines(log)] == [
        ("a", None, "success", digest_of(7)),
        (None, "t", "failed", digest_of_error("no")),
        ("b", None, "cancelled", None),
        ("c", None, "success", digest_of(None)),
    ]


def test_digests_tell_results_from_errors_and_do_not_depend_on_the_class_of_an_error() -> None:
    assert digest_of("no") != digest_of_error("no")
    assert digest_of({"b", "a", "c"}) == digest_of({"c", "b", "a"})
    assert digest_of((1,)) != digest_of([1])
    assert digest_of_error(ValueError("no")) == digest_of_error(TaskFailed("shop:No", "no")) == digest_of_error("no")
    assert digest_of_error("x" * 100_000) == digest_of_error("x" * 5_000)
    assert digest_of_error("\ud800") != digest_of_error("")


class Receipt(msgspec.Struct):
    total: int


def test_a_witness_takes_the_codec_of_the_app(tmp_path: Path) -> None:
    codec = Codec()
    codec.register(Receipt)
    log = Witness(tmp_path / "me.jsonl", codec=codec)
    with log.execution("t") as run:
        run.returns(Receipt(3))
    log.saw("a", result=Receipt(3))
    _, end, seen = lines(log)
    assert end.digest == seen.digest == digest_of(Receipt(3), codec)


def test_leases_services_and_runners(log: Witness) -> None:
    with log.runner("r1") as beat:
        beat()
        with log.service("sweep", epoch=4, owner="r1"), log.lease("k", 3, token="t", epoch=2):
            pass
    with pytest.raises(ValueError):
        with log.lease("k", 3, id="a"):
            raise ValueError
    found = lines(log)
    assert [event.what for event in found] == [
        What.RUNNER_START,
        What.RUNNER_BEAT,
        What.SERVICE_START,
        What.LEASE_ENTER,
        What.LEASE_EXIT,
        What.SERVICE_END,
        What.RUNNER_END,
        What.LEASE_ENTER,
        What.LEASE_EXIT,
    ]
    facts: list[Any] = [(event.owner, event.service, event.key, event.limit, event.epoch) for event in found]
    assert facts[0] == facts[1] == facts[6] == ("r1", None, None, None, None)
    assert facts[2] == facts[5] == ("r1", "sweep", None, None, 4)
    assert facts[3] == facts[4] == (None, None, "k", 3, 2)


def test_faults_are_read_from_ledgers(log: Witness) -> None:
    clock = log._clock
    assert isinstance(clock, FakeClock)
    with log.fault("kill", pid=77, owner="r1"):
        clock.advance(1)
    with log.fault("outage"):
        clock.advance(5)
        log.write(What.FAULT_START, kind="lost_reply", ids=("a",), span="never ended")
    clock.advance(2)
    log.fenced("a", epoch=1)
    faults = Faults.of(witness.read(log.path))
    assert [(fault.kind, fault.at, fault.until) for fault in faults.all] == [
        (FaultKind.KILL, 0, 1),
        (FaultKind.OUTAGE, 1, 6),
        (FaultKind.LOST_REPLY, 6, 8),
    ]
    assert (faults.all[0].pid, faults.all[0].owner, faults.all[2].ids) == (77, "r1", ("a",))
    assert faults.windows(aftermath=2) == [(0, 10)]


def test_a_line_is_plain_json_without_what_is_empty(log: Witness) -> None:
    log.fenced("a", epoch=1)
    line = json.loads(log.path.read_text())
    assert line == {"what": "fenced", "at": 0.0, "pid": os.getpid(), "id": "a", "epoch": 1}
