"""holdfast dev: a runner and pages in one terminal, which follow the code, and end together."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.processes import children, eventually, is_gone
from tests.support.patience import patient

from holdfast import App
from holdfast.cli import dev
from holdfast.cli.output import Output
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.cli.processes import Process

    from conftest import Command

Start = Callable[..., "Process"]


def started(start: Start, *arguments: str) -> tuple[Process, str]:
    """Return the command, and the address of its pages, once its worker takes calls."""
    process = start("dev", "shop:app", "--port", "0", "--no-open", *arguments)
    address = process.says("open http://").split()[1]
    process.says("it serves 3 tasks")
    return process, address


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=patient(30)) as answer:
        text: str = answer.read().decode()
        return text


def family(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *family(child))]


@pytest.mark.slow
def test_it_follows_the_code_and_ends_as_one(shop: Path, holdfast: Command, start: Start) -> None:
    process, address = started(start)
    assert holdfast("submit", "add", "1", "--app", "shop:app", "--wait", "--timeout", "60").out.strip() == "1"
    code = (shop / "shop.py").read_text()
    (shop / "shop.py").write_text(code + "\ndef (\n")
    process.says("it is no Python")
    assert "Holdfast" in page(address)
    (shop / "shop.py").write_text(code.replace("return a + b", "return a + b + 100") + "\nimport nonsense\n")
    process.says("No module named 'nonsense'")
    assert "Holdfast" in page(address), "the pages go on while the code cannot be imported"
    (shop / "shop.py").write_text(code.replace("return a + b", "return a + b + 100"))
    eventually(lambda: len(process.said("it serves 3 tasks")) == 2, "a worker with the new code")
    with App("sqlite:///shop.db") as app:
        assert app.task(name="shop:add")(lambda a, b=0: None).submit(1).result(patient(60)) == 101
    assert "Holdfast" in page(address)
    there = family(process.pid)
    assert len(there) >= 3  # the pages, the runner, its worker
    process.interrupt_all()
    answer = process.ends()
    assert (answer.code, "stopped" in answer.out) == (0, True), answer.err
    assert all(map(is_gone, there))


@pytest.mark.faults
@pytest.mark.slow
def test_a_second_ctrl_c_ends_running_work_at_once(shop: Path, holdfast: Command, start: Start) -> None:
    process, _ = started(start)
    id = holdfast("submit", "linger", "600", "--app", "shop:app").out.strip()
    process.says("lingering")
    process.interrupt_all()
    process.says("SIGTERM; running work may end")
    eventually(lambda: not process.signal(signal.SIGINT) and process.said("running work is ended"), "a second signal")
    assert process.ends().code == 0
    assert holdfast("show", id, "--app", "shop:app", "--json").json["status"] in ("rerouted", "registered", "pending")


@pytest.mark.slow
def test_nothing_outlives_it(shop: Path, start: Start) -> None:
    process, _ = started(start)
    there = family(process.pid)
    process.signal(signal.SIGKILL)
    eventually(lambda: all(map(is_gone, there)), "its children have ended")
    process.ends()


@pytest.mark.faults
@pytest.mark.slow
def test_an_import_that_never_ends_does_not_outlive_it(shop: Path, start: Start) -> None:
    process, _ = started(start)
    hangs = "import sys, time\nif '--only-import' in sys.argv:\n    open('hangs', 'w').close()\n    time.sleep(600)\n"
    (shop / "shop.py").write_text((shop / "shop.py").read_text() + hangs)
    eventually((shop / "hangs").exists, "the pages try the new code")
    there = family(process.pid)
    process.interrupt_all()
    assert process.ends().code == 0
    eventually(lambda: all(map(is_gone, there)), "its children have ended")


@pytest.mark.slow
def test_it_waits_for_code_that_can_be_imported(shop: Path, start: Start) -> None:
    code = (shop / "shop.py").read_text()
    (shop / "shop.py").write_text("def (")
    process = start("dev", "shop:app", "--port", "0")
    process.says("Nothing runs until a file changes.")
    (shop / "shop.py").write_text(code)
    process.says("open http://")
    process.signal(signal.SIGTERM)
    assert process.ends().code == 0


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
def test_on_mongodb(shop: Path, holdfast: Command, start: Start, mongo_url: str) -> None:
    (shop / "shop.py").write_text((shop / "shop.py").read_text().replace("sqlite:///shop.db", mongo_url))
    process, address = started(start)
    assert holdfast("submit", "add", "1", "--app", "shop:app", "--wait", "--timeout", "60").out.strip() == "1"
    assert "Holdfast" in page(address)
    process.interrupt_all()
    assert process.ends().code == 0


def test_a_port_that_was_asked_for_is_taken_or_refused(shop: Path, holdfast: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = holdfast("dev", "shop:app", "--port", other.getsockname()[1])
    assert answer.code == 1
    assert "another program uses that port" in answer.err
    assert holdfast("dev", "shop:app", "--app", "other:app").code == 2


def test_without_a_wish_the_next_free_port_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = other.getsockname()[1]
        monkeypatch.setattr(dev, "FIRST_PORT", first)
        with dev._taken(Output(json=False), None) as taken:
            assert taken.getsockname()[1] != first
        assert f"another program uses port {first}, so the pages are at port" in capsys.readouterr().err
        with pytest.raises(ConfigurationError), dev._taken(Output(json=False), first):
            pass


@pytest.mark.parametrize(
    ("environ", "platform", "may"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({}, "darwin", True),
        ({"CI": "1"}, "darwin", False),
    ],
)
def test_a_browser_is_opened_only_where_a_person_has_one(environ: dict[str, str], platform: str, may: bool) -> None:
    assert dev.may_open_browser(environ, platform) is may


def test_pages_of_a_store_alone_know_that_there_is_no_code(shop: Path) -> None:
    with App("sqlite:///shop.db") as alone:
        assert not alone.runtime.has_code
        alone.task(name="shop:add")(lambda a: a)
        assert alone.runtime.has_code
