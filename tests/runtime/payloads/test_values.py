"""Large values from submit to result: nobody who calls a task can tell that they lie apart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.runtime.payloads.tools import lose_payloads, payload_sizes, raw_mongo
from tests.store.mongo.tools import until

from holdfast import App, Invocation, Status
from holdfast.cli import main
from holdfast.codec import Reference, references
from holdfast.errors import NotEncodable, PayloadLost

MIB = 2**20
INLINE, CHUNK = 1024, 5000
SECONDS = 30.0


class Odd(Exception):
    """Has something to show beside its text."""

    def __init__(self, text: str, cargo: object) -> None:
        super().__init__(text)
        self.cargo = cargo


class Tasks:
    def __init__(self, app: App) -> None:
        app.register(Odd)
        self.runs = 0

        @app.task(name="echo")
        def echo(value: Any, *more: Any) -> Any:
            self.runs += 1
            return [value, *more] if more else value

        @app.task(name="aecho")
        async def aecho(value: Any) -> Any:
            return value

        @app.task(name="make")
        def make(size: int, kind: str = "bytes") -> Any:
            return b"r" * size if kind == "bytes" else "r" * size

        @app.task(name="fail")
        def fail(size: int) -> None:
            raise Odd("no", "e" * size)

        @app.task(name="measure")
        def measure(number: int, value: Any) -> int:
            return number + len(value)

        self.echo, self.aecho, self.make, self.fail, self.measure = echo, aecho, make, fail, measure


@pytest.fixture
def app(url: str) -> Iterator[App]:
    # Without the cache of payloads: these tests are about what is in the store.
    with App(url, inline_limit=INLINE, chunk_threshold=CHUNK, poll_interval_seconds=0.2, payload_cache=0) as app:
        yield app


@pytest.fixture
def tasks(app: App) -> Tasks:
    return Tasks(app)


# --- round trips


def test_every_size_comes_back_as_argument_result_and_error(app: App, tasks: Tasks, url: str) -> None:
    sizes = [limit + more for limit in (INLINE, CHUNK) for more in range(-5, 3)]
    with app.runner():
        texts = tasks.echo.map(["t" * size for size in sizes])
        blobs = tasks.make.map(sizes)
        errors = tasks.fail.map(sizes)
        assert [len(text) for text in texts.results(SECONDS)] == sizes
        assert blobs.results(SECONDS) == [b"r" * size for size in sizes]
        for size, failed in zip(sizes, errors, strict=True):
            with pytest.raises(Odd, match="no") as caught:
                failed.result(SECONDS)
            assert caught.value.cargo == "e" * size
    for size, text, blob in zip(sizes, texts, blobs, strict=True):
        # Three bytes stand before a text or bytes of that length, and three more around a call.
        assert len(text.record().payloads) == (size + 6 > INLINE)
        assert len(blob.record().payloads) == (size + 3 > INLINE)
        assert len(blob.record().result or b"") <= INLINE
    assert max(payload_sizes(url)) > CHUNK


def test_a_coroutine_and_an_awaiting_caller(app: App, tasks: Tasks) -> None:
    async def scenario() -> None:
        async with app.runner():
            one = await tasks.aecho.asubmit({"deep": ["x" * 9000]})
            assert await one.aresult(SECONDS) == {"deep": ["x" * 9000]}
            group = await tasks.aecho.amap([b"y" * size for size in (10, 9000)])
            assert await group.aresults(SECONDS) == [b"y" * 10, b"y" * 9000]

    asyncio.run(scenario())


def test_other_limits_read_what_these_wrote(app: App, tasks: Tasks, url: str) -> None:
    value = "v" * 9000
    ours = tasks.echo.submit(value)
    with App(url, poll_interval_seconds=0.2) as other:
        Tasks(other)
        with other.runner():
            assert ours.result(SECONDS) == value
            assert other.invocation(ours.id).result(SECONDS) == value
    assert ours.record().result == app.runtime.codec.encode(value)  # small enough for the other one


# --- stored once


@pytest.mark.parametrize("common", [b"\x00c" * (MIB // 2), ["c" * 1000] * 1049], ids=["bytes", "list"])
def test_a_fan_out_stores_its_common_argument_once(app: App, tasks: Tasks, url: str, common: Any) -> None:
    group = tasks.measure.map([(number, common) for number in range(100)])
    (size,) = payload_sizes(url)
    assert size > 1_000_000
    with app.runner():
        assert group.results(SECONDS) == [number + len(common) for number in range(100)]
    again = tasks.measure.submit(0, common)
    assert payload_sizes(url) == [size]
    assert {one.record().payloads for one in (*group, again)} == {group[0].record().payloads}


def test_a_result_that_is_its_argument_is_stored_once(app: App, tasks: Tasks, url: str) -> None:
    with app.runner():
        value = b"v" * 9000
        assert tasks.echo.submit(value).result(SECONDS) == value
    assert payload_sizes(url) == [9000]


def test_what_a_generator_changes_between_two_calls_is_stored_as_it_was_at_each(app: App, tasks: Tasks) -> None:
    def calls() -> Iterator[list[Any]]:
        lines = ["x" * 3000]
        for number in range(5):
            lines.append(str(number))
            yield lines
        lines.clear()

    def nested() -> Iterator[tuple[dict[str, Any], bytearray]]:
        order: dict[str, Any] = {"pad": "p" * 3000}
        buffer = bytearray(3000)
        for number in range(3):
            order["number"], buffer[0] = number, number
            yield order, buffer

    async def awaiting() -> list[Any]:
        group = await tasks.echo.amap(calls())
        return list(await group.aresults(SECONDS))

    with app.runner():
        expected = [["x" * 3000, *map(str, range(last + 1))] for last in range(5)]
        assert tasks.echo.map(calls()).results(SECONDS) == expected
        assert asyncio.run(awaiting()) == expected
        assert tasks.echo.map(nested()).results(SECONDS) == [
            [{"pad": "p" * 3000, "number": number}, bytearray([number]) + bytearray(2999)] for number in range(3)
        ]


# --- refused


def test_more_than_the_limit_is_refused_by_name_and_nothing_is_stored(url: str) -> None:
    with App(url, inline_limit=INLINE, payload_limit=4000, poll_interval_seconds=0.2) as app:
        tasks = Tasks(app)
        with pytest.raises(NotEncodable, match=r"^argument 'value': value takes 4,001 bytes, more than payload_limit"):
            tasks.echo.map([(b"a" * 4000,), (b"a" * 4001,)])
        assert (app.invocations(), payload_sizes(url)) == ([], [])
        with app.runner():
            large = tasks.make.submit(4001)
            with pytest.raises(NotEncodable, match=r"^result takes 4,001 bytes") as caught:
                large.result(SECONDS)
            assert caught.value.path == "result"
            assert tasks.make.submit(4000).result(SECONDS) == b"r" * 4000
            # An error's text is kept when its cargo is too large.
            with pytest.raises(Exception, match="no"):
                tasks.fail.submit(4001).result(SECONDS)
        assert "the result cannot be stored: result takes 4,001 bytes" in large.record().reason


# --- lost


def test_a_lost_result_is_told_and_the_record_stays(app: App, tasks: Tasks, url: str) -> None:
    with app.runner():
        done, small = tasks.make.submit(9000), tasks.make.submit(9)
        failed = tasks.fail.submit(9000)
        assert done.result(SECONDS) == b"r" * 9000
        with pytest.raises(Odd):
            failed.result(SECONDS)
        lose_payloads(url)
        for lost in (done.result, failed.result, app.invocation(done.id).result):
            with pytest.raises(PayloadLost, match="is not in the store"):
                lost(SECONDS)
        assert small.result(SECONDS) == b"r" * 9
        assert (done.status, failed.status) == (Status.SUCCESS, Status.FAILED)
        tasks.make.submit(9000).result(SECONDS)  # the same bytes are there again
        assert done.result(SECONDS) == b"r" * 9000


def test_work_whose_arguments_are_lost_is_parked_until_they_are_there_again(app: App, tasks: Tasks, url: str) -> None:
    value = "v" * 9000
    lost, other = tasks.echo.submit(value, 1), tasks.echo.submit(value, 2)
    lose_payloads(url)
    small = tasks.echo.submit("s")
    with app.runner(concurrency=1):
        assert small.result(SECONDS) == "s"
        for parked in (lost, other):
            until(lambda parked=parked: parked.status is Status.PARKED, what="parked")  # type: ignore[misc]
            assert "its arguments cannot be had: the payload" in parked.record().reason
            assert "is not in the store" in parked.explain()
        assert tasks.runs == 1
        assert tasks.echo.submit(value).result(SECONDS) == value  # which stores the value again
        for parked, number in ((lost, 1), (other, 2)):
            parked.wake()
            assert parked.result(SECONDS) == [value, number]
    statuses = [entry.status.value for entry in lost.history()]
    assert statuses == [*("registered", "pending", "running", "parked"), *("rerouted", "pending", "running", "success")]


# --- shown


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    return command


def test_the_command_line_describes_large_values_and_does_not_fetch_them(
    app: App, tasks: Tasks, url: str, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    with app.runner():
        done = tasks.echo.submit("x" * 9000, 1)
        done.result(SECONDS)
    lose_payloads(url)  # what cannot be had cannot be fetched
    arguments, result = (one.digest for one in _references(done))
    for told_now in (told("show", done.id, "--url", url), told("show", done.id, "--url", url, "--json")):
        assert "x" * 100 not in told_now
        plain = "".join(told_now.split())
        assert f"<payloadof9,003bytes,{arguments[:12]}" in plain
        assert f"bytes,{result[:12]}" in plain
    assert "success" in told("ps", "--url", url)


def _references(invocation: Invocation[Any]) -> Iterator[Reference]:
    record = invocation.record()
    return itertools.chain(references(record.arguments), references(record.result))


# --- MongoDB's limit of a document


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
def test_no_size_meets_the_limit_of_a_document(mongo_url: str) -> None:
    """Around 15 MB, where values are cut, and around 16 MB, where documents end."""
    sizes = [15 * MIB, 15 * MIB + 1, 16 * MIB - 50, 17_000_000]
    with App(mongo_url, poll_interval_seconds=0.2, max_retries=0) as app:
        tasks = Tasks(app)
        with app.runner(concurrency=1):
            for size in sizes:
                assert tasks.measure.submit(1, b"a" * size).result(SECONDS) == size + 1
                assert tasks.make.submit(size, "text").result(SECONDS) == "r" * size
                with pytest.raises(Odd) as caught:
                    tasks.fail.submit(size).result(SECONDS)
                assert caught.value.cargo == "e" * size
            # Many that are small enough each are too large together.
            middling = [str(number) * 600_000 for number in range(10, 25)]
            assert tasks.echo.submit(*middling).result(SECONDS) == middling
    with raw_mongo(mongo_url) as database:
        stages = [{"$group": {"_id": None, "largest": {"$max": {"$bsonSize": "$$ROOT"}}}}]
        largest = {name: next(database[name].aggregate(stages), {"largest": 0})["largest"] for name in COLLECTIONS}
        assert 15 * MIB < max(largest.values()) < 16 * MIB - 500_000
        assert largest["holdfast_invocations"] < 2**18


COLLECTIONS = ("holdfast_invocations", "holdfast_payloads", "holdfast_payload_pieces")
