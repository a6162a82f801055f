"""Least privilege: everything that a kind of process does works under its role, and nothing beyond."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pymongo import MongoClient
from tests.store.mongo.tools import Events, make_store, opened, play
from tests.support.mongod import QUICK, Mongod
from tests.support.patience import patient
from typer.testing import CliRunner

from holdfast import App, chain, context, group, hook, on_event, stream
from holdfast.cli.program import _make
from holdfast.clock import Clock
from holdfast.errors import StoreReadOnly, StoreUnauthorised, StoreUnavailable
from holdfast.model.changes import APPLIED
from holdfast.model.log import APPENDED
from holdfast.model.records import Entry
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.store import open_store
from holdfast.store.contract import EntryOrder, Observe, Store
from holdfast.store.mongo import schema
from holdfast.store.mongo.retry import READS
from holdfast.store.mongo.roles import ROLES, role_command
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.conformance import StoreConformance
from holdfast.testing.conformance_payloads import PayloadConformance
from holdfast.testing.conformance_reads import ReadConformance
from holdfast.testing.samples import RUN, START, Stage, delivery, ids_of, invocation, owned, page, pushing, wish

pytestmark = [pytest.mark.xdist_group("mongo")]

Client = MongoClient[dict[str, Any]]
DATABASE = "guarded"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A replica set of one node that lets nobody in without a password, and a user for each role."""
    folder = tmp_path_factory.mktemp("guarded")
    key = folder / "key"
    key.write_text("aGVsbG8gaGVsbG8gaGVsbG8gaGVsbG8=")
    os.chmod(key, 0o600)
    server = Mongod(folder / "db", replica_set="rs0", options=("--keyFile", str(key), *QUICK))
    server.start()
    try:
        server.initiate()
        with server.client() as client:
            client.admin.command("createUser", "root", pwd="root", roles=["root"])
        with MongoClient[dict[str, Any]](url(server, "root", "admin")) as client:
            for role in ROLES:
                client[DATABASE].command(role_command(role, DATABASE))
                client[DATABASE].command("createUser", role, pwd=role, roles=[f"holdfast{role.capitalize()}"])
            more = {"db": DATABASE, "collection": schema.INVOCATIONS}
            client[DATABASE].command(
                "createRole", "more", privileges=[{"resource": more, "actions": ["update"]}], roles=[]
            )
            client[DATABASE].command("createUser", "caller", pwd="caller", roles=["holdfastSubmitter", "more"])
            client[DATABASE].command("createUser", "nobody", pwd="nobody", roles=[])
        yield server
    finally:
        server.stop()


def url(server: Mongod, user: str, source: str = DATABASE) -> str:
    return f"mongodb://{user}:{user}@{server.address}/{DATABASE}?replicaSet=rs0&authSource={source}"


def prepare(server: Mongod) -> None:
    with App(url(server, "admin"), name="shop") as admin:
        admin.invocations()


@pytest.fixture(scope="module")
def root(server: Mongod) -> Iterator[MongoClient[dict[str, Any]]]:
    """Prepared by the admin."""
    prepare(server)
    with MongoClient[dict[str, Any]](url(server, "root", "admin")) as client:
        yield client


@pytest.fixture
def empty(server: Mongod, root: MongoClient[dict[str, Any]]) -> Mongod:
    """Prepared, and without documents."""
    for name in root[DATABASE].list_collection_names():
        if name != schema.META:
            root[DATABASE][name].delete_many({})
    return server


@pytest.fixture
def damaged(empty: Mongod) -> Iterator[Mongod]:
    """For a test that takes something away of what the admin has prepared."""
    yield empty
    prepare(empty)


class TestUnderTheRunnersRole(StoreConformance):
    """The whole suite of the store contract."""

    @pytest.fixture
    def store_url(self, empty: Mongod) -> str:
        return url(empty, "runner")


LOOKS = frozenset(name.replace(" ", "_") for name in READS)
SUBMITS = LOOKS | {"insert", "keep_payloads", "put_piece", "put_payloads"}


class Divided:
    """A store on which a role does what it is for, and the runner's role the rest."""

    def __init__(self, own: Store, names: frozenset[str], runner: Store) -> None:
        self._own, self._names, self._runner = own, names, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if name in self._names else self._runner, name)

    async def open(self) -> None:
        await self._runner.open()
        await self._own.open()

    async def close(self) -> None:
        await self._own.close()
        await self._runner.close()


