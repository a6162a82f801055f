"""Keep ended invocations for another time than was agreed at submit."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord, retain_until
from holdfast.model.status import FINAL


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write that keeps an ended invocation until another time. It walks no edge and leaves no line in the
    history.
    """

    app: str
    id: InvocationId
    until: float


def kept_as(record: InvocationRecord, kept: Mapping[str, float | None]) -> Kept | None:
    """Return the write that keeps an ended invocation as long as `kept` says for its outcome, counted from its end;
    None if that changes nothing. The time of its key, and the shortest time, hold all the same.
    """
    outcome = record.status.value
    if record.status not in FINAL or outcome not in kept:
        return None
    terms = msgspec.structs.replace(record.terms, retention={outcome: kept[outcome]})
    until = retain_until(terms, record.key, record.status, record.changed_at)
    return None if until == record.retain_until else Kept(app=record.app, id=record.id, until=until)
