"""A value that is never shown."""

from __future__ import annotations

import hmac
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")
SHOWN = "***"


class Secret(Generic[T]):
    """Wrap a value so that no text shows it: ``***`` stands in logs, errors, commands and pages.

    As an argument or a result it is stored as such, encrypted where the app has `encryption_keys`. A parameter that is
    annotated with it, ``card: Secret[str]``, gets it also where the caller gave the bare value.
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