class Shared:
    """The fixtures of the suite for a role that does a part of it."""

    role: str
    names: frozenset[str]

    @pytest.fixture
    def store_url(self, empty: Mongod) -> str:
        return url(empty, "runner")

    @pytest.fixture
    def stage(self, empty: Mongod) -> Stage:
        def open_both(clock: Clock, observe: Observe) -> Any:
            own, runner = (open_store(url(empty, r), clock=clock, observe=observe) for r in (self.role, "runner"))
            return Divided(own, self.names, runner)

        return Stage(open_both)


class TestUnderTheSubmittersRole(Shared, ReadConformance, PayloadConformance):
    """What submits and looks, by a submitter."""

    role, names = "submitter", SUBMITS
    test_whole = StoreConformance.test_what_is_inserted_comes_back_whole
    test_taken = StoreConformance.test_a_taken_id_is_refused_and_what_is_there_stays
    test_repeated = StoreConformance.test_an_insert_repeated_is_recognised_although_others_have_written_since
    test_batch = StoreConformance.test_a_batch_is_answered_record_by_record


class TestUnderTheMonitorsRole(Shared, ReadConformance):
    """What looks, by a monitor."""

    role, names = "monitor", LOOKS


class TestUnderTheAdminsRole(ReadConformance, PayloadConformance):
    @pytest.fixture
    def store_url(self, empty: Mongod) -> str:
        return url(empty, "admin")

    open_store = StoreConformance.open_store
    stage = StoreConformance.stage


def sum_of(numbers: list[int]) -> int:
    return sum(numbers)


def fails_once(n: int) -> int:
    if context().attempt == 1:
        raise ConnectionError("away")
    return n


def shop(url: str) -> App:
    app = App(url, name="shop")

    @app.task(name="ship")
    def ship(order: int, label: bytes = b"") -> int:
        return order + len(label)

    return app


def test_a_submitter_submits_and_a_runner_runs(empty: Mongod) -> None:
    large = bytes(100_000)
    with shop(url(empty, "submitter")) as submitter, shop(url(empty, "runner")) as runner:
        ship = submitter.get_task("ship")
        with runner.runner(concurrency=2):
            assert ship.submit(1).result(patient(20)) == 1
            assert ship.map(range(5)).results(patient(20)) == list(range(5))
            keyed = ship.options(key="order 7")
            assert keyed.submit(7, large) == keyed.submit(7, large)
            assert keyed.submit(7, large).result(patient(20)) == 7 + len(large)
            with (
                MongoClient[dict[str, Any]](url(empty, "submitter")) as client,
                client.start_session() as session,
                session.start_transaction(),
            ):
                joined = ship.options(session=session).submit(3)
            assert joined.result(patient(20)) == 3
            assert "success" in [entry.status for entry in joined.history()]
            assert len(submitter.runners()) == 1
        waiting = ship.submit(9)
        assert "no runner is alive" in waiting.explain()


def test_a_submitter_makes_groups_chains_and_first_attempts(empty: Mongod) -> None:
    with shop(url(empty, "submitter")) as submitter, shop(url(empty, "runner")) as runner:
        for each in (submitter, runner):
            each.task(name="total")(sum_of)
            each.task(name="shaky", retries=Fixed(1, 0.01))(fails_once)
        ship, total = submitter.get_task("ship"), submitter.get_task("total")
        with runner.runner(concurrency=2):
            both = group([ship.s(1), ship.s(2)], common_args={"label": bytes(1000)}).then(total).submit()
            assert both.results(timeout=patient(20)) == [1001, 1002]
            assert both.callback is not None
            assert both.callback.result(timeout=patient(20)) == 2003
            assert dict(both.counts()) == {Status.SUCCESS: 2}
            assert group([ship.s(1)]).submit().results(timeout=patient(20)) == [1]
            assert chain(ship.s(1), ship.s()).on_error(total).submit().result(timeout=patient(20)) == 1
            tried = submitter.get_task("shaky").options(attributes={"customer": "c-17"}).try_here(1)
            assert tried.invocation is not None
            assert tried.result(timeout=patient(20)) == 1
        assert len(submitter.invocations(attributes={"customer": "c-17"})) == 1
        large = submitter.emit("order", {"text": "x" * 100_000})
        assert submitter.events()[0].id == large.id
        assert submitter.stats().deploys


