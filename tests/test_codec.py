"""The codec: a supported value comes back exactly, any other is refused with its path, and no bytes do harm."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import hashlib
import math
import pathlib
import random
import subprocess
import sys
import threading
import typing
import uuid
import zoneinfo

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from holdfast import errors
from holdfast.codec import (
    MAX_DEPTH,
    MAX_ERROR_TEXT_BYTES,
    Code,
    Codec,
    ErrorRecord,
    Packed,
    Payload,
    Reference,
    Seen,
    SizeLimits,
    references,
)
from holdfast.errors import InvocationCancelled, NotDecodable, NotEncodable, ResultTimeout, TaskFailed, UsageError

pack = msgspec.msgpack.encode


class Colour(enum.Enum):
    RED = "r"
    GREEN = "g"
    CRIMSON = "r"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"


class Perm(enum.Flag):
    R = 1
    W = 2


class Bits(enum.IntFlag):
    A = 1
    B = 4


@dataclasses.dataclass
class Line:
    sku: str
    price: object
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    id: int
    lines: tuple[Line, ...] = ()
    note: str | None = None


@dataclasses.dataclass
class Doubled:
    """Its __post_init__ is not idempotent and needs an argument that is not kept."""

    size: int
    factor: dataclasses.InitVar[int]
    area: int = dataclasses.field(init=False)
    unit: str = dataclasses.field(init=False, default="m")

    def __post_init__(self, factor: int) -> None:
        self.size *= factor
        self.area = self.size**2

    @functools.cached_property
    def half(self) -> float:
        return self.size / 2


class Point(typing.NamedTuple):
    x: object
    y: object = 0


class Event(msgspec.Struct, frozen=True):
    name: str
    data: object = None
    tags: list[str] = []


class Counting(msgspec.Struct, kw_only=True):
    start: int = 0
    end: int

    def __post_init__(self) -> None:
        self.end += 1


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(alias="Street")
    zip: str = "0000"
    parts: list[object] = pydantic.Field(default_factory=list)
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("zip")
    @classmethod
    def _digits(cls, value: str) -> str:
        assert value.isdigit()
        return value


class Open(pydantic.BaseModel, extra="allow", frozen=True):
    a: int


class Names(pydantic.RootModel[list[str]]):
    pass


REGISTERED = (Colour, Level, Word, Perm, Bits, Line, Order, Doubled, Point, Event, Counting, Address, Open, Names)


@pytest.fixture
def codec() -> Codec:
    return full_codec()


def full_codec() -> Codec:
    codec = Codec()
    for cls in REGISTERED:
        codec.register(cls)
    return codec


CODEC = full_codec()


def same(a: object, b: object) -> bool:
    """Equal and of the same types all the way down; NaN is the same as NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    match a:
        case float():
            return repr(a) == repr(b)
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)
        case decimal.Decimal():
            return a.as_tuple() == b.as_tuple()
        case dt.datetime() | dt.time():
            return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and zone(a) == zone(b)
        case enum.Enum():
            return a is b or (isinstance(a, enum.Flag) and a == b)
        case dict():
            return len(a) == len(b) and all(
                same(x, y) for x, y in zip([*a, *a.values()], [*b, *b.values()], strict=True)
            )
        case list() | tuple():
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        case set() | frozenset():
            return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
        case pydantic.BaseModel():
            return same(a.__getstate__(), b.__getstate__())
        case msgspec.Struct():
            return same(msgspec.structs.astuple(a), msgspec.structs.astuple(b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def zone(value: dt.datetime | dt.time) -> object:
    tz = value.tzinfo
    if isinstance(tz, zoneinfo.ZoneInfo):
        return tz.key
    return tz and (type(tz), tz.utcoffset(None), tz.tzname(None))


ZONES = st.one_of(
    st.none(),
    st.sampled_from(["UTC", "Europe/Berlin", "America/Argentina/Ushuaia", "Etc/GMT+5"]).map(zoneinfo.ZoneInfo),
    st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone),
    st.just(dt.timezone(dt.timedelta(hours=1), "CET")),
)
FOLD = st.sampled_from([0, 1])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PATH_TEXT = st.lists(st.sampled_from(["a", "..", "b c", "é", ".x", "/", "c:"]), max_size=4).map("/".join)
ALL_HASHABLE_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]),
    st.floats(),
    TEXT,
    st.binary(max_size=8),
    st.complex_numbers(),
    st.decimals().filter(lambda v: not v.is_snan()),  # which has no hash
    st.sampled_from(["NaN123", "-0", "1E+999999", "-Infinity", "0E-50"]).map(decimal.Decimal),
    st.uuids(),
    st.dates(),
    st.timedeltas(),
    st.builds(lambda t, z, f: t.replace(tzinfo=z, fold=f), st.times(), ZONES, FOLD),
    st.builds(
        lambda d, z, f: d.replace(tzinfo=z, fold=f),
        st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1)),
        ZONES,
        FOLD,
    ),
    st.builds(lambda cls, text: cls(text), st.sampled_from([pathlib.Path, pathlib.PurePosixPath]), PATH_TEXT),
    st.sampled_from([*Colour, *Level, *Word, *Perm, *Bits, Perm.R | Perm.W, Perm(0), Bits(64), Bits.A | Bits.B]),
    st.just(pathlib.PureWindowsPath("c:\\x\\y")),
)
HASHABLE_LEAVES = st.deferred(lambda: ALL_HASHABLE_LEAVES)  # hypothesis would print the whole of it otherwise
KEYS = st.recursive(
    HASHABLE_LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3), st.builds(Point, inner, inner)
    ),
    max_leaves=4,
)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=4),
        st.builds(Line, TEXT, inner, st.lists(TEXT, max_size=2)),
        st.builds(lambda i, p: Order(id=i, lines=(Line("s", p),)), st.integers(), inner),
        st.builds(lambda a, b: Doubled(a, b), st.integers(), st.integers(-9, 9)),
        st.builds(Point, inner, inner),
        st.builds(Event, TEXT, inner, st.lists(TEXT, max_size=2)),
        st.builds(lambda s, e: Counting(start=s, end=e), st.integers(0, 9), st.integers(0, 9)),
        st.builds(lambda s, p: Address(Street=s, parts=[p]), TEXT, inner),
        st.builds(lambda a, x: Open(a=a, x=x), st.integers(), inner),
        st.lists(TEXT, max_size=3).map(Names),
    )


LEAVES = st.one_of(HASHABLE_LEAVES, st.binary(max_size=5).map(bytearray), st.just(decimal.Decimal("sNaN7")))
VALUES = st.recursive(LEAVES, containers, max_leaves=12)


# ---- round trips


