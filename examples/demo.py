"""Show what Holdfast does, on a SQLite file: `make demo`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from holdfast import App, Invocation, InvocationGroup

say = Console(highlight=False).print


@dataclasses.dataclass
class Order:
    id: int
    customer: str
    amount: float


class CardDeclined(Exception):
    pass


def declare(app: App) -> None:
    app.register(CardDeclined)

    @app.task(name="shop:charge")
    def charge(order: Order) -> str:
        if order.amount > 1000:
            raise CardDeclined(f"the card of {order.customer} was declined")
        return f"receipt-{order.id}"

    @app.task(name="shop:thumbnail")
    def thumbnail(number: int) -> int:
        return number * number


def print_history(invocation: Invocation[object]) -> None:
    """Print every status of an invocation, as the store has it."""
    record = invocation.record()
    table = Table(title=f"{record.task}  {invocation.id}", title_justify="left", box=None, pad_edge=False)
    for heading in ("time (UTC)", "status", "owner", "epoch", "why"):
        table.add_column(heading, style="cyan" if heading == "status" else "")
    for entry in record.history:
        moment = dt.datetime.fromtimestamp(entry.at, dt.UTC).strftime("%H:%M:%S.%f")[:-3]
        table.add_row(moment, entry.status, entry.owner or "–", str(entry.epoch), entry.why)
    say(table)
    say()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shop.db"
        with App(f"sqlite:///{file}") as app:
            declare(app)
            show(app, file)
        crash(Path(folder))
        say("Next: [bold]holdfast --help[/], and the README.")
        if sys.stdout.isatty() and not os.environ.get("CI"):
            look_around(Path(folder))


def show(app: App, file: Path) -> None:
    charge, thumbnail = app.get_task("shop:charge"), app.get_task("shop:thumbnail")
    say("[bold]Holdfast[/]: durable background tasks. One import, one SQLite file.\n")

    say(f"[bold]1.[/] Submit an order. No runner is there yet; the order is safe in [green]{file.name}[/].")
    paid = charge.submit(Order(1, "ada@example.com", 19.90))
    say(f"   status: {paid.status}   why: {paid.explain()}\n")

    say("[bold]2.[/] Start a runner with 8 slots. It finds the order and charges it.")
    with app.runner(concurrency=8):
        say(f"   result: {paid.result(timeout=30)}\n")
        print_history(paid)

        say("[bold]3.[/] An order that fails comes back as the exception it was.")
        declined = charge.submit(Order(2, "eve@example.com", 99999.0))
        try:
            declined.result(timeout=30)
        except CardDeclined as error:
            say(f"   CardDeclined: {error}\n")
        print_history(declined)

        say("[bold]4.[/] Two thousand at once.")
        began = time.perf_counter()
        group: InvocationGroup[int] = thumbnail.map(range(2000))
        submitted = time.perf_counter() - began
        total = sum(group.results(timeout=120))
        seconds = time.perf_counter() - began
        say(f"   stored in {submitted:.2f} s, all done after {seconds:.2f} s, every one of them on the disk.")
        assert total == sum(n * n for n in range(2000)), "a result is wrong"

    counts = {status: len(app.invocations(status=status, limit=5000)) for status in ("success", "failed")}
    say(f"   in the store: {counts['success']} success, {counts['failed']} failed, nothing in between.\n")
    assert counts == {"success": 2001, "failed": 1}, counts


def crash(folder: Path) -> None:
    """Kill a worker process in the middle of its work. Its runner notices, and another worker does it again."""
    say("[bold]5.[/] Now with worker processes, and one of them is killed with [red]kill -9[/] in mid-task.")
    url = f"sqlite:///{folder / 'parcels.db'}"
    environment = os.environ | {"HOLDFAST_URL": url}
    command = [sys.executable, "-m", "holdfast", "run", "parcels:app", "--workers", "2", "--log-level", "error"]
    here = Path(__file__).parent
    with (
        App(url, name="parcels") as app,
        subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.DEVNULL) as runner,
    ):
        try:
            until(lambda: any(len(found.workers) == 2 for found in app.runners()))
            weigh = app.task(name="parcels:weigh")(parcels_weigh)
            parcel = weigh.submit(42, 1.0)
            until(lambda: parcel.status == "running")
            owner = parcel.record().owner or ""
            (pid,) = [w.pid for found in app.runners() for w in found.workers if f"{found.id}/{w.id}" == owner]
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            result = parcel.result(timeout=60)
            say(f"   worker {pid} is dead; {time.perf_counter() - killed:.1f} s later: {result}\n")
            print_history(parcel)
        finally:
            runner.send_signal(signal.SIGINT)


def look_around(folder: Path) -> None:
    """Serve the pages of the shop's store until Ctrl-C."""
    url = f"sqlite:///{folder / 'shop.db'}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "holdfast", "monitor", "--url", url, "--port", port, "--log-level", "error"]
    with subprocess.Popen(command) as pages:
        while pages.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # it has heard it too, and ends in order
                pages.wait()


def parcels_weigh(parcel: int, seconds: float) -> str:
    """Declare the signature of `parcels:weigh`; the runner has its code."""
    raise NotImplementedError


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