def test_a_submitter_emits_and_its_own_triggers_hear_of_it(empty: Mongod) -> None:
    """Inside a transaction and outside, though it may not tell others that there is a new trigger."""
    with shop(url(empty, "runner")) as runner:
        runner.task(name="known", triggers=[on_event("order")])(lambda: None)
        with runner.runner():
            pass  # now there are triggers, and the submitter's are not among them
        with shop(url(empty, "submitter")) as submitter:
            submitter.task(name="new", triggers=[on_event("order")])(lambda: None)
            outside = submitter.emit("order", {"n": 1})
            with (
                MongoClient[dict[str, Any]](url(empty, "submitter")) as client,
                client.start_session() as session,
                session.start_transaction(),
            ):
                inside = submitter.emit("order", {"n": 2}, session=session)
            for event in (outside, inside):
                assert {name.partition("#")[0] for name in event.outbox} == {"known", "new"}
            deadline = time.monotonic() + patient(20)
            while sorted(record.task for record in submitter.invocations()) != ["known", "known", "new", "new"]:
                assert time.monotonic() < deadline, submitter.invocations()
                time.sleep(0.02)


def test_a_submitter_puts_events_and_changes_none(empty: Mongod) -> None:
    event = Entry(app="shop", kind="event", name="e1", body=b"{}", keep_until=START)

    async def scenario(store: MongoStore) -> None:
        assert await store.put_entry(event)
        assert await store.put_entry(event), "again"
        assert list(await store.entries("shop", "event", order=EntryOrder.LATEST, limit=5)) == [event]
        for refused in (store.put_entry(replace(event, version=2)), store.remove_entry(event)):
            with pytest.raises(StoreReadOnly):
                await refused
        with pytest.raises(StoreReadOnly):
            await store.apply(delivery("a"))

    play(url(empty, "submitter"), scenario)


def test_only_a_runner_writes_logs_and_inboxes_and_every_role_reads_them(empty: Mongod) -> None:
    async def write(store: MongoStore) -> None:
        await owned(store, run=RUN)
        assert list(await store.append([page(1)])) == [APPENDED]
        assert list(await store.apply([pushing("a")])) == [APPLIED]

    async def read(store: MongoStore) -> None:
        assert list(await store.read_log("shop", "a", limit=9)) == [page(1)]
        refusals = [store.append([page(2)]), store.remove_log("shop", "a", before=1), store.apply([pushing("a", "e2")])]
        for refused in refusals:
            with pytest.raises(StoreReadOnly):
                await refused

    play(url(empty, "runner"), write)
    for role in ("submitter", "monitor"):
        play(url(empty, role), read)