@given(VALUES)
@settings(max_examples=400, deadline=None)
def test_every_supported_value_comes_back_exactly(value: object) -> None:
    data = CODEC.encode(value)
    back = CODEC.decode(data)
    assert same(back, value)
    assert CODEC.encode(back) == data


@given(st.lists(VALUES, max_size=3).map(tuple), st.dictionaries(TEXT, VALUES, max_size=3))
@settings(max_examples=100, deadline=None)
def test_calls_come_back_exactly(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    back = CODEC.decode_call(CODEC.encode_call(args, kwargs))
    assert same(back, (args, kwargs))


def test_dict_order_is_kept(codec: Codec) -> None:
    value = {"b": 1, (1, 2): 2, "a": 3, 2**80: 4}
    assert list(codec.decode(codec.encode(value)).items()) == list(value.items())


def test_equal_nan_keys_stay_apart(codec: Codec) -> None:
    value = {decimal.Decimal("NaN"): 1, decimal.Decimal("NaN"): 2}
    assert list(codec.decode(codec.encode(value)).values()) == [1, 2]


def test_equal_sets_give_equal_bytes(codec: Codec) -> None:
    assert codec.encode({8, 0, 16}) == codec.encode({16, 8, 0})
    assert codec.encode({"a", "b", 1, (2,)}) == codec.encode({(2,), 1, "b", "a"})


def test_fold_and_zone_key_survive(codec: Codec) -> None:
    late = dt.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1)
    back = codec.decode(codec.encode(late))
    assert (back.fold, back.tzinfo.key, back.utcoffset()) == (1, "Europe/Berlin", dt.timedelta(hours=1))


def test_the_caller_s_value_is_not_changed(codec: Codec) -> None:
    value = {"a": [1, (2, {3})], "b": {"c": 2**90}}
    codec.encode(value)
    assert same(value, {"a": [1, (2, {3})], "b": {"c": 2**90}})


def test_decimal_context_of_the_reader_does_not_matter(codec: Codec) -> None:
    data = codec.encode(decimal.Decimal("1.23456789E-7"))
    with decimal.localcontext(decimal.Context(prec=2, Emax=5, Emin=-5, traps=[])):
        assert str(codec.decode(data)) == "1.23456789E-7"
        with pytest.raises(NotDecodable):
            codec.decode(pack(Ext(Code.DECIMAL, b"nonsense")))


# ---- objects


def test_post_init_is_not_run_again(codec: Codec) -> None:
    value = Doubled(2, 3)
    assert value.half == 3.0  # a cached property is no state
    back = codec.decode(codec.encode(value))
    assert (back.size, back.area, back.unit) == (6, 36, "m")
    assert codec.decode(codec.encode(Counting(end=1))).end == 2


def test_generic_dataclass_comes_back() -> None:
    codec = Codec()
    codec.register(Box)
    assert codec.decode(codec.encode(Box[int](3))) == Box(3)


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    item: T


def test_pydantic_keeps_fields_set_extra_and_private(codec: Codec) -> None:
    value = Address(Street="Main")
    value._seen = 7
    back = codec.decode(codec.encode(value))
    assert back == value
    assert back.model_fields_set == {"street"}
    assert back._seen == 7
    assert codec.decode(codec.encode(Open(a=1, b=(2,)))).b == (2,)


def test_pydantic_is_not_validated_again(codec: Codec) -> None:
    value = Address.model_construct(street="x", zip="letters")
    assert codec.decode(codec.encode(value)).zip == "letters"


def test_pydantic_is_never_imported_by_the_codec() -> None:
    code = "import sys; from holdfast.codec import Codec; c = Codec(); c.decode(c.encode([1, (2,)])); "
    code += "assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def as_stored(cls: type, fields: object, state: object = None) -> bytes:
    return pack(Ext(Code.OBJECT, pack((f"{cls.__module__}:{cls.__qualname__}", fields, state))))


@pytest.mark.parametrize(
    ("cls", "fields", "expected"),
    [
        (Line, {"sku": "a", "price": 1}, Line("a", 1, [])),
        (Order, {"id": 1}, Order(id=1)),
        (Point, {"x": 1}, Point(1, 0)),
        (Event, {"name": "n"}, Event("n", None, [])),
        (Address, {"street": "s"}, Address(Street="s")),
    ],
)
def test_a_new_field_with_a_default_gets_it(codec: Codec, cls: type, fields: object, expected: object) -> None:
    assert same(codec.decode(as_stored(cls, fields)), expected)


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (Line, "sku"),
        (Order, "id"),
        (Point, "x"),
        (Event, "name"),
        (Address, "street"),
        (Counting, "end"),
        (Doubled, "size"),
    ],
)
def test_a_new_field_without_a_default_is_named(codec: Codec, cls: type, field: str) -> None:
    with pytest.raises(NotDecodable, match=rf"{cls.__name__} needs the field '{field}'"):
        codec.decode(as_stored(cls, {}))


@pytest.mark.parametrize("cls", [Line, Order, Point, Event, Address, Counting])
def test_a_removed_field_is_named(codec: Codec, cls: type) -> None:
    with pytest.raises(NotDecodable, match=rf"{cls.__name__} has no field 'gone'"):
        codec.decode(as_stored(cls, {"gone": 1}))


def test_a_removed_enum_member_is_named(codec: Codec) -> None:
    with pytest.raises(NotDecodable, match="Colour has no member 'BLUE'"):
        codec.decode(pack(Ext(Code.ENUM, pack((f"{__name__}:Colour", "BLUE")))))


def test_a_class_that_changed_its_kind_is_refused(codec: Codec) -> None:
    with pytest.raises(NotDecodable, match="enum"):
        codec.decode(as_stored(Colour, {}))
    with pytest.raises(NotDecodable, match="enum"):
        codec.decode(pack(Ext(Code.ENUM, pack((f"{__name__}:Line", "RED")))))
    with pytest.raises(NotDecodable, match="pydantic"):
        codec.decode(as_stored(Line, {"sku": "", "price": 0}, [[], None, None]))


# ---- the registry


def test_default_names_are_module_and_qualname() -> None:
    codec = Codec()
    codec.register(Colour)
    assert f"{__name__}:Colour".encode() in codec.encode(Colour.RED)


def test_main_goes_by_its_import_name(tmp_path: pathlib.Path) -> None:
    source = "import enum\nfrom holdfast.codec import Codec\nclass C(enum.Enum):\n    A = 1\n"
    source += "c = Codec()\nc.register(C)\nassert b'shop:C' in c.encode(C.A), c.encode(C.A)\n"
    (tmp_path / "shop.py").write_text(source)
    subprocess.run([sys.executable, str(tmp_path / "shop.py")], check=True)
    subprocess.run([sys.executable, "-m", "shop"], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    "thing", [int, object, dict, Codec, KeyboardInterrupt, asyncio.CancelledError, type("D", (dict,), {}), 5, "x", len]
)
def test_what_cannot_be_registered(thing: typing.Any) -> None:
    with pytest.raises(UsageError):
        Codec().register(thing)


