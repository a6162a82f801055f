"""Whatever is wrong with a stored record, its decoder says so in one way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.errors import CorruptRecord
from holdfast.model import decoding
from holdfast.model.decoding import DEEPEST, JsonDecoder, check_body, check_json, check_plain, corrupt
from holdfast.model.records import Entry, HistoryEntry, Terms
from holdfast.schedules import records as schedules
from holdfast.triggers import events, joins
from holdfast.triggers import rules as triggers


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("epoch"), "the field 'epoch' is missing"),
        (MemoryError(), "MemoryError"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (OverflowError("too large"), "OverflowError: too large"),
        (ValueError("a \udcff b"), "a \\udcff b"),
        (ValueError("x" * 10_000), "x" * 500 + "…"),
    ],
)
def test_every_failure_becomes_a_corrupt_record(error: Exception, reason: str) -> None:
    found = corrupt("schedule", "nightly", error)
    assert (found.kind, found.id, found.reason) == ("schedule", "nightly", reason)
    assert str(found) == f"the schedule 'nightly' cannot be read: {reason}"
    str(found).encode()


def test_the_field_is_named() -> None:
    with pytest.raises(Exception, match="timeout") as failure:
        JsonDecoder[Terms](Terms).decode('{"timeout": "soon"}')
    assert corrupt("invocation", "a", failure.value).field == "timeout"


def test_json_may_be_as_deep_as_is_allowed_and_no_deeper() -> None:
    check_json("[" * DEEPEST + "]" * DEEPEST)
    check_json('["' + "[" * 500 + '\\"{"]')
    check_json(json.dumps([[1]] * 1000))
    for deep in ("[" * (DEEPEST + 1), '{"a":' * 2000, b"[" * 2000):
        with pytest.raises(ValueError, match="deep"):
            check_json(deep)


def test_json_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LARGEST_TEXT", 1000)
    with pytest.raises(ValueError, match="1,002 characters"):
        JsonDecoder[str](str).decode('"' + "x" * 1000 + '"')


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": "\xff"}', b"[" * 2000, "{}", None, 2**62])
def test_a_body_that_is_no_json_is_refused(body: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="body"):
        check_body(body)


@pytest.mark.parametrize("at", ["1e300", "-1e300", "253402300800", '"now"', "null", "true"])
def test_a_moment_beyond_every_calendar_is_refused(at: str) -> None:
    decoder = JsonDecoder[HistoryEntry](HistoryEntry)
    with pytest.raises(Exception, match="t`"):
        decoder.decode(f'{{"v": 1, "s": "registered", "t": {at}, "op": "o"}}')


def test_only_plain_data_is_plain() -> None:
    check_plain({"a": [1, 2.5, None, True, {"b": "c"}]}, "terms")
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for wrong in (deep, {"a": object()}, {b"a": 1}):
        with pytest.raises((ValueError, TypeError), match="terms"):
            check_plain(wrong, "terms")


@pytest.mark.parametrize("kind", [schedules, triggers, joins, events], ids=lambda module: module.KIND)
@pytest.mark.parametrize("body", [b"", b"1", b"{}", b"\xff", b"[" * 2000, b'{"app": 1}', b'{"version": 1e999}'])
def test_an_entry_that_says_nothing_is_corrupt_whatever_its_kind(kind: Any, body: bytes) -> None:
    with pytest.raises(CorruptRecord) as failure:
        kind.from_entry(Entry(app="shop", kind=kind.KIND, name="n", body=body))
    assert (failure.value.kind, failure.value.id) == (kind.KIND, "n")