DIES = """
import asyncio, sys
from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.testing.samples import page

async def main():
    store = open_store(sys.argv[1], clock=SystemClock(), observe=lambda *_: None, options={})
    await store.open()
    transaction = store.transaction(is_async=True, owner=sys.argv[2])
    await transaction.begin()
    await store.joined(transaction.session).aappend([page(int(sys.argv[3]))], ())
    print("begun", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_runner_rolls_back_what_a_dead_process_has_left_open(empty: Mongod) -> None:
    """Otherwise the server keeps it for a minute, and the place of its page is taken until then."""
    for first, owner in ((1, "dead/0"), (2, "dead/01")):
        command = [sys.executable, "-c", DIES, url(empty, "runner"), owner, str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.kill()

    async def scenario(store: MongoStore) -> None:
        assert await store.abort_transactions(["dead/0"]) == 1
        assert await store.abort_transactions(["dead/0"]) == 0
        assert await store.abort_transactions(["dead/01", "dead/2"]) == 1
        async with asyncio.timeout(10):
            assert list(await store.append([page(1), page(2)])) == [APPENDED] * 2

    play(url(empty, "runner"), scenario)


def test_a_submitter_and_a_monitor_cannot_run_anything(empty: Mongod) -> None:
    with shop(url(empty, "submitter")) as submitter:
        submitter.get_task("ship").submit(1)
        with pytest.raises(StoreReadOnly), submitter.runner():
            pass
    with shop(url(empty, "monitor")) as monitor:
        assert len(monitor.invocations()) == 1
        with pytest.raises(StoreReadOnly):
            monitor.get_task("ship").submit(2)
        assert len(monitor.invocations()) == 1


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_check_the_store(empty: Mongod, role: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a")])
        async with opened(url(empty, role)) as looking:
            found = await looking.check(deep=True)
        assert all(finding.ok for finding in found), found
        assert "not allowed" not in str(found)
        (history,) = [finding.detail for finding in found if finding.subject == "index history"]
        assert "this user may not read it" in history

    play(url(empty, "runner"), scenario)


def test_who_may_not_look_is_told_so_line_by_line(empty: Mongod) -> None:
    with MongoClient[dict[str, Any]](url(empty, "root", "admin")) as client:
        place = {"resource": {"db": DATABASE, "collection": schema.META}, "actions": ["find", "listIndexes"]}
        client[DATABASE].command("createRole", "doorkeeper", privileges=[place], roles=[])
        client[DATABASE].command("createUser", "doorkeeper", pwd="doorkeeper", roles=["doorkeeper"])
    store = make_store(url(empty, "doorkeeper"))
    found = {finding.subject: finding for finding in asyncio.run(store.check(deep=True))}
    assert found["schema"].ok
    forbidden = {subject for subject, finding in found.items() if finding.detail == "not allowed to look"}
    places = {f"indexes of {name}" for name in schema.COLLECTIONS if name != schema.META}
    assert forbidden == {"quarantine", "records", *places}
    assert not any(found[subject].ok for subject in forbidden)


@pytest.mark.parametrize(
    "command",
    [
        *(["ps"], ["ps", "--core"], ["ps", "--attribute", "a=b"], ["runners"], ["services"], ["queues"], ["apps"]),
        *(["groups"], ["limits"], ["limits", "show", "ship"], ["stats"], ["archive"], ["store", "check"]),
    ],
)
def test_a_monitor_looks(empty: Mongod, command: list[str]) -> None:
    with shop(url(empty, "submitter")) as submitter:
        submitter.get_task("ship").submit(1)
    result = CliRunner().invoke(_make(), [*command, "--url", url(empty, "monitor"), "--name", "shop", "--json"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("user", "command", "deed"),
    [
        ("monitor", ["submit", "ship", "1"], "insert into holdfast_entries"),  # the audit record comes first
        ("submitter", ["run"], "change holdfast_runners"),
        ("submitter", ["queues", "pause", "mail"], "change holdfast_entries"),
        ("monitor", ["limits", "set", "ship", "--rate", "1/s"], "insert into holdfast_entries"),
        ("monitor", ["run", "--workers", "0"], "change holdfast_runners"),
        ("nobody", ["ps"], "read holdfast_meta"),
        ("nobody", ["store", "check"], "read holdfast_meta"),
        ("nobody", ["store", "prepare"], "read holdfast_meta"),
    ],
)
def test_who_may_not_is_told_so_in_one_sentence(
    empty: Mongod, tmp_path: Path, user: str, command: list[str], deed: str
) -> None:
    if command[0] in ("run", "submit"):  # they need code: in a process, which other modules of that name do not disturb
        app = f'from holdfast import App\napp = App("{url(empty, user)}")\n'
        (tmp_path / "shop.py").write_text(f"{app}@app.task\ndef ship(order):\n    pass\n")
        program = [sys.executable, "-m", "holdfast", *command]
        ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60), check=False)
        code, out, said = ended.returncode, ended.stdout, ended.stderr
    else:
        result = CliRunner().invoke(_make(), [*command, "--url", url(empty, user)])
        code, out, said = result.exit_code, result.stdout, result.stderr
    assert (code, out) == (1, "")
    assert said.startswith(f"error: the user '{user}' may not {deed} in MongoDB at {empty.address}/{DATABASE}")
    assert said.endswith("Check the user and its roles; holdfast store roles prints what each role needs.\n")
    assert said.count("\n") == 1


def test_a_role_reaches_nothing_else(empty: Mongod) -> None:
    for role in ROLES:
        with MongoClient[dict[str, Any]](url(empty, role)) as client, pytest.raises(Exception, match="not authorized"):
            client[DATABASE].orders.insert_one({})


def test_who_may_not_make_indexes_says_what_to_do(damaged: Mongod) -> None:
    with MongoClient[dict[str, Any]](url(damaged, "root", "admin")) as client:
        client[DATABASE][schema.META].delete_many({})
    with shop(url(damaged, "runner")) as runner, pytest.raises((StoreReadOnly, StoreUnauthorised), match="roles"):
        runner.get_task("ship").submit(1)


def test_who_may_not_make_a_dropped_index_says_so_once_and_waits_for_it(empty: Mongod) -> None:
    events = Events()
    with MongoClient[dict[str, Any]](url(empty, "root", "admin")) as client:
        invocations = client[DATABASE][schema.INVOCATIONS]

        async def scenario(store: MongoStore) -> None:
            await store.insert([invocation("a")])
            invocations.drop_index("ready")
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match=r"holdfast_invocations\.ready.*holdfast store prepare"):
                    await store.claim(wish())
            async with opened(url(empty, "admin")):
                pass
            assert ids_of((await store.claim(wish())).records) == ["a"]

        play(url(empty, "runner"), scenario, events, max_retries=1)
    (told,) = events.named("index_missing")
    assert "holdfast_invocations.ready is missing" in told["why"]
    assert "holdfast store prepare" in told["why"]


def test_the_command_line_prints_the_roles(tmp_path: Path) -> None:
    arguments = ["store", "roles", "--url", "mongodb://127.0.0.1:1/shop", "--json"]
    result = CliRunner().invoke(_make(), arguments)
    assert result.exit_code == 0, result.output
    for role in ROLES:
        assert f"holdfast{role.capitalize()}" in result.output


def test_a_hook_is_resumed_by_a_runner_or_an_admin_and_seen_by_a_monitor(empty: Mongod) -> None:
    """To resume changes what is stored, as to cancel does."""

    def declared(role: str) -> App:
        app = App(url(empty, role), name="shop", poll_interval_seconds=0.1)

        @app.workflow(name="asks")
        async def asks() -> list[int]:
            numbers = hook("numbers", int)
            return [await numbers, await numbers]

        return app

    with declared("submitter") as submitter, declared("runner") as runner, runner.runner():
        run = submitter.get_task("asks").submit()
        deadline = time.monotonic() + patient(20)
        while not runner.hooks(run=run.id):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for role in ("submitter", "monitor"):
            with declared(role) as app:
                assert app.hook("numbers").run == app.hooks()[0].run == run.id
                with pytest.raises(StoreReadOnly, match=f"the user '{role}' may not change holdfast_invocations"):
                    app.resume_hook("numbers", 0)
        for number, role in enumerate(("runner", "admin")):
            with declared(role) as app:
                app.resume_hook("numbers", number)
        assert run.result(patient(20)) == [0, 1]


def test_streams_are_written_by_a_runner_and_read_by_every_role(empty: Mongod) -> None:
    def declared(role: str) -> App:
        app = App(url(empty, role), name="shop", poll_interval_seconds=0.1)

        @app.task(name="speaks")
        def speaks() -> None:
            stream("words").write("hello")

        return app

    with declared("submitter") as submitter, declared("runner") as runner, runner.runner():
        call = submitter.get_task("speaks").submit()
        for role in ("submitter", "monitor", "admin"):
            with declared(role) as app:
                seen = app.invocation(call.id)
                assert list(seen.stream("words").values()) == ["hello"]
                assert [info.name for info in seen.streams()] == ["words"]
        call.result(patient(20))


def test_a_submitter_changes_no_call_that_is_stored_and_is_told_so(empty: Mongod) -> None:
    """To cancel, to debounce once more and to take a key that is over are changes of what is there."""
    with (
        shop(url(empty, "submitter")) as submitter,
        shop(url(empty, "runner")) as runner,
        shop(url(empty, "caller")) as caller,
    ):
        ship = submitter.get_task("ship")
        over = ship.options(key="order 7", key_for=0)
        with runner.runner():
            assert over.submit(7).result(patient(20)) == 7
            rare = ship.options(throttle=0.001)
            assert rare.submit(6).result(patient(20)) == 6
        quiet = ship.options(debounce="1h")
        first = quiet.submit(1)
        for refused in (first.cancel, lambda: quiet.submit(2), lambda: over.submit(7), lambda: rare.submit(6)):
            with pytest.raises(StoreReadOnly, match="the user 'submitter' may not change holdfast_invocations"):
                refused()
        assert first.status is Status.REGISTERED
        assert len(submitter.invocations()) == 3
        assert over.options(key="order 8").submit(7).status is Status.REGISTERED
        allowed = caller.get_task("ship")
        assert allowed.options(debounce="1h").submit(2).id == first.id
        assert caller.invocation(first.id).cancel() is Status.CANCELLED
        assert allowed.options(key="order 7").submit(7).status is Status.REGISTERED
        assert allowed.options(throttle=0.001).submit(6).status is Status.REGISTERED
