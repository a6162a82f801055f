"""The `devl` form of payloads. The texts on the right were written by devalue 6 with the types of Workflow DevKit."""

from __future__ import annotations

import gzip
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.world import devl

JUNE = datetime(2024, 6, 15, 10, 30, tzinfo=UTC)
WRITTEN: list[tuple[Any, str]] = [
    ([1, "a", None, None, True, {"a": 1.5}], '[[1,2,3,-1,4,5],1,"a",null,true,{"a":6},1.5]'),
    ({"d": JUNE}, '[{"d":1},["Date",2],"2024-06-15T10:30:00.000Z"]'),
    ({"d": JUNE}, '[{"d":1},["Date","2024-06-15T10:30:00.000Z"]]'),
    ({"b": b"\1\2\xff", "e": b""}, '[{"b":1,"e":3},["Uint8Array",2],"AQL/",["Uint8Array",4],"."]'),
    ({"b": b"\1\2\xff"}, '[{"b":1},["Uint8Array",2],["ArrayBuffer","AQL/"]]'),
    (None, "-1"),
    (42, "[42]"),
    ("x", '["x"]'),
    ([], "[[]]"),
    ({"a": 1}, '[["Map",1],[2],[3,4],"a",1]'),
    ({"a": 1}, '[["Map",1,2],"a",1]'),
    ([1, 2], '[["Set",1],[2,3],1,2]'),
    ([1, 2], '[["Set",1,2],1,2]'),
    (123456789012345678901234567890, '[["BigInt",1],"123456789012345678901234567890"]'),
    (
        {"name": "TypeError", "message": "no card", "stack": "at"},
        '[["TypeError",1],{"name":2,"message":3,"stack":4},"TypeError","no card","at"]',
    ),
    ([["x"], ["x"]], '[[1,1],[2],"x"]'),
    (-math.inf, "-5"),
]


@pytest.mark.parametrize(("value", "written"), WRITTEN)
def test_reads_what_javascript_writes(value: Any, written: str) -> None:
    payload = b"devl" + written.encode()
    assert devl.loads(payload) == value
    assert devl.loads(b"gzip" + gzip.compress(payload)) == value


def test_writes_what_javascript_reads() -> None:
    value = {"d": JUNE, "b": b"\1\2\xff", "n": None, "big": 2**60}
    assert devl.dumps(value) == (
        b'devl[{"d":1,"b":3,"n":5,"big":6},["Date",2],"2024-06-15T10:30:00.000Z",["Uint8Array",4],"AQL/",null,'
        b'["BigInt",7],"1152921504606846976"]'
    )
    assert devl.dumps(math.nan) == b"devl-3"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_everything_comes_back(value: Any) -> None:
    assert devl.loads(devl.dumps(value)) == value


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"devl",
        b"encrsecret",
        b"zstd1234",
        b"gzip1234",
        b"json{}",
        b"devl[]",
        b"devl{}",
        b"devl[[7]]",
        b"devl[[0]]",
        b"devl-99",
        b'devl[["Date",1],5]',
        b'devl[["Symbol",1],"x"]',
        b'devl[["Request",1],{}]',
        b'devl[["Uint8Array","***"]]',
        b'devl["\xff"]',
        b"devl" + b"[" * 100_000,
        b"devl[" + b",".join(b"[%d]" % (number + 1) for number in range(500)) + b",1]",
    ],
)
def test_damaged_payloads_raise_value_errors(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        devl.loads(payload)


def test_shared_values_do_not_multiply() -> None:
    levels = [f"[{number + 1},{number + 1}]" for number in range(100)]
    assert len(devl.loads(f"devl[{','.join(levels)},1]".encode())) == 2


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}])
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="cannot carry"):
        devl.dumps(value)
