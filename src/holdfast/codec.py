"""Values to bytes and back: MessagePack with a closed set of extensions.

**Exact or refused.** A value comes back equal and of the same type, with no annotation to help, or it is refused when
it is stored, with the path to the culprit. So dispatch is on the exact type: an `OrderedDict` would come back as a
`dict`, hence it is refused. Two references to one object come back as two objects; cycles are refused.

**Data, not code.** Stored bytes never cause an import: classes come only from the registry, and `decode` raises nothing
but `NotDecodable`, whatever the bytes. (A time zone's key makes `zoneinfo` open that zone's data, or the data package
`tzdata`; its spelling is checked first.)

**State, not constructor calls.** Objects are rebuilt from their fields without `__init__` or `__post_init__`: those ran
when the value was made. To run them again would apply their changes twice, would need the `InitVar` arguments that are
gone, and would judge old data by new rules. The same holds for exceptions, whose `args` seldom are what their
`__init__` takes. Structs can only be made by their constructor, so their fields are set once more afterwards.

**Two passes.** The first pass trusts strings and integers and hands containers of plain values to msgspec as they are.
Only if that fails does a careful pass look at each leaf: it finds big integers, or the path of what must be refused.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import pathlib
import re
import struct
import sys
import traceback
import types
import typing
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

from holdfast.errors import NotDecodable, NotEncodable, TaskFailed, UsageError

MAX_DEPTH = 200
MAX_ERROR_TEXT_BYTES = 32 * 1024


class Code:
    """All extensions. A number is never reused: stored data outlives code. msgspec itself reads -1, a timestamp.

    Not an IntEnum, whose members msgspec refuses as codes.
    """

    BIGINT = 1  # signed big-endian bytes; only beyond MessagePack's 64 bits
    BYTEARRAY = 2  # the bytes
    COMPLEX = 3  # two big-endian doubles
    DECIMAL = 4  # its text, which keeps exponent, sign and NaN payload
    UUID = 5  # 16 bytes
    DATE = 6  # big-endian ordinal
    TIME = (
        7  # packed [hour, minute, second, microsecond, fold, zone]; zone: nil, key, or [offset in microseconds, name]
    )
    DATETIME = 8  # packed [year, month, day] followed by the items of TIME
    TIMEDELTA = 9  # packed [days, seconds, microseconds]
    PATH = 10  # packed [flavour, text]
    TUPLE = 11  # packed array
    SET = 12  # packed array, sorted by encoding, so that equal sets give equal bytes
    FROZENSET = 13  # as SET
    MAP = 14  # packed [key, value, key, value, …]: a dict with a key that is itself an extension
    ENUM = 15  # packed [class name, member name, or value if a Flag]
    OBJECT = 16  # packed [class name, {field: value}, nil or pydantic's [fields set, extra, private]]


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as it is stored. `data`: args and attributes, if the class is registered and they can be stored."""

    type_name: str
    message: str
    traceback: str
    data: bytes | None


class _Refused(Exception):
    """Why a value cannot be stored. Each container on the way out adds its step, so success pays nothing for paths."""

    def __init__(self, why: str, *, too_deep: bool = False) -> None:
        self.why, self.too_deep = why, too_deep
        self.steps: list[tuple[object, str]] = []

    def locate(self, root: str) -> tuple[str, str]:
        """The path and the reason. The same container twice on one path is a cycle."""
        path, seen = root, dict[int, str]()
        for container, segment in reversed(self.steps):
            if self.too_deep and id(container) in seen:
                return path, f"refers back to {seen[id(container)]}; a value that contains itself cannot be stored"
            seen[id(container)] = path
            path += segment
        return (f"{path[:60]}…" if self.too_deep else path), self.why


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_BUILTIN_BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_SURROGATE = "contains a lone surrogate, which UTF-8 cannot hold; store bytes, or decode with errors='replace'"
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")  # no dots: neither a path upwards nor a module's name
_EXACT = Context(traps=[InvalidOperation])  # a caller's own context must not turn nonsense into NaN
_PATHS: dict[int, Any] = {0: pathlib.Path, 1: pathlib.PurePosixPath, 2: pathlib.PureWindowsPath}