def test_a_dataclass_over_a_builtin_cannot_be_registered() -> None:
    @dataclasses.dataclass
    class Bag(dict):  # type: ignore[type-arg]
        a: int

    with pytest.raises(UsageError):
        Codec().register(Bag)


def test_one_name_for_two_classes_is_refused() -> None:
    codec = Codec()
    codec.register(Colour, name="x")
    codec.register(Colour, name="x")
    with pytest.raises(UsageError, match="'x' already names"):
        codec.register(Level, name="x")
    with pytest.raises(UsageError, match="ValueError"):
        codec.register(Level, name="builtins:ValueError")


def make_local() -> type:
    @dataclasses.dataclass
    class Local:
        a: int

    return Local


def test_a_reloaded_class_takes_the_place_of_the_old() -> None:
    old, new, codec = make_local(), make_local(), Codec()
    codec.register(old)
    data = codec.encode(old(1))
    codec.register(new)
    assert type(codec.decode(data)) is new
    with pytest.raises(NotEncodable, match="not registered"):
        codec.encode(old(1))


def test_a_renamed_class_still_reads_its_old_name() -> None:
    codec = Codec()
    codec.register(Point, name="old")
    data = codec.encode(Point(1))
    codec.register(Point, name="new")
    assert b"new" in codec.encode(Point(1))
    assert codec.decode(data) == Point(1)


@dataclasses.dataclass
class Node:
    children: list[Node]
    colour: Colour | None = None
    missing: Unknown = None  # type: ignore[name-defined]  # noqa: F821


def test_annotations_are_walked() -> None:
    def task(
        node: typing.Annotated[dict[str, Node], "doc"],
        event: typing.Optional[Event],  # noqa: UP045
        level: typing.Literal[Level.LOW],
        pair: tuple[Point, ...] | set[Word],
        box: Box[Perm],
        address: Address,
        broken: Nowhere,  # type: ignore[name-defined]  # noqa: F821
        plain: int = 0,
    ) -> collections.abc.Iterator[Counting]: ...

    codec = Codec()
    codec.register_annotations(task)
    everything = [Node([], Colour.RED), Event("e"), Level.LOW, Point(1), Word.A, Box(Perm.R), Address(Street="s")]
    everything.append(Counting(end=1))
    assert same(codec.decode(codec.encode(everything)), everything)


@pytest.mark.parametrize("thing", [len, None, 5, functools.partial(print), object(), "text", lambda x: x])
def test_annotations_never_raise(thing: typing.Any) -> None:
    Codec().register_annotations(thing)


def test_annotations_keep_an_explicit_name() -> None:
    codec = Codec()
    codec.register(Point, name="p")

    def task(point: Point) -> None: ...

    codec.register_annotations(task)
    assert b"\xa1p" in codec.encode(Point(1))


# ---- refusals


class MyInt(int):
    pass


class FakeZone(dt.tzinfo):
    def utcoffset(self, when: object) -> dt.timedelta:
        return dt.timedelta(0)


class Plain:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def cyclic() -> list[object]:
    value: list[object] = [1]
    value.append({"again": value})
    return value


def deep(levels: int, wrap: typing.Callable[[object], object] = lambda v: [v]) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


def loose() -> Line:
    line = Line("a", 1)
    line.stray = 1  # type: ignore[attr-defined]
    return line


def unset() -> Line:
    line = Line("a", 1)
    del line.price
    return line


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        (Plain(), "value", "Plain, which cannot be stored"),
        ([1, 2, Plain()], "value[2]", "cannot be stored"),
        ((1, Plain()), "value[1]", "cannot be stored"),
        ({"retry": Plain()}, "value['retry']", "cannot be stored"),
        ({1: {b"x": Plain()}}, "value[1][b'x']", "cannot be stored"),
        ({Plain(): 1}, "value[key <Plain>]", "cannot be stored"),
        ({MyInt(3)}, "value{…}", "MyInt, which would come back as a plain int"),
        (Order(id=1, lines=(Line("a", 1), Line("b", Plain()))), "value.lines[1].price", "cannot be stored"),
        (Event("a", [Plain()]), "value.data[0]", "cannot be stored"),
        (Point(1, Plain()), "value.y", "cannot be stored"),
        (Address(Street="a", parts=[Plain()]), "value.parts[0]", "cannot be stored"),
        (Open(a=1, b=Plain()), "value['b']", "cannot be stored"),
        (collections.OrderedDict(a=1), "value", "OrderedDict, which would come back as a plain dict"),
        ([collections.defaultdict(list)], "value[0]", "plain dict"),
        (type("S", (str,), {})("x"), "value", "plain str"),
        (type("D", (dt.datetime,), {})(2020, 1, 1), "value", "plain datetime"),
        ({"a": ["\ud800"]}, "value['a'][0]", "lone surrogate"),
        ({"\udcff": 1}, "value[key '\\udcff']", "lone surrogate"),
        ([pathlib.Path("\udcff")], "value[0]", "lone surrogate"),
        ([dt.datetime(2020, 1, 1, tzinfo=FakeZone())], "value[0]", "time zone"),
        ([ValueError("x")], "value[0]", "exception is raised, not stored"),
        (KeyboardInterrupt(), "value", "exception is raised, not stored"),
        ([loose()], "value[0]", "attribute 'stray'"),
        ([unset()], "value[0]", "not set"),
        (cyclic(), "value[1]['again']", "refers back to value;"),
        ([Box], "value[0]", "type type"),
        (len, "value", "cannot be stored"),
        (memoryview(b"x"), "value", "memoryview"),
        (threading.Lock(), "value", "lock"),
        (..., "value", "ellipsis"),
    ],
)
def test_refusals_name_the_path(codec: Codec, value: object, path: str, reason: str) -> None:
    with pytest.raises(NotEncodable) as caught:
        codec.encode(value)
    assert caught.value.path == path
    assert reason in str(caught.value)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize("value", [Colour.RED, Perm.R, Line("a", 1), Event("a"), Point(1), Address(Street="a")])
def test_an_unregistered_class_says_how_to_register(value: object) -> None:
    with pytest.raises(NotEncodable, match=rf"app\.register\({type(value).__name__}\), or annotate"):
        Codec().encode([value])


def test_an_unregistered_subclass_of_a_registered_class_is_refused(codec: Codec) -> None:
    class Special(Line):
        pass

    with pytest.raises(NotEncodable, match="not registered"):
        codec.encode(Special("a", 1))


