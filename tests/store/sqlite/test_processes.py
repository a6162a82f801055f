"""Several processes on one file: fair, durable, and told of each other's work."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast.model.records import ENDED, READY, Hint
from holdfast.store.contract import Store
from holdfast.store.sqlite.hints import SocketHints
from holdfast.testing.samples import Stage

PREAMBLE = """
import asyncio, json, os, random, signal, sys, time
from pathlib import Path
from holdfast.clock import SystemClock
from holdfast.model import changes
from holdfast.model.records import Hint
from holdfast.store.contract import ignore
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.samples import invocation, wish

def new_store(synchronous="full"):
    return SqliteStore(Path(sys.argv[1]), clock=SystemClock(), observe=ignore, synchronous=synchronous,
                       busy_timeout_seconds=10.0)
"""


def process(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


# --- fairness

BUSY = """
async def main():
    store, name = new_store(), sys.argv[2]
    await store.open()
    print("ready", flush=True)
    sys.stdin.readline()
    done, worst, end = 0, 0.0, time.monotonic() + 1.5
    while (began := time.monotonic()) < end:
        id = f"{name}-{done}"
        await store.insert([invocation(id)])
        between = time.monotonic()
        got = await store.claim(wish(f"claim {id}", ids=(id,), owner=name))
        assert [record.id for record in got.records] == [id]
        worst = max(worst, between - began, time.monotonic() - between)
        done += 1
    print(json.dumps([done, worst]), flush=True)
    await store.close()
asyncio.run(main())
"""


@pytest.mark.slow
def test_four_processes_share_one_file_fairly(path: Path) -> None:
    children = [process(BUSY, path, name) for name in "abcd"]
    assert [line_of(child) for child in children] == ["ready"] * 4
    for child in children:
        tell(child, "go")
    shares, waits = zip(*[json.loads(line_of(child)) for child in children], strict=True)
    for child in children:
        child.communicate(timeout=patient(10))
    assert max(waits) < 1.0, f"somebody waited {max(waits):.2f} s for one write"
    assert min(shares) >= max(shares) / 4, f"the shares are {shares}"


# --- durability

KILLED_AGAIN_AND_AGAIN = """
async def work(number, acknowledge):
    store = new_store()
    await store.open()
    async def submit_and_finish(lane):
        for count in range(10_000):
            id = f"{number:02}-{lane}-{count:05}"
            assert list(await store.insert([invocation(id, arguments=b"x" * random.choice([1, 100, 9000]))])) == [True]
            os.write(acknowledge, f"stored {id}\\n".encode())
            (record,) = (await store.claim(wish(f"claim {id}", ids=(id,)))).records
            end = changes.completed(record, result=id.encode(), operation=f"end {id}", at=1.0)
            assert list(await store.apply([end])) == [changes.APPLIED]
            os.write(acknowledge, f"ended {id}\\n".encode())
    await asyncio.gather(*[submit_and_finish(lane) for lane in range(4)])

acknowledged = []
rng = random.Random(7)
for number in range(20):
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        asyncio.run(work(number, said))
        os._exit(1)
    os.close(said)
    with os.fdopen(heard, "rb") as lines:
        acknowledged += [lines.readline() for _ in range(rng.randrange(1, 60))]
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        acknowledged += lines.readlines()

async def look():
    store = new_store()
    await store.open()
    lost = []
    for line in acknowledged:
        what, id = line.decode().split()
        (record,) = await store.get("shop", [id])
        if record is None or (what == "ended" and record.result != id.encode()):
            lost.append(line.decode())
    bad = [finding.detail for finding in await store.check(deep=True) if not finding.ok]
    await store.close()
    print(json.dumps([len(acknowledged), lost, bad]))
asyncio.run(look())
"""


@pytest.mark.slow
def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    child = process(KILLED_AGAIN_AND_AGAIN, path)
    answer, _ = child.communicate(timeout=patient(60))
    count, lost, bad = json.loads(answer)
    assert count >= 20
    assert lost == []
    assert bad == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


# --- hints

LISTENING = """
async def main():
    store = new_store()
    await store.open()
    heard = asyncio.get_running_loop().create_future()
    store.hints().listen(sys.argv[2], lambda hint: heard.done() or heard.set_result(hint))
    print("listening", flush=True)
    hint = await asyncio.wait_for(heard, 20)
    print(json.dumps([hint.kind, list(hint.subjects)]), flush=True)
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    await store.close()
asyncio.run(main())
"""


def sockets_in(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".sock")]


def test_a_hint_reaches_the_other_process_and_a_dead_ones_socket_is_swept(stage: Stage, path: Path) -> None:
    folder = path.with_name("store.db-holdfast")

    async def scenario(store: Store) -> None:
        channel = store.hints()
        assert channel is not None
        child = process(LISTENING, path, READY, "die")
        assert line_of(child) == "listening"
        channel.send([Hint(ENDED, ("not for it",)), Hint(READY, ("default|shop:send",))])
        assert json.loads(line_of(child)) == ["ready", ["default|shop:send"]]
        child.communicate(timeout=patient(10))
        assert len(sockets_in(folder)) == 1
        channel.send([Hint(ENDED, ())])
        assert len(sockets_in(folder)) == 1, "nobody has tried it yet"
        channel.send([Hint(READY, ())])
        assert sockets_in(folder) == []

    stage.play(scenario)


def hear(folder: Path, *, garbage: list[bytes], hints: list[Hint]) -> tuple[list[Hint], list[dict[str, Any]]]:
    """What a listener makes of these, and what went wrong on its loop."""
    received: list[Hint] = []
    problems: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        ours, theirs = SocketHints(folder), SocketHints(folder)
        ours.listen(READY, received.append)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for message in garbage:
                stranger.sendto(message, str(folder / sockets_in(folder)[0]))
        ours.send([Hint(READY, ("an echo",))])
        theirs.send(hints)
        for _ in range(1000):
            if len(received) >= len(hints):
                break
            await asyncio.sleep(0.001)
        await ours.close()
        await theirs.close()
        assert sockets_in(folder) == []

    asyncio.run(scenario())
    return received, problems


def test_nonsense_in_the_socket_is_ignored(folder: Path) -> None:
    garbage = [b"", b"nonsense", b"\xff\xfe", b'{"kind": "\xff", "subjects": []}', b'{"kind": 7}', b"[" * 500, b"null"]
    good = Hint(READY, ("a", "b"))
    assert hear(folder, garbage=garbage, hints=[good]) == ([good], [])


def test_a_hint_that_is_too_long_says_only_that_there_is_something(folder: Path) -> None:
    long = Hint(READY, tuple(f"lane {n}" for n in range(5000)))
    assert hear(folder, garbage=[], hints=[long]) == ([Hint(READY, ())], [])


def test_hints_never_raise(folder: Path) -> None:
    missing = SocketHints(folder / "missing")
    missing.send([Hint(READY, ())])
    asyncio.run(missing.close())
    (folder / "ready-1-dead.sock").write_text("no socket at all")
    odd = SocketHints(folder)
    odd.send([Hint(READY, ())])
    asyncio.run(odd.close())

    async def too_long() -> None:
        deep = folder / ("d" * 90)
        deep.mkdir()
        channel = SocketHints(deep)
        channel.listen(READY, lambda hint: None)
        await channel.close()

    asyncio.run(too_long())
