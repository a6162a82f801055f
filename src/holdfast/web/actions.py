"""The answer of an action: with `preview`, its targets; else its effect. Pages show both in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from holdfast.web.documents import Document

_ITEMS = 10


def touched(summary: str, count: int | None = None, items: Iterable[str] = (), **more: object) -> Document:
    """Return the answer to an action: a sentence, how many it touches, and the first few of them."""
    return {"summary": summary, "count": count, "items": list(islice(items, _ITEMS)), **more}
