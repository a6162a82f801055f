"""Import of databases of `@workflow-worlds/mongodb` 0.2.x, written here as that package writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.world.interleaving import forbidden
from tests.world.worlds import World

from holdfast.cli import main
from holdfast.errors import ImportRefused, UsageError
from holdfast.ids import derived_id
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.world.errors import WorldError
from holdfast.world.importing import Imported, import_original
from holdfast.world.records import invocation_of, run_name

START = datetime(2025, 11, 1, 12, 0, tzinfo=UTC)
NAME = "workflow"


class Original:
    """A database of the original, with the documents that it writes. Ids and times grow."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client: MongoClient[dict[str, Any]] = MongoClient(url)
        self.database = self._client[NAME]
        self._made = 0

    def make(self) -> None:
        for name in ("runs", "steps", "events", "hooks", "stream_chunks", "stream_runs", "queue_messages"):
            self.database.create_collection(name)

    def at(self) -> datetime:
        self._made += 1
        return START + timedelta(seconds=self._made)

    def id(self, prefix: str) -> str:
        return prefix + run_name(derived_id(str(self._made), at=self.at().timestamp()))[5:]

    def run(self, status: str = "running", **more: Any) -> str:
        run, at = self.id("wrun_"), self.at()
        document = {"runId": run, "status": status, "deploymentId": "dpl_mongodb", "workflowName": "workflow//./a//buy"}
        document |= {"specVersion": 2, "input": b"devl[[]]", "createdAt": at, "updatedAt": at}
        document |= {} if status == "pending" else {"startedAt": at}
        self.database["runs"].insert_one({**document, **more})
        data = {name: document[name] for name in ("deploymentId", "workflowName", "input")}
        self.event(run, "run_created", eventData=data)
        if status != "pending":
            self.event(run, "run_started")
        return run

    def event(self, run: str, kind: str, call: str | None = None, **more: Any) -> None:
        document = {"eventType": kind, "runId": run, "eventId": self.id("evnt_"), "createdAt": self.at()}
        document |= {"specVersion": 2} | ({} if call is None else {"correlationId": call})
        self.database["events"].insert_one({**document, **more})

    def step(self, run: str, id: str, status: str = "running", **more: Any) -> None:
        at = self.at()
        document = {"runId": run, "stepId": id, "stepName": "step//./a//charge", "status": status, "attempt": 1}
        document |= {"input": b"devl[1]", "createdAt": at, "startedAt": at, "updatedAt": at, "specVersion": 2}
        self.database["steps"].insert_one({**document, **more})

    def hook(self, run: str, id: str, token: str) -> None:
        document = {"runId": run, "hookId": id, "token": token, "ownerId": "mongodb-owner", "createdAt": self.at()}
        self.database["hooks"].insert_one({**document, "specVersion": 2, "metadata": b"devl[2]"})

    def stream(self, run: str, name: str, *chunks: bytes, closed: bool = True) -> None:
        self.database["stream_runs"].insert_one({"runId": run, "streamName": name, "createdAt": self.at()})
        for chunk in (*chunks, *([b""] if closed else [])):
            document = {"chunkId": self.id("chnk_"), "streamName": name, "data": chunk, "eof": not chunk}
            self.database["stream_chunks"].insert_one({**document, "createdAt": self.at()})

    def bring(self, world: World, **more: Any) -> Imported:
        return world.do(import_original(world.engine, self.url, NAME, **more))

    def close(self) -> None:
        self._client.drop_database(NAME)
        self._client.close()


@pytest.fixture
def original(replica_set: str) -> Iterator[Original]:
    original = Original(replica_set)
    original.make()
    yield original
    original.close()


def record_of(world: World, run: str) -> InvocationRecord:
    id = invocation_of(run)
    assert id is not None
    (record,) = world.do(world.engine.store.get("app", [id]))
    assert record is not None
    return record