def _zone_to_plain(zone: dt.tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        unnamed = name == dt.timezone(offset).tzname(None)
        return offset // dt.timedelta(microseconds=1), None if unnamed else name
    if type(zone) is zoneinfo.ZoneInfo and _ZONE_KEY.fullmatch(zone.key or ""):
        return zone.key
    raise _Refused(f"has the time zone {zone!r:.80}; use zoneinfo.ZoneInfo with a key, or datetime.timezone")


def _zone_from_plain(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        if not _ZONE_KEY.fullmatch(zone):
            raise NotDecodable(f"{zone!r:.80} is not the key of a time zone")
        return zoneinfo.ZoneInfo(zone)
    microseconds, name = zone
    offset = dt.timedelta(microseconds=microseconds)
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _pack_clock(value: dt.time | dt.datetime) -> bytes:
    day = (value.year, value.month, value.day) if isinstance(value, dt.datetime) else ()
    zone = _zone_to_plain(value.tzinfo)
    return _pack((*day, value.hour, value.minute, value.second, value.microsecond, value.fold, zone))


def _read_clock(data: memoryview) -> dt.time | dt.datetime:
    *day, hour, minute, second, microsecond, fold, zone = _unpack(data)
    time = dt.time(hour, minute, second, microsecond, _zone_from_plain(zone), fold=fold)
    return dt.datetime.combine(dt.date(*day), time) if day else time


def _pack_timedelta(value: dt.timedelta) -> bytes:
    return _pack((value.days, value.seconds, value.microseconds))


def _pack_path(value: pathlib.PurePath) -> bytes:
    flavour = next(flavour for flavour, cls in _PATHS.items() if isinstance(value, cls))
    if type(value)(str(value)) != value:  # for instance PureWindowsPath("./c:a") on some versions
        raise _Refused("is a path whose text means another path")
    return _pack((flavour, str(value)))


def _read_path(data: memoryview) -> Any:
    flavour, text = _unpack(data)
    return _PATHS[flavour](text)


# Extensions that hold no other values: the exact type, its code, its payload, and back.
_LEAVES: tuple[tuple[type, int, Callable[[Any], bytes], Callable[[memoryview], object]], ...] = (
    (bytearray, Code.BYTEARRAY, bytes, bytearray),
    (complex, Code.COMPLEX, lambda v: struct.pack(">dd", v.real, v.imag), lambda d: complex(*struct.unpack(">dd", d))),
    (Decimal, Code.DECIMAL, lambda v: str(v).encode(), lambda d: Decimal(str(d, "ascii"), _EXACT)),
    (UUID, Code.UUID, lambda v: v.bytes, lambda d: UUID(bytes=bytes(d))),
    (dt.date, Code.DATE, lambda v: v.toordinal().to_bytes(4, "big"), lambda d: dt.date.fromordinal(_int_from(d))),
    (dt.time, Code.TIME, _pack_clock, _read_clock),
    (dt.datetime, Code.DATETIME, _pack_clock, _read_clock),
    (dt.timedelta, Code.TIMEDELTA, _pack_timedelta, lambda d: dt.timedelta(*_unpack(d))),
    (type(pathlib.Path()), Code.PATH, _pack_path, _read_path),
    (pathlib.PurePosixPath, Code.PATH, _pack_path, _read_path),
    (pathlib.PureWindowsPath, Code.PATH, _pack_path, _read_path),
)


def _int_from(data: memoryview) -> int:
    return int.from_bytes(data, "big", signed=True)


class _Writer:
    """Turns values into what msgspec writes natively, plus `Ext`."""

    def __init__(self, shapes: dict[type, _Shape], *, careful: bool) -> None:
        self.careful = careful
        self.shapes = shapes
        self.containers: dict[type, Callable[[Any, int], Any]] = {
            list: self.items,
            dict: self._dict,
            tuple: lambda value, depth: Ext(Code.TUPLE, _pack(self.items(value, depth))),
            set: self._set,
            frozenset: self._set,
        }

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return self._checked(value) if self.careful else value
        if kind in _LEAF_WRITERS:
            code, pack = _LEAF_WRITERS[kind]
            try:
                return Ext(code, pack(value))
            except UnicodeEncodeError:
                raise _Refused(_SURROGATE) from None
        write = self.containers.get(kind)
        if write is None:
            if kind not in self.shapes:
                raise _Refused(_why_unsupported(kind))
            write = self._enum if issubclass(kind, enum.Enum) else self._object
        if depth >= MAX_DEPTH:
            raise _Refused(f"is nested more than {MAX_DEPTH} levels deep; flatten it", too_deep=True)
        return write(value, depth + 1)

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(2**63) <= value < 2**64:
            return Ext(Code.BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _Refused(_SURROGATE) from None
        return value

    def items(self, values: Sequence[Any], depth: int) -> Sequence[Any]:
        if not self.careful and _PLAIN.issuperset(map(type, values)):
            return values
        done: list[Any] = []
        try:
            for item in values:
                done.append(self.plain(item, depth))
        except _Refused as refused:
            refused.steps.append((values, f"[{len(done)}]"))
            raise
        return done

    def _dict(self, value: dict[Any, Any], depth: int) -> object:
        if not self.careful and _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values())):
            return value
        keys, items, key = [], [], None
        try:
            for key, item in value.items():
                keys.append(self.plain(key, depth))
                items.append(self.plain(item, depth))
        except _Refused as refused:
            shown = f"{key!r:.80}" if type(key) in _PLAIN else f"<{type(key).__name__}>"
            refused.steps.append((value, f"[{shown}]" if len(keys) > len(items) else f"[key {shown}]"))
            raise
        if _PLAIN.issuperset(map(type, keys)):
            return dict(zip(keys, items, strict=True))
        return Ext(Code.MAP, _pack([part for pair in zip(keys, items, strict=True) for part in pair]))

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> object:
        try:
            packed = sorted([_pack(self.plain(item, depth)) for item in value])
        except _Refused as refused:
            refused.steps.append((value, "{…}"))
            raise
        return Ext(Code.SET if type(value) is set else Code.FROZENSET, _pack([msgspec.Raw(item) for item in packed]))

    def _enum(self, value: enum.Enum, _depth: int) -> object:
        cls = type(value)
        if not isinstance(value, enum.Flag) and cls.__members__.get(value.name) is not value:
            raise _Refused(f"is not a declared member of {_type_name(cls)}")
        return Ext(
            Code.ENUM, _pack((self.shapes[cls].name, value.value if isinstance(value, enum.Flag) else value.name))
        )

    def _object(self, value: Any, depth: int) -> object:
        shape, name, fields = self.shapes[type(value)], "", dict[str, Any]()
        try:
            raw, state = _take_apart(value, shape.defaults)
            for name, item in raw.items():
                fields[name] = self.plain(item, depth)
            name = ""  # extra and private attributes carry their names as dict keys
            state = state and [self.plain(item, depth) for item in state]
        except _Refused as refused:
            refused.steps.append((value, name and f".{name}"))
            raise
        return Ext(Code.OBJECT, _pack((shape.name, fields, state)))


_LEAF_WRITERS = {kind: (code, pack) for kind, code, pack, _ in _LEAVES}


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """A registered class: its name, and for each field what makes its default, or None if it has none."""

    cls: Any
    name: str
    defaults: dict[str, Callable[[], Any] | None]


def _fields_of(cls: Any) -> dict[str, Callable[[], Any] | None] | None:
    """The `_Shape.defaults` of a class; None if it cannot be registered."""
    if issubclass(cls, enum.Enum):
        return {}
    if issubclass(cls, msgspec.Struct):
        names, ends = cls.__struct_fields__, cls.__struct_defaults__  # defaults of the last fields
        defaults = (msgspec.NODEFAULT,) * (len(names) - len(ends)) + ends
        return {name: _maker(default) for name, default in zip(names, defaults, strict=True)}
    if _is_model(cls):
        return {
            name: None if info.is_required() else functools.partial(info.get_default, call_default_factory=True)
            for name, info in cls.model_fields.items()
        }
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        return {name: _maker(cls._field_defaults.get(name, msgspec.NODEFAULT)) for name in cls._fields}
    if not issubclass(cls, _BUILTIN_BASES) and dataclasses.is_dataclass(cls):
        fields, missing = dataclasses.fields(cls), dataclasses.MISSING
        return {f.name: _maker(f.default) if f.default_factory is missing else f.default_factory for f in fields}
    return None


def _maker(default: object) -> Callable[[], Any] | None:
    return None if default is dataclasses.MISSING or default is msgspec.NODEFAULT else lambda: default


def _is_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")  # never imported by us: without it there are no models
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _take_apart(value: Any, fields: Iterable[str]) -> tuple[dict[str, Any], Any]:
    inside = getattr(value, "__dict__", {})
    try:
        if _is_model(type(value)):  # not getattr, which warns about deprecated fields
            state = (sorted(value.__pydantic_fields_set__), value.__pydantic_extra__, value.__pydantic_private__)
            return {name: inside[name] for name in fields}, state
        for name in inside.keys() - fields - {"__orig_class__"}:
            if not isinstance(getattr(type(value), name, None), functools.cached_property):
                raise _Refused(f"has the attribute {name!r}, which would be lost; declare it as a field")
        return {name: getattr(value, name) for name in fields}, None
    except (AttributeError, KeyError) as error:
        raise _Refused(f"has a field that is not set: {error}") from None


def _put_together(shape: _Shape, stored: dict[str, Any], state: Any) -> object:
    cls: Any = shape.cls
    if issubclass(cls, msgspec.Struct):
        made = cls(**stored)  # fills in the defaults
        for name, value in stored.items() if hasattr(cls, "__post_init__") else ():
            msgspec.structs.force_setattr(made, name, value)
        return made
    fields = stored | {name: make() for name, make in shape.defaults.items() if make and name not in stored}
    fields = {name: fields[name] for name in shape.defaults}  # in the class's order
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values())
    if _is_model(cls):
        return _put_model_together(cls, fields, [list(stored), None, None] if state is None else state)
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _put_model_together(cls: Any, fields: dict[str, Any], state: Any) -> object:
    """What pydantic does for pickle and copy; `model_construct` would run `model_post_init`, and looks for aliases."""
    fields_set, extra, private = state
    if not {type(extra), type(private)} <= {dict, type(None)}:
        raise NotDecodable(f"the extra or private attributes of {_type_name(cls)} are not a map")
    if private is None and cls.__private_attributes__:  # declared since
        nothing = sys.modules["pydantic_core"].PydanticUndefined
        made_now = {name: attribute.get_default() for name, attribute in cls.__private_attributes__.items()}
        private = {name: value for name, value in made_now.items() if value is not nothing}
    made = cls.__new__(cls)
    inside = {"__pydantic_fields_set__": set(fields_set), "__pydantic_extra__": extra, "__pydantic_private__": private}
    made.__setstate__({"__dict__": fields, **inside})
    return made


