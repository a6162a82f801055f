"""Arithmetic with spans of time."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """The same time, in spans that are sorted and apart."""
    joined: Spans = []
    for since, until in sorted(spans):
        if joined and since <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(until, joined[-1][1]))
        elif until > since:
            joined.append((since, until))
    return joined


def without(span: Span, windows: Spans) -> Spans:
    """What is left of a span outside of the windows, which are sorted and apart."""
    since, until = span
    left: Spans = []
    for start, end in windows:
        if end <= since:
            continue
        if start >= until:
            break
        left.append((since, start))
        since = end
    return [(a, b) for a, b in [*left, (since, until)] if b > a]


def length(spans: Spans) -> float:
    return sum(until - since for since, until in spans)
