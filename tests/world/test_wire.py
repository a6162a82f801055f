"""The JSON of the World's protocol: what goes in comes out, and what is no request is refused."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.world import wire
from holdfast.world.errors import WorldError

times = st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(2200, 1, 1)).map(
    lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000, tzinfo=dt.UTC)
)
keys = st.sampled_from(["$b", "$d", "$o", "a", "cursor", ""])
values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.binary(max_size=20) | times,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert wire.decode(wire.encode(value)) == value


def test_fields_without_a_value_are_left_out_but_not_in_messages() -> None:
    value = {"a": None, "cursor": None, "list": [None], "inner": {"b": None}}
    assert wire.encode(value) == b'{"cursor":null,"list":[null],"inner":{}}'
    assert wire.decode(wire.encode(value, keeps_null=True)) == value


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b"[" * 5000, b'{"$b": 1}', b'{"$b": "?"}', b'{"$d": "x"}', b'{"$d": true}'),
        *(b'{"$d": 1e300}', b'{"$d": %d}' % 10**400, b'{"$o": []}', b'{"$d": -1}'),
    ],
)
def test_what_is_no_value_is_refused(body: bytes) -> None:
    with pytest.raises(WorldError) as refused:
        wire.decode(body)
    assert refused.value.status == 400
