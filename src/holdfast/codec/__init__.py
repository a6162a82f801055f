"""Values to bytes and back: MessagePack with a closed set of extensions.

**Exact or refused.** A value comes back equal and of the same type, without the help of annotations. Otherwise it is
refused when it is stored, with the path to the culprit. So dispatch is on the exact type: an `OrderedDict` would come
back as a `dict`, hence it is refused. Two references to one object come back as two objects; cycles are refused.

**Data, not code.** Stored bytes never cause an import: classes come only from the registry, and `decode` raises nothing
but `NotDecodable`, whatever the bytes. (A time zone's key makes `zoneinfo` open that zone's data, or the data package
`tzdata`; its spelling is checked first.)

**State, not constructor calls.** Objects are rebuilt from their fields without `__init__` or `__post_init__`: those ran
when the value was made. To run them again would apply their changes twice, would need the `InitVar` arguments that are
gone, and would judge old data by new rules. The same holds for exceptions, whose `args` seldom are what their
`__init__` takes. Structs can only be made by their constructor, so their fields are set once more afterwards.

**Two passes.** The first pass trusts strings and integers and hands containers of plain values to msgspec as they are.
Only if that fails does a careful pass look at each leaf: it finds big integers, or the path of what must be refused.

The modules, each importing only from those above it: `extensions` (codes, leaves, refusals), `payloads` (values stored
apart), `sealing` (encryption), `secret`, `classes` (the registry's shapes), `values` (writer and reader), `failures`
(exceptions), `data` (values without their classes, digests, damage). Outside, import from here.
"""

from __future__ import annotations

import contextlib
import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast.codec.classes import Shape, fields_of, hints_of, stored_name, type_name
from holdfast.codec.data import DataReader, damage_of, digest_of
from holdfast.codec.extensions import Code, Refused, pack
from holdfast.codec.failures import MAX_ERROR_TEXT_BYTES, ErrorRecord, KnownErrors
from holdfast.codec.payloads import (
    MARK,
    NamePayload,
    Packed,
    Payload,
    Payloads,
    Placeholder,
    Reference,
    Seen,
    Shelf,
    SizeLimits,
    Spill,
    references,
    split,
)
from holdfast.codec.sealing import is_sealed, refuse_sealed, why_sealed
from holdfast.codec.values import MAX_DEPTH, PLAIN, Reader, Writer, is_call
from holdfast.errors import NotDecodable, NotEncodable, UsageError

__all__ = [
    "MARK",
    "MAX_DEPTH",
    "MAX_ERROR_TEXT_BYTES",
    "NO_PAYLOADS",
    "Code",
    "Codec",
    "DataCodec",
    "ErrorRecord",
    "NamePayload",
    "Packed",
    "Payload",
    "Payloads",
    "Placeholder",
    "Reference",
    "Seen",
    "SizeLimits",
    "damage_of",
    "references",
]

NO_PAYLOADS: Payloads = MappingProxyType({})
_WORTH_BYTES = 256  # a smaller value is not worth its own payload


