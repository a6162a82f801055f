"""Spans of submits, attempts, steps and children: who is below whom, what failed, and what the store keeps of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from tests.tracing.conftest import Spans, each_trace

from holdfast import App, context
from holdfast.errors import NotEncodable, TimedOut, WorkerLost
from holdfast.retries import Fixed
from holdfast.tracing import linked

own = trace.get_tracer("shop")


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'shop.db'}"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), tracing=True) as app:
        yield app


@pytest.fixture
def here() -> Iterator[App]:
    with App("memory://", tracing=True) as app:
        yield app


def facts(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_an_attempt_is_below_its_submit_and_above_the_spans_of_its_code(app: App, spans: Spans) -> None:
    @app.task(name="add", queue="sums")
    def add(a: int, b: int) -> int:
        with own.start_as_current_span("inner"):
            return a + b

    @app.task(name="aadd")
    async def aadd(a: int, b: int) -> int:
        with own.start_as_current_span("ainner"):
            return a + b

    with app.runner():
        with own.start_as_current_span("outer"):
            run = add.submit(1, 2)
        assert (run.result(), aadd.submit(1, 2).result()) == (3, 3)
    for name, inner, outer in (("add", "inner", "outer"), ("aadd", "ainner", None)):
        submit, attempt = spans.one(f"submit {name}"), spans.one(f"run {name}")
        assert (submit.kind, attempt.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        assert spans.above(submit) == outer
        assert spans.above(attempt) == f"submit {name}"
        assert spans.above(spans.one(inner)) == f"run {name}"
        assert attempt.status.status_code is StatusCode.UNSET
    assert facts(spans.one("run add")) == {
        "messaging.system": "holdfast",
        "messaging.operation.type": "process",
        "messaging.operation.name": "run",
        "messaging.destination.name": "sums",
        "messaging.message.id": run.id,
        "holdfast.task": "add",
        "holdfast.attempt": 1,
        "holdfast.outcome": "succeeded",
    }


def test_an_attempt_after_a_failed_one_links_to_it(app: App, spans: Spans) -> None:
    @app.task(name="bad", retries=Fixed(1, "1ms"))
    def bad() -> None:
        raise ValueError("no luck at mongodb://user:geheim@host/db")

    with app.runner():
        run = bad.submit()
        with pytest.raises(ValueError, match="no luck"):
            run.result()
        (again,) = app.rerun([run.id]).invocations
        with pytest.raises(ValueError, match="no luck"):
            again.result()
    first, second, third = spans.named("run bad")[:3]
    assert spans.above(first) == spans.above(second) == "submit bad"
    assert [link.context.span_id for link in first.links] == []
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert spans.above(third) is None
    assert [link.context.span_id for link in third.links] == [spans.one("submit bad").context.span_id]
    assert each_trace(third) != each_trace(first)
    for attempt in (first, second):
        assert attempt.status.status_code is StatusCode.ERROR
        (event,) = attempt.events
        noted = dict(event.attributes or {})
        assert noted["exception.type"] == "builtins.ValueError"
        assert "raise ValueError" in str(noted["exception.stacktrace"])
        assert "geheim" not in f"{noted} {attempt.status.description}"


def test_steps_and_children_are_below_their_run(here: App, spans: Spans) -> None:
    app = here

    @app.task(name="add")
    def add(a: int) -> int:
        return a + 1

    @app.step(name="one")
    def one(a: int) -> int:
        with own.start_as_current_span("in step"):
            return a + 1

    @app.step(name="two", queue="other")
    async def two(a: int) -> int:
        return a + 1

    @app.step(name="three", retries=1)
    def three(a: int) -> int:
        if context().attempt == 1:
            raise ValueError("once")
        return a + 1

    @app.workflow(name="flow")
    def flow(a: int) -> int:
        with own.start_as_current_span("in body"):
            return int(add.submit(three(two(one(a)))).result())

    @app.workflow(name="aflow")
    async def aflow(a: int) -> int:
        with own.start_as_current_span("in abody"):
            return int(await add.submit(one(a)))  # type: ignore[misc]

    with app.runner():
        assert flow.submit(1).result() == 5
    assert spans.above(spans.one("step one")) == "run flow"
    assert spans.above(spans.one("in step")) == "step one"
    assert spans.above(spans.one("in body")) == "run flow"
    assert spans.above(spans.one("run step:two")) == "run flow"
    assert spans.above(spans.one("run add")) == "run flow"
    failed, done = spans.named("step three")
    assert [each.status.status_code for each in (failed, done)] == [StatusCode.ERROR, StatusCode.UNSET]
    assert facts(done) == {"holdfast.step": "three#1", "holdfast.attempt": 2, "holdfast.outcome": "succeeded"}
    assert {each_trace(span) for span in spans.all} == {each_trace(spans.one("submit flow"))}


PROGRAM = """
import json, os, signal
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from holdfast import App

class Lines(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as lines:
            for span in spans:
                above = span.parent.span_id if span.parent else None
                said = {"name": span.name, "id": span.context.span_id, "above": above, "pid": os.getpid(),
                        "trace": span.context.trace_id, "status": span.status.status_code.name}
                lines.write(json.dumps(said) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Lines()))
