"""Actions over HTTP: submit, cancel, rerun, purge and fork, of one invocation and of all that a search means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually

from holdfast import App, context
from holdfast.model.status import FINAL
from holdfast.retries import Fixed
from holdfast.web.asgi import WebApp

Post = Any
UNKNOWN = "0" * 26


@pytest.fixture(params=["memory://", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[App]:
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.param
    app = App(url, name="shop", api_token="")

    @app.task(name="shop:add")
    def add(a: int, b: int = 0) -> int:
        return a + b

    @app.task(name="shop:boom", retries=Fixed(1, 0))
    def boom(text: str, customer: str = "c-1") -> None:
        context().set(customer=customer)
        raise TimeoutError(text)

    @app.step(name="shop:charge")
    async def charge(order: str) -> str:
        return f"receipt {order}"

    @app.workflow(name="shop:checkout")
    async def checkout(order: str) -> str:
        return f"{await charge(order)}, {await charge(order)}"

    yield app
    app.close()


@pytest.fixture
def client(app: App) -> Iterator[TestClient]:
    with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def post(client: TestClient) -> Post:
    def ask(path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        answer = client.post(f"/api/v1{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    return ask


@pytest.fixture
def search(client: TestClient) -> Any:
    """Return the ids that a search means."""

    def ids(q: str, **query: Any) -> list[str]:
        answer = client.get("/api/v1/invocations", params={"q": q, **query})
        assert answer.status_code == 200, answer.text
        return [each["id"] for each in answer.json()["invocations"]]

    return ids


@pytest.fixture
def done(app: App) -> dict[str, str]:
    """Ended calls, by name."""
    tasks = app.tasks
    with app.runner(concurrency=4):
        ids = {
            "sum": tasks["shop:add"].submit(1, b=2).id,
            "failure": tasks["shop:boom"].submit("the bank did not answer").id,
            "other": tasks["shop:boom"].submit("no such order", customer="c 2").id,
            "run": tasks["shop:checkout"].submit("42").id,
        }
        for id in ids.values():
            eventually(lambda id=id: app.invocation(id).status in FINAL)
    return ids


# --- one


def test_a_call_is_submitted_with_types_and_once_for_a_key(app: App, post: Post) -> None:
    first = post("/tasks/shop:add/submit", args=["1"], kwargs={"b": 2}, headers={"Idempotency-Key": "k-1"})
    again = post("/tasks/shop:add/submit", args=[1], kwargs={"b": 2}, headers={"Idempotency-Key": "k-1"})
    assert (first["new"], again["new"], again["id"]) == (True, False, first["id"])
    record = app.invocation(first["id"]).record()
    assert (record.key, app.runtime.codec.decode_call(record.arguments)) == ("k-1", ((1,), {"b": 2}))
    short = post("/tasks/add/submit", args=[1], queue="later", delay="1h", priority=3, attributes={"stage": "new"})
    record = app.invocation(short["id"]).record()
    assert (record.queue, record.priority, record.attributes) == ("later", 3, {"stage": "new"})
    assert record.due_at > record.created_at + 3000


@pytest.mark.parametrize(
    ("path", "body", "status", "title"),
    [
        ("/tasks/shop:add/submit", {"args": ["x"]}, 400, "UsageError"),
        ("/tasks/shop:add/submit", {"args": [1, 2, 3]}, 400, "UsageError"),
        ("/tasks/shop:add/submit", {"args": [1], "priority": 1000}, 400, "UsageError"),
        ("/tasks/shop:add/submit", {"args": [1], "colour": "red"}, 422, "UsageError"),
        ("/tasks/shop:nothing/submit", {}, 404, "UnknownTask"),
        (f"/invocations/{UNKNOWN}/cancel", {}, 404, "InvocationNotFound"),
        (f"/invocations/{UNKNOWN}/rerun", {"arguments": [1]}, 404, "InvocationNotFound"),
        ("/invocations/bulk-cancel", {}, 422, "UsageError"),
        ("/invocations/bulk-cancel", {"query": "staus:failed"}, 400, "UsageError"),
        ("/invocations/bulk-purge", {"ids": ["short"]}, 422, "UsageError"),
    ],
)
def test_what_is_wrong_is_a_problem(post: Post, path: str, body: dict[str, Any], status: int, title: str) -> None:
    assert post(path, status, **body)["title"] == title


def test_other_arguments_with_the_same_key_are_refused(post: Post) -> None:
    post("/tasks/shop:add/submit", args=[1], key="k")
    assert post("/tasks/shop:add/submit", 409, args=[2], key="k")["title"] == "KeyTaken"
    post("/tasks/shop:add/submit", 422, args=[1], key="k", headers={"Idempotency-Key": "other"})


def test_a_preview_changes_nothing_and_cancelling_is_safe_to_repeat(app: App, post: Post) -> None:
    id = app.tasks["shop:add"].submit(1).id
    assert post(f"/invocations/{id}/cancel", preview=True)["count"] == 1
    assert app.invocation(id).status == "registered"
    assert post(f"/invocations/{id}/cancel", reason="by mistake")["status"] == "cancelled"
    record = app.invocation(id).record()
    assert record.cancellation is not None
    assert record.cancellation.reason == "by mistake"
    assert post(f"/invocations/{id}/cancel")["status"] == "cancelled"
    assert post(f"/invocations/{id}/cancel", preview=True)["count"] == 0


def test_a_rerun_may_have_other_arguments(app: App, done: dict[str, str], post: Post) -> None:
    path = f"/invocations/{done['sum']}/rerun"
    assert "once more" in post(path, preview=True)["summary"]
    same = post(path)["id"]
    edited = post(path, arguments={"args": ["5"], "kwargs": {"b": 7}}, new_key=True)["id"]
    listed = post(path, arguments=[8])["id"]
    decoded = [app.runtime.codec.decode_call(app.invocation(id).record().arguments) for id in (same, edited, listed)]
    assert decoded == [((1,), {"b": 2}), ((5,), {"b": 7}), ((8,), {})]
    assert {app.invocation(id).record().rerun_of for id in (same, edited)} == {done["sum"]}
    assert post(path, 400, arguments=["no number"])["path"] == "body.arguments"
    assert post(path, 400, arguments={"c": 1})["path"] == "body.arguments"
    waiting = app.tasks["shop:add"].submit(1).id
    assert post(f"/invocations/{waiting}/rerun", 409)["title"] == "InvocationStatusTransitionError"
    request = app.runtime.ids.new()
    assert post(path, request=request)["id"] == post(path, request=request)["id"]


def test_a_rerun_with_other_arguments_is_of_their_limit(post: Post, app: App) -> None:
    """The slot of a limit by an argument is that of the new argument."""

    @app.task(name="shop:by_customer", limit=1, limit_by="customer")
    def by_customer(customer: str) -> None: ...

    with app.runner():
        first = by_customer.submit("c-1")
        first.result(timeout=30)
    again = app.invocation(first.id).rerun(arguments=("c-2",)).record()
    assert again.limit_key == by_customer.submit("c-2").record().limit_key != first.record().limit_key


def test_ended_ones_are_kept_longer_or_removed(app: App, done: dict[str, str], post: Post) -> None:
    path = f"/invocations/{done['failure']}"
    assert "kept for another time" in post(f"{path}/retain", retention="30d")["summary"]
    assert "would be removed" in post(f"{path}/purge", preview=True)["summary"]
    assert post(f"{path}/purge")["count"] == 1
    post(f"{path}/purge", 404)
    waiting = app.tasks["shop:add"].submit(1).id
    assert "only ended" in post(f"/invocations/{waiting}/purge", 409)["detail"]


def test_a_run_is_forked_before_a_step(app: App, done: dict[str, str], post: Post) -> None:
    path = f"/invocations/{done['run']}/fork"
    step = app.invocation(done["run"]).steps()[1].id
    assert step in post(path, step=step, preview=True)["summary"]
    fork = post(path, step=step, arguments={"order": "43"})
    assert app.invocation(fork["id"]).record().rerun_of == done["run"]
    assert post(path, 404, step="nothing#1")["title"] == "StepNotFound"


# --- searching


def test_every_term_finds_what_it_means(app: App, done: dict[str, str], search: Any) -> None:
    sum, failure, other, run = (done[name] for name in ("sum", "failure", "other", "run"))
    assert search("task:add") == [sum]
    assert search("task:shop:boom") == [other, failure]
    assert search("status:failed -error:order") == [failure]
    assert search("-status:success -status:failed") == []
    assert search("customer:c-1") == [failure]
    assert search('customer:"c 2" status:failed') == [other]
    assert search("error:Timeout since:1h") == [other, failure]
    assert search("error:TimeoutError -customer:c-1") == [other]
    assert search("bank") == [failure]
    assert search("kind:workflow") == [run]
    assert search("-kind:workflow -task:boom") == [sum]
    assert search("until:1h") == []
    assert search("since:2030-01-01") == []
    assert search(f"id:{sum[:20]}") in ([sum], [])
    assert search(f"id:{sum[-8:]}") == [sum]
    assert search("status:failed", status="success") == []
    assert search("status:failed", task="shop:boom", limit=1) == [other]
    keyed = app.tasks["shop:add"].options(key="k 1").submit(9)
    assert search('key:"k 1"') == [keyed.id]
    assert search(f"-id:{keyed.id} task:add") == [sum]


def test_counts_and_completion(app: App, done: dict[str, str], client: TestClient) -> None:
    assert client.get("/api/v1/invocations/count?q=task:boom").json() == {"count": 2, "more": False, "text": "2"}
    found = client.get("/api/v1/invocations/complete", params={"q": "status:failed task:bo", "at": 21}).json()
    assert found == {"start": 14, "end": 21, "items": ["task:boom", "task:shop:boom"]}
    wrong = client.get("/api/v1/invocations?q=staus:failed")
    assert (wrong.status_code, wrong.json()["path"]) == (400, "query.q")


# --- all that a search means


def test_what_was_previewed_is_what_is_cancelled(app: App, post: Post) -> None:
    ids = [each.id for each in app.tasks["shop:add"].map([(number,) for number in range(450)])]
    preview = post("/invocations/bulk-cancel", query="task:add", preview=True)
    assert (preview["count"], len(preview["items"]), preview["summary"]) == (
        450,
        10,
        "450 invocations would be cancelled",
    )
    later = app.tasks["shop:add"].submit(1).id
    body: dict[str, Any] = {"query": "task:add", "reason": "a test"} | preview["bind"]
    done, more = 0, {}
    while True:
        found = post("/invocations/bulk-cancel", **body | more)
        done, more = done + found["count"], found["more"]
        if more is None:
            break
    assert done == 450
    assert {app.invocation(id).status for id in ids} == {"cancelled"}
    assert app.invocation(later).status == "registered"
    assert post("/invocations/bulk-cancel", **body)["count"] == 0


def test_a_status_counts_as_it_was_at_the_preview(app: App, done: dict[str, str], post: Post) -> None:
    preview = post("/invocations/bulk-rerun", query="status:failed", preview=True)
    assert preview["count"] == 2
    first = post("/invocations/bulk-rerun", query="status:failed", **preview["bind"])
    again = post("/invocations/bulk-rerun", query="status:failed", **preview["bind"])
    assert (first["count"], again["count"]) == (2, 2)
    assert len(app.invocations(task="shop:boom", limit=100)) == 4  # nothing is stored twice


def test_named_ones_are_removed_and_others_are_left(app: App, done: dict[str, str], post: Post) -> None:
    waiting = app.tasks["shop:add"].submit(1).id
    found = post("/invocations/bulk-purge", ids=[done["sum"], waiting, UNKNOWN])
    assert found["count"] == 1
    assert app.invocation(waiting).status == "registered"
    keyed = app.tasks["shop:add"].options(key="k").submit(1)
    app.invocation(keyed.id).cancel()
    assert list(post("/invocations/bulk-purge", ids=[keyed.id])["refused"]) == [keyed.id]
    assert post("/invocations/bulk-purge", ids=[keyed.id], force=True)["count"] == 1


def test_the_audit_record_of_many_has_the_search(app: App, client: TestClient, post: Post) -> None:
    app.tasks["shop:add"].submit(1)
    post("/invocations/bulk-cancel", query="task:add", preview=True)
    post("/invocations/bulk-cancel", query="task:add since:1h", reason="a test")
    (record,) = client.get("/api/v1/audit").json()["records"]
    assert (record["action"], record["reason"], record["outcome"]) == ("invocation.cancel", "a test", "done")
    assert record["twin"] == "holdfast cancel '--search=task:add since:1h'"
    assert record["detail"] == "1 invocation cancelled"