class Codec:
    """Encodes and decodes values, calls and errors, and knows the classes that may appear in them."""

    _reader: type[Reader] = Reader
    name_payload: NamePayload | None = None  # of an app that encrypts
    parameters: dict[str, tuple[str, ...]]  # of tasks by name, so that arguments can be hidden by their names

    def __init__(self) -> None:
        self.parameters = {}
        self._by_type: dict[type, Shape] = {}
        self._by_name: dict[str, Shape] = {}
        self._errors = KnownErrors()
        self._quick = Writer(self._by_type, careful=False)
        self._careful = Writer(self._by_type, careful=True)

    def register(self, cls: type, *, name: str | None = None) -> None:
        """Allow a dataclass, struct, enum, NamedTuple, pydantic model or exception class to be stored.

        A class may have several names: the last one is written, all are read, so that a class can be renamed.
        """
        if not isinstance(cls, type):
            raise UsageError(f"register() takes a class, not {cls!r:.80}")
        name = stored_name(cls) if name is None else name
        known: Any = self._errors.by_name.get(name) or (self._by_name[name].cls if name in self._by_name else None)
        if known not in (None, cls) and stored_name(known) != stored_name(cls):
            raise UsageError(f"{name!r} already names {type_name(known)}; pass register({cls.__name__}, name=...)")
        if self._errors.admits(cls):
            self._errors.add(cls, name)
            return
        fields = None if issubclass(cls, BaseException) else fields_of(cls)
        if fields is None:
            kinds = "a dataclass, msgspec.Struct, Enum, NamedTuple, pydantic model or ordinary Exception"
            raise UsageError(f"{type_name(cls)} cannot be registered: it is not {kinds}")
        self._by_type.pop(known, None)  # of a reloaded module: its instances would come back as the new class
        self._by_name[name] = self._by_type[cls] = Shape(cls, name, fields)

    def register_annotations(self, function: Callable[..., Any]) -> None:
        """Register each registrable class the annotations lead to. Never raises: what cannot be resolved is left."""
        pending, seen = hints_of(function), dict[int, object]()
        while pending:
            hint = pending.pop()
            if id(hint) not in seen:
                seen[id(hint)] = hint  # kept, so that its id is not given to another
                with contextlib.suppress(Exception):
                    pending += self._register_hint(hint)

    def _register_hint(self, hint: Any) -> list[Any]:
        """Register an annotation that is a class, and return what it leads to."""
        if isinstance(hint, type) and typing.get_origin(hint) is None:
            if hint not in self._by_type and hint not in self._errors.names:
                self.register(hint)
            return hints_of(hint)
        if isinstance(hint, enum.Enum):  # inside a Literal
            return [type(hint)]
        return [*typing.get_args(hint), typing.get_origin(hint), getattr(hint, "__value__", None)]

    def encode(self, value: object, *, at: str = "value") -> bytes:
        """Return the value as bytes. Raises `NotEncodable` with the path to the value that cannot be stored; `at` is
        the beginning of the path.
        """
        try:
            return pack(self._quick.plain(value, 0))
        except Exception:
            return self._encode_carefully(value, at)

    def decode(self, data: bytes, payloads: Payloads = NO_PAYLOADS, *, describe: bool = False) -> Any:
        """Return the value of these bytes. Raises `NotDecodable` and nothing else. To `describe` is to put a text
        where a payload is not at hand.
        """
        try:
            known, body = split(data) if data[:1] == MARK else ((), data)
            shelf = Shelf(known, payloads, describe=describe) if known else None
            return msgspec.msgpack.decode(body, ext_hook=self._reader(self._by_name, shelf).hook)
        except Exception as error:
            if is_sealed(data):
                if describe:
                    return Placeholder(f"<{why_sealed(data)}>")
                refuse_sealed(data)
            if isinstance(error, NotDecodable):
                raise
            raise NotDecodable(f"stored bytes cannot be read: {type(error).__name__}: {str(error)[:200]}") from error

    def digest(self, values: Mapping[str, object]) -> str:
        """Return a text that is the same for equal named values of the same types, in any order, and for no others.

        Raises `NotEncodable`.
        """
        named = sorted(values.items())
        return digest_of(part for name, value in named for part in (pack(name), self.encode(value, at=name)))

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, object], names: Sequence[str] = ()) -> bytes:
        """Encode the arguments of a call. `names` are the parameters of the positional ones, for messages."""
        try:
            if PLAIN.issuperset(map(type, args)) and (not kwargs or PLAIN.issuperset(map(type, kwargs.values()))):
                return pack((args, kwargs))
            plain = self._quick.plain
            return pack(([plain(item, 0) for item in args], {name: plain(item, 0) for name, item in kwargs.items()}))
        except Exception:
            return self._encode_call_carefully(args, kwargs, names)

    def _encode_call_carefully(self, args: tuple[Any, ...], kwargs: dict[str, object], names: Sequence[str]) -> bytes:
        roots = _roots(args, names)
        self._encode_carefully(list(kwargs), "keywords")
        again = self._encode_carefully
        positional = [again(item, root, f"argument {root!r}: ") for root, item in zip(roots, args, strict=True)]
        named = {name: again(item, name, f"argument {name!r}: ") for name, item in kwargs.items()}
        return pack(([msgspec.Raw(item) for item in positional], {n: msgspec.Raw(item) for n, item in named.items()}))

    def decode_call(
        self, data: bytes, payloads: Payloads = NO_PAYLOADS, *, describe: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = self.decode(data, payloads, describe=describe)
        if is_call(call):
            return tuple(call[0]), call[1]
        if isinstance(call, Placeholder):
            return (call,), {}
        raise NotDecodable("stored bytes are not the arguments of a call")

    def _encode_carefully(self, value: object, root: str, prefix: str = "") -> bytes:
        try:
            return pack(self._careful.plain(value, 0))
        except Refused as refused:
            path, why = refused.locate(root)
            raise NotEncodable(f"{prefix}{path} {why}", path=path) from None
        except Exception as error:
            why = f"cannot be stored: {type(error).__name__}: {error}"
            raise NotEncodable(f"{prefix}{root} {why}", path=root) from error

    def encode_error(self, error: BaseException) -> ErrorRecord:
        """Never raises: an error that cannot be described is still recorded as an error."""
        return self._errors.to_record(error, self.encode)

    def decode_error(
        self, record: ErrorRecord, payloads: Payloads = NO_PAYLOADS, *, invocation_id: str | None = None
    ) -> BaseException:
        """Return an instance of the registered class, the remote traceback as a note, or `TaskFailed`. Never raises."""
        return self._errors.from_record(record, lambda data: self.decode(data, payloads), invocation_id)

    # --- the same with large values stored apart (see `payloads`)

    def pack(self, value: object, limits: SizeLimits, *, at: str = "value") -> Packed:
        """Encode a value, as `encode` does; a value of more than `limits.inline` bytes is stored apart whole."""
        data = value if type(value) is bytes and len(value) > limits.inline else self.encode(value, at=at)
        if len(data) <= limits.inline:
            return Packed(data)
        spill = Spill(limits, None, self.name_payload)
        try:
            return spill.packed(pack(spill.put_out(data, is_value=data is value).ext))
        except Refused as refused:
            path, why = refused.locate(at)
            raise NotEncodable(f"{path} {why}", path=path) from None

    def pack_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        names: Sequence[str],
        limits: SizeLimits,
        seen: Seen | None = None,
        shared: Mapping[str, bytes] | None = None,
    ) -> Packed:
        """Encode a call, as `encode_call` does. Arguments of more than `limits.inline` bytes are stored apart, each by
        itself; if the others are too large together, the largest of them too. So are those that are `shared` with other
        calls, whose encoded form is given.
        """
        if not shared and (
            bytes not in map(type, (*args, *kwargs.values()))
            or not [item for item in (*args, *kwargs.values()) if type(item) is bytes and len(item) > limits.inline]
        ):
            data = self.encode_call(args, kwargs, names)
            if len(data) <= limits.inline:
                return Packed(data)  # nearly all of them
            del data
        spill = Spill(limits, seen, self.name_payload)
        try:
            small = tuple([spill.bytes_put_out(item) for item in args])
            named = {name: spill.bytes_put_out(item) for name, item in kwargs.items()}
            named |= {name: spill.put_out(data) for name, data in (shared or {}).items()}
            data = self.encode_call(small, named, names)
            if len(data) > limits.inline:
                del data  # it may be large, and comes once more
                data = self._call_put_out(small, named, spill)
            if len(data) > limits.inline:  # thousands of arguments
                spill = Spill(limits, seen, self.name_payload)
                data = pack(spill.put_out(self.encode_call(args, kwargs, names)).ext)
        except Refused as refused:
            raise self._too_large(args, kwargs, names, limits, refused.why) from None
        return spill.packed(data)

    def _too_large(
        self, args: tuple[Any, ...], kwargs: dict[str, object], names: Sequence[str], limits: SizeLimits, why: str
    ) -> NotEncodable:
        """Return the error that names the argument."""
        for root, item in zip((*_roots(args, names), *kwargs), (*args, *kwargs.values()), strict=True):
            if len(item if type(item) is bytes else self.encode(item)) > limits.max_bytes:
                return NotEncodable(f"argument {root!r}: {root} {why}", path=root)
        return NotEncodable(f"the call {why}", path="arguments")

    def _call_put_out(self, args: tuple[Any, ...], kwargs: dict[str, object], spill: Spill) -> bytes:
        """Encode the arguments with the largest stored apart, until the rest is small enough."""
        parts: list[Any] = [self.encode(item) for item in (*args, *kwargs.values())]
        total = sum(map(len, parts))
        for index in sorted(range(len(parts)), key=lambda index: -len(parts[index])):
            size = len(parts[index])
            if total <= spill.limit or size < _WORTH_BYTES:
                break
            parts[index] = pack(spill.put_out(parts[index]).ext)
            total -= size
        raw = [msgspec.Raw(part) for part in parts]
        return pack((raw[: len(args)], dict(zip(kwargs, raw[len(args) :], strict=True))))

    def shared(self, values: Mapping[str, object]) -> dict[str, bytes]:
        """Return the encoded form of those of these arguments that are worth storing once for many calls."""
        encoded = {name: self.encode(value, at=name) for name, value in values.items()}
        return {name: data for name, data in encoded.items() if len(data) > _WORTH_BYTES}

    def pack_error(self, error: BaseException, limits: SizeLimits) -> tuple[ErrorRecord, tuple[Payload, ...]]:
        """Encode an error, as `encode_error` does, with large values stored apart."""
        found: list[Packed] = []

        def encode(value: object) -> bytes:
            found.append(self.pack(value, limits))
            return found[-1].data

        record = self._errors.to_record(error, encode)
        return record, found[-1].payloads if found and record.data is not None else ()


class DataCodec(Codec):
    """Decode without classes: objects stay as they were written. See `holdfast.codec.data`."""

    _reader = DataReader


def _roots(args: tuple[Any, ...], names: Sequence[str]) -> list[str]:
    """Return what the paths of positional arguments begin with."""
    return [names[index] if index < len(names) else f"args[{index}]" for index in range(len(args))]
