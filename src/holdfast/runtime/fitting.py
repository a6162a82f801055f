"""Whether the arguments of a call fit the annotations of its task (``validate="submit"``).

What a type checker accepts fits: an int for a float, a subclass for its base. What cannot be judged here fits as well:
an annotation that does not resolve, a type variable, a protocol without a run-time check. Nothing is converted: the
task gets the values as they were given. Fields of dataclasses, structs, named tuples and typed dicts are looked into;
a pydantic model has checked its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.codec.classes import type_name
from holdfast.codec.secret import Secret, resolved, says_secret
from holdfast.errors import ArgumentsDoNotFit
from holdfast.masking import is_secret_name

_WIDER: dict[type, tuple[type, ...]] = {float: (float, int), complex: (complex, float, int)}
_QUALIFIERS = (typing.Required, typing.NotRequired, typing.Final)  # in front of a field's type
_ITEMS = (list, tuple, set, frozenset, collections.deque)
_DEEPEST = 100


class Misfit(NamedTuple):
    """Where a value does not fit, what it is there, and what was expected."""

    path: str
    value: object
    expected: str

    def __str__(self) -> str:
        is_hidden = any(map(is_secret_name, re.split(r"[.\[]", self.path)))
        return f"{self.path} is {'***' if is_hidden else _shown(self.value)}; expected {self.expected}"


class Fitting:
    """The annotations of one task, resolved when the first call is checked."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature, task: str) -> None:
        self._function = function
        self._signature = signature
        self._task = task

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        return {each.name: hint_of(self._function, each) for each in self._signature.parameters.values()}

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, takes: bool = False) -> None:
        """Raise `ArgumentsDoNotFit`, with the path, unless every argument fits its annotation.

        With `takes`, the first argument stands for the result of another call, and is not judged.
        """
        for hint, path, value in itertools.islice(self._given(args, kwargs), int(takes), None):
            if hint is not inspect.Parameter.empty and (misfit := misfit_of(value, hint, path)) is not None:
                raise ArgumentsDoNotFit(
                    f"the arguments of {self._task} do not fit its annotations: {misfit}", path=misfit.path
                )

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[Any, str, Any]]:
        """Yield the annotation, path and value of each argument, in the order of the parameters."""
        bound = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if name in bound:
                yield from ((self._hints[name], path, value) for path, value in _given(parameter, bound[name]))


def _given(parameter: inspect.Parameter, value: Any) -> Iterable[tuple[str, Any]]:
    """Yield the values of a parameter, each with its path: ``*args`` and ``**kwargs`` have several."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return ((f"{parameter.name}[{index}]", item) for index, item in enumerate(value))
    return value.items() if parameter.kind is parameter.VAR_KEYWORD else ((parameter.name, value),)


def hint_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the resolved annotation; `Parameter.empty` if there is none, or none that can be resolved here."""
    return parameter.empty if parameter.annotation is parameter.empty else resolved(function, parameter.annotation)


def secret_parameters(function: Callable[..., Any], signature: inspect.Signature) -> frozenset[str]:
    """Return the names of the parameters that are annotated with `Secret`."""
    parameters = signature.parameters.values()
    return frozenset(each.name for each in parameters if says_secret(function, each.annotation))


