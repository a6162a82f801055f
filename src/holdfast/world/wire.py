"""The JSON of the World's protocol: bytes are ``{"$b": base64}``, times ``{"$d": milliseconds}``.

An object whose only key is one of these marks is ``{"$o": {…}}``, so that any value comes back as it went. Objects of
an answer have no fields without a value, since clients expect them so; only `cursor` may be null.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from typing import Any

import msgspec

from holdfast.world.errors import WorldError, bad_request

BYTES, TIME, OBJECT = "$b", "$d", "$o"
_MARKS = frozenset({BYTES, TIME, OBJECT})
_MAY_BE_NULL = "cursor"
_LATEST_MILLISECONDS = 253_402_300_799_999  # the last of the year 9999
_encoder = msgspec.json.Encoder()


def decode(data: bytes) -> Any:
    """Return the value of these bytes. Raises `WorldError` (400)."""
    try:
        return _read(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def encode(value: Any, *, keeps_null: bool = False) -> bytes:
    """Return a value as bytes, in objects without fields that are None, unless it `keeps_null`."""
    return _encoder.encode(_written(value, keeps_null))


def _read(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        if len(value) == 1:
            ((key, inner),) = value.items()
            if key in _MARKS:
                return _read_marked(key, inner)
        return {key: _read(item) for key, item in value.items()}
    if kind is list:
        return [_read(item) for item in value]
    return value


def _read_marked(mark: str, inner: Any) -> Any:
    if mark == BYTES and isinstance(inner, str):
        try:
            return base64.b64decode(inner, validate=True)
        except (binascii.Error, ValueError):
            raise bad_request(f'{{"{BYTES}": …}} is no base64') from None
    if mark == TIME and isinstance(inner, int | float) and not isinstance(inner, bool):
        if 0 <= inner <= _LATEST_MILLISECONDS:
            return dt.datetime.fromtimestamp(inner / 1000, dt.UTC)
    elif mark == OBJECT and isinstance(inner, dict):
        return {key: _read(item) for key, item in inner.items()}
    raise bad_request(f'{{"{mark}": …}} has a wrong value')


def _written(value: Any, keeps_null: bool) -> Any:
    if isinstance(value, dict):
        written = {
            key: _written(item, keeps_null)
            for key, item in value.items()
            if item is not None or keeps_null or key == _MAY_BE_NULL
        }
        return {OBJECT: written} if len(written) == 1 and not _MARKS.isdisjoint(written) else written
    if isinstance(value, list | tuple):
        return [_written(item, keeps_null) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, dt.datetime):
        return {TIME: round(value.timestamp() * 1000)}
    return value


# --- errors


def error_document(error: WorldError) -> dict[str, Any]:
    """Return the document of an error; a field without a value is not in it."""
    facts: dict[str, Any] = {"name": error.name, "message": error.message, "status": error.status}
    if error.retry_after is not None:
        facts["retryAfter"] = error.retry_after
    return {"error": facts}