def test_a_finished_run_comes_whole(original: Original, quick: World) -> None:
    run = original.run("completed", output=b"devl[42]", completedAt=START + timedelta(hours=1))
    original.step(run, "step_1", "completed", output=b"devl[7]")
    for kind, data in (
        ("step_created", {"stepName": "step//./a//charge", "input": b"devl[1]"}),
        ("step_started", None),
        ("step_completed", {"result": b"devl[7]"}),
    ):
        original.event(run, kind, "step_1", **({} if data is None else {"eventData": data}))
    original.event(run, "run_completed", eventData={"output": b"devl[42]"})
    original.stream(run, "strm_x_user", b"a", b"b")
    done = original.bring(quick)
    assert (done.runs, done.open, done.events, done.dropped, done.added, done.chunks) == (1, 0, 6, 0, 0, 2)
    got = quick.get(run)
    assert (got["status"], got["output"], got["specVersion"]) == ("completed", b"devl[42]", 2)
    assert quick.kinds(run) == [
        *("run_created", "run_started", "step_created", "step_started", "step_completed", "run_completed"),
    ]
    assert quick.call("steps_get", run_id=run, step_id="step_1")["output"] == b"devl[7]"
    assert got["createdAt"] < START + timedelta(minutes=1)
    record = record_of(quick, run)
    assert (record.status, record.task) == (Status.SUCCESS, "world:buy")
    chunks = quick.call("streams_get_chunks", run_id=run, name="strm_x_user")
    assert ([chunk["data"] for chunk in chunks["data"]], chunks["done"]) == ([b"a", b"b"], True)


def test_an_open_run_goes_on_here(original: Original, quick: World) -> None:
    run = original.run()
    original.event(run, "hook_created", "hook_1", eventData={"token": "approve", "metadata": b"devl[2]"})
    original.hook(run, "hook_1", "approve")
    original.event(run, "wait_created", "wait_1", eventData={"resumeAt": START + timedelta(days=900)})
    original.stream(run, "out", b"a", closed=False)
    assert original.bring(quick).open == 1
    assert record_of(quick, run).status is Status.SUSPENDED
    assert quick.call("hooks_get_by_token", token="approve")["runId"] == run
    assert quick.hook(quick.run(), "hook_2", "approve")["event"]["eventType"] == "hook_conflict"
    quick.create(run, "hook_received", "hook_1", data={"payload": b"1"})
    quick.create(run, "wait_completed", "wait_1")
    quick.call("streams_write", run_id=run, name="out", chunks=["b"])
    quick.create(run, "run_completed", data={"output": b"1"})
    assert quick.call("streams_get_info", run_id=run, name="out") == {"tailIndex": 1, "done": False}


def test_what_the_original_lost_and_doubled_is_repaired(original: Original, quick: World) -> None:
    run = original.run()
    original.event(run, "run_started")  # each wake wrote one
    original.event(run, "step_created", "step_1", eventData={"stepName": "s", "input": b"1"})
    original.event(run, "step_created", "step_1", eventData={"stepName": "s", "input": b"1"})
    original.event(run, "step_started", "step_1")
    original.step(run, "step_1", "completed", output=b"devl[7]")  # and its event was never written
    original.step(run, "step_2", "failed", error={"message": "no card", "stack": "at"})  # nor any of these
    for _ in range(2):
        original.event(run, "wait_created", "wait_1", eventData={"resumeAt": START})
        original.event(run, "wait_completed", "wait_1")
    original.event(run, "hook_created", "hook_1", eventData={"token": "gone"})  # it was disposed of
    original.hook(run, "hook_2", "lost")
    done = original.bring(quick)
    assert (done.dropped, done.added) == (4, 6)
    assert forbidden(quick.events(run)) == []
    steps = {step["stepId"]: step for step in quick.call("steps_list", run_id=run)["data"]}
    assert (steps["step_1"]["status"], steps["step_1"]["output"]) == ("completed", b"devl[7]")
    assert (steps["step_2"]["status"], steps["step_2"]["error"]) == ("failed", {"message": "no card", "stack": "at"})
    assert [hook["hookId"] for hook in quick.call("hooks_list", run_id=run)["data"]] == ["hook_2"]


