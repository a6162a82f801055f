"""The filter of a list of invocations, from what people give: names, ids, texts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import UsageError
from holdfast.model.status import Status
from holdfast.store.contract import Filter


def filter_of(
    *,
    status: str | Iterable[str] = (),
    task: str | Iterable[str] = (),
    queue: str | Iterable[str] = (),
    parent: str | None = None,
    attributes: Mapping[str, str] | None = None,
    before: str | None = None,
) -> Filter:
    """Return which invocations are meant. Raises `UsageError`."""
    return Filter(
        statuses=frozenset(_status(name) for name in _several(status)),
        tasks=frozenset(_several(task)),
        queues=frozenset(_several(queue)),
        parent=parent,
        attributes=_pairs(attributes or {}),
        before_id=before,
    )


def _several(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _pairs(attributes: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    for name, value in attributes.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"attributes={{{name!r}: {value!r:.80}}}: an attribute has a name and a text")
    return frozenset(attributes.items())


def _status(name: str) -> Status:
    try:
        return Status(name.lower())
    except ValueError:
        raise UsageError(f"there is no status '{name}'; there are: {', '.join(Status)}") from None
