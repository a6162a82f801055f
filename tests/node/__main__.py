"""Run what needs Node 20 or newer: the package for Node, and the suite of Workflow DevKit on SQLite and on MongoDB.

``python -m tests.node [PART …]``: only these parts, of `sqlite`, `mongodb`, `package` and `example`. Two run
only if they are named: `kills`, the suite while servers are killed (SEED=7 repeats what it has printed), and `figures`.

The suite starts a program for each test. In the newest suite all programs use one server, which they are told of; in
the older one, in our own tests of the joint and in the example, each starts a server of its own. It ends with 2 where
it cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.support.mongod import given_url, quick_server

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "integrations" / "workflow-world"
SUITE = PACKAGE / "conformance"
EXAMPLE = PACKAGE / "example"
HOLDFAST = Path(sys.executable).parent / "holdfast"
OLDEST_NODE = 20

CANNOT_RUN = 2

Environment = Mapping[str, str]
ITS_OWN_SERVER = {"WORKFLOW_HOLDFAST_COMMAND": str(HOLDFAST)}


class CannotRun(Exception):
    """Something is missing on this machine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.node")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join([*PARTS, *BESIDE]))
    wanted = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in wanted if part not in {**PARTS, **BESIDE}]:
        parser.error(f"unknown: {' '.join(unknown)}; expected some of {' '.join([*PARTS, *BESIDE])}")
    try:
        need_node()
        at_once(*(partial(install_in, folder) for folder in (PACKAGE, EXAMPLE) if needs(folder, wanted)))
        run("npm", "run", "--silent", "build", folder=PACKAGE)
        at_once(*(partial(done, part) for part in wanted if part in STORES))
        for part in wanted:
            if part not in STORES:
                done(part)
    except CannotRun as reason:
        print(f"cannot run here: {reason}", file=sys.stderr)
        return CANNOT_RUN
    except subprocess.CalledProcessError as error:
        print(f"FAILED: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


def needs(folder: Path, wanted: Sequence[str]) -> bool:
    return folder == PACKAGE or "example" in wanted


def at_once(*works: Callable[[], None]) -> None:
    """Do some things at once: they wait more than they work. Raises what the first of them has raised."""
    with ThreadPoolExecutor(max(1, len(works))) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def done(part: str) -> None:
    began = time.monotonic()
    {**PARTS, **BESIDE}[part]()
    print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


def need_node() -> None:
    """Raise CannotRun unless Node is there, and new enough."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise CannotRun(f"this needs Node {OLDEST_NODE} or newer, with npm, on PATH")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    found = re.match(r"v(\d+)", version)
    if found is None or int(found[1]) < OLDEST_NODE:
        raise CannotRun(f"this needs Node {OLDEST_NODE} or newer, and the one on PATH is {version}")


def run(*command: str | Path, folder: Path, environment: Environment | None = None) -> None:
    """Run a command, and print what it says when it has ended: others may run beside it."""
    env = {**clean_environment(), **(environment or {})}
    ended = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    with _PRINTING:
        print(ended.stdout.decode(errors="replace"), end="", flush=True)
    ended.check_returncode()


_PRINTING = threading.Lock()


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of whoever runs this."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "WORKFLOW_"))}


def install_in(folder: Path) -> None:
    """Install what the lockfile names, if it is not there."""
    lock, done = folder / "package-lock.json", folder / "node_modules" / ".package-lock.json"
    if not done.exists() or done.stat().st_mtime < lock.stat().st_mtime:
        try:
            run("npm", "ci", "--prefer-offline", "--no-audit", "--no-fund", folder=folder)
        except subprocess.CalledProcessError as error:
            raise CannotRun(f"npm could not install what {lock.relative_to(ROOT)} names") from error


def package() -> None:
    """Check style and types, and run the package's own tests."""
    for script in ("lint", "types", "test"):
        run("npm", "run", "--silent", script, folder=PACKAGE)


def suite(file: str, environment: Environment, *options: str) -> None:
    """Run a file of the suite. Each has a store of its own: open runs would be delivered to the next program."""
    run("npx", "vitest", "run", file, *options, folder=SUITE, environment=environment)


def on_sqlite() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with server({"HOLDFAST_URL": f"sqlite:///{folder}/suite.db"}) as environment:
            suite("suite", environment)
        for file in ("older", "real"):
            suite(file, {**ITS_OWN_SERVER, "HOLDFAST_URL": f"sqlite:///{folder}/{file}.db"})


def on_mongodb() -> None:
    def store(file: str) -> dict[str, str]:
        database = f"world_{file}_{secrets.token_hex(4)}"
        return {"WORKFLOW_MONGODB_URI": url, "WORKFLOW_MONGODB_DATABASE_NAME": database}

    with mongodb() as url:
        with server(store("suite")) as environment:
            suite("suite", environment)
        suite("real", {**ITS_OWN_SERVER, **store("real")})


@contextlib.contextmanager
def mongodb() -> Iterator[str]:
    """Return the address of a replica set: a given one, or a new one."""
    if given := given_url():
        yield given
        return
    with quick_server(replica_set="rs0") as mongod:
        yield mongod.url()


@contextlib.contextmanager
def server(store: Environment) -> Iterator[dict[str, str]]:
    """Run a server, and return the environment by which applications find it."""
    token = secrets.token_urlsafe(32)
    environment = {**clean_environment(), **store, "HOLDFAST_WORLD_TOKEN": token}
    command = [HOLDFAST, "world", "serve", "--child", "--log-level", "warning"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield {"WORKFLOW_HOLDFAST_SERVER": json.loads(line)["url"], "HOLDFAST_WORLD_TOKEN": token}
        finally:
            process.stdin.close()
            assert process.wait(timeout=60) == 0


def example() -> None:
    """Build the example for the release that users install, and let its order go its way."""
    from tests.node.example import run_example

    run("npm", "run", "--silent", "build", folder=EXAMPLE)
    run_example(EXAMPLE, HOLDFAST, clean_environment())


def kills() -> None:
    """Run what may be delivered twice while the first server of each program is killed, on both stores.

    The rest counts deliveries, measures the time between two attempts, or has no time for a recovery.
    """
    seed = os.environ.get("SEED") or secrets.token_hex(4)
    print(f"servers die by SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, mongodb() as url:
        mongo = {"WORKFLOW_MONGODB_URI": url, "WORKFLOW_MONGODB_DATABASE_NAME": f"world_kills_{secrets.token_hex(4)}"}
        for store in ({"HOLDFAST_URL": f"sqlite:///{folder}/kills.db"}, mongo):
            with tempfile.TemporaryDirectory() as dead:
                environment = {
                    **store,
                    "WORKFLOW_HOLDFAST_COMMAND": f"{sys.executable} {ROOT / 'tests' / 'node' / 'mortal.py'}",
                    "MORTAL_FOLDER": dead,
                    "MORTAL_SEED": seed,
                    # Else the messages of a server wait for 15 s.
                    "HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.5",
                    "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": "0.05",
                }
                suite("suite", environment, "-t", MAY_BE_DELIVERED_TWICE)


def figures() -> None:
    """Measure the World as Node sees it, on both stores; and the suite beside the vendor's own World, in turns."""
    with tempfile.TemporaryDirectory() as folder, mongodb() as url:
        mongo = {"WORKFLOW_MONGODB_URI": url, "WORKFLOW_MONGODB_DATABASE_NAME": f"world_{secrets.token_hex(4)}"}
        for name, store in (("sqlite", {"HOLDFAST_URL": f"sqlite:///{folder}/figures.db"}), ("mongodb", mongo)):
            print(f"{name}: events a second of 1 run, of 20; ms from queue() to the handler", flush=True)
            run("node", "measure.mjs", folder=SUITE, environment={**ITS_OWN_SERVER, **store})
        for turn in ("first", "second"):
            with server({"HOLDFAST_URL": f"sqlite:///{folder}/{turn}.db"}) as environment:
                print(f"{turn} turn, Holdfast on SQLite: {timed_suite(environment):.1f} s", flush=True)
            theirs = {"SUITE_WORLD": "local", "WORKFLOW_LOCAL_DATA_DIR": f"{folder}/{turn}"}
            print(f"{turn} turn, the vendor's local World: {timed_suite(theirs):.1f} s", flush=True)


def timed_suite(environment: Environment) -> float:
    began = time.monotonic()
    suite("suite", environment)
    return time.monotonic() - began


MAY_BE_DELIVERED_TWICE = "addition|idempotency|hooks|lineage|chain"
STORES = {"sqlite": on_sqlite, "mongodb": on_mongodb}
PARTS = {**STORES, "package": package, "example": example}
BESIDE = {"kills": kills, "figures": figures}

if __name__ == "__main__":
    sys.exit(main())
