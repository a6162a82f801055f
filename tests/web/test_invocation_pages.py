"""Pages of invocations: the list, and one of them, for tasks and for workflows."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from html import unescape
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient
from tests.docs.test_reference import command_line
from tests.support.patience import eventually
from tests.web.shop import HOSTILE, Approval, WebShop

from holdfast import App
from holdfast.model.records import HistoryEntry, first_history
from holdfast.model.status import TABLE, Status
from holdfast.runtime.runs import Span, StepRecord
from holdfast.web.asgi import WebApp
from holdfast.web.pages.as_pytest import as_pytest, literal
from holdfast.web.pages.charts import Axes
from holdfast.web.pages.filters import fields_of_schema
from holdfast.web.pages.lifelines import machine_of, waterfall_of
from holdfast.workflows.hooks_types import schema_of


@pytest.fixture
def page(client: TestClient) -> Any:
    """Get a page."""

    def text(path: str, status: int = 200, **query: Any) -> str:
        answer = client.get(path, params=query or None, follow_redirects=False)
        assert answer.status_code == status, answer.text
        return answer.text

    return text


def ids_of(text: str) -> list[str]:
    return re.findall(r'<tr data-row>.*?title="([0-9a-z]{26})"', text, re.DOTALL)


# --- the list


def test_the_list_shows_what_a_search_means(shop: WebShop, page: Any) -> None:
    assert ids_of(page("/invocations", q="status:failed task:boom")) == [shop.failure.id]
    assert ids_of(page("/invocations", q="queue:later")) == [shop.later.id]
    assert "Nothing matches" in page("/invocations", q="customer:nobody")
    assert shop.sum.id in page("/invocations")


def test_the_list_pages_by_links(shop: WebShop, page: Any) -> None:
    first = page("/invocations", limit=2)
    older = re.search(r'<a href="([^"]+)" rel="next">', first)
    assert older is not None
    second = page(older[1].replace("&amp;", "&"))
    assert len(ids_of(first)) == len(ids_of(second)) == 2
    assert max(ids_of(second)) < min(ids_of(first))
    assert ">Newest</a>" in second


def test_a_search_that_cannot_be_read_is_said_beside_the_box(page: Any) -> None:
    text = page("/invocations", q="staus:failed")
    assert "did you mean status:?" in text
    assert 'aria-invalid="true"' in text
    assert 'value="staus:failed"' in text
    assert "this app declares no task" in page("/invocations", q="task:nothing")


def test_a_whole_id_leads_to_its_page_and_so_does_a_part(shop: WebShop, client: TestClient) -> None:
    for path in (f"/invocations?q={shop.sum.id}", f"/invocations/{shop.sum.id[-8:]}"):
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/invocations/{shop.sum.id}")


def test_chips_and_columns_are_links_that_keep_the_rest_of_the_search(page: Any) -> None:
    text = page("/invocations", q="task:add status:failed")
    assert 'href="/invocations?q=task%3Aadd+status%3Asuccess"' in text
    assert 'href="/invocations?q=task%3Aadd"' in text  # all
    assert re.search(r'href="/invocations\?q=task%3Aadd\+status%3Afailed\+since%3A1h"', text)
    assert "data-since=" in page("/invocations", q="task:add")


def test_an_empty_store_has_a_list() -> None:
    app = App("memory://", name="empty")
    with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
        answer = client.get("/invocations")
    app.close()
    assert answer.status_code == 200
    assert "No calls yet" in answer.text


# --- one


def test_why_comes_first_and_then_errors_and_values(shop: WebShop, page: Any) -> None:
    text = page(f"/invocations/{shop.sum.id}")
    assert "Ended with a result." in text
    assert "registered → pending → running → success" in text
    assert text.index("Ended with a result") < text.index("Arguments") < text.index("Path through the states")
    failed = page(f"/invocations/{shop.failure.id}")
    assert failed.index('class="why is-bad"') < failed.index("builtins:ValueError") < failed.index(">Arguments<")


def test_hostile_strings_are_only_text(shop: WebShop, page: Any) -> None:
    for text in (page(f"/invocations/{shop.failure.id}"), page("/invocations", q=HOSTILE.replace("\x00", ""))):
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text
    assert "\u202e" not in page("/invocations", q="task:boom")


def test_what_is_not_there_is_a_404(page: Any) -> None:
    page("/invocations/" + "0" * 26, status=404)
    page("/invocations/zzzzzzzz", status=404)
    page("/invocations/!", status=404)


def test_a_workflow_shows_steps_events_and_forks(shop: WebShop, page: Any) -> None:
    text = page(f"/invocations/{shop.run.id}")
    assert 'id="step-charge#2"' in text
    assert f'data-action="/invocations/{shop.run.id}/fork"' in text
    assert "run_completed" in text
    assert "Steps over time: 2 calls" in text


def test_a_waiting_workflow_has_a_form_for_its_hook(shop: WebShop, page: Any, client: TestClient) -> None:
    run = shop.approve.submit("a form")
    eventually(lambda: run.status is Status.SUSPENDED)
    text = page(f"/invocations/{run.id}")
    assert "Waits for the hook approve:a form" in text
    found = re.search(r'data-action="(/hooks/[0-9a-f]{64}/resume)"', text)
    assert found is not None
    answer = client.post(f"/api/v1{found[1]}", json={"payload": {"by": "me"}, "reason": "said so"})
    assert answer.status_code == 200, answer.text
    assert run.result(timeout=30) == "me"


def test_a_stream_shows_its_last_items(shop: WebShop, page: Any) -> None:
    spoken = shop.speak.submit(["one", HOSTILE, {"a": 1}])
    spoken.result(timeout=30)
    text = page(f"/invocations/{spoken.id}")
    assert "Stream words" in text
    assert "one\n" in text
    assert "<script>alert" not in text


def test_large_values_are_cut_and_lead_to_the_whole(shop: WebShop, page: Any, client: TestClient) -> None:
    large = shop.add.options(delay="1h").submit("x" * 1_000_000)
    text = page(f"/invocations/{large.id}")
    assert len(text) < 100_000
    assert f"/api/v1/invocations/{large.id}/values" in text
    assert "Rerun with other arguments" not in text
    whole = client.get(f"/api/v1/invocations/{large.id}/values").json()
    assert whole["arguments"]["args"] == ["x" * 1_000_000]
    assert "The arguments are large" in text


def test_pages_read_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside thousands of records, a page reads as many as beside a few."""
    app = App("memory://", name="many", api_token="")

    @app.task(name="noop")
    def noop(number: int) -> None: ...

    noop.map([(number,) for number in range(3000)])
    engine = app.runtime.ready()
    read = []
    real = engine.store.find

    async def find(*args: Any, **kwargs: Any) -> Any:
        found = await real(*args, **kwargs)
        read.append(len(found))
        return found

    monkeypatch.setattr(engine.store, "find", find)
    with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
        for path, most in (
            ("/invocations", 60),
            ("/invocations?q=error:nothing", 2000),
            ("/invocations?q=status:failed", 60),
        ):
            read.clear()
            answer = client.get(path)
            assert answer.status_code == 200, answer.text
            assert sum(read) <= most, path
        assert "The search stopped here" in client.get("/invocations?q=error:nothing").text
    app.close()


