"""Types of payloads: a JSON schema that is stored with a hook, the check in the resumer, the object in the body. Pure.

The resumer may be another program: it has the schema, and never the class. So a payload of a typed hook travels as
plain JSON values, and is checked against the schema before anything is written. In the body it becomes an object of the
type. msgspec makes the schema (dataclasses, structs, builtins), pydantic that of its models. Rules of a class that no
schema can express (validators, `__post_init__`) are applied in the body, where they raise.

A payload that passes the check but not the body would end the run by a sender's mistake. So formats are read here as in
the body, and schemas of msgspec get the parts that it leaves out: formats, time zones, keys of dicts.

A hook of type `Any` takes whatever the codec can store, exactly as it is.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from msgspec import inspect

from holdfast.codec.classes import type_name
from holdfast.errors import NotDecodable, PayloadDoesNotFit, UsageError

Schema = Mapping[str, Any]
_DEEPEST = 100
_DECIMAL = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_WITH_ZONE = "x-time-zone"  # whether a time has to have a time zone; it may not have one, if that is false


def schema_of(type: Any) -> dict[str, Any]:
    """Return the JSON schema of a payload type; empty for `Any`. Raises `UsageError` for what is no type."""
    try:
        schema = msgspec.json.schema(type)
        _add_formats(inspect.type_info(type), schema, schema, set())
        return schema
    except Exception as error:
        if (adapter := _adapter(type)) is not None:
            return dict(adapter.json_schema(schema_generator=_pydantic_schemas()))
        raise UsageError(
            f"hook(type={type!r:.80}): a payload is of a dataclass, a msgspec struct, a pydantic model or a builtin "
            f"type. {type!r:.80} is none of them: {str(error).splitlines()[0]}"
        ) from None


def name_of_type(type: Any) -> str:
    """Return the name of a type, for people."""
    if type is Any:
        return ""
    return type_name(type) if isinstance(type, _CLASS) and not hasattr(type, "__origin__") else str(type)


_CLASS = type


def _adapter(type: Any) -> Any:
    """Return pydantic's adapter of a type; None if pydantic is not in use, or does not know the type."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not _mentions_model(type, pydantic.BaseModel):
        return None
    try:
        return pydantic.TypeAdapter(type)
    except Exception:
        return None


@functools.cache
def _pydantic_schemas() -> Any:
    """Return pydantic's generator of schemas, which here also marks texts that are decimals, keys or addresses."""
    base: Any = importlib.import_module("pydantic.json_schema").GenerateJsonSchema

    class Schemas(base):  # type: ignore[misc]
        def decimal_schema(self, schema: Any) -> Any:
            made = super().decimal_schema(schema)
            for part in made.get("anyOf", ()):
                if part.get("type") == "string":
                    part.setdefault("pattern", _DECIMAL)
            return made

        def dict_schema(self, schema: Any) -> Any:
            made = super().dict_schema(schema)
            if schema.get("keys_schema", {}).get("type") == "int":
                made.setdefault("propertyNames", {"format": "integer"})
            return made

        def url_schema(self, schema: Any) -> Any:
            made = super().url_schema(schema)
            if schemes := schema.get("allowed_schemes"):
                made.setdefault("pattern", f"^(?i:{'|'.join(map(re.escape, schemes))}):")
            return made

    return Schemas


def _mentions_model(type: Any, base: Any) -> bool:
    if isinstance(type, _CLASS) and issubclass(type, base):
        return True
    return any(_mentions_model(each, base) for each in getattr(type, "__args__", ()))


def _add_formats(info: Any, schema: Any, whole: Any, seen: set[str]) -> None:
    """Add what msgspec leaves out: formats of times where a time zone may be missing, and what keys of a dict are."""
    if not isinstance(schema, dict):
        return
    if (reference := schema.get("$ref")) is not None:
        if reference in seen:
            return
        seen.add(reference)
        schema = _resolved(schema, whole)
    match info:
        case inspect.DateTimeType() | inspect.TimeType():
            schema.setdefault("format", "date-time" if isinstance(info, inspect.DateTimeType) else "time")
            if info.tz is not None:
                schema[_WITH_ZONE] = info.tz
        case inspect.Metadata():
            _add_formats(info.type, schema, whole, seen)
        case inspect.CollectionType():
            _add_formats(info.item_type, schema.get("items"), whole, seen)
        case inspect.DictType():
            _add_formats(info.value_type, schema.get("additionalProperties"), whole, seen)
            if (keys := _keys(info.key_type)) is not None:
                schema["propertyNames"] = keys
        case inspect.TupleType():
            for item, part in zip(info.item_types, schema.get("prefixItems", ()), strict=False):
                _add_formats(item, part, whole, seen)
        case inspect.UnionType():
            _add_to_union(info, schema, whole, seen)
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType() | inspect.NamedTupleType():
            parts = schema.get("properties", {})
            for field in info.fields:
                _add_formats(field.type, parts.get(field.encode_name), whole, seen)