def test_call_refusals_name_the_argument(codec: Codec) -> None:
    bad = Order(id=1, lines=(Line("a", Plain()),))
    with pytest.raises(NotEncodable, match=r"argument 'order': order\.lines\[0\]\.price is of the type") as caught:
        codec.encode_call((1, bad), {}, ["n", "order"])
    assert caught.value.path == "order.lines[0].price"
    with pytest.raises(NotEncodable, match=r"argument 'args\[1\]': ") as caught:
        codec.encode_call((1, Plain()), {}, ["n"])
    assert caught.value.path == "args[1]"
    with pytest.raises(NotEncodable, match="argument 'options': ") as caught:
        codec.encode_call((), {"options": {"retry": {1, Plain()}}})
    assert caught.value.path == "options['retry']{…}"
    with pytest.raises(NotEncodable, match="surrogate"):
        codec.encode_call((), {"\ud800": 1})


def test_big_integers_in_calls(codec: Codec) -> None:
    args, kwargs = (2**64, -(2**63) - 1), {"k": [2**100, {2**70: 1}]}
    assert codec.decode_call(codec.encode_call(args, kwargs)) == (args, kwargs)


def test_path_begins_with_at(codec: Codec) -> None:
    with pytest.raises(NotEncodable) as caught:
        codec.encode([Plain()], at="result")
    assert caught.value.path == "result[0]"


WRAPS: list[typing.Callable[[typing.Any], object]] = [
    lambda v: [v],
    lambda v: (v,),
    lambda v: {"k": v},
    lambda v: frozenset([v]),
    lambda v: Line("a", v),
    lambda v: Point(v),
    lambda v: Event("a", v),
    lambda v: Address.model_construct(street="", parts=v),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_depth_is_limited_on_both_sides_alike(codec: Codec, wrap: typing.Callable[[object], object]) -> None:
    codec.decode(codec.encode(deep(MAX_DEPTH - 1, wrap)))  # one level is left for the lists in some of the objects
    for levels in (MAX_DEPTH + 1, MAX_DEPTH * 2):
        with pytest.raises(NotEncodable, match=f"nested more than {MAX_DEPTH} levels"):
            codec.encode(deep(levels, wrap))


def test_endless_nesting_is_refused(codec: Codec) -> None:
    with pytest.raises(NotEncodable, match="nested more than"):
        codec.encode(deep(100_000))
    with pytest.raises(NotEncodable, match="argument 'tree'"):
        codec.encode_call((deep(100_000, lambda v: {1: v}),), {}, ["tree"])


@pytest.mark.parametrize("wrap", [w for w in WRAPS if not isinstance(w(1), frozenset | tuple | Event)])
def test_cycles_through_any_container(codec: Codec, wrap: typing.Callable[[object], object]) -> None:
    ring: list[object] = []
    ring.append(wrap(ring))
    with pytest.raises(NotEncodable, match="refers back to value;"):
        codec.encode(ring)


def test_a_shared_object_is_no_cycle(codec: Codec) -> None:
    shared = [1]
    assert codec.decode(codec.encode([shared, (shared, {"a": shared})])) == [shared, (shared, {"a": shared})]


def test_encoding_on_an_almost_full_stack_is_refused_not_fatal(codec: Codec) -> None:
    def descend(left: int) -> None:
        if left:
            return descend(left - 1)
        codec.decode(codec.encode(deep(MAX_DEPTH, lambda v: (v,))))
        return None

    with pytest.raises((NotEncodable, NotDecodable)):
        descend(sys.getrecursionlimit() - 300)


# ---- hostile bytes

GADGETS = [
    "os:system",
    "posix:system",
    "subprocess:Popen",
    "subprocess:check_output",
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "builtins:open",
    "builtins:compile",
    "builtins:getattr",
    "builtins:object",
    "builtins:type",
    "builtins:print",
    "builtins:SystemExit",
    "builtins:KeyboardInterrupt",
    "builtins:BaseException",
    "builtins:GeneratorExit",
    "builtins:BaseExceptionGroup",
    "asyncio.exceptions:CancelledError",
    "importlib:import_module",
    "pickle:loads",
    "marshal:loads",
    "shutil:rmtree",
    "runpy:run_path",
    "ctypes:CDLL",
    "code:interact",
    "pty:spawn",
    "socket:socket",
    "sys:exit",
    "holdfast.codec:Codec",
    "antigravity:x",
    "this:s",
    "__main__:Codec",
    "os.system",
    "../../etc/passwd",
    ":",
    ":x",
    "x:",
    "builtins:ValueError.__init__",
    "holdfast.errors:HoldfastError",
    "__import__('os').system('id')",
]


@pytest.mark.parametrize("name", GADGETS)
def test_no_name_reaches_a_class_outside_the_registry(codec: Codec, name: str) -> None:
    before = set(sys.modules)
    for payload in ((name, {}, None), (name, {"args": ["id"]}, None), (name, "x"), (name, 1)):
        for code in (Code.OBJECT, Code.ENUM):
            with pytest.raises(NotDecodable):
                codec.decode(pack(Ext(code, pack(payload))))
    record = ErrorRecord(type_name=name, message="id", traceback="", data=codec.encode([["id"], {}]))
    error = codec.decode_error(record, invocation_id="i1")
    assert type(error) is TaskFailed
    assert (error.type_name, error.message, error.invocation_id) == (name, "id", "i1")
    assert set(sys.modules) == before


def nested_ext(levels: int, code: int) -> bytes:
    data = b"\x01"
    for _ in range(levels):
        data = pack(Ext(code, b"\x91" + data))
    return data


CORPUS: dict[str, bytes] = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "trailing bytes": b"\x01\x01",
    "arrays 100k deep": b"\x91" * 100_000 + b"\x01",
    "maps 100k deep": b"\x81\x01" * 100_000 + b"\x01",
    "keys 100k deep": b"\x81" * 100_000 + b"\x01",
    "tuples too deep": nested_ext(MAX_DEPTH + 1, Code.TUPLE),
    "tuples 3k deep": nested_ext(3000, Code.TUPLE),
    "sets 3k deep": nested_ext(3000, Code.FROZENSET),
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge string": b"\xdb\xff\xff\xff\xff",
    "huge extension": b"\xc9\xff\xff\xff\xff\x0b",
    "bad utf-8": b"\xa2\xff\xfe",
    "unhashable key": pack({1: 2}).replace(b"\x01", pack(Ext(Code.SET, b"\x90"))),
    "map as key": b"\x81\x80\x01",
    "unhashable in set": pack(Ext(Code.SET, b"\x91\x90")),
    "unhashable in map": pack(Ext(Code.MAP, b"\x92\x90\x01")),
    "odd map": pack(Ext(Code.MAP, b"\x91\x01")),
    "text as tuple": pack(Ext(Code.TUPLE, pack("abc"))),
    "map as set": pack(Ext(Code.SET, pack({1: 2}))),
    "short uuid": pack(Ext(Code.UUID, b"123")),
    "short complex": pack(Ext(Code.COMPLEX, b"123")),
    "date zero": pack(Ext(Code.DATE, b"\0\0\0\0")),
    "date too far": pack(Ext(Code.DATE, b"\xff" * 4)),
    "decimal exponent": pack(Ext(Code.DECIMAL, b"1E" + b"9" * 40)),
    "decimal nonsense": pack(Ext(Code.DECIMAL, b"__import__")),
    "decimal not ascii": pack(Ext(Code.DECIMAL, "١".encode())),
    "timedelta overflow": pack(Ext(Code.TIMEDELTA, pack((2**62, 0, 0)))),
    "timedelta of text": pack(Ext(Code.TIMEDELTA, pack(("a", 0, 0)))),
    "datetime month": pack(Ext(Code.DATETIME, pack((2020, 13, 1, 0, 0, 0, 0, 0, None)))),
    "datetime offset": pack(Ext(Code.DATETIME, pack((2020, 1, 1, 0, 0, 0, 0, 0, (10**15, None))))),
    "datetime zone type": pack(Ext(Code.DATETIME, pack((2020, 1, 1, 0, 0, 0, 0, 0, 5)))),
    "datetime short": pack(Ext(Code.DATETIME, pack((2020, 1, 1)))),
    "datetime pickled state": pack(Ext(Code.DATETIME, pack((b"\x07\xe4\x01\x01\0\0\0\0\0\0",)))),
    "path flavour": pack(Ext(Code.PATH, pack((9, "x")))),
    "path number": pack(Ext(Code.PATH, pack((0, 5)))),
    "object fields": as_stored(Line, [1, 2]),
    "object field names": as_stored(Line, {1: 2}),
    "object name": pack(Ext(Code.OBJECT, pack(([], {}, None)))),
    "object short": pack(Ext(Code.OBJECT, pack((f"{__name__}:Line", {})))),
    "model state": as_stored(Address, {"street": "x"}, 5),
    "model extra": as_stored(Address, {"street": "x"}, [[], 5, None]),
    "model fields set": as_stored(Address, {"street": "x"}, [[{}], None, None]),
    "enum member type": pack(Ext(Code.ENUM, pack((f"{__name__}:Colour", {})))),
    "enum member attribute": pack(Ext(Code.ENUM, pack((f"{__name__}:Colour", "__class__")))),
    "flag value": pack(Ext(Code.ENUM, pack((f"{__name__}:Perm", 1 << 40)))),
    "timestamp of a wrong size": pack(Ext(-1, b"abc")),
    "invalid timestamp": pack(Ext(-1, b"\xff" * 12)),
}
CORPUS |= {
    f"zone {key!r}": pack(Ext(Code.DATETIME, pack((2020, 1, 1, 0, 0, 0, 0, 0, key))))
    for key in [
        "../../etc/passwd",
        "/etc/passwd",
        "a\0b",
        "",
        ".",
        "Europe",
        "os.path",
        "x" * 5000,
        "Europe/../UTC",
        "No/Such",
        "tzdata.zi",
        "é",
    ]
}
CORPUS |= {f"code {code}": pack(Ext(code, b"\x90")) for code in (0, 17, 18, 100, 127, -2, -128)}


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_bytes_raise_not_decodable(codec: Codec, name: str) -> None:
    with pytest.raises(NotDecodable) as caught:
        codec.decode(CORPUS[name])
    assert len(str(caught.value)) < 400
    with pytest.raises(NotDecodable):
        codec.decode_call(CORPUS[name])


