"""What `store check` says of records that cannot be read, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from holdfast.errors import CorruptRecord
from holdfast.lifecycle import events, joins, schedules, triggers
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import Entry
from holdfast.store.contract import Finding

SHOWN = 5

_BODIES: Mapping[str, Callable[[Entry], object]] = {
    schedules.KIND: schedules.from_entry,
    triggers.KIND: triggers.from_entry,
    joins.KIND: joins.from_entry,
    events.KIND: events.from_entry,
    events.KEY_KIND: events.from_entry,
}


def read_body(entry: Entry) -> None:
    """Raise `CorruptRecord` if what an entry says cannot be read, as far as its kind is known here."""
    if entry.kind in _BODIES:
        _BODIES[entry.kind](entry)


def set_aside(kinds: Mapping[str, int], whys: Sequence[str], where: str) -> Finding:
    """Tell how many records were set aside, by kind, and what the latest of them are."""
    total = sum(kinds.values())
    if not total:
        return Finding(subject="quarantine", ok=True, detail="0 records were set aside")
    each = ", ".join(counted(count, kind) for kind, count in sorted(kinds.items()))
    verb = "was" if total == 1 else "were"
    return Finding(
        subject="quarantine",
        ok=False,
        detail=f"{counted(total, 'record')} {verb} set aside ({each}): {'; '.join(whys[:SHOWN])}",
        advice=f"they are kept whole in {where}; see docs/damaged-records.md for how to look, repair and remove",
    )


class Reading:
    """Counts what was read, and what of it cannot be."""

    def __init__(self) -> None:
        self._seen = 0
        self._bad: Counter[str] = Counter()
        self._whys: list[str] = []

    def read(self, decode: Callable[[], object]) -> None:
        self._seen += 1
        try:
            decode()
        except CorruptRecord as error:
            self._bad[error.kind] += 1
            self._whys.append(str(error))

    def finding(self) -> Finding:
        bad = ", ".join(counted(count, kind) for kind, count in sorted(self._bad.items()))
        told = f" ({bad}): {'; '.join(self._whys[:SHOWN])}" if bad else ""
        return Finding(
            subject="records",
            ok=not bad,
            detail=f"{self._seen} read, {len(self._whys)} unreadable{told}",
            advice="an unreadable record is set aside when a runner meets it; see docs/damaged-records.md"
            if bad
            else "",
        )