trace.set_tracer_provider(provider)
app = App("sqlite:///shop.db", tracing=True)
own = trace.get_tracer("shop")

@app.task(name="apart", executor="process")
def apart():
    with own.start_as_current_span("inner"):
        return os.getpid()

@app.task(name="dies", executor="process")
def dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""
MAIN = """
from shop import app, apart, dies
if __name__ == "__main__":
    with app.runner():
        print(apart.submit().result())
        try:
            dies.submit().result()
        except Exception as error:
            print(type(error).__name__)
"""


def test_a_process_gets_the_span_and_its_worker_ends_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "shop.py").write_text(PROGRAM)
    (tmp_path / "main.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    child, error = done.stdout.split()
    found = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    by_name = {span["name"]: span for span in found}
    assert error == WorkerLost.__name__
    inner, run, submit = by_name["inner"], by_name["run apart"], by_name["submit apart"]
    assert (inner["pid"], inner["above"], run["above"]) == (int(child), run["id"], submit["id"])
    assert run["pid"] == submit["pid"] != inner["pid"]
    assert inner["trace"] == submit["trace"]
    assert by_name["run dies"]["status"] == "ERROR"


def test_a_late_attempt_has_failed(here: App, spans: Spans) -> None:
    @here.task(name="slow", timeout="50ms")
    async def slow() -> None:
        import asyncio

        await asyncio.Event().wait()

    with here.runner():
        with pytest.raises(TimedOut):
            slow.submit().result()
    attempt = spans.one("run slow")
    assert (attempt.status.status_code, attempt.status.description) == (StatusCode.ERROR, "its time was over")


def test_an_app_that_encrypts_tells_the_type_of_an_error_alone(tmp_path: Path, spans: Spans) -> None:
    keys = f"k1:{base64.b64encode(b'k' * 32).decode()}"
    with App(f"sqlite:///{tmp_path / 'shop.db'}", tracing=True, encryption_keys=keys) as app:

        @app.task(name="bad")
        def bad(card: object) -> None:
            raise ValueError(f"no luck with {card}")

        with app.runner(), pytest.raises(ValueError, match="no luck"):
            bad.submit("4711-0815").result()
        with pytest.raises(NotEncodable, match="card"):
            bad.submit({"4711-0815": object()})
    ran = spans.one("run bad")
    assert (ran.status.status_code, ran.status.description) == (StatusCode.ERROR, "ValueError")
    assert [dict(event.attributes or {}) for event in ran.events] == [{"exception.type": "builtins.ValueError"}]
    assert "4711-0815" not in "".join(span.to_json() for span in spans.all)


def test_a_submit_that_fails_is_recorded(here: App, spans: Spans) -> None:
    @here.task(name="add")
    def add(a: int) -> int:
        return a

    with pytest.raises(TypeError):
        add.submit()  # type: ignore[call-arg]
    submit = spans.one("submit add")
    assert submit.status.status_code is StatusCode.ERROR
    assert submit.events[0].name == "exception"


def test_without_tracing_a_stored_trace_changes_nothing(tmp_path: Path, spans: Spans) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with App(url, tracing=True) as traced, App(url) as plain:
        for each in (traced, plain):
            each.task(name="add")(lambda a: a)
        run = traced.get_task("add").submit(1)
        with plain.runner():
            assert plain.invocation(run.id).result() == 1
    assert [span.name for span in spans.all] == ["submit add"]


def test_a_schedule_does_not_keep_the_trace_of_its_declaration(here: App) -> None:
    @here.task(name="add")
    def add(a: int) -> int:
        return a

    engine = here.runtime.ready()
    with own.start_as_current_span("declaring"):
        record, _, _ = add.template(engine, (1,), {})
        assert add.prepared(engine, (1,), {})[0].terms.trace
    assert record.terms.trace is None


@pytest.mark.parametrize("state", ["a=1,b=2", "x" * 600])
def test_a_trace_state_is_kept_unless_it_is_long(here: App, spans: Spans, state: str) -> None:
    tracer = here.runtime.tracer
    assert tracer is not None
    with own.start_as_current_span("outer"):
        carrier = tracer.carrier(None)
    given = tracer.extracted({**carrier, "tracestate": state})
    assert tracer.carrier(given).get("tracestate") == (state if len(state) < 512 else None)


@pytest.mark.parametrize("text", ["", "00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-zz", "x" * 100_000])
def test_a_damaged_trace_is_none(here: App, text: str) -> None:
    tracer = here.runtime.tracer
    assert tracer is not None
    assert tracer.carrier(tracer.extracted({"traceparent": text})) == {}


def test_linked() -> None:
    assert linked(None) is None
    assert linked({"traceparent": "a", "tracestate": "b"}) == {"link": "a"}
    assert linked({"link": "a"}) == {"link": "a"}


def test_the_calls_of_a_map_share_what_is_made_of_their_context(here: App) -> None:
    tracer = here.runtime.ready().tracer
    assert tracer is not None
    with own.start_as_current_span("outer"):
        first, again = tracer.carrier(None), tracer.carrier(None)
    with own.start_as_current_span("other"):
        other = tracer.carrier(None)
    assert first is again
    assert first != other
    assert tracer.extracted(first) is tracer.extracted(dict(first))
    assert tracer.extracted(first) is not tracer.extracted(other)
