"""submit: how arguments become values, what is printed where, and the exit codes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli import submit
from holdfast.cli.output import Output
from holdfast.ids import is_id
from holdfast.model import changes
from holdfast.model.claims import Claim

if TYPE_CHECKING:
    from conftest import Command, Process

TYPED = """
from __future__ import annotations
import datetime as dt, decimal, enum, pathlib, uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from holdfast import App
if TYPE_CHECKING:
    from nowhere import Unknown

app = App("sqlite:///typed.db")

class Colour(enum.Enum):
    RED = "red"

@dataclass
class Order:
    number: int
    price: decimal.Decimal
    at: dt.datetime | None = None

    def __post_init__(self):
        if self.number < 0:
            raise RuntimeError("below zero")

@app.task
def text(to: str): ...
@app.task
def maybe(to: str | None): ...
@app.task
def number(n: int): ...
@app.task
def real(x: float): ...
@app.task
def money(d: decimal.Decimal): ...
@app.task
def colour(c: Colour): ...
@app.task
def choice(c: Literal["a", "b"]): ...
@app.task
def moment(at: dt.datetime): ...
@app.task
def key(id: uuid.UUID): ...
@app.task
def order(o: Order): ...
@app.task
def several(*numbers: int, **words: str): ...
@app.task
def unknown(u: Unknown, n: int = 0): ...
@app.task
def file(path: pathlib.Path): ...
@app.task
def bare(x): ...
@app.task(name="fresh:send", aliases=["old:post", "older:send"])
def send(to: str): ...
"""


@pytest.fixture
def typed(folder: Path) -> Path:
    (folder / "typed.py").write_text(TYPED)
    return folder


def call_of(holdfast: Command, *arguments: str) -> Any:
    """The call that was stored, as Python writes it."""
    answer = holdfast("submit", *arguments)
    assert (answer.code, answer.err) == (0, "")
    lines = holdfast("show", answer.out.strip()).out.splitlines()
    return next(line for line in lines if line.startswith("call ")).split(None, 1)[1]


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["text", "12345"], "text('12345')"),
        (["text", "true"], "text('true')"),
        (["text", '"quoted"'], "text('quoted')"),
        (["text", "-k", "to=12345"], "text(to='12345')"),
        (["text", "--kwargs", '{"to": 12345}'], "text(to='12345')"),
        (["maybe", "null"], "maybe(None)"),
        (["number", "5"], "number(5)"),
        (["number", '"5"'], "number(5)"),
        (["real", "5"], "real(5.0)"),
        (["money", "12345678901234567890.10"], "money(Decimal('12345678901234567890.10'))"),
        (["colour", "red"], "colour(<Colour.RED: 'red'>)"),
        (["choice", "a"], "choice('a')"),
        (["moment", "2026-11-15T08:00:00Z"], "moment(datetime.datetime(2026, 11, 15, 8, 0, tzinfo=datetime.timezone"),
        (["key", "0" * 32], "key(UUID('00000000-0000-0000-0000-000000000000'))"),
        (["order", '{"number": "3", "price": 1.10}'], "order(Order(number=3, price=Decimal('1.10'), at=None))"),
        (["several", "1", "2", "-k", "a=3"], "several(1, 2, a='3')"),
        (["unknown", "[1]", "2"], "unknown([1], 2)"),
        (["file", "a.txt"], "file('a.txt')"),
        (["bare", "1"], "bare(1)"),
        (["bare", "one"], "bare('one')"),
    ],
)
def test_arguments_become_what_the_annotations_say(
    typed: Path, holdfast: Command, arguments: list[str], call: str
) -> None:
    assert call_of(holdfast, *arguments).startswith(f"typed:{call}")


@pytest.mark.parametrize(
    ("arguments", "parameter", "reason"),
    [
        (["number", "abc"], "n", "Expected `int`, got `str`"),
        (["number", "5.5"], "n", "Expected `int`, got `float`"),
        (["colour", "blue"], "c", "Invalid enum value 'blue'"),
        (["order", '{"number": "x", "price": 1}'], "o", "Expected `int`, got `str` - at `$.number`"),
        (["order", '{"number": -1, "price": 1}'], "o", "below zero"),
        (["several", "1", "x"], "numbers", "Expected `int`, got `str`"),
        (["unknown", "1", "-k", "n=x"], "n", "Expected `int`, got `str`"),
        (["moment", "tomorrow"], "at", "Invalid RFC3339"),
    ],
)
def test_a_wrong_argument_names_its_parameter_and_stores_nothing(
    typed: Path, holdfast: Command, arguments: list[str], parameter: str, reason: str
) -> None:
    answer = holdfast("submit", *arguments, "--json")
    assert (answer.code, answer.json["error"]["type"]) == (2, "UsageError")
    assert f"'{parameter}' of typed:{arguments[0]}" in answer.json["error"]["message"]
    assert reason in answer.json["error"]["message"]
    assert not (typed / "typed.db").exists()


def test_arguments_that_do_not_bind_make_no_store(typed: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "number", "--json")
    assert (answer.code, answer.json["error"]["type"]) == (2, "ArgumentsDoNotBind")
    assert not (typed / "typed.db").exists()


# --- names


@pytest.mark.parametrize("name", ["send", "post", "old:post", "fresh:send"])
def test_a_task_is_found_by_its_aliases_and_their_short_names(typed: Path, holdfast: Command, name: str) -> None:
    assert call_of(holdfast, name, "me") == "fresh:send('me')"


@pytest.mark.parametrize(
    ("given", "meant"), [("numbr", "typed:number"), ("pst", "old:post"), ("fresh:sen", "fresh:send")]
)
def test_a_misspelt_name_suggests_the_right_one(typed: Path, holdfast: Command, given: str, meant: str) -> None:
    holdfast("store", "prepare")
    for command in (["submit", given, "1"], ["ps", "--task", given]):
        answer = holdfast(*command)
        assert answer.code == 2
        assert f"Did you mean '{meant}'?" in answer.err


def test_ps_takes_short_names_and_lists_a_task_under_all_of_its_names(typed: Path, holdfast: Command) -> None:
    sent, _ = holdfast("submit", "send", "me").out.strip(), holdfast("submit", "text", "x")
    for name in ("send", "post", "fresh:send"):
        assert [facts["id"] for facts in holdfast("ps", "--task", name, "--json").json["invocations"]] == [sent]
    without_app = ["ps", "--url", "sqlite:///typed.db", "--json", "--task"]
    assert holdfast(*without_app, "send").json["invocations"] == []
    assert len(holdfast(*without_app, "fresh:send").json["invocations"]) == 1


def test_ps_asks_back_if_a_short_name_is_ambiguous(folder: Path, holdfast: Command) -> None:
    code = "from holdfast import App\napp = App('sqlite:///x.db')\n"
    code += "".join(f"@app.task(name='{place}:go')\ndef {place}(): ...\n" for place in ("east", "west"))
    (folder / "both.py").write_text(code)
    holdfast("store", "prepare")
    answer = holdfast("ps", "--task", "go")
    assert (answer.code, answer.err) == (2, "error: 'go' may be east:go or west:go; write the whole name\n")


def test_a_page_begins_with_an_id(shop: Path, holdfast: Command) -> None:
    holdfast("store", "prepare")
    answer = holdfast("ps", "--before", "yesterday")
    assert answer.code == 2
    assert "--before 'yesterday' is no id" in answer.err


def test_a_call_may_expire_and_keep_its_key_for_longer(shop: Path, holdfast: Command) -> None:
    id = holdfast("submit", "add", "1", "--key", "one", "--key-for", "7d", "--expires", "1h").out.strip()
    shown = holdfast("show", id).out
    assert "It expires in 1h unless it is started" in shown or "It expires in 59m" in shown
    refused = holdfast("submit", "add", "1", "--at", "2100-01-01T00:00:00")
    assert (refused.code, "has no time zone; write it like" in refused.err) == (2, True)


# --- waiting


def test_without_wait_the_answer_is_the_id_alone(shop: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "add", "1")
    assert is_id(answer.out.removesuffix("\n"))
    assert answer.err == ""


@pytest.fixture
def ended(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Let what is submitted end at once, with this result."""

    def arrange(result: object) -> None:
        real = submit.wait_for_result

        def end_it(invocation: Any, *more: Any) -> object:
            record, runtime = invocation.record(), invocation._runtime
            claim = Claim(app=record.app, owner="r/0", lanes=(record.lane,), limit=1, operation="c", at=record.due_at)

            async def job() -> None:
                store = (await runtime.engine()).store
                (claimed,) = (await store.claim(claim)).records
                done = changes.completed(
                    claimed, result=runtime.codec.encode(result), operation="d", at=runtime.clock.now()
                )
                await store.apply([done])

            runtime.run(job())
            return real(invocation, *more)

        monkeypatch.setattr(submit, "wait_for_result", end_it)

    return arrange