def test_what_cannot_be_read_is_said_and_the_page_is_shown(shop: WebShop, page: Any) -> None:
    engine, like = shop.app.runtime.ready(), shop.later.record()
    damaged = replace(
        like, id=engine.ids.new(), arguments=b"\xff\xfe", history=first_history(engine.ids.operation(), like.created_at)
    )
    assert shop.app.runtime.run(engine.store.insert([damaged])) == [True]
    text = page(f"/invocations/{damaged.id}")
    assert "notice-line" in text
    assert "The arguments cannot be read here" in text
    assert "Rerun with other arguments" not in text
    assert damaged.id in page("/invocations", q="queue:later")


def test_the_commands_that_actions_show_exist(shop: WebShop, page: Any) -> None:
    texts = [page(f"/invocations/{each.id}") for each in (shop.sum, shop.later, shop.run, shop.sleeping)]
    twins = {unescape(twin) for text in texts for twin in re.findall(r'data-twin="([^"]+)"', text)}
    assert len(twins) > 6
    for twin in twins:
        words, command = shlex.split(twin)[1:], command_line()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands") or command.callback is not None, twin
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, twin


# --- parts


def test_the_machine_has_every_status_and_the_path_is_lit() -> None:
    history = [
        HistoryEntry(version=number, at=float(number), status=status, owner=None, epoch=0, operation=f"{number}")
        for number, status in enumerate((Status.REGISTERED, Status.PENDING, Status.RUNNING, Status.SUCCESS), 1)
    ]
    machine = machine_of(history)
    assert {node.status for node in machine.drawing.nodes} == set(TABLE)
    assert set(machine.visits) == {each.status for each in history}
    assert machine.current is Status.SUCCESS
    assert sum(arrow.is_taken for arrow in machine.arrows) == 3


