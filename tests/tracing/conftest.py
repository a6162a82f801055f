"""Spans that are kept in memory. OpenTelemetry takes one provider for a process, so all tests share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_KEPT = InMemorySpanExporter()


class Spans:
    """The spans that have ended."""

    @property
    def all(self) -> list[ReadableSpan]:
        return list(_KEPT.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """Return those of this name, in the order of their starts."""
        found = [span for span in self.all if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def above(self, span: ReadableSpan) -> str | None:
        """Return the name of a span's parent; None for a root."""
        if span.parent is None:
            return None
        (found,) = [each for each in self.all if each.context.span_id == span.parent.span_id]
        assert each_trace(found) == each_trace(span)
        return found.name


def each_trace(span: ReadableSpan) -> int:
    return span.context.trace_id


@pytest.fixture
def spans() -> Iterator[Spans]:
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_KEPT))
        trace.set_tracer_provider(provider)
    _KEPT.clear()
    yield Spans()
    _KEPT.clear()