@pytest.mark.parametrize(
    ("result", "printed"),
    [
        (3, "3"),
        ("two\nlines \x1b", "two\nlines \x1b"),
        (None, "null"),
        (True, "true"),
        ([1, "é"], '[1, "é"]'),
        ({"a": (1, 2)}, '{"a": [1, 2]}'),
        (["\x1b\u202e"], '["\\u001b\\u202e"]'),
    ],
)
def test_the_answer_of_a_wait_is_the_result_alone(
    holdfast: Command, ended: Callable[[object], None], result: object, printed: str
) -> None:
    ended(result)
    answer = holdfast("submit", "add", "1", "--wait")
    assert (answer.code, answer.out) == (0, printed + "\n")
    word, id = answer.err.split()
    assert word == "submitted"
    assert is_id(id)


def test_a_text_result_cannot_act_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False, terminal=True).value("one\n\x1b[2Jtwo")
    assert capsys.readouterr().out == "one\n\\x1b[2Jtwo\n"


def test_a_program_gets_the_result_in_one_document(holdfast: Command, ended: Callable[[object], None]) -> None:
    ended([1, 2])
    answer = holdfast("submit", "add", "1", "--wait", "--json")
    assert (answer.json["result"], answer.json["status"], answer.err) == ([1, 2], "success", "")