@pytest.mark.parametrize("value", [1, [], [1], [[], []], [[], {1: 2}], [[], {}, 1], ((), {}), "ab", {}])
def test_bytes_that_are_no_call(codec: Codec, value: object) -> None:
    with pytest.raises(NotDecodable, match="arguments of a call"):
        codec.decode_call(codec.encode(value))


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_bytes(data: bytes) -> None:
    for raw in (data, *(pack(Ext(code, data)) for code in range(1, 18))):
        try:
            CODEC.decode(raw)
        except NotDecodable:
            continue


SAMPLES = [
    [Order(id=1, lines=(Line("a", decimal.Decimal("1.5")),)), {1, "a", (2,)}, {(1,): 2**70}],
    (Event("a", Point(1, Colour.RED)), Address(Street="s"), Open(a=1, b=2), Doubled(1, 2), Perm.R | Perm.W),
    {
        "t": dt.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        "d": dt.timedelta(1),
        "p": pathlib.Path("a"),
    },
    [uuid.UUID(int=5), 1j, dt.date(2020, 1, 1), dt.time(1, 2, tzinfo=dt.UTC), bytearray(b"x"), math.inf],
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_damaged_encodings(codec: Codec, sample: object) -> None:
    data, rng, refused = codec.encode(sample), random.Random(7), 0
    damaged = [data[:end] for end in range(len(data))]
    for _ in range(3000):
        copy = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            copy[rng.randrange(len(copy))] = rng.randrange(256)
        damaged.append(bytes(copy))
    for raw in damaged:
        try:
            codec.decode(raw)
        except NotDecodable:
            refused += 1
    assert refused >= len(data)  # every truncation, at least


def test_the_codec_is_usable_after_refusals(codec: Codec) -> None:
    with pytest.raises(NotDecodable):
        codec.decode(nested_ext(MAX_DEPTH + 1, Code.TUPLE))
    assert codec.decode(codec.encode(SAMPLES[0])) == SAMPLES[0]


# ---- errors


class Declined(Exception):
    """Its args are not what its __init__ takes, as is common."""

    def __init__(self, order_id: int, reason: str) -> None:
        super().__init__(f"order {order_id}: {reason}")
        self.order_id = order_id
        self.at = dt.date(2020, 1, 1)


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Needy(OSError):
    pass


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def round_trip(codec: Codec, error: BaseException) -> BaseException:
    return codec.decode_error(codec.encode_error(error), invocation_id="i1")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 1, (2,)),
        KeyError("k"),
        ZeroDivisionError(),
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("no", name="n", path="p"),
        TimeoutError(),
        Exception(),
        RuntimeWarning("w"),
    ],
)
def test_builtin_errors_come_back(codec: Codec, error: Exception) -> None:
    back = round_trip(codec, raised(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)
    for name in ("filename", "errno", "name", "path", "object", "reason"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_remote_traceback_is_a_note(codec: Codec) -> None:
    back = round_trip(codec, raised(ValueError("outer"), raised(KeyError("inner"))))
    (note,) = back.__notes__
    assert note.startswith("Remote traceback:\n")
    for part in ("in raised", "KeyError: 'inner'", "direct cause", "ValueError: outer"):
        assert part in note


def test_notes_are_kept_but_remote_tracebacks_do_not_pile_up(codec: Codec) -> None:
    error = ValueError("x")
    error.add_note("hint")
    back = round_trip(codec, round_trip(codec, raised(error)))
    assert [note.splitlines()[0] for note in back.__notes__] == ["hint", "Remote traceback:"]


def test_registered_error_comes_back_with_its_state(codec: Codec) -> None:
    codec.register(Declined)
    back = round_trip(codec, raised(Declined(7, "no money")))
    assert type(back) is Declined
    assert (str(back), back.order_id, back.at) == ("order 7: no money", 7, dt.date(2020, 1, 1))


def test_registered_subclass_of_oserror(codec: Codec) -> None:
    codec.register(Needy, name="needy")
    assert codec.encode_error(Needy()).type_name == "needy"
    back = round_trip(codec, Needy(2, "text", "file"))
    assert (type(back), back.errno, back.filename) == (Needy, 2, "file")


def test_unregistered_error_is_task_failed(codec: Codec) -> None:
    back = round_trip(codec, raised(Declined(7, "no")))
    assert isinstance(back, TaskFailed)
    assert (back.type_name, back.message) == (f"{__name__}:Declined", "order 7: no")
    assert (back.invocation_id, "in raised" in back.remote_traceback) == ("i1", True)
    assert codec.encode_error(Declined(7, "no")).data is None


def test_unstorable_args(codec: Codec) -> None:
    codec.register(Declined)
    builtin = round_trip(codec, ValueError(Plain))
    assert (type(builtin), builtin.args) == (ValueError, (str(Plain),))
    own = Declined(7, "no")
    own.lock = threading.Lock()  # type: ignore[attr-defined]
    assert type(round_trip(codec, own)) is TaskFailed
    assert type(round_trip(codec, ExceptionGroup("g", [ValueError()]))) is TaskFailed


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration(3),
        StopAsyncIteration(),
    ],
)
def test_control_flow_is_never_rebuilt(codec: Codec, error: BaseException) -> None:
    assert type(round_trip(codec, error)) is TaskFailed


