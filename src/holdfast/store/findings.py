"""What `store check` says of records that cannot be read, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from holdfast.errors import CorruptRecord
from holdfast.model.names import counted
from holdfast.store.contract import Finding

SHOWN = 5


def set_aside(kinds: Mapping[str, int], whys: Sequence[str], where: str) -> Finding:
    """Report how many records were quarantined, by kind, and why the latest were."""
    total = sum(kinds.values())
    if not total:
        return Finding(subject="quarantine", ok=True, detail="0 records were set aside")
    each = ", ".join(counted(count, kind) for kind, count in sorted(kinds.items()))
    verb = "was" if total == 1 else "were"
    return Finding(
        subject="quarantine",
        ok=False,
        detail=f"{counted(total, 'record')} {verb} set aside ({each}): {'; '.join(whys[:SHOWN])}",
        advice=f"they are kept whole in {where}; "
        "see docs/operations/damaged-records.md for how to look, repair and remove",
    )


class Reading:
    """Counts readable and corrupt records."""

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
        reasons = f" ({bad}): {'; '.join(self._whys[:SHOWN])}" if bad else ""
        return Finding(
            subject="records",
            ok=not bad,
            detail=f"{self._seen} read, {len(self._whys)} unreadable{reasons}",
            advice="an unreadable record is set aside when a runner meets it; see docs/operations/damaged-records.md"
            if bad
            else "",
        )