def test_a_wait_in_vain_ends_with_its_own_code(shop: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "add", "1", "--wait", "--timeout", "10ms")
    assert (answer.code, answer.out) == (3, "")
    assert "within 10ms" in answer.err


def test_who_waits_long_is_told_once_why(shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "EXPLAIN_AFTER_SECONDS", 0.01)
    answer = holdfast("submit", "add", "1", "--wait", "--timeout", "150ms")
    assert answer.code == 3
    notes = [line for line in answer.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "no runner is alive" in notes[0]
    assert "within 150ms" in answer.err.splitlines()[-1]


def test_an_interrupted_wait_still_tells_the_id(shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "wait_for_result", interrupted)
    answer = holdfast("submit", "add", "1", "--wait", "--json")
    assert (answer.code, answer.json["error"]["type"], answer.err) == (130, "Interrupted", "")
    assert is_id(answer.json["id"])
    assert holdfast("submit", "add", "1", "--wait").code == 130


@pytest.mark.slow
def test_a_signal_ends_the_wait_and_not_the_work(start: Callable[..., Process], holdfast: Command) -> None:
    waiting = start("submit", "add", "1", "--wait")
    waiting.says("submitted ")
    waiting.signal(signal.SIGINT)
    answer = waiting.ends()
    assert (answer.code, answer.out) == (130, "")
    (stored,) = json.loads(holdfast("ps", "--json").out)["invocations"]
    id = stored["id"]
    assert answer.err == f"submitted {id}\nerror: interrupted; {id} stays in the store\n"