_BOUNDS = {
    "ge": "minimum",
    "le": "maximum",
    "gt": "exclusiveMinimum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}


def _keys(info: Any) -> dict[str, Any] | None:
    """Return the schema of the keys of a dict, which are texts in JSON; None: any text, or msgspec has it."""
    match info:
        case inspect.Metadata():
            return _keys(info.type)
        case inspect.IntType() | inspect.FloatType():
            bounds = {name: getattr(info, short) for short, name in _BOUNDS.items() if getattr(info, short) is not None}
            return {"format": "integer" if isinstance(info, inspect.IntType) else "number"} | bounds
        case inspect.DateType():
            return {"format": "date"}
        case inspect.DateTimeType():
            return {"format": "date-time"}
        case inspect.UUIDType():
            return {"format": "uuid"}
        case inspect.DecimalType():
            return {"format": "decimal"}
        case inspect.EnumType():
            return {"enum": [str(each.value) for each in info.cls]}
        case inspect.LiteralType():
            return {"enum": [str(each) for each in info.values]}
    return None


def _add_to_union(info: inspect.UnionType, schema: dict[str, Any], whole: Any, seen: set[str]) -> None:
    parts, texts = schema.get("anyOf", ()), 0
    for each in info.types:
        texts += isinstance(each, inspect.StrType | inspect.LiteralType)
    for each in info.types:
        if isinstance(each, inspect.DateTimeType | inspect.TimeType) and not texts:
            for part in parts:
                if part == {"type": "string"}:
                    _add_formats(each, part, whole, seen)
        elif len(matching := [part for part in parts if _is_alike(each, part)]) == 1:
            _add_formats(each, matching[0], whole, seen)


def _is_alike(info: Any, part: Any) -> bool:
    if "$ref" in part:
        name = getattr(getattr(info, "cls", None), "__name__", None)
        return name is not None and str(part["$ref"]).rpartition("/")[2] == name
    wanted = {"array": (inspect.CollectionType, inspect.TupleType), "object": (inspect.DictType,)}
    return isinstance(info, wanted.get(part.get("type"), ()))


# --- to plain values


def plain(value: object, what: str = "the payload", *, keeps: tuple[type, ...] = ()) -> Any:
    """Return a payload as plain JSON values, and values of types that the receiver `keeps`. Raises `UsageError` for
    what has no such form. Runs user code.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_model_values, builtin_types=keeps)
    except Exception as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from error


def _model_values(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"an object of {type_name(type(value))} is no JSON value")


def converted(value: Any, type: Any) -> Any:
    """Return the object of a type that a payload stands for, in the body. Raises `NotDecodable`.

    A payload may be no plain value, if the type was not known when it was sent: see `resume_or_submit`.
    """
    if type is Any:
        return value
    try:
        value = plain(value)
        if (adapter := _adapter(type)) is not None:
            return adapter.validate_json(msgspec.json.encode(value))
        return msgspec.convert(value, type, str_keys=True)
    except Exception as error:
        raise NotDecodable(f"the payload is no {name_of_type(type)}: {error}") from error


# --- the check


class _Whole(NamedTuple):
    """The schema of a payload. `known`: what does not fit a part of it, by path and part. Without it, each level of a
    payload would double the time where a type chooses among types that hold it.
    """

    schema: Schema
    known: dict[tuple[str, int], list[tuple[str, str]]]


def check(value: Any, schema: Schema) -> None:
    """Raise `PayloadDoesNotFit`, with the path to what does not fit the schema."""
    for path, why in _misfits(value, schema, _Whole(schema, {}), "payload", 0):
        raise PayloadDoesNotFit(f"{path} {why}", path=path)


def _misfits(value: Any, schema: Any, whole: _Whole, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield what does not fit, with the path to it. Unknown keywords ask for nothing."""
    if depth > _DEEPEST:
        yield path, "is nested too deep"
        return
    if schema is False:
        yield path, "is not expected"
        return
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield from _misfits(value, _resolved(schema, whole.schema), whole, path, depth + 1)
    yield from _of_type(value, schema, path)
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        yield path, f"is none of {', '.join(map(repr, schema['enum']))}"
    if "const" in schema and not _same(value, schema["const"]):
        yield path, f"is not {schema['const']!r}"
    for each in schema.get("allOf", ()):
        yield from _misfits(value, each, whole, path, depth + 1)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            yield from _of_choice(value, schema, schema[choice], whole, path, depth)
    if isinstance(value, Mapping):
        yield from _of_object(value, schema, whole, path, depth)
    elif isinstance(value, list):
        yield from _of_array(value, schema, whole, path, depth)
    elif isinstance(value, str):
        yield from _of_text(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _of_number(value, schema, path)


def _resolved(schema: Mapping[str, Any], whole: Schema) -> Any:
    found: Any = whole
    for part in str(schema["$ref"]).removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}
_SAID = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}


