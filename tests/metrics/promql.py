"""Scrapes, and the few forms of PromQL that our dashboard and rules use, evaluated on two scrapes.

`rate` and `increase` look at the first and the last scrape. Prometheus itself extrapolates to the ends of the window,
which moves a value by less than one interval of scraping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_TOKEN = re.compile(r'\s*(?:(\d+(?:\.\d+)?)(?![\w])|([A-Za-z_][\w:]*)|("[^"]*")|(\[[^\]]*\])|(.))')
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


class Scrape(NamedTuple):
    """The samples of an endpoint at a time, by name."""

    at: float
    samples: dict[str, Vector]


def scraped(text: str, at: float, instance: str = "runner:9000") -> Scrape:
    samples: dict[str, Vector] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset({**sample.labels, "instance": instance}.items())
            samples.setdefault(sample.name, {})[labels] = sample.value
    return Scrape(at, samples)


class Selector(NamedTuple):
    """A metric with its labels, as an expression names it."""

    name: str
    wanted: tuple[tuple[str, str], ...]


class Evaluation:
    """One expression on two scrapes. `selectors` are those that it names, and `by` the labels that it groups by."""

    def __init__(self, text: str, first: Scrape, last: Scrape) -> None:
        text = text.replace("$__rate_interval", "5m")
        self._tokens = [match[0].strip() for match in _TOKEN.finditer(text) if match[0].strip()]
        self._at = 0
        self._first, self._last = first, last
        self.selectors: list[Selector] = []
        self.by: set[str] = set()
        self.value = self._comparison()
        assert self._at == len(self._tokens), self._tokens[self._at :]

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        assert not wanted or token in wanted, (wanted, token, self._tokens)
        self._at += 1
        return token

    def _comparison(self) -> Vector:
        left = self._quotient()
        if self._peek() in (">", "<"):
            is_more, bound = self._take() == ">", float(self._take())
            return {key: value for key, value in left.items() if (value > bound if is_more else value < bound)}
        return left

    def _quotient(self) -> Vector:
        left = self._term()
        while self._peek() == "/":
            self._take()
            right = self._term()
            left = {key: value / right[key] if right[key] else math.nan for key, value in left.items() if key in right}
        return left

    def _term(self) -> Vector:
        if self._peek() == "(":
            self._take()
            found = self._comparison()
            self._take(")")
            return found
        name = self._take()
        if name in _AGGREGATES:
            return self._aggregate(_AGGREGATES[name])
        if name in ("rate", "increase"):
            return self._increase(per_second=name == "rate")
        if name == "histogram_quantile":
            self._take("(")
            quantile = float(self._take())
            self._take(",")
            found = self._comparison()
            self._take(")")
            return quantiles(quantile, found)
        return self._selected(name, self._last)

    def _aggregate(self, function: Callable[[list[float]], float]) -> Vector:
        by: list[str] = []
        if self._peek() == "by":
            self._take()
            self._take("(")
            while (token := self._take()) != ")":
                by += [token] if token != "," else []
        self.by |= {*by}
        groups: dict[Labels, list[float]] = {}
        for labels, value in self._term().items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(value)
        return {labels: function(values) for labels, values in groups.items()}

    def _increase(self, *, per_second: bool) -> Vector:
        self._take("(")
        name, place = self._take(), self._at
        last = self._selected(name, self._last)
        self._at = place
        first = self._selected(name, self._first, is_noted=False)
        assert self._take().startswith("[")
        self._take(")")
        seconds = self._last.at - self._first.at if per_second else 1.0
        return {labels: (value - first[labels]) / seconds for labels, value in last.items() if labels in first}

    def _selected(self, name: str, scrape: Scrape, *, is_noted: bool = True) -> Vector:
        wanted: list[tuple[str, str]] = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                label = self._take()
                self._take("=")
                wanted.append((label, self._take().strip('"')))
                if self._peek() == ",":
                    self._take()
            self._take("}")
        if is_noted:
            self.selectors.append(Selector(name, tuple(wanted)))
        return {labels: value for labels, value in scrape.samples.get(name, {}).items() if labels >= {*wanted}}


def quantiles(quantile: float, buckets: Vector) -> Vector:
    found: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        found.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((bound, value))
    return {labels: _quantile(quantile, sorted(pairs)) for labels, pairs in found.items()}


def _quantile(quantile: float, pairs: list[tuple[float, float]]) -> float:
    rank, before = quantile * pairs[-1][1], (0.0, 0.0)
    for bound, count in pairs:
        if count >= rank and count > 0:
            if math.isinf(bound):
                return before[0]
            return before[0] + (bound - before[0]) * (rank - before[1]) / max(count - before[1], 1e-9)
        before = (bound, count)
    return math.nan


def expressions(document: object) -> Iterator[str]:
    """Return every `expr` of a dashboard or a file of rules."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "expr" and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(document, list):
        for each in document:
            yield from expressions(each)
