"""The spans of one app, made with the API of OpenTelemetry alone: the program chooses the SDK and the exporter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from holdfast._version import __version__
from holdfast.codec import ErrorRecord
from holdfast.errors import MissingExtra
from holdfast.model.records import InvocationRecord
from holdfast.showing import without_secrets

PARENT, STATE, LINK = "traceparent", "tracestate", "link"
_MOST_STATE = 512
_FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_TEXT = 2_000
_OUTCOMES = {
    "Returned": "succeeded",
    "Raised": "failed",
    "Deferred": "deferred",
    "Unfit": "unfit",
    "Interrupted": "interrupted",
    "Crashed": "crashed",
    "LetGo": "suspended",
}


def linked(trace: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the trace of a rerun: one of its own, with a link to the submit of the original."""
    found = None if trace is None else trace.get(PARENT) or trace.get(LINK)
    return None if found is None else {LINK: found}


class Tracer:
    """Make the spans of one app. Without `shows_errors` they have only the types of errors. Raises `MissingExtra`."""

    def __init__(self, *, shows_errors: bool = True) -> None:
        self._shows_errors = shows_errors
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "tracing=True needs the library 'opentelemetry-api', which is not installed: "
                "pip install 'holdfast[otel]'"
            ) from error
        self._tracer = trace.get_tracer("holdfast", __version__)
        self._trace = trace
        self._w3c = TraceContextTextMapPropagator()
        self._empty = context.Context()
        self._flags = [trace.TraceFlags(number) for number in range(256)]
        self.attach, self.detach = context.attach, context.detach
        # The calls of a `map` have one context: what was made of the last one is used again.
        self._carried: tuple[Any, dict[str, str]] = (None, {})
        self._extracted: tuple[tuple[str, str], Any] = (("", ""), self._empty)

    # --- submitting

    def submitting(self, task: str, queue: str) -> AbstractContextManager[Any]:
        """Return a span around a submit, which is current in it. What is raised there is recorded."""
        facts = {**_SENDING, "messaging.destination.name": queue, "holdfast.task": task}
        return self._tracer.start_as_current_span(
            f"submit {task}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes=facts,
            record_exception=self._shows_errors,
            set_status_on_exception=self._shows_errors,
        )

    def passed(self, record: InvocationRecord) -> InvocationRecord:
        """Return the record with the current context, if there is one."""
        return self.with_trace(record, self.carrier(None))

    def with_trace(self, record: InvocationRecord, trace: Mapping[str, str] | None) -> InvocationRecord:
        return record if not trace else replace(record, terms=replace(record.terms, trace=trace))

    def carrier(self, context: Any) -> dict[str, str]:
        """Return a context in the form of W3C; empty without a span."""
        span = self._trace.get_current_span(context).get_span_context()
        known, carrier = self._carried
        if span is not known:
            carrier = {}
            self._w3c.inject(carrier, context)
            if len(carrier.get(STATE, "")) > _MOST_STATE:
                del carrier[STATE]
            self._carried = (span, carrier)
        return carrier

    # --- running

    def attempt(self, record: InvocationRecord) -> CallSpan:
        """Return the span of an attempt that begins, or of a workflow that goes on."""
        trace = record.terms.trace or {}
        above = self.extracted(trace) if PARENT in trace else self._empty
        linked = [trace[LINK]] if LINK in trace else []
        if record.errors:
            linked.append(record.errors[-1].trace)
        facts = {
            **_PROCESSING,
            "messaging.destination.name": record.queue,
            "messaging.message.id": record.id,
            "holdfast.task": record.task,
            "holdfast.attempt": record.attempt,
        }
        kind = self._trace.SpanKind.CONSUMER
        return self._begun(f"run {record.task}", above, kind, facts, linked)

    def step(self, name: str, call: str, attempt: int, above: Any) -> CallSpan:
        """Return the span of a step that begins, below the span of its run."""
        facts = {"holdfast.step": call, "holdfast.attempt": attempt}
        return self._begun(f"step {name}", above, self._trace.SpanKind.INTERNAL, facts, ())

    def _begun(self, name: str, above: Any, kind: Any, facts: Mapping[str, Any], linked: Sequence[str]) -> CallSpan:
        links = None
        if linked:
            found = [span for each in linked if (span := self._remote(each)) is not None]
            links = [self._trace.Link(each.get_span_context()) for each in found]
        span = self._tracer.start_span(name, above, kind, facts, links)
        return CallSpan(self, span, self._trace.set_span_in_context(span, above))

    def extracted(self, carrier: Mapping[str, str]) -> Any:
        """Return the context in a carrier, on top of nothing. What is no context of W3C is none."""
        asked = (carrier.get(PARENT, ""), carrier.get(STATE, ""))
        known, context = self._extracted
        if asked != known:
            span = self._remote(*asked)
            context = self._empty if span is None else self._trace.set_span_in_context(span, self._empty)
            self._extracted = (asked, context)
        return context

    def _remote(self, traceparent: str, state: str = "") -> Any:
        if _FORM.fullmatch(traceparent) is None:
            return None
        trace, span, flags = int(traceparent[3:35], 16), int(traceparent[36:52], 16), int(traceparent[53:], 16)
        made = self._trace.TraceState.from_header([state]) if state else None
        context = self._trace.SpanContext(trace, span, True, self._flags[flags], made)
        return self._trace.NonRecordingSpan(context) if context.is_valid else None

    def fail(self, span: Any, why: str, error: ErrorRecord | None) -> None:
        """Mark a span as failed."""
        if error is not None:
            facts = {"exception.type": error.type_name.replace(":", ".")}
            if self._shows_errors:
                facts["exception.message"] = _plain(error.message)
                facts["exception.stacktrace"] = without_secrets(error.traceback)
            else:
                why = error.type_name.rpartition(":")[2]  # the reason quotes the message
            span.add_event("exception", facts)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, _plain(why)))


