"""holdfast streams: listed and printed without code, followed while they are written, for people and for programs."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.cli.processes import Process, eventually
from tests.support.patience import patient

from holdfast import App, Invocation, context, stream
from holdfast.retries import Fixed

if TYPE_CHECKING:
    from conftest import Command

BY_URL = ("--url", "sqlite:///studio.db", "--name", "studio")


class Studio:
    """An app whose task writes what the test says, and begins anew after None; its runner is in a thread."""

    def __init__(self, url: str) -> None:
        self.said: queue.Queue[object] = queue.Queue()
        self.app = app = App(url, name="studio", poll_interval_seconds=0.1)

        @app.task(name="speak", retries=Fixed(1, 0.01))
        def speak() -> None:
            with stream("words") as words:
                while (word := self.said.get()) != "end":
                    if word is None:
                        raise OSError(f"attempt {context().attempt}")
                    words.write(word)

        self._speak = speak

    def speak(self, *words: object) -> Invocation[None]:
        for word in words:
            self.said.put(word)
        return self._speak.submit()


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    monkeypatch.chdir(tmp_path)
    studio = Studio(f"sqlite:///{tmp_path}/studio.db")
    with studio.app, studio.app.runner():
        yield studio


def test_streams_are_listed_and_printed(studio: Studio, holdfast: Command) -> None:
    call = studio.speak("one", {"n": 2}, None, b"\x00", "end")
    call.result(patient(30))
    (row,) = holdfast("streams", call.id, *BY_URL).out.splitlines()[1:]
    assert row.split()[:3] == ["words", "4", "closed"]
    whole = holdfast("streams", call.id, "words", *BY_URL)
    assert whole.out.splitlines() == ["one", '{"n": 2}', '"AA=="']
    assert "starts over here, with attempt 2" in whole.err
    assert holdfast("streams", call.id, "words", "--last", *BY_URL).out.splitlines() == ['"AA=="']
    assert holdfast("streams", call.id, "words", "--start", "1", "--stop", "2", *BY_URL).out.splitlines() == [
        '{"n": 2}'
    ]
    items = msgspec.json.decode(holdfast("streams", call.id, "words", "--json", *BY_URL).out)["items"]
    assert [(each["index"], each["kind"], each["attempt"]) for each in items] == [
        (0, "chunk", 1),
        (1, "chunk", 1),
        (2, "restart", 2),
        (3, "chunk", 2),
    ]
    assert (items[3]["value"], items[3]["encoding"]) == ("AA==", "base64")


def test_a_stream_is_followed_line_by_line(studio: Studio, tmp_path: Path) -> None:
    call = studio.speak("one")
    process = Process(tmp_path, "streams", call.id, "words", "--follow", "--json", *BY_URL)
    try:
        eventually(lambda: len(process.out) == 1, lambda: f"the first chunk in {process.out} {process.err}")
        studio.said.put("two")
        eventually(lambda: len(process.out) == 2, "the second one is printed while the call runs")
        studio.said.put("end")
        answer = process.ends()
    finally:
        process.end()
    assert (answer.code, [msgspec.json.decode(line)["value"] for line in process.out]) == (0, ["one", "two"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["words", "--stop", "-1"], "expected an index"),
        (["a/b"], "without a slash"),
        (["--follow"], "name it"),
        (["--last"], "name it"),
    ],
)
def test_what_makes_no_sense_is_refused(studio: Studio, holdfast: Command, options: list[str], said: str) -> None:
    call = studio.speak("end")
    answer = holdfast("streams", call.id, *options, *BY_URL)
    assert (answer.code, said in answer.err) == (2, True), answer


def test_an_unknown_call_is_not_found(studio: Studio, holdfast: Command) -> None:
    answer = holdfast("streams", "0" * 26, *BY_URL)
    assert (answer.code, "has no invocation" in answer.err) == (4, True)
