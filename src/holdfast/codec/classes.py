"""Registered classes: their fields, and how an object is taken apart and put together.

An object is rebuilt from its state, never by a constructor call; the package's docstring says why. Pydantic is not
imported here: code with a model has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from holdfast.codec.extensions import Refused
from holdfast.errors import NotDecodable

BUILTIN_BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A registered class: its name, and for each field what makes its default, or None if it has none."""

    cls: Any
    name: str
    defaults: dict[str, Callable[[], Any] | None]


def fields_of(cls: Any) -> dict[str, Callable[[], Any] | None] | None:
    """Return the `Shape.defaults` of a class; None if it cannot be registered."""
    if issubclass(cls, enum.Enum):
        return {}
    if issubclass(cls, msgspec.Struct):
        names, ends = cls.__struct_fields__, cls.__struct_defaults__  # defaults of the last fields
        defaults = (msgspec.NODEFAULT,) * (len(names) - len(ends)) + ends
        return {name: _maker(default) for name, default in zip(names, defaults, strict=True)}
    if is_model(cls):
        return {
            name: None if info.is_required() else functools.partial(info.get_default, call_default_factory=True)
            for name, info in cls.model_fields.items()
        }
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        return {name: _maker(cls._field_defaults.get(name, msgspec.NODEFAULT)) for name in cls._fields}
    if not issubclass(cls, BUILTIN_BASES) and dataclasses.is_dataclass(cls):
        fields, missing = dataclasses.fields(cls), dataclasses.MISSING
        return {f.name: _maker(f.default) if f.default_factory is missing else f.default_factory for f in fields}
    return None


def _maker(default: object) -> Callable[[], Any] | None:
    return None if default is dataclasses.MISSING or default is msgspec.NODEFAULT else lambda: default


def is_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")  # never imported by us: without it there are no models
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def take_apart(value: Any, fields: Iterable[str]) -> tuple[dict[str, Any], Any]:
    inside = getattr(value, "__dict__", {})
    try:
        if is_model(type(value)):  # not getattr, which warns about deprecated fields
            state = (sorted(value.__pydantic_fields_set__), value.__pydantic_extra__, value.__pydantic_private__)
            return {name: inside[name] for name in fields}, state
        for name in inside.keys() - fields - {"__orig_class__"}:
            if not isinstance(getattr(type(value), name, None), functools.cached_property):
                raise Refused(f"has the attribute {name!r}, which would be lost; declare it as a field")
        return {name: getattr(value, name) for name in fields}, None
    except (AttributeError, KeyError) as error:
        raise Refused(f"has a field that is not set: {error}") from None


def put_together(shape: Shape, stored: dict[str, Any], state: Any) -> object:
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
    if is_model(cls):
        return _put_model_together(cls, fields, [list(stored), None, None] if state is None else state)
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _put_model_together(cls: Any, fields: dict[str, Any], state: Any) -> object:
    """Do what pydantic does for pickle: `model_construct` would run `model_post_init`, and look for aliases."""
    fields_set, extra, private = state
    if not {type(extra), type(private)} <= {dict, type(None)}:
        raise NotDecodable(f"the extra or private attributes of {type_name(cls)} are not a map")
    if private is None and cls.__private_attributes__:  # declared since
        nothing = sys.modules["pydantic_core"].PydanticUndefined
        made_now = {name: attribute.get_default() for name, attribute in cls.__private_attributes__.items()}
        private = {name: value for name, value in made_now.items() if value is not nothing}
    made = cls.__new__(cls)
    inside = {"__pydantic_fields_set__": set(fields_set), "__pydantic_extra__": extra, "__pydantic_private__": private}
    made.__setstate__({"__dict__": fields, **inside})
    return made


def type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def stored_name(cls: type) -> str:
    """Return ``module:qualname``. The main module goes by the name that other processes import it by."""
    module = cls.__module__
    if module in ("__main__", "__mp_main__"):  # the second is what multiprocessing calls it in a child
        main = sys.modules[module]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else pathlib.PurePath(file).stem if file else module
    return f"{module}:{cls.__qualname__}"


def hints_of(source: Any) -> list[Any]:
    """Return the resolved annotations of a function or class, as far as they can be resolved."""
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
