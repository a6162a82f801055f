"""What `store check` says of records that cannot be read, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from holdfast.errors import CorruptRecord
from holdfast.model.decoding import PAGE, corrupt
from holdfast.model.log import Page, page_name
from holdfast.model.names import counted
from holdfast.store.contract import Finding

SHOWN = 5
_WALK = 1000  # records between two reports of progress


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
    """Counts readable and corrupt records, and reports how many were read. Pages come in the order of their logs, so
    that a missing one is noticed.
    """

    def __init__(self, walked: Callable[[int], object]) -> None:
        self._walked = walked
        self.after_gaps: list[tuple[Page, int]] = []  # pages that do not follow, and where each was expected
        self._seen = 0
        self._bad: Counter[str] = Counter()
        self._whys: list[str] = []
        self._log: tuple[str, str, int] | None = None
        self._next: int | None = 1  # None: the page before could not be read

    def read(self, decode: Callable[[], object]) -> None:
        self._seen += 1
        if not self._seen % _WALK:
            self._walked(_WALK)
        try:
            record = decode()
        except CorruptRecord as error:
            self._count(error)
            self._next = None
        else:
            if isinstance(record, Page):
                self._follow(record)

    def count_gap(self, page: Page, expected: int) -> None:
        before = f"the page before it ends at {expected - 1}" if expected > 1 else "its log begins with it"
        self._count(corrupt(PAGE, page_name(page.run, page.first), ValueError(before)))

    def _follow(self, page: Page) -> None:
        log = (page.app, page.run, page.generation)
        expected = self._next if log == self._log or self._next is None else 1
        if expected is not None and page.first != expected:
            self.after_gaps.append((page, expected))
        self._log, self._next = log, page.last + 1

    def _count(self, error: CorruptRecord) -> None:
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