def test_a_kind_of_stop_iteration_cannot_be_registered(codec: Codec) -> None:
    class Halt(StopIteration):
        pass

    with pytest.raises(UsageError):
        codec.register(Halt)


def test_an_error_without_text(codec: Codec) -> None:
    codec.register(Rude)
    record = codec.encode_error(raised(Rude()))
    assert "RuntimeError" in record.message
    assert "Rude" in record.traceback
    assert type(codec.decode_error(record)) is Rude


def test_texts_are_capped_and_valid_utf8(codec: Codec) -> None:
    record = codec.encode_error(raised(ValueError("HEAD\ud800" + "é" * 100_000 + "TAIL")))
    for text in (record.message, record.traceback):
        assert len(text.encode()) <= MAX_ERROR_TEXT_BYTES
        assert "bytes left out" in text
        assert text.rstrip().endswith("TAIL")
    assert record.message.startswith("HEAD\\ud800")
    assert record.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    "state",
    [5, [], [[], 5], [5, {}], [[], {"__class__": "x"}], [[], {"add_note": 1}], [[], {"__notes__": 3}], [[], {1: 2}]],
)
def test_damaged_error_state_is_task_failed(codec: Codec, state: object) -> None:
    record = ErrorRecord(type_name="builtins:ValueError", message="m", traceback="t", data=codec.encode(state))
    assert type(codec.decode_error(record)) is TaskFailed
    assert type(codec.decode_error(msgspec.structs.replace(record, data=b"\xc1"))) is TaskFailed


# ---- Holdfast's own errors, let through by a task

OWN_ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.HoldfastError) and cls is not errors.HoldfastError
]


@pytest.mark.parametrize("cls", OWN_ERRORS)
def test_each_of_holdfast_s_own_errors_comes_back_as_itself(codec: Codec, cls: typing.Any) -> None:
    error = TaskFailed("shop:Declined", "no", "trace") if cls is TaskFailed else cls("what happened")
    back = round_trip(codec, raised(error))
    assert type(back) is cls
    assert (back.args, str(back)) == (error.args, str(error))
    own = {name: value for name, value in vars(back).items() if name != "__notes__"}
    assert own == vars(error)
    assert "in raised" in back.__notes__[0]


def test_a_timeout_let_through_is_still_a_timeout_error(codec: Codec) -> None:
    with pytest.raises(TimeoutError, match="within 5 s") as caught:
        raise round_trip(codec, raised(ResultTimeout("no result within 5 s")))
    assert type(caught.value) is ResultTimeout


def test_a_cancellation_let_through_names_the_invocation_that_was_cancelled(codec: Codec) -> None:
    back = round_trip(codec, raised(InvocationCancelled("was cancelled", invocation_id="inner")))
    assert isinstance(back, InvocationCancelled)
    assert back.invocation_id == "inner"  # not the one that let it through


def test_a_refused_result_keeps_the_path_to_the_culprit(codec: Codec) -> None:
    with pytest.raises(NotEncodable) as caught:
        codec.encode([Plain()], at="result")
    back = round_trip(codec, caught.value)
    assert isinstance(back, NotEncodable)
    assert back.path == "result[0]"


def test_task_failed_is_not_wrapped_again_however_many_tasks_let_it_through(codec: Codec) -> None:
    first = round_trip(codec, raised(Declined(7, "no")))
    assert isinstance(first, TaskFailed)
    error: BaseException = first
    for _ in range(3):
        error = codec.decode_error(codec.encode_error(raised(error)), invocation_id="outer")
        assert type(error) is TaskFailed
        assert (error.type_name, error.message) == (f"{__name__}:Declined", "order 7: no")
        assert (error.remote_traceback, str(error)) == (first.remote_traceback, str(first))
        assert error.invocation_id == "i1"
        assert len(error.__notes__) == 1


def test_a_longest_task_failed_passes_through_whole(codec: Codec) -> None:
    first = round_trip(codec, raised(Declined(7, "é" * MAX_ERROR_TEXT_BYTES)))
    back = round_trip(codec, raised(first))
    assert isinstance(first, TaskFailed)
    assert isinstance(back, TaskFailed)
    assert (back.message, back.remote_traceback) == (first.message, first.remote_traceback)


