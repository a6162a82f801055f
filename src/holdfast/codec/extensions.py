"""The numbers of the extensions, and the extensions without other values inside: numbers, dates, zones and paths.

Stored forms are exact: a `Decimal` keeps its exponent, a time its fold, a zone its key. A value that cannot be stored
raises `Refused`, which collects the path to it.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import re
import struct
import zoneinfo
from collections.abc import Callable
from decimal import Context, Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import msgspec

from holdfast.errors import NotDecodable


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
    TIME = 7  # packed [hour, minute, second, microsecond, fold, zone]; zone: nil, key, or [microseconds, name]
    DATETIME = 8  # packed [year, month, day] followed by the items of TIME
    TIMEDELTA = 9  # packed [days, seconds, microseconds]
    PATH = 10  # packed [flavour, text]
    TUPLE = 11  # packed array
    SET = 12  # packed array, sorted by encoding, so that equal sets give equal bytes
    FROZENSET = 13  # as SET
    MAP = 14  # packed [key, value, key, value, …]: a dict with a key that is itself an extension
    ENUM = 15  # packed [class name, member name, or value if a Flag]
    OBJECT = 16  # packed [class name, {field: value}, nil or pydantic's [fields set, extra, private]]
    SECRET = 18  # packed array of one value
    PAYLOAD = 17  # packed [number of the reference, whether the payload is the value itself and not its encoding]


pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
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
    raise Refused(f"has the time zone {zone!r:.80}; use zoneinfo.ZoneInfo with a key, or datetime.timezone")


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
    return pack((*day, value.hour, value.minute, value.second, value.microsecond, value.fold, zone))


def _read_clock(data: memoryview) -> dt.time | dt.datetime:
    *day, hour, minute, second, microsecond, fold, zone = _unpack(data)
    time = dt.time(hour, minute, second, microsecond, _zone_from_plain(zone), fold=fold)
    return dt.datetime.combine(dt.date(*day), time) if day else time


def _pack_timedelta(value: dt.timedelta) -> bytes:
    return pack((value.days, value.seconds, value.microseconds))


def _pack_path(value: pathlib.PurePath) -> bytes:
    flavour = next(flavour for flavour, cls in _PATHS.items() if isinstance(value, cls))
    if type(value)(str(value)) != value:  # for instance PureWindowsPath("./c:a") on some versions
        raise Refused("is a path whose text means another path")
    return pack((flavour, str(value)))


def _read_path(data: memoryview) -> Any:
    flavour, text = _unpack(data)
    return _PATHS[flavour](text)


def _int_from(data: memoryview) -> int:
    return int.from_bytes(data, "big", signed=True)


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
LEAF_WRITERS = {kind: (code, payload_of) for kind, code, payload_of, _ in _LEAVES}
LEAF_READERS: dict[int, Callable[[memoryview], object]] = {code: read for _, code, _, read in _LEAVES} | {
    Code.BIGINT: _int_from
}


# --- refusals


class Refused(Exception):
    """Raised for a value that cannot be stored. Each container adds its step on the way out: success builds no path."""

    def __init__(self, why: str, *, too_deep: bool = False) -> None:
        self.why, self.too_deep = why, too_deep
        self.steps: list[tuple[object, str]] = []

    def locate(self, root: str) -> tuple[str, str]:
        """Return the path and the reason. The same container twice on one path is a cycle."""
        path, seen = root, dict[int, str]()
        for container, segment in reversed(self.steps):
            if self.too_deep and id(container) in seen:
                return path, f"refers back to {seen[id(container)]}; a value that contains itself cannot be stored"
            seen[id(container)] = path
            path += segment
        return (f"{path[:60]}…" if self.too_deep else path), self.why