def with_secrets(
    names: frozenset[str], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with these wrapped in `Secret` where they are not."""

    def wrapped(name: str, value: Any) -> Any:
        return Secret(value) if name in names and value is not None and not isinstance(value, Secret) else value

    positional = tuple(map(wrapped, signature.parameters, args)) + args[len(signature.parameters) :]
    return positional, {name: wrapped(name, value) for name, value in kwargs.items()}


def misfit_of(value: Any, hint: Any, path: str, depth: int = 0) -> Misfit | None:
    """Return where the value does not fit the annotation; None if it fits, or cannot be judged."""
    try:
        return _misfit(value, hint, path, depth)
    except (TypeError, RecursionError):  # an annotation that knows no run-time check
        return None


def _misfit(value: Any, hint: Any, path: str, depth: int) -> Misfit | None:
    if depth > _DEEPEST or hint is Any or hint is object:
        return None
    if hint is None or hint is types.NoneType:
        return None if value is None else Misfit(path, value, "None")
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return misfit_of(value, typing.get_args(hint)[0], path, depth + 1) or _unconstrained(value, hint, path)
    if origin in _QUALIFIERS:
        return misfit_of(value, typing.get_args(hint)[0], path, depth + 1)
    if origin in (typing.Union, types.UnionType):
        return _misfit_of_union(value, hint, path, depth)
    if origin is typing.Literal:
        fits = any(type(value) is type(each) and value == each for each in typing.get_args(hint))
        return None if fits else Misfit(path, value, " or ".join(map(repr, typing.get_args(hint))))
    if (stands_for := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
        return misfit_of(value, stands_for, path, depth + 1)
    if typing.is_typeddict(hint):
        return _misfit_of_typed_dict(value, hint, path, depth)
    if origin is not None:
        return _misfit_of_generic(value, hint, origin, path, depth)
    if not isinstance(hint, type):
        return None  # a type variable, a string that stays one
    if not isinstance(value, _WIDER.get(hint, hint)):
        return Misfit(path, value, type_name(hint))
    return _misfit_of_fields(value, path, depth)


def _misfit_of_union(value: Any, hint: Any, path: str, depth: int) -> Misfit | None:
    arms = typing.get_args(hint)
    misfits = [misfit_of(value, arm, path, depth + 1) for arm in arms]
    if None in misfits:
        return None
    # One arm took the value, and not what is in it: that says more than all of them.
    deeper = [each for each in misfits if each is not None and each.path != path]
    return deeper[0] if len(deeper) == 1 else Misfit(path, value, _named(hint))


def _misfit_of_generic(value: Any, hint: Any, origin: Any, path: str, depth: int) -> Misfit | None:
    if not isinstance(origin, type) or origin is type:
        return None
    if not isinstance(value, origin):
        return Misfit(path, value, _named(hint))
    inner, items = typing.get_args(hint), typing.cast(Any, value)
    if isinstance(value, Mapping) and len(inner) == 2:
        return _misfit_of_mapping(value, inner, path, depth)
    if origin is tuple:
        if len(inner) != 2 or inner[1] is not ...:
            if len(inner) != len(items):
                return Misfit(path, value, _named(hint))
            pairs = enumerate(zip(items, inner, strict=True))
            found = (misfit_of(item, each, f"{path}[{index}]", depth + 1) for index, (item, each) in pairs)
            return next(filter(None, found), None)
        inner = inner[:1]
    if len(inner) != 1 or not isinstance(value, _ITEMS):
        return _misfit_of_fields(value, path, depth)
    if _is_plain(inner[0]) and {inner[0]}.issuperset(map(type, value)):
        return None  # a long list of numbers or texts
    found = (misfit_of(item, inner[0], f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
    return next(filter(None, found), None)


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, str, bytes, bool)


def _misfit_of_mapping(value: Mapping[Any, Any], inner: tuple[Any, ...], path: str, depth: int) -> Misfit | None:
    for key, item in value.items():
        if (misfit := misfit_of(key, inner[0], f"a key of {path}", depth + 1)) is not None:
            return misfit
        if (misfit := misfit_of(item, inner[1], f"{path}[{key!r:.40}]", depth + 1)) is not None:
            return misfit
    return None


def _misfit_of_typed_dict(value: Any, hint: Any, path: str, depth: int) -> Misfit | None:
    if not isinstance(value, dict):
        return Misfit(path, value, type_name(hint))
    hints = _hints_of(hint)
    if missing := sorted(hint.__required_keys__ - value.keys()):
        return Misfit(path, value, f"the key {missing[0]!r} of {type_name(hint)} as well")
    if unknown := [key for key in value if key not in hints]:
        return Misfit(path, value, f"no key {unknown[0]!r:.40}, which {type_name(hint)} has not")
    found = (misfit_of(item, hints[key], f"{path}[{key!r}]", depth + 1) for key, item in value.items())
    return next(filter(None, found), None)


def _misfit_of_fields(value: Any, path: str, depth: int) -> Misfit | None:
    """Look into the fields that the value's class declares."""
    cls: Any = type(value)
    if not (dataclasses.is_dataclass(cls) or isinstance(value, msgspec.Struct) or _is_named_tuple(cls)):
        return None
    hints = _hints_of(cls)
    found = (
        misfit_of(getattr(value, name), hints[name], f"{path}.{name}", depth + 1)
        for name in _field_names(cls)
        if name in hints and hasattr(value, name)
    )
    return next(filter(None, found), None)


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_field_defaults")


def _field_names(cls: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return cls.__struct_fields__ if issubclass(cls, msgspec.Struct) else cls._fields  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1000)
def _hints_of(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:
        return {}


def _unconstrained(value: Any, hint: Any, path: str) -> Misfit | None:
    """Return what a `msgspec.Meta` says against a plain value."""
    base, *metadata = typing.get_args(hint)
    if base not in (int, float, str, bytes) or not any(isinstance(each, msgspec.Meta) for each in metadata):
        return None
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return Misfit(path, value, str(error).removeprefix("Expected ").replace("`", ""))
    return None


def _named(hint: Any) -> str:
    return str(hint).replace("typing.", "")


def _shown(value: object) -> str:
    kind = type_name(type(value))
    return "None" if value is None else f"{value!r:.60} ({kind})"