def test_an_own_error_that_lacks_what_it_promises_is_task_failed(codec: Codec) -> None:
    for cls in (TaskFailed, InvocationCancelled, NotEncodable):
        name = f"holdfast.errors:{cls.__name__}"
        for data in (codec.encode([["m"], {}]), codec.encode([["m"], None]), None):
            record = ErrorRecord(type_name=name, message="m", traceback="t", data=data)
            back = codec.decode_error(record, invocation_id="i1")
            assert isinstance(back, TaskFailed)
            assert (back.type_name, back.message, back.invocation_id) == (name, "m", "i1")


def test_an_unregistered_kind_of_an_own_error_is_task_failed(codec: Codec) -> None:
    class Special(InvocationCancelled):
        pass

    assert type(round_trip(codec, Special("x"))) is TaskFailed


def test_an_error_record_is_itself_storable() -> None:
    record = Codec().encode_error(raised(ValueError("x")))
    assert msgspec.msgpack.decode(pack(record), type=ErrorRecord) == record


def test_one_codec_serves_many_threads() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                for sample in SAMPLES:
                    assert same(CODEC.decode(CODEC.encode(sample)), sample)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- large values, put out

MOST = 1 << 30
INLINE = st.sampled_from([0, 1, 8, 40, 300, 700])
SIZED = st.one_of(
    VALUES,
    st.binary(min_size=30, max_size=900),
    st.builds(lambda text, times: text * times, TEXT, st.integers(1, 99)),
    st.lists(st.binary(max_size=90), max_size=9),
)


def apart(payloads: typing.Iterable[Payload]) -> dict[str, bytes]:
    return {payload.digest: payload.data for payload in payloads}


def check_references(data: bytes | None, payloads: typing.Sequence[Payload]) -> None:
    """What the bytes say they refer to is what came with them, each once, and named by its content."""
    assert references(data) == tuple(Reference(payload.digest, len(payload.data)) for payload in payloads)
    assert len(apart(payloads)) == len(payloads)
    assert all(hashlib.sha256(payload.data).hexdigest() == payload.digest for payload in payloads)


def header(count: int, *, size: int = 1, digest: bytes = b"\xaa" * 32, body: bytes = b"") -> bytes:
    return b"\xc1" + count.to_bytes(2, "big") + (digest + size.to_bytes(8, "big")) * count + body


@given(SIZED, INLINE)
@settings(max_examples=150, deadline=None)
def test_a_value_comes_back_whatever_lies_apart(value: object, inline: int) -> None:
    packed = CODEC.pack(value, SizeLimits(inline, MOST))
    assert same(CODEC.decode(packed.data, apart(packed.payloads)), value)
    check_references(packed.data, packed.payloads)
    whole = CODEC.encode(value)
    assert len(packed.payloads) == (len(whole) > inline)
    if not packed.payloads:
        assert packed.data == whole
    else:
        with pytest.raises(NotDecodable, match=packed.payloads[0].digest):
            CODEC.decode(packed.data)


@given(st.lists(SIZED, max_size=4).map(tuple), st.dictionaries(TEXT, SIZED, max_size=3), INLINE)
@settings(max_examples=150, deadline=None)
def test_a_call_comes_back_whatever_lies_apart(
    args: tuple[object, ...], kwargs: dict[str, object], inline: int
) -> None:
    packed = CODEC.pack_call(args, kwargs, ("a", "b"), SizeLimits(inline, MOST))
    assert same(CODEC.decode_call(packed.data, apart(packed.payloads)), (args, kwargs))
    check_references(packed.data, packed.payloads)
    head = 3 + 40 * len(packed.payloads) if packed.payloads else 0
    assert len(packed.data) <= head + max(inline, 8)  # 8: the call as a whole, put out
    if len(CODEC.encode_call(args, kwargs)) <= inline:
        assert packed == Packed(CODEC.encode_call(args, kwargs))


@given(st.lists(SIZED, max_size=3), st.dictionaries(TEXT.filter(str.isidentifier), SIZED, max_size=2), INLINE)
@settings(max_examples=100, deadline=None)
def test_an_error_comes_back_whatever_lies_apart(args: list[object], state: dict[str, object], inline: int) -> None:
    codec = full_codec()
    codec.register(Declined)
    error = Declined.__new__(Declined)
    error.args = tuple(args)
    vars(error).update(state)
    record, payloads = codec.pack_error(error, SizeLimits(inline, MOST))
    check_references(record.data, payloads)
    back = codec.decode_error(record, apart(payloads))
    del back.__notes__
    assert type(back) is Declined
    assert same((back.args, vars(back)), (error.args, vars(error)))
    if payloads:
        assert type(codec.decode_error(record)) is TaskFailed  # without its payload, its text is left


def test_an_error_that_cannot_be_stored_or_is_too_large_has_no_payloads(codec: Codec) -> None:
    for error, limits in (
        (ValueError("x" * 5000, object()), SizeLimits(64, MOST)),
        (ValueError("x" * 5000), SizeLimits(64, 4000)),
    ):
        record, payloads = codec.pack_error(error, limits)
        assert (record.data, payloads) == (None, ())
        assert str(codec.decode_error(record)).startswith(("('xxx", "xxx"))


def test_large_bytes_are_their_own_payload_without_a_copy(codec: Codec) -> None:
    blob = bytes(5000)
    packed = codec.pack(blob, SizeLimits(64, MOST))
    assert packed.payloads[0].data is blob
    assert codec.decode(packed.data, apart(packed.payloads)) is blob
    call = codec.pack_call((1, blob), {"again": blob, "text": "t" * 5000}, (), SizeLimits(64, MOST))
    assert [payload.data is blob for payload in call.payloads] == [True, False]
    (_, first), kwargs = codec.decode_call(call.data, apart(call.payloads))
    assert first is kwargs["again"] is blob


@pytest.mark.parametrize("common", [b"c" * 5000, "c" * 5000, [1] * 5000], ids=["bytes", "text", "list"])
def test_the_calls_of_a_fan_out_share_what_is_equal(codec: Codec, common: object) -> None:
    seen: Seen = {}
    calls = [codec.pack_call((n, common), {"own": f"{n}" * 500}, (), SizeLimits(64, MOST), seen) for n in range(20)]
    payloads = [payload for call in calls for payload in call.payloads]
    assert len(apart(payloads)) == 21
    assert len({id(payload.data) for payload in payloads}) == 21  # also in memory


def test_bytes_that_are_gone_are_not_taken_for_others_at_the_same_place(codec: Codec) -> None:
    seen: Seen = {}
    for number in range(300):
        blob = bytes([number % 3]) * 5000  # equal to others, so not kept; the next ones may come to lie there
        packed = codec.pack_call((blob,), {}, (), SizeLimits(64, MOST), seen)
        assert codec.decode_call(packed.data, apart(packed.payloads)) == ((blob,), {})
        del blob, packed