class _Reader:
    """One decoding. msgspec calls `hook` for each extension; what that holds is decoded from its payload in turn."""

    __slots__ = ("depth", "shapes")

    def __init__(self, shapes: dict[str, _Shape]) -> None:
        self.shapes, self.depth = shapes, 0

    def hook(self, code: int, data: memoryview) -> object:
        leaf = _LEAF_READERS.get(code)
        if leaf is not None:
            return leaf(data)
        if self.depth >= MAX_DEPTH:
            raise NotDecodable(f"nested more than {MAX_DEPTH} levels deep")
        self.depth += 1
        body = msgspec.msgpack.decode(data, ext_hook=self.hook)
        self.depth -= 1
        build = _CONTAINER_READERS.get(code)
        if build is None or type(body) is not list:
            raise NotDecodable(f"extension {code} is unknown or damaged; was it written by a newer Holdfast?")
        return build(self, body)

    def enum(self, body: list[Any]) -> object:
        name, member = body
        cls = self._shape(name, is_enum=True).cls
        if type(member) is int and issubclass(cls, enum.Flag):
            return cls(member)
        if member not in cls.__members__:
            raise NotDecodable(f"{name} has no member {member!r:.80}")
        return cls.__members__[member]

    def object(self, body: list[Any]) -> object:
        name, fields, state = body
        shape = self._shape(name, is_enum=False)
        for unknown in fields.keys() - shape.defaults:
            raise NotDecodable(f"{name} has no field {unknown!r:.80}, but the stored value has")
        for field, default in shape.defaults.items():
            if default is None and field not in fields:
                raise NotDecodable(f"{name} needs the field {field!r}, which the stored value lacks; give it a default")
        if state is not None and not _is_model(shape.cls):
            raise NotDecodable(f"{name} was a pydantic model when it was stored, and is none now")
        return _put_together(shape, fields, state)

    def _shape(self, name: str, *, is_enum: bool) -> _Shape:
        shape = self.shapes.get(name)
        if shape is None:
            raise NotDecodable(f"the class {name!r:.80} is not registered; call app.register() with it before reading")
        if issubclass(shape.cls, enum.Enum) is not is_enum:
            raise NotDecodable(f"{name} was an enum when it was stored and is none now, or the other way round")
        return shape


