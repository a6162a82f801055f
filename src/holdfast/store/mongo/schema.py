"""Collections, indexes and their version.

Every index names the query it serves; a test explains each query and fails on a scan of a collection or a sort in
memory. Creating them is idempotent and happens on first use and by `holdfast store prepare`; a process whose user may
not create indexes goes on with those that are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pymongo import ASCENDING, IndexModel

from holdfast.errors import SchemaMismatch

SCHEMA_VERSION = 1
MIN_READER = 1

INVOCATIONS = "holdfast_invocations"
RUNNERS = "holdfast_runners"
SIGNALS = "holdfast_signals"
QUARANTINE = "holdfast_quarantine"
META = "holdfast_meta"
COLLECTIONS = (INVOCATIONS, RUNNERS, SIGNALS, QUARANTINE, META)

SIGNAL_SECONDS = 3600  # a process that has not sent a hint for so long has its signal document removed


class Index(NamedTuple):
    collection: str
    name: str
    keys: tuple[tuple[str, int], ...]
    serves: str
    options: dict[str, Any]

    @property
    def model(self) -> IndexModel:
        return IndexModel(list(self.keys), name=self.name, **self.options)


def _up(*names: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, ASCENDING) for name in names)


INDEXES = (
    Index(
        INVOCATIONS,
        "ready",
        _up("app", "lane", "rank", "due_at", "id"),
        "claim: only what is ready, so it stays as small as the backlog",
        {"partialFilterExpression": {"ready": True}},
    ),
    Index(
        INVOCATIONS,
        "due",
        # With `ready` among the keys, the lanes can be told by jumping from one to the next, without a document.
        _up("ready", "app", "lane", "due_at"),
        "lanes; when the next invocation of a lane falls due, whatever its priority",
        {"partialFilterExpression": {"ready": True}},
    ),
    Index(
        INVOCATIONS,
        "owned",
        _up("app", "owner", "claim_token"),
        "a claim repeated after a lost answer; what an owner holds",
        {"partialFilterExpression": {"owned": True}},
    ),
    Index(INVOCATIONS, "status", _up("app", "status", "id"), "find by status; counts", {}),
    Index(INVOCATIONS, "task", _up("app", "task", "id"), "find by task", {}),
    Index(INVOCATIONS, "queue", _up("app", "queue", "id"), "find by queue", {}),
    Index(RUNNERS, "roster", _up("app", "started_at", "id"), "roster", {}),
    Index(QUARANTINE, "app", _up("app", "at"), "quarantined", {}),
    Index(
        SIGNALS,
        "at",
        _up("at"),
        "removes the signals of processes that are gone",
        {"expireAfterSeconds": SIGNAL_SECONDS},
    ),
)


def refuse_or_accept(meta: dict[str, Any] | None) -> None:
    """Raise `SchemaMismatch` unless this Holdfast may work on a database with that version document (None:

    a new one).
    """
    if meta is None:
        return
    try:
        version, min_reader = int(meta["schema_version"]), int(meta["min_reader"])
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaMismatch(
            f"{META} does not tell the schema's version ({meta!r}). Restore a backup, or use another database."
        ) from error
    if min_reader > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the database has schema version {version}, which needs a Holdfast that knows version {min_reader}; "
            f"this one knows {SCHEMA_VERSION}. Upgrade Holdfast here."
        )