def test_a_short_sleep_is_drawn_from_the_end_of_the_call_before_it() -> None:
    step = StepRecord(id="a#1", kind="step", name="a", status="completed", started_at=100.0, ended_at=101.0, position=1)
    wait = StepRecord(id="wait#1", kind="wait", name="sleep", status="completed", ended_at=104.0, position=2)
    _, bar = waterfall_of([step, wait], Span(100.0, 105.0), "default").bars
    axes = Axes(100.0, 105.0, 1, width=960, left=1)
    assert (bar.x, round(bar.x + bar.width, 2)) == (axes.x(101.0), axes.x(104.0))


ARGUMENTS: list[Any] = [
    {"args": [1, "a\n'\"b", None], "kwargs": {"b": 2.5}},
    {"args": [], "kwargs": {"not a name": [1, {"x": float("nan")}]}},
    {"args": ["x" * 30_000], "kwargs": {}},
    {"args": [HOSTILE, b"bytes", {1, 2}, Approval("me")], "kwargs": {"text": "y" * 200, "more": ["z" * 90] * 5}},
    {"unreadable": "its class\nis not here"},
    None,
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("task", ["shop:charge", "a b:é", "9", "²", HOSTILE])
def test_a_copied_test_is_valid_python(arguments: Any, task: str) -> None:
    document = {"task": task, "id": "0" * 26, "status": "success", "arguments": arguments, "error": None}
    for result in (None, {"value": 3}, {"value": HOSTILE}, {"value": ["x" * 200]}, {"unreadable": "no"}):
        ast.parse(as_pytest(document | {"result": result}, "shop.tasks"))
    error = {"type": "ValueError", "message": HOSTILE, "traceback": ""}
    ast.parse(as_pytest(document | {"result": None, "error": error}, None))


def test_an_argument_that_is_no_name_is_passed_by_its_text() -> None:
    """A keyword is an identifier for `str`, and no name of an argument; "µ" is read as another letter."""
    names = ["class", "None", "match", "b", "not a name", "µ", "ﬁne", "__debug__", "", "é"]
    for args in ([], [1]):
        arguments = {"args": args, "kwargs": {name: number for number, name in enumerate(names)}}
        document = {"task": "shop:charge", "id": "0" * 26, "status": "failed", "arguments": arguments}
        text = as_pytest(document | {"result": None, "error": None}, "shop.tasks")
        (called,) = [
            each
            for each in ast.walk(ast.parse(text))
            if isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "submit"
        ]
        given: dict[str, Any] = {}
        for each in called.keywords:
            given |= ast.literal_eval(each.value) if each.arg is None else {each.arg: ast.literal_eval(each.value)}
        assert given == arguments["kwargs"]
        compile(text, "test", "exec")
        assert {each.arg for each in called.keywords} == {None, "b", "match", "é"}


def test_a_copied_test_runs(shop: WebShop, get: Any) -> None:
    text = as_pytest(get(f"/invocations/{shop.sum.id}"), None)
    assert "task.submit(1, b=2)" in text
    assert "assert invocation.result() == 3" in text
    assert eval(literal({"a": [1, None, float("inf")]})) == {"a": [1, None, float("inf")]}


def test_forms_follow_the_schema() -> None:
    @dataclasses.dataclass
    class Payload:
        by: str
        score: int = 0
        comment: str | None = None

    fields = fields_of_schema(schema_of(Payload))
    assert [(each["name"], each["kind"], each["optional"]) for each in fields] == [
        ("payload.by", "text", False),
        ("payload.score", "number", True),
        ("payload.comment", "text", True),
    ]