_LEAF_READERS: dict[int, Callable[[memoryview], object]] = {code: read for _, code, _, read in _LEAVES} | {
    Code.BIGINT: _int_from
}
_CONTAINER_READERS: dict[int, Callable[[_Reader, list[Any]], object]] = {
    Code.TUPLE: lambda _, body: tuple(body),
    Code.SET: lambda _, body: set(body),
    Code.FROZENSET: lambda _, body: frozenset(body),
    Code.MAP: lambda _, body: dict(zip(body[::2], body[1::2], strict=True)),
    Code.ENUM: _Reader.enum,
    Code.OBJECT: _Reader.object,
}


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _stored_name(cls: type) -> str:
    """`module:qualname`. The main module goes by the name that other processes import it by."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else pathlib.PurePath(file).stem if file else module
    return f"{module}:{cls.__qualname__}"


def _why_unsupported(cls: type) -> str:
    name = _type_name(cls)
    if issubclass(cls, BaseException):
        return f"is the exception {name}; an exception is raised, not stored: store its text or its args"
    if _fields_of(cls) is not None:
        return f"is a {name}, which is not registered; call app.register({cls.__name__}), or annotate the task with it"
    for base in cls.__mro__[1:]:
        if base in _BUILTIN_BASES or base in _LEAF_WRITERS:
            return f"is a {name}, which would come back as a plain {base.__name__}; convert it to {base.__name__}"
    return f"is of the type {name}, which cannot be stored; pass plain data, a dataclass, or an id to look it up by"


def _hints(source: Any) -> list[Any]:
    """The resolved annotations of a function or class. If one cannot be resolved, the others still are, one by one."""
    try:
        return list(typing.get_type_hints(source, include_extras=True).values())
    except Exception:
        found: list[Any] = []
    module = sys.modules.get(getattr(source, "__module__", None) or "")
    for name, hint in (getattr(source, "__annotations__", None) or {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(Exception):
            found += typing.get_type_hints(alone, getattr(module, "__dict__", {}), include_extras=True).values()
    return found


class Codec:
    """Encodes and decodes values, calls and errors, and knows the classes that may appear in them."""

    def __init__(self) -> None:
        self._by_type: dict[type, _Shape] = {}
        self._by_name: dict[str, _Shape] = {}
        self._errors = dict(_BUILTIN_ERRORS)
        self._error_names: dict[type, str] = {}
        self._quick = _Writer(self._by_type, careful=False)
        self._careful = _Writer(self._by_type, careful=True)

    def register(self, cls: type, *, name: str | None = None) -> None:
        """Allow a dataclass, struct, enum, NamedTuple, pydantic model or exception class to be stored.

        A class may have several names: the last one is written, all are read, so that a class can be renamed.
        """
        if not isinstance(cls, type):
            raise UsageError(f"register() takes a class, not {cls!r:.80}")
        name = _stored_name(cls) if name is None else name
        known: Any = self._errors.get(name) or (self._by_name[name].cls if name in self._by_name else None)
        if known not in (None, cls) and _stored_name(known) != _stored_name(cls):
            raise UsageError(f"{name!r} already names {_type_name(known)}; pass register({cls.__name__}, name=...)")
        if issubclass(cls, Exception) and not issubclass(cls, _NEVER_REBUILT):
            self._errors[name], self._error_names[cls] = cls, name
            return
        fields = None if issubclass(cls, BaseException) else _fields_of(cls)
        if fields is None:
            kinds = "a dataclass, msgspec.Struct, Enum, NamedTuple, pydantic model or ordinary Exception"
            raise UsageError(f"{_type_name(cls)} cannot be registered: it is not {kinds}")
        self._by_type.pop(known, None)  # of a reloaded module: its instances would come back as the new class
        self._by_name[name] = self._by_type[cls] = _Shape(cls, name, fields)

    def register_annotations(self, function: Callable[..., Any]) -> None:
        """Register each registrable class the annotations lead to. Never raises: what cannot be resolved is left."""
        pending, seen = _hints(function), dict[int, object]()
        while pending:
            hint = pending.pop()
            if id(hint) not in seen:
                seen[id(hint)] = hint  # kept, so that its id is not given to another
                with contextlib.suppress(Exception):
                    pending += self._register_hint(hint)

    def _register_hint(self, hint: Any) -> list[Any]:
        """Register an annotation that is a class, and return what it leads to."""
        if isinstance(hint, type) and typing.get_origin(hint) is None:
            if hint not in self._by_type and hint not in self._error_names:
                self.register(hint)
            return _hints(hint)
        if isinstance(hint, enum.Enum):  # inside a Literal
            return [type(hint)]
        return [*typing.get_args(hint), typing.get_origin(hint), getattr(hint, "__value__", None)]

    def encode(self, value: object, *, at: str = "value") -> bytes:
        """Raises `NotEncodable` with the path to what cannot be stored; `at` is what the path begins with."""
        try:
            return _pack(self._quick.plain(value, 0))
        except Exception:
            return self._encode_carefully(value, at)

    def decode(self, data: bytes) -> Any:
        """Raises `NotDecodable` and nothing else."""
        try:
            return msgspec.msgpack.decode(data, ext_hook=_Reader(self._by_name).hook)
        except NotDecodable:
            raise
        except Exception as error:
            raise NotDecodable(f"stored bytes cannot be read: {type(error).__name__}: {str(error)[:200]}") from error

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, object], names: Sequence[str] = ()) -> bytes:
        """The arguments of a call. `names` are the parameters of the positional ones, for messages."""
        try:
            if _PLAIN.issuperset(map(type, args)) and (not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))):
                return _pack((args, kwargs))
            plain = self._quick.plain
            return _pack(([plain(item, 0) for item in args], {name: plain(item, 0) for name, item in kwargs.items()}))
        except Exception:
            return self._encode_call_carefully(args, kwargs, names)

    def _encode_call_carefully(self, args: tuple[Any, ...], kwargs: dict[str, object], names: Sequence[str]) -> bytes:
        roots = [names[index] if index < len(names) else f"args[{index}]" for index in range(len(args))]
        self._encode_carefully(list(kwargs), "keywords")
        again = self._encode_carefully
        positional = [again(item, root, f"argument {root!r}: ") for root, item in zip(roots, args, strict=True)]
        named = {name: again(item, name, f"argument {name!r}: ") for name, item in kwargs.items()}
        return _pack(([msgspec.Raw(item) for item in positional], {n: msgspec.Raw(item) for n, item in named.items()}))

    def decode_call(self, data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = self.decode(data)
        if (
            type(call) is list
            and [type(part) for part in call] == [list, dict]
            and {str}.issuperset(map(type, call[1]))
        ):
            return tuple(call[0]), call[1]
        raise NotDecodable("stored bytes are not the arguments of a call")

    def _encode_carefully(self, value: object, root: str, prefix: str = "") -> bytes:
        try:
            return _pack(self._careful.plain(value, 0))
        except _Refused as refused:
            path, why = refused.locate(root)
            raise NotEncodable(f"{prefix}{path} {why}", path=path) from None
        except Exception as error:
            why = f"cannot be stored: {type(error).__name__}: {error}"
            raise NotEncodable(f"{prefix}{root} {why}", path=root) from error

    def encode_error(self, error: BaseException) -> ErrorRecord:
        """Never raises: an error that cannot be described is still recorded as an error."""
        cls, data = type(error), None
        name = self._error_names.get(cls) or _stored_name(cls)
        if self._errors.get(name) is cls:
            with contextlib.suppress(Exception):  # then only its text is kept
                data = self.encode(_error_state(error))
        trace = _clip(lambda: "".join(traceback.format_exception(error)))
        return ErrorRecord(type_name=name, message=_clip(lambda: str(error)), traceback=trace, data=data)

    def decode_error(self, record: ErrorRecord, *, invocation_id: str | None = None) -> BaseException:
        """An instance of the registered class, with the remote traceback as a note, or `TaskFailed`. Never raises."""
        cls = self._errors.get(record.type_name)
        with contextlib.suppress(Exception):
            if cls is not None and (record.data is not None or cls is _builtin_base(cls)):
                # A builtin's text is all that callers use of it, if its args could not be stored.
                args, state = self.decode(record.data) if record.data is not None else ([record.message], None)
                return _rebuild_error(cls, args, state, record.traceback)
        return TaskFailed(record.type_name, record.message, record.traceback, invocation_id=invocation_id)


_NOTE = "Remote traceback:"
# These would end the caller's process, or be taken for the end of its generator or coroutine: TaskFailed instead.
_NEVER_REBUILT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, SystemExit)
_BUILTIN_ERRORS: dict[str, type[Exception]] = {
    f"builtins:{cls.__name__}": cls
    for cls in vars(builtins).values()
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEVER_REBUILT)
}


def _builtin_base(cls: type) -> Any:
    return next(base for base in cls.__mro__ if _BUILTIN_ERRORS.get(f"builtins:{base.__name__}") is base)


def _error_state(error: BaseException) -> list[Any]:
    """Args and attributes, as the builtin base tells them: OSError's file name, for instance, is not among its args."""
    _, args, *rest = _builtin_base(type(error)).__reduce__(error)
    state = dict(rest[0] or {}) if rest else {}
    if "__notes__" in state:  # those of an earlier hop are in the traceback's text; kept here, they would pile up
        state["__notes__"] = [note for note in state["__notes__"] if not str(note).startswith(_NOTE)]
    return [list(args), state]


def _rebuild_error(cls: type[Exception], args: list[Any], state: Any, remote_traceback: str) -> Exception:
    base = _builtin_base(cls)
    error: Exception = base.__new__(cls, *args)
    base.__init__(error, *args)
    base.__setstate__(error, state)
    error.add_note(f"{_NOTE}\n{remote_traceback}")
    return error


def _clip(produce: Callable[[], str]) -> str:
    """The text, valid in UTF-8 and of at most `MAX_ERROR_TEXT_BYTES`: its head and tail are kept."""
    try:
        raw = produce().encode("utf-8", "backslashreplace")
    except Exception as error:  # what an exception says of itself is user code
        return f"<no text: making it raised {type(error).__name__}>"
    if len(raw) <= MAX_ERROR_TEXT_BYTES:
        return raw.decode()
    half = MAX_ERROR_TEXT_BYTES // 2 - 50
    head, tail = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{head}\n… {len(raw) - 2 * half} bytes left out …\n{tail}"
