"""A value that is never shown."""

from __future__ import annotations

import hmac
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")
SHOWN = "***"


class Secret(Generic[T]):
    """Wrap a value so that no text shows it: ``***`` stands in logs, errors, commands and pages.

    As an argument or a result it is stored as such, encrypted where the app has `encryption_keys`. A parameter that is
    annotated with it, ``card: Secret[str]``, gets it also where the caller gave the bare value. The same holds for the
    result of a function that is annotated with it.
    """

    __slots__ = ("_hidden",)

    def __init__(self, value: T) -> None:
        self._hidden = value

    def reveal(self) -> T:
        """Return the value."""
        return self._hidden

    def __repr__(self) -> str:
        return SHOWN

    def __format__(self, spec: str) -> str:
        return SHOWN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        mine, theirs = self._hidden, other.reveal()
        if isinstance(mine, str) and isinstance(theirs, str):
            return hmac.compare_digest(mine.encode("utf-8", "surrogatepass"), theirs.encode("utf-8", "surrogatepass"))
        if isinstance(mine, bytes) and isinstance(theirs, bytes):
            return hmac.compare_digest(mine, theirs)
        return bool(mine == theirs)

    def __hash__(self) -> int:
        return hash((Secret, self._hidden))

    def __copy__(self) -> Secret[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret[T]:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled: that would write its value; pass it as an argument of a task")


# --- annotations

_NAMED = re.compile(r"\bSecret\b")


def says_secret(function: Callable[..., Any], annotation: Any) -> bool:
    """Return whether an annotation of the function is `Secret`, or that or None."""
    return _NAMED.search(str(annotation)) is not None and is_secret(resolved(function, annotation))


def is_secret(hint: Any) -> bool:
    """Return whether a resolved annotation is `Secret`, or that or None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(map(is_secret, typing.get_args(hint)))
    return Secret in (hint, typing.get_origin(hint))


def resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Return an annotation with all names looked up; `Parameter.empty` if that is not possible."""
    alone = types.SimpleNamespace(__annotations__={"it": annotation})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(alone, names, include_extras=True)["it"]
    except Exception:  # a name that only a type checker sees, or anything that an annotation may do when evaluated
        return inspect.Parameter.empty
