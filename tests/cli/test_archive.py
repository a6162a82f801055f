"""``archive``, ``rerun`` and ``purge``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.processes import Answer
from tests.support.patience import patient

from holdfast import App, TimedOut, crashpoints
from holdfast.ids import is_id

Holdfast = Callable[..., Answer]


@pytest.fixture
def ended(shop: Path) -> dict[str, str]:
    """Three that have ended, and one that has not."""
    with App(f"sqlite:///{shop / 'shop.db'}") as app:

        @app.task(name="shop:add")
        def add(a: int, b: int = 0) -> int:
            return a + b

        @app.task(name="shop:boom", queue="mail", tags=["eu"])
        def boom(text: str) -> None:
            raise ValueError(text)

        made = {"good": add.submit(1), "bad": boom.submit("no card"), "keyed": add.options(key="k").submit(2)}
        with app.runner(tags=["eu"]):
            for name in ("good", "keyed"):
                made[name].result(patient(30))  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="no card"):
                made["bad"].result(patient(30))
        made["later"] = add.options(delay="1h").submit(3)
        return {name: invocation.id for name, invocation in made.items()}


def test_the_archive_tells_the_reason_of_each_failure(holdfast: Holdfast, ended: dict[str, str]) -> None:
    said = holdfast("archive").out
    assert "ValueError: no card" in said
    assert ended["later"] not in said
    assert all(ended[name] in said for name in ("good", "bad", "keyed"))
    only = json.loads(holdfast("archive", "--status", "failed", "--error", "card", "--tag", "eu", "--json").out)
    assert [one["id"] for one in only["invocations"]] == [ended["bad"]]
    assert only["invocations"][0]["error"] == {"type": "builtins:ValueError", "message": "no card"}
    assert holdfast("archive", "--task", "add", "--queue", "mail").out.startswith("no ended invocation")
    assert holdfast("archive", "--since", "2100-01-01T00:00:00Z").out.startswith("no ended invocation")
    assert ended["bad"] in holdfast("archive", "--since", "1h ago", "--until", "2100-01-01T00:00:00Z").out
    assert ended["keyed"] in holdfast("archive", "--key", "k").out
    assert holdfast("archive", "--status", "running").code == 2
    assert "or 2h for two hours ago" in holdfast("archive", "--since", "soon").err
    late = holdfast("archive", "--since", "2026-11-15T08:00:00")
    assert (late.code, "has no time zone; write it like" in late.err) == (2, True)


def test_what_error_and_reason_both_say_is_told_once(holdfast: Holdfast, shop: Path) -> None:
    with App(f"sqlite:///{shop / 'shop.db'}") as app:

        @app.task(name="shop:hang", timeout="20ms")
        async def hang() -> None:
            await asyncio.Event().wait()

        with app.runner(), pytest.raises(TimedOut):
            hang.submit().result(patient(30))
    (row,) = [line for line in holdfast("archive").out.splitlines() if "shop:hang" in line]
    assert row.endswith("  TimedOut: timed out after 20ms")


def test_the_archive_has_pages(holdfast: Holdfast, ended: dict[str, str]) -> None:
    seen, more = list[str](), list[str]()
    for _ in range(3):
        page = json.loads(holdfast("archive", "--limit", "1", "--json", *more).out)
        seen += [one["id"] for one in page["invocations"]]
        more = ["--before", page["before"]]
    assert sorted(seen) == sorted(ended[name] for name in ("good", "bad", "keyed"))
    assert "there may be more: --before" in holdfast("archive", "--limit", "1").err


def test_one_is_run_again_and_both_tell_so(holdfast: Holdfast, ended: dict[str, str]) -> None:
    done = holdfast("rerun", ended["bad"], "--at", "2100-01-01T00:00:00Z")
    new, _, rest = done.out.partition(" ")
    assert is_id(new)
    assert rest.strip() == f"is a rerun of {ended['bad']}"
    assert f"rerun of  {ended['bad']}" in " ".join(holdfast("show", new).out.split(" "))
    assert f"rerun of {ended['bad']}" in holdfast("history", new).out
    assert f"{new}, registered" in holdfast("show", ended["bad"]).out
    assert f"rerun as {new}" in holdfast("history", ended["bad"]).out
    assert json.loads(holdfast("show", ended["bad"], "--json").out)["reruns"] == [new]
    refused = holdfast("rerun", ended["later"])
    assert refused.code == 1
    assert "it is registered; only what has ended can be run again" in refused.out
    assert holdfast("rerun").code == 2
    assert holdfast("rerun", ended["bad"], "--status", "failed").code == 2


def test_a_filter_is_a_dry_run_until_it_is_confirmed(
    holdfast: Holdfast, ended: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored() -> int:
        return len(json.loads(holdfast("ps", "--json").out)["invocations"])

    dry = holdfast("rerun", "--status", "failed")
    assert dry.code == 0
    assert "ValueError: no card" in dry.out
    assert "1 invocation would run again; nothing was done. To do it, add --yes" in dry.err
    plan = json.loads(holdfast("rerun", "--status", "failed", "--json").out)
    assert plan == {"dry_run": True, "matched": 1, "ids": [ended["bad"]]}
    assert stored() == 4
    done = json.loads(holdfast("rerun", "--status", "failed", "--delay", "1h", "--yes", "--json").out)
    assert [one["rerun_of"] for one in done["reruns"]] == [ended["bad"]]
    again = holdfast("rerun", "--status", "failed", "--yes", "--request", done["request"])
    assert done["reruns"][0]["id"] in again.out
    assert stored() == 5
    for answer, more in (("n\n", 0), ("y\n", 1)):
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        holdfast("rerun", "--status", "failed")
        assert stored() == 5 + more


def test_the_request_that_a_rerun_prints_repeats_it(holdfast: Holdfast, ended: dict[str, str]) -> None:
    first = holdfast("rerun", "--status", "failed", "--yes")
    (request,) = {word.rstrip(";") for word in first.err.split() if len(word.rstrip(";")) == len(ended["bad"])}
    again = holdfast("rerun", "--status", "failed", "--yes", "--request", request)
    assert (again.code, again.out.splitlines()[-1]) == (0, first.out.splitlines()[-1])


class _Terminal:
    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self, *_: int) -> str:
        return self._line

    def fileno(self) -> int:
        raise OSError


def test_a_purge_removes_what_has_ended_and_nothing_else(holdfast: Holdfast, ended: dict[str, str]) -> None:
    dry = holdfast("purge", "--status", "success")
    assert "1 invocation would be removed; nothing was done" in dry.err
    assert f"{ended['keyed']} is kept: its key 'k' is still taken" in dry.out
    assert holdfast("purge", "--status", "success", "--yes").out.endswith("1 invocation removed\n")
    assert holdfast("show", ended["good"]).code == 4
    forced = json.loads(holdfast("purge", "--status", "success", "--yes", "--force", "--json").out)
    assert forced == {"dry_run": False, "matched": 1, "removed": 1, "kept": {}}
    live = holdfast("purge", ended["later"], "--yes")
    assert live.code == 1
    assert f"{ended['later']} is kept: it is registered; only ended invocations can be removed" in live.out
    assert holdfast("purge").code == 2
    assert holdfast("show", ended["bad"]).code == 0


def test_show_tells_how_long_it_is_kept(holdfast: Holdfast, ended: dict[str, str]) -> None:
    (line,) = [line for line in holdfast("show", ended["good"]).out.splitlines() if line.startswith("kept")]
    assert "6d23h" in line.replace(" ", "") or "7d" in line
    assert "\nkept" not in holdfast("show", ended["later"]).out


def test_the_history_tells_what_is_left_out(holdfast: Holdfast, ended: dict[str, str], shop: Path) -> None:
    line = '{"v":%d,"s":"%s","t":1.0,"op":"o%d"},'
    lines = [line % (1, "registered", 1), *[line % (v, "retry", v) for v in range(100, 400)]]
    with closing(sqlite3.connect(shop / "shop.db")) as connection:
        connection.execute(
            "UPDATE holdfast_invocations SET history = ?, version = 399, status = 'retry' WHERE id = ?",
            ("".join(lines), ended["later"]),
        )
        connection.commit()
    told = holdfast("history", ended["later"]).out.splitlines()
    assert told[1].startswith("1 ")
    assert "98 lines left out of a long history" in told[2]
    assert told[3].startswith("100 ")


@pytest.mark.slow
def test_a_request_that_died_half_way_is_repeated_without_a_double(holdfast: Holdfast, shop: Path) -> None:
    """Killed after a part of the new ones was stored; who repeats the request completes it."""
    with App(f"sqlite:///{shop / 'shop.db'}") as app:
        boom = app.task(name="shop:boom")(lambda text: 1 / 0)
        originals = boom.map([str(number) for number in range(450)])
        with app.runner():
            for one in originals:
                with pytest.raises(ZeroDivisionError):
                    one.result(timeout=patient(60))

    request = "00000000000000000000000001"
    command = [sys.executable, "-m", "holdfast", "rerun", "--status", "failed", "--delay", "1h", "--yes"]
    command += ["--request", request]
    environment = {**os.environ, crashpoints.VARIABLE: "submit.after:2"}
    killed = subprocess.run(command, cwd=shop, env=environment, capture_output=True, timeout=patient(60), check=False)
    assert killed.returncode == -signal.SIGKILL

    def repeats() -> list[str | None]:
        with App(f"sqlite:///{shop / 'shop.db'}") as app:
            return [record.rerun_of for record in app.invocations(limit=10_000) if record.rerun_of]

    assert len(repeats()) == 400  # two pages
    assert holdfast(*command[3:]).code == 0
    assert sorted(map(str, repeats())) == sorted(one.id for one in originals)


@pytest.mark.parametrize("option", ["--key", "--error", "--task", "--queue", "--tag"])
def test_an_empty_filter_does_not_widen_what_is_meant(holdfast: Holdfast, ended: dict[str, str], option: str) -> None:
    """As of a shell variable that is not set."""
    answer = holdfast("purge", "--status", "failed", option, "", "--yes")
    assert answer.code == 2, answer
    assert holdfast("show", ended["bad"]).code == 0