def _of_type(value: Any, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    wanted = schema.get("type")
    if wanted is None:
        return
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if not any(_TYPES[name](value) for name in names if name in _TYPES):
        yield path, f"is {_SAID.get(type(value), 'an object')}, and {' or '.join(names)} is expected"


def _of_choice(
    value: Any, schema: Schema, parts: Any, whole: _Whole, path: str, depth: int
) -> Iterator[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for each in parts:
        misfits = whole.known.get((path, id(each)))
        if misfits is None:
            misfits = whole.known[path, id(each)] = list(_misfits(value, each, whole, path, depth + 1))
        if not misfits:
            return
        found.append(max(misfits, key=lambda misfit: len(misfit[0])))  # the deepest is what was meant
    deepest = max(found, key=lambda misfit: len(misfit[0]), default=(path, "fits nothing"))
    yield deepest if len(deepest[0]) > len(path) else (path, f"fits none of {len(found)} possible types: {deepest[1]}")


def _of_object(
    value: Mapping[str, Any], schema: Schema, whole: _Whole, path: str, depth: int
) -> Iterator[tuple[str, str]]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}", "is missing"
    others = schema.get("additionalProperties", True)
    for name in value if "propertyNames" in schema else ():
        yield from _misfits(name, schema["propertyNames"], whole, f"{path}[{name!r:.80}]", depth + 1)
    for name, each in value.items():
        if name in known:
            yield from _misfits(each, known[name], whole, f"{path}.{name}", depth + 1)
        elif others is False:
            yield f"{path}.{name}", "is not expected"
        else:
            yield from _misfits(each, others, whole, f"{path}[{name!r}]", depth + 1)
    yield from _bounded(len(value), schema, "Properties", path, "fields")


def _of_array(value: list[Any], schema: Schema, whole: _Whole, path: str, depth: int) -> Iterator[tuple[str, str]]:
    first = schema.get("prefixItems", ())
    for index, each in enumerate(value):
        part = first[index] if index < len(first) else schema.get("items", True)
        yield from _misfits(each, part, whole, f"{path}[{index}]", depth + 1)
    yield from _bounded(len(value), schema, "Items", path, "items")


def _of_text(value: str, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    yield from _bounded(len(value), schema, "Length", path, "characters")
    if "pattern" in schema and not re.search(str(schema["pattern"]), value):
        yield path, f"does not match {schema['pattern']!r}"
    kind = str(schema.get("format") or schema.get("contentEncoding"))
    read = _FORMATS.get(kind)
    if read is None:
        return
    try:
        found = read(value)
    except (ValueError, msgspec.ValidationError):
        yield path, f"is no {kind}"
        return
    if isinstance(found, int | float):  # a key of a dict
        yield from _of_number(found, schema, path)
    has_zone = getattr(found, "tzinfo", None) is not None
    if schema.get(_WITH_ZONE, has_zone) != has_zone:
        yield path, f"has {'a' if has_zone else 'no'} time zone, and is to have {'none' if has_zone else 'one'}"


def _read_as(type: Any) -> Callable[[str], object]:
    return lambda text: msgspec.convert(text, type)


def _number(type: Any, form: str) -> Callable[[str], object]:
    def read(text: str) -> object:
        if not re.fullmatch(form, text):
            raise ValueError
        return type(text)

    return read


def _duration(text: str) -> object:
    """Read a duration. pydantic writes one of over a year with years."""
    return text if re.fullmatch(r"[+-]?P\d+Y(\d+D)?(T\S+)?", text) else _read_as(dt.timedelta)(text)


def _uri(text: str) -> object:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", text):
        raise ValueError
    return text


_FORMATS: dict[str, Callable[[str], object]] = {
    "date-time": _read_as(dt.datetime),
    "date": _read_as(dt.date),
    "time": _read_as(dt.time),
    "duration": _duration,
    "uuid": _read_as(UUID),
    "decimal": _read_as(Decimal),
    "integer": _number(int, r"-?(0|[1-9][0-9]{0,17})"),
    "number": _number(float, r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"),
    "uri": _uri,
    "base64": _read_as(bytes),
}


def _of_number(value: float, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    bounds = {
        "minimum": (value.__ge__, "at least"),
        "maximum": (value.__le__, "at most"),
        "exclusiveMinimum": (value.__gt__, "more than"),
        "exclusiveMaximum": (value.__lt__, "less than"),
    }
    for name, (holds, said) in bounds.items():
        if name in schema and holds(schema[name]) is False:
            yield path, f"is {value}, and has to be {said} {schema[name]}"
    if "multipleOf" in schema and value % schema["multipleOf"]:
        yield path, f"is no multiple of {schema['multipleOf']}"


def _bounded(size: int, schema: Schema, what: str, path: str, unit: str) -> Iterator[tuple[str, str]]:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}", size)
    if not low <= size <= high:
        yield path, f"has {size} {unit}, and {f'at least {low}' if size < low else f'at most {high}'} are expected"


def _same(value: Any, wanted: Any) -> bool:
    return bool(type(value) is type(wanted) and value == wanted)
