"""Types of payloads: what passes the check of a resumer is never refused in the body, where it would end the run."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest

from holdfast.errors import NotDecodable, PayloadDoesNotFit
from holdfast.workflows.hooks_types import check, converted, plain, schema_of


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Order:
    by: str
    at: dt.datetime | None = None
    amount: Decimal = Decimal(0)


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class Pair(NamedTuple):
    a: int
    b: str = "x"


class Loose(TypedDict, total=False):
    a: int
    at: dt.time


class Form(pydantic.BaseModel):
    at: dt.datetime | None = None
    day: dt.date | None = None
    amount: Decimal = Decimal(0)
    lasts: dt.timedelta | None = None
    id: uuid.UUID | None = None
    link: pydantic.HttpUrl | None = None
    names: dict[int, str] = {}
    colors: dict[Color, int] = {}


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    a: int


Aware, Naive = Annotated[dt.datetime, msgspec.Meta(tz=True)], Annotated[dt.datetime, msgspec.Meta(tz=False)]
TYPES: list[Any] = [int, float, str, bool, bytes, None, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, Decimal]
TYPES += [list[int], set[int], tuple[int, str], tuple[int, ...], list[dt.datetime], Literal["a", 1, None], Color, Level]
TYPES += [
    dict[int, str],
    dict[float, int],
    dict[Color, int],
    dict[Level, int],
    dict[dt.date, int],
    dict[uuid.UUID, int],
]
TYPES += [dict[Decimal, int], dict[dt.datetime, int], dict[Literal["a", "b"], int], dict[str, dt.timedelta]]
TYPES += [dict[Annotated[str, msgspec.Meta(max_length=2)], int], dict[Annotated[int, msgspec.Meta(ge=1)], int]]
TYPES += [Aware, Naive, Annotated[dt.time, msgspec.Meta(tz=True)], dt.datetime | int, uuid.UUID | None]
TYPES += [Annotated[int, msgspec.Meta(ge=1, le=5)], Annotated[str, msgspec.Meta(pattern="^a.c$")]]
TYPES += [Order, Cat | Dog, Closed, Pair, Loose, Form, list[Form], Strict]

TEXTS = ["", "a", "abc", "red", "1", "-1", "1.5", "1e5", "1_0", " 1", "NaN", "Infinity", "YWJj", "YWJ", "====", "YQ=="]
TEXTS += ["2026-01-31", "20260131", "2026-W01-1", "2026-02-30", "2026-01-31T10:00", "2026-01-31 10:00:00"]
TEXTS += ["2026-01-31T10:00:00", "2026-01-31T10:00:00Z", "2026-01-31T10:00:00+0100", "2026-01-31T24:00:00"]
TEXTS += ["10:00", "10:00:00", "10:00:00Z", "10", "T10:00:00", "P1D", "PT1H", "P", "1 day", "P1DT", "-PT0.5S"]
TEXTS += ["{12345678-1234-5678-1234-567812345678}", "12345678-1234-5678-1234-567812345678", "1234567812345678" * 2]
TEXTS += ["urn:uuid:12345678-1234-5678-1234-567812345678", "https://shop.example/x", "mailto:me", "http:"]
FIELDS = ("by", "a", "at", "day", "amount", "lasts", "id", "link", "b")


def values() -> Iterator[Any]:
    yield from TEXTS
    yield from (None, True, 0, 1, 5, -1, 1.5, 3.0, 10**19, [], [1], [1, 1], ["a"], [1, "a"], [None], {})
    yield from ({"type": "Cat", "lives": 9}, {"type": "Cat"}, {"type": "Cow"}, {"type": "Dog", "name": "Rex"})
    for text in TEXTS:
        yield from ({text: 1}, {text: text}, [text], {"names": {text: "x"}}, {"colors": {text: 1}})
        yield from ({field: text} for field in FIELDS)
        yield from ({"by": "x", "at": text}, {"by": "x", "amount": text})
    for number in (1, 1.5, -1, 10**19):
        yield from ({field: number} for field in FIELDS)


@pytest.mark.parametrize("type", TYPES, ids=str)
def test_what_passes_the_check_is_of_the_type(type: Any) -> None:
    schema, passed = schema_of(type), 0
    for value in values():
        try:
            check(value, schema)
        except PayloadDoesNotFit:
            continue
        passed += 1
        converted(value, type)  # raises nothing
    assert passed


@pytest.mark.parametrize(
    ("type", "value", "path"),
    [
        (Order, {"by": "x", "at": "2026-01-31"}, "payload.at"),
        (dict[int, str], {"1": "a", "b": "b"}, "payload['b']"),
        (list[Aware], ["2026-01-31T10:00:00Z", "2026-01-31T10:00:00"], "payload[1]"),
        (Form, {"amount": "much"}, "payload.amount"),
        (Form, {"link": "ftp://shop.example"}, "payload.link"),
    ],
)
def test_the_path_leads_to_what_does_not_fit(type: Any, value: Any, path: str) -> None:
    with pytest.raises(PayloadDoesNotFit) as refused:
        check(value, schema_of(type))
    assert refused.value.path == path
    with pytest.raises(NotDecodable):  # it is right to refuse it
        converted(value, type)


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (dict[int, dt.datetime], {7: dt.datetime(2026, 1, 31, tzinfo=dt.UTC)}),
        (dict[Level, bytes], {Level.LOW: b"abc"}),
        (dict[uuid.UUID, Decimal], {uuid.UUID(int=7): Decimal("1.50")}),
        (dt.timedelta, dt.timedelta(days=800, seconds=5, microseconds=7)),
        (Form, Form(lasts=dt.timedelta(days=800, seconds=5), amount=Decimal("-1E+5"), names={7: "x"})),
        (Form, Form(link=pydantic.HttpUrl("HTTPS://shop.example"), day=dt.date(2026, 1, 31), colors={Color.RED: 1})),
    ],
    ids=str,
)
def test_an_object_of_the_type_passes_and_comes_back(type: Any, value: Any) -> None:
    sent = plain(value)
    check(sent, schema_of(type))
    assert converted(sent, type) == value


class Branch(pydantic.BaseModel):
    parts: list[Branch | Leaf]


class Leaf(pydantic.BaseModel):
    parts: list[Branch | Leaf]
    name: str = ""


def test_a_payload_that_nests_choices_is_judged_at_once() -> None:
    """Each level has two choices: to try all of them would take 2 ** 40 looks."""
    payload: dict[str, Any] = {"parts": "none"}
    for _ in range(40):
        payload = {"parts": [payload]}
    schema, began = schema_of(Branch), time.process_time()
    with pytest.raises(PayloadDoesNotFit):
        check(payload, schema)
    assert time.process_time() - began < 1.0