def test_the_largest_argument_lies_apart_and_small_ones_stay(codec: Codec) -> None:
    args = ("small", "m" * 300, "l" * 500, 7)
    packed = codec.pack_call(args, {"k": "n" * 100}, (), SizeLimits(450, MOST))
    assert [len(payload.data) for payload in packed.payloads] == [503]
    assert codec.decode_call(packed.data, describe=True) == (
        ("small", "m" * 300, f"<payload of 503 bytes, {packed.payloads[0].digest[:12]}…>", 7),
        {"k": "n" * 100},
    )


def test_thousands_of_arguments_lie_apart_together(codec: Codec) -> None:
    args = tuple(range(3000))
    packed = codec.pack_call(args, {"blob": b"b" * 999}, (), SizeLimits(1024, MOST))
    assert len(packed.payloads) == 1
    assert len(packed.data) < 100
    assert codec.decode_call(packed.data, apart(packed.payloads)) == (args, {"blob": b"b" * 999})


def test_nesting_is_limited_alike_apart_and_not(codec: Codec) -> None:
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    packed = codec.pack(value, SizeLimits(64, MOST))
    assert packed.payloads
    assert codec.decode(packed.data, apart(packed.payloads)) == value
    with pytest.raises(NotEncodable, match="levels deep"):
        codec.pack((value,), SizeLimits(64, MOST))


# ---- too large


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        (("s", b"b" * 2001), {}, "blob"),
        (("s", "b" * 2001), {}, "blob"),
        ((), {"blob": b"b" * 2001}, "blob"),
        (("s", 1, 2, [3] * 2001), {}, "args[3]"),
    ],
)
def test_what_is_too_large_is_refused_by_name(
    codec: Codec, args: tuple[object, ...], kwargs: dict[str, object], path: str
) -> None:
    with pytest.raises(NotEncodable) as caught:
        codec.pack_call(args, kwargs, ("small", "blob"), SizeLimits(64, 2000))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"argument {path!r}: {path} takes 2,0")
    assert "payload_limit allows (2,000)" in str(caught.value)


def test_a_call_that_is_too_large_only_as_a_whole_is_refused_as_such(codec: Codec) -> None:
    with pytest.raises(NotEncodable, match=r"^the call takes [\d,]+ bytes, more than payload_limit"):
        codec.pack_call(tuple("x" * 100 for _ in range(50)), {}, (), SizeLimits(64, 2000))


@pytest.mark.parametrize("value", [b"x" * 2000, "x" * 1997])
def test_the_limit_itself_is_allowed(codec: Codec, value: bytes | str) -> None:
    packed = codec.pack(value, SizeLimits(64, 2000))
    assert len(packed.payloads[0].data) == 2000
    with pytest.raises(NotEncodable, match=r"^result takes 2,001 bytes") as caught:
        codec.pack(value + value[:1], SizeLimits(64, 2000), at="result")
    assert caught.value.path == "result"


# ---- damage


REFERRING = {
    "without its payload": header(1, body=pack(Ext(Code.PAYLOAD, pack([0, True])))),
    "to a number too high": header(1, body=pack(Ext(Code.PAYLOAD, pack([1, True])))),
    "to a negative number": header(1, body=pack(Ext(Code.PAYLOAD, pack([-1, True])))),
    "to a number that is none": header(1, body=pack(Ext(Code.PAYLOAD, pack([False, True])))),
    "to a text": header(1, body=pack(Ext(Code.PAYLOAD, pack(["0", True])))),
    "in too few words": header(1, body=pack(Ext(Code.PAYLOAD, pack([0])))),
    "in too many words": header(1, body=pack(Ext(Code.PAYLOAD, pack([0, True, 1])))),
    "as no list": header(1, body=pack(Ext(Code.PAYLOAD, pack(0)))),
    "without a header": pack(Ext(Code.PAYLOAD, pack([0, True]))),
    "with an empty header": header(0, body=pack(1)),
    "with half a header": header(3)[:-1],
    "with nothing behind it": header(1),
    "with more behind it": header(1, body=pack(1) + pack(1)),
    "one after another": header(1, body=header(1, body=pack(1))),
}


@pytest.mark.parametrize("name", REFERRING)
def test_a_damaged_reference_raises_not_decodable(codec: Codec, name: str) -> None:
    for describe in (False, True):
        if describe and name == "without its payload":
            continue
        with pytest.raises(NotDecodable):
            codec.decode(REFERRING[name], describe=describe)
    with pytest.raises(NotDecodable):
        codec.decode_call(REFERRING[name])


def test_a_payload_that_refers_to_payloads_is_refused(codec: Codec) -> None:
    inner = pack(Ext(Code.PAYLOAD, pack([0, False])))
    for data in (inner, pack([inner, Ext(Code.TUPLE, pack([Ext(Code.PAYLOAD, pack([0, True]))]))]), header(1)):
        payload = Payload.of(data)
        packed = header(1, digest=bytes.fromhex(payload.digest), size=len(data), body=inner)
        with pytest.raises(NotDecodable):
            codec.decode(packed, apart([payload]))


@given(st.binary(max_size=150))
@settings(max_examples=300, deadline=None)
def test_random_bytes_behind_the_mark(data: bytes) -> None:
    for raw in (b"\xc1" + data, header(1, body=data), header(2, body=data), b"\xc1\x00\x01" + data):
        found = references(raw)
        assert all(len(reference.digest) == 64 for reference in found)
        for payloads in ({}, {reference.digest: data for reference in found}):
            try:
                CODEC.decode(raw, payloads)
            except NotDecodable:
                continue


@pytest.mark.parametrize("sample", SAMPLES)
def test_damaged_references_and_payloads(codec: Codec, sample: object) -> None:
    """Whatever happens to the bytes in the record, or to those apart: NotDecodable, or some value."""
    packed, rng = codec.pack_call((sample, b"b" * 300), {"k": 1}, (), SizeLimits(40, MOST)), random.Random(7)
    assert len(packed.payloads) == 2 or codec.pack(sample, SizeLimits(256, MOST)).payloads == ()
    shelf, refused = apart(packed.payloads), 0
    for turn in range(1500):
        data, payloads = bytearray(packed.data), dict(shelf)
        if turn < len(data):
            del data[turn:]
        elif turn % 3:
            data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            digest = rng.choice(list(payloads))
            copy = bytearray(payloads[digest])
            copy[rng.randrange(len(copy))] = rng.randrange(256)
            payloads[digest] = bytes(copy[: rng.randrange(len(copy))] if turn % 2 else copy)
        try:
            codec.decode_call(bytes(data), payloads)
        except NotDecodable:
            refused += 1
    assert refused >= len(packed.data)  # every truncation, at least
