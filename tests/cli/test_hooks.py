"""holdfast hooks: listed, shown and resumed by token and by name, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App, Invocation, hook
from holdfast.workflows.hooks_records import name_of

if TYPE_CHECKING:
    from conftest import Command

SECRET = "0123456789abcdef0123456789abcdef"


@dataclasses.dataclass
class Approval:
    by: str


class Desk:
    """An app with two workflows that wait: for a token of the code, and for a secret one. Its runner is in a thread."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.app = app = App(url, name="desk", workflow_linger_seconds=0.0, poll_interval_seconds=0.1, **settings)

        @app.workflow(name="publish")
        async def publish(article: str) -> str:
            return (await hook(f"approve:{article}", Approval, metadata={"article": article})).by

        @app.workflow(name="quiet")
        async def quiet() -> str:
            return str(await hook(type=str))

        self._publish, self._quiet = publish, quiet

    def publish(self, article: str) -> Invocation[str]:
        return self._waiting(self._publish.submit(article))

    def quiet(self) -> Invocation[str]:
        return self._waiting(self._quiet.submit())

    def _waiting(self, run: Invocation[str]) -> Invocation[str]:
        eventually(lambda: self.app.hooks(run=run.id), "its hook is there")
        return run


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    desk = Desk(f"sqlite:///{tmp_path}/desk.db")
    with desk.app, desk.app.runner():
        yield desk


BY_URL = ("--url", "sqlite:///desk.db", "--name", "desk")


def test_hooks_are_listed_shown_and_resumed(desk: Desk, holdfast: Command) -> None:
    run = desk.publish("42")
    (row,) = holdfast("hooks", *BY_URL).out.splitlines()[1:]
    assert (row.split()[0], row.split()[-1]) == ("approve:42", name_of("approve:42"))
    assert run.id in row
    shown = holdfast("hooks", "show", "approve:42", *BY_URL).out
    assert ["chosen by the code" in shown, "Approval" in shown, "article" in shown] == [True] * 3
    refused = holdfast("hooks", "resume", "approve:42", '{"by": 7}', *BY_URL)
    assert (refused.code != 0, "payload.by" in refused.err) == (True, True)
    assert holdfast("hooks", "resume", "approve:42", '{"by": "Ada"}', *BY_URL).out.strip() == run.id
    assert run.result(patient(60)) == "Ada"
    for command in (["show", "approve:42"], ["resume", "approve:42", "1"]):
        gone = holdfast("hooks", *command, *BY_URL)
        assert (gone.code, "no open hook" in gone.err) == (4, True)


def test_a_secret_token_is_known_by_its_name_and_the_log_is_named_if_it_has_it(desk: Desk, holdfast: Command) -> None:
    run = desk.quiet()
    (found,) = msgspec.json.decode(holdfast("hooks", "--run", run.id, "--json", *BY_URL).out)["hooks"]
    assert (found["token"], found["origin"]) == (None, "random")
    shown = holdfast("hooks", "show", found["name"], *BY_URL).out
    assert "it lies in the log of the run" in shown
    assert holdfast("hooks", "resume", found["name"], '"yes"', "--resume-id", "1", *BY_URL).out.strip() == run.id
    assert run.result(patient(60)) == "yes"


def test_a_derived_token_is_only_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Command) -> None:
    monkeypatch.chdir(tmp_path)
    desk = Desk(f"sqlite:///{tmp_path}/desk.db", hook_secret=SECRET)
    with desk.app, desk.app.runner():
        (found,) = desk.app.hooks(run=desk.quiet().id)
        assert "derived of hook_secret: only its hash is stored" in holdfast("hooks", "show", found.name, *BY_URL).out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["resume", "x", "yes"], "is no JSON"),
        (["resume", "", "1"], "expected a text of 1 to 256"),
        (["show", "y" * 257], "expected a text of 1 to 256"),
        (["list", "--before", "x"], "is no name of a hook"),
        (["resume", "x", "1", "--resume-id", ""], "resume_id"),
    ],
)
def test_what_makes_no_sense_is_refused(desk: Desk, holdfast: Command, command: list[str], said: str) -> None:
    answer = holdfast("hooks", *command, *BY_URL)
    assert (answer.code != 0, said in answer.err) == (True, True), answer
