"""Read requests: parameters of the query, and bodies. A mistake names its place: ``query.limit``."""

from __future__ import annotations

import asyncio
import datetime as dt
import difflib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from holdfast.clock import parse_moment
from holdfast.errors import UsageError
from holdfast.ids import LENGTH, is_id
from holdfast.web.problems import Problem, wrong

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
LONGEST_TEXT = 1000  # characters of a parameter
BODY_SECONDS = 30.0  # for a client to send a body


class Parameter(NamedTuple):
    """A parameter of a query."""

    doc: str
    kind: str = "text"  # or "number", "id"
    low: int = 0
    high: int = 0
    default: int | str | None = None
    choices: tuple[str, ...] = ()
    is_list: bool = False  # may be repeated


def limit_parameter(default: int, high: int) -> Parameter:
    return Parameter("how many at most", "number", low=1, high=high, default=default)


def query_of(request: Request, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the values of all parameters: None, or an empty list, where one is not given. Raises `Problem`."""
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(known) or 'none'}."
            raise wrong(f"query.{name[:80]}", f"there is no parameter '{name[:80]}'.{hint}")
        given.setdefault(name, []).append(value)
    return {name: _value(name, parameter, given.get(name, [])) for name, parameter in known.items()}


def _value(name: str, parameter: Parameter, given: Sequence[str]) -> Any:
    values = [_checked(name, parameter, text) for text in given]
    if parameter.is_list:
        return values
    if len(values) > 1:
        raise wrong(f"query.{name}", f"{name} is given {len(values)} times; give it once")
    return values[0] if values else parameter.default


def _checked(name: str, parameter: Parameter, text: str) -> Any:
    shown = f"{name}={text[:80]!r}"
    if len(text) > LONGEST_TEXT or "\0" in text:
        raise wrong(f"query.{name}", f"{shown} is no text of up to {LONGEST_TEXT:,} characters")
    if parameter.kind == "number":
        low, high = parameter.low, parameter.high
        digits = text.removeprefix("-") if low < 0 else text
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and low <= int(text) <= high):
            raise wrong(f"query.{name}", f"{shown}: expected a whole number from {low:,} to {high:,}")
        return int(text)
    if parameter.choices and text not in parameter.choices:
        raise wrong(f"query.{name}", f"{shown}: expected {' or '.join(parameter.choices)}")
    if parameter.kind == "id" and not is_id(text):
        raise wrong(f"query.{name}", f"{shown} is no id: an id has {LENGTH} characters")
    return text


def time_of(place: str, text: str) -> dt.datetime:
    """Return the time in a text such as 2026-11-15T08:00:00Z. Raises `Problem`."""
    try:
        at = dt.datetime.fromisoformat(text)
        parse_moment(at)
    except (ValueError, UsageError):
        raise wrong(place, f"{text[:80]!r}: expected a time with its zone, such as 2026-11-15T08:00:00Z") from None
    return at


async def body_of(
    request: Request, limit: int, *, seconds: float = BODY_SECONDS, came: Callable[[int], object] = int
) -> bytes:
    """Return the body. `came` is called with the size of each part. Raises `Problem`: 413 if the body is longer than
    `limit`, 408 if it does not come in time; and `ClientDisconnect`.
    """
    too_long = Problem(413, "TooLarge", f"a body may have up to {limit:,} bytes")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:18]) > limit:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_long
                came(len(part))
                parts.append(part)
    except TimeoutError:
        raise Problem(408, "TimedOut", f"the body did not come within {seconds:g} s") from None
    return b"".join(parts)


async def while_connected(request: Request, work: Coroutine[Any, Any, T], grace_seconds: float) -> T:
    """Return what `work` does. If the client hangs up, it has this long to end, and then it is cancelled; raises
    `ClientDisconnect`. The body has to be read before.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait([task], timeout=grace_seconds)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def document_of(request: Request, limit: int) -> dict[str, Any]:
    """Return the body as a JSON object. Raises `Problem`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "UsageError", "send JSON, with 'Content-Type: application/json'", path="body")
    try:
        found = msgspec.json.decode(await body_of(request, limit))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong("body", f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise wrong("body", f"the body is a JSON {type(found).__name__}; expected an object")
    return found


async def body_as(request: Request, kind: type[S], limit: int) -> S:
    """Return the body as a value of a type. Raises `Problem`: what is wrong, and where in the body."""
    given = await document_of(request, limit)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise wrong(f"body{place.rstrip('`')}", what, status=422) from None
