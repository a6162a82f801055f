"""Submitted calls, and how they differ from the expectation of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.clock import format_duration
from holdfast.executors.call import bind
from holdfast.invocation import Invocation
from holdfast.model.status import Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.testing.report import as_call

_SHOWN = 10


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A stored call, and its status now."""

    invocation: Invocation[Any]
    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queue: str
    priority: int
    key: str | None
    delay_seconds: float
    status: Status

    def __str__(self) -> str:
        facts = [str(self.status)]
        facts += [f"queue {self.queue}"] if self.queue != "default" else []
        facts += [f"key {self.key!r}"] if self.key is not None else []
        facts += [f"delay {format_duration(self.delay_seconds)}"] if self.delay_seconds else []
        return f"{as_call(self.task, self.args, self.kwargs)}  [{', '.join(facts)}]"


def matching(
    definition: TaskDefinition, found: Sequence[Submitted], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Submitted]:
    """Return the calls with these arguments; all of them if none are given. Raises `ArgumentsDoNotBind`."""
    if not args and not kwargs:
        return list(found)
    wanted = _bound(definition, args, kwargs)
    return [each for each in found if _bound(definition, each.args, each.kwargs) == wanted]


def complaint(
    definition: TaskDefinition,
    found: Sequence[Submitted],
    hits: Sequence[Submitted],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    times: int | None,
    everything: Sequence[Submitted],
) -> str:
    """Say what was expected, how often it was found, and which calls come near to it."""
    any_call = not args and not kwargs
    what = f"{definition.name} (whatever its arguments)" if any_call else as_call(definition.name, args, kwargs)
    expected = "at least once" if times is None else _times(times)
    lines = [f"{what} was submitted {_times(len(hits))}, and not {expected} as expected."]
    if hits:
        return "\n".join(lines + _some("These were:", [str(each) for each in hits]))
    if found:
        wanted = _bound(definition, args, kwargs)
        differences = [(_differences(wanted, _bound(definition, each.args, each.kwargs)), each) for each in found]
        near = sorted(differences, key=lambda pair: len(pair[0]))
        shown = [f"{each}  differs in {', '.join(lines)}" for lines, each in near]
        return "\n".join(lines + _some("Of this task there are, the nearest first:", shown))
    others = _some("Other tasks were:", [str(each) for each in everything])
    return "\n".join([*lines, *(others if everything else ["Nothing was submitted at all."])])


def _bound(definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bind(definition.signature, args, kwargs, definition.name)
    bound = definition.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _differences(wanted: dict[str, Any], there: dict[str, Any]) -> list[str]:
    names = [name for name in wanted if wanted[name] != there.get(name)]
    return [f"{name}: {there.get(name)!r:.100} instead of {wanted[name]!r:.100}" for name in names]


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _some(title: str, lines: Sequence[str]) -> list[str]:
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [title, *[f"  {line}" for line in lines[:_SHOWN]], *more]