class CallSpan:
    """The span of an attempt or a step, in the process that ends it."""

    __slots__ = ("_span", "_tracer", "context")

    def __init__(self, tracer: Tracer, span: Any, context: Any) -> None:
        self._tracer, self._span, self.context = tracer, span, context

    def attach(self) -> object:
        """Make it the current span of this thread or coroutine."""
        return self._tracer.attach(self.context)

    def detach(self, token: Any) -> None:
        self._tracer.detach(token)

    @property
    def carrier(self) -> dict[str, str]:
        """Return its context, for another process."""
        return self._tracer.carrier(self.context)

    def passed_to(self, record: InvocationRecord) -> InvocationRecord:
        """Return a record that is submitted below this span."""
        return self._tracer.with_trace(record, self.carrier)

    def step(self, name: str, call: str, attempt: int) -> CallSpan:
        """Return the span of a step below this one. `call` is its id in the run."""
        return self._tracer.step(name, call, attempt, self.context)

    def end(self, outcome: object, why: str = "") -> None:
        """End it as the outcome of the call says, or as failed, with this reason."""
        span = self._span
        if span.is_recording():
            name = _OUTCOMES.get(type(outcome).__name__, "ended")
            if name != "succeeded":
                error = getattr(outcome, "error", None)
                if why or name in ("failed", "unfit", "crashed"):
                    name = name if name != "interrupted" else "failed"
                    self._tracer.fail(span, why or str(getattr(outcome, "why", "")), error)
            span.set_attribute("holdfast.outcome", name)
        span.end()


class PassedSpan:
    """The span of a call that runs here for another process, which ends the span."""

    def __init__(self, carrier: Mapping[str, str]) -> None:
        self._tracer = Tracer()
        self._context = self._tracer.extracted(carrier)

    def attach(self) -> object:
        return self._tracer.attach(self._context)

    def detach(self, token: Any) -> None:
        self._tracer.detach(token)


def _plain(text: str) -> str:
    return without_secrets(text[:_MOST_TEXT])


_SENDING = {"messaging.system": "holdfast", "messaging.operation.type": "send", "messaging.operation.name": "submit"}
_PROCESSING = {"messaging.system": "holdfast", "messaging.operation.type": "process", "messaging.operation.name": "run"}
