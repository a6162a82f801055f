"""How many calls of a task may run at once, as its declaration says it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.lifecycle.limits import Limit

MOST_AT_ONCE = 10_000


class RunningConcurrency(StrEnum):
    """Which calls of a task share a limit."""

    DISABLED = "disabled"
    TASK = "task"  # all of them
    ARGUMENTS = "arguments"  # those with the same arguments
    KEYS = "keys"  # those with the same values of some arguments


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that share a limit, and the limit."""

    mode: RunningConcurrency = RunningConcurrency.DISABLED
    key_arguments: tuple[str, ...] = ()
    limit: Limit = Limit(1)

    def shared(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What a call has in common with those that share its limit: values of its arguments, defaults included. None
        if it is not limited.
        """
        if self.mode is RunningConcurrency.DISABLED:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        names = {RunningConcurrency.TASK: (), RunningConcurrency.ARGUMENTS: tuple(bound.arguments)}
        return {name: bound.arguments[name] for name in names.get(self.mode, self.key_arguments)}


def concurrency_of(
    signature: inspect.Signature,
    mode: str,
    key_arguments: Iterable[str],
    concurrency_limit: int = 1,
    waits: bool = True,
    *,
    name: str = "running_concurrency",
) -> Concurrency:
    """The concurrency of a declaration. Raises `UsageError`."""
    try:
        chosen = RunningConcurrency(mode)
    except ValueError:
        known = ", ".join(f"'{each}'" for each in RunningConcurrency)
        raise UsageError(f"{name}={mode!r}: expected one of {known}") from None
    if isinstance(key_arguments, str):
        raise UsageError(f"key_arguments={key_arguments!r}: expected names in a list, such as [{key_arguments!r}]")
    keys = tuple(sorted(set(key_arguments)))
    if unknown := [name for name in keys if name not in signature.parameters]:
        names = ", ".join(signature.parameters) or "none"
        raise UsageError(f"key_arguments: the task has no parameter {unknown[0]!r}; it has: {names}")
    if chosen is RunningConcurrency.KEYS and not keys:
        raise UsageError(f'{name}="keys" needs key_arguments=[…], which say what is compared')
    if keys and chosen is not RunningConcurrency.KEYS:
        raise UsageError(
            'key_arguments=[…] alone changes nothing: they say what is compared for running_concurrency="keys", '
            'registration_concurrency="keys", debounce= and throttle='
        )
    if type(concurrency_limit) is not int or not 1 <= concurrency_limit <= MOST_AT_ONCE:
        raise UsageError(f"concurrency_limit={concurrency_limit!r}: expected a whole number from 1 to {MOST_AT_ONCE:,}")
    limit = Limit(concurrency_limit, bool(waits))
    if chosen is RunningConcurrency.DISABLED and limit != Limit(1):
        raise UsageError(
            "concurrency_limit= and reroute_on_concurrency_control= need running_concurrency=, which says what calls "
            'share the limit: "task", "arguments" or "keys"'
        )
    return Concurrency(mode=chosen, key_arguments=keys, limit=limit)