@pytest.mark.parametrize(
    ("status", "more"),
    [
        ("completed", {"output": b"1"}),
        ("failed", {"error": {"message": "no", "code": "USER_ERROR"}}),
        ("cancelled", {}),
    ],
)
@pytest.mark.parametrize("spec", [1, 2])
def test_ends_that_only_the_run_knows(
    original: Original, quick: World, status: str, more: dict[str, Any], spec: int
) -> None:
    run = original.run(status, specVersion=spec, completedAt=START + timedelta(hours=1), **more)
    if spec == 1:
        original.database["events"].delete_many({})
    original.bring(quick)
    got = quick.get(run)
    assert (got["status"], got["specVersion"]) == (status, spec)
    assert got["completedAt"] == START + timedelta(hours=1)
    if status == "failed":
        assert got["error"]["message"] == "no"


def test_importing_again_changes_nothing_and_goes_on_after_a_crash(original: Original, quick: World) -> None:
    runs = [original.run() for _ in range(3)]
    for number, run in enumerate(runs):
        original.stream(run, f"s{number}", b"a" * 1000)
    assert original.bring(quick, check_only=True).runs == 3
    assert quick.call("runs_list")["data"] == []
    insert = quick.engine.store.insert

    async def die(*args: Any) -> Any:
        raise RuntimeError("the process died")

    quick.engine.store.insert = die  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        original.bring(quick)
    quick.engine.store.insert = insert  # type: ignore[method-assign]
    assert quick.call("runs_list")["data"] == []
    assert original.bring(quick).runs == 3
    again = original.bring(quick)
    assert (again.runs, again.there) == (0, 3)
    assert len(quick.call("runs_list")["data"]) == 3
    assert quick.call("streams_get_info", run_id=runs[0], name="s0") == {"tailIndex": 0, "done": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runId": "wrun_mine"}, "no ULID|not 'wrun_'"),
        ({"specVersion": 9}, "newer"),
        ({"workflowName": 7}, "workflowName"),
        ({"createdAt": "soon"}, "createdAt"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_and_nothing_is_written(
    original: Original, quick: World, change: dict[str, Any], words: str
) -> None:
    original.run()
    wrong = original.run()
    original.database["runs"].update_one({"runId": wrong}, {"$set": change})
    with pytest.raises(ImportRefused, match=words) as caught:
        original.bring(quick)
    assert caught.value.runs == (change.get("runId", wrong),)
    assert quick.call("runs_list")["data"] == []


def test_an_event_that_is_none_is_named(original: Original, quick: World) -> None:
    run = original.run()
    original.event(run, "run_paused")
    with pytest.raises(ImportRefused, match="run_paused"):
        original.bring(quick)


def test_a_database_in_use_or_of_others_is_refused(original: Original, quick: World) -> None:
    locked = datetime.fromtimestamp(quick.clock.now() + 60, UTC)
    original.database["queue_messages"].insert_one({"messageId": "m", "status": "processing", "lockedUntil": locked})
    with pytest.raises(ImportRefused, match="being delivered"):
        original.bring(quick)
    with pytest.raises(UsageError, match="no database of"):
        quick.do(import_original(quick.engine, original.url, "other"))


def test_a_token_that_is_taken_here_is_named(original: Original, quick: World) -> None:
    quick.hook(quick.run(), "hook_9", "approve")
    run = original.run()
    original.event(run, "hook_created", "hook_1", eventData={"token": "approve"})
    original.hook(run, "hook_1", "approve")
    with pytest.raises(ImportRefused, match="belongs to"):
        original.bring(quick)
    with pytest.raises(WorldError):
        quick.get(run)


def test_the_command(original: Original, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def give(*command: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([*command, "--url", f"sqlite:///{tmp_path / 'store.db'}", "--name", "shop"])
        return (int(str(caught.value.code)), *capsys.readouterr())

    original.run()
    assert give("store", "prepare")[0] == 0
    code, said, _ = give("world", "import", original.url, "--check")
    assert (code, said) == (0, "1 run can be imported, 1 of them open, with 2 events\n")
    assert json.loads(give("world", "import", original.url, "--json")[1])["runs"] == 1
    assert json.loads(give("world", "import", original.url, "--json")[1])["there"] == 1
    original.run(specVersion=9)
    code, _, complaint = give("world", "import", original.url, "--database", NAME)
    assert code == 1
    assert "newer" in complaint
