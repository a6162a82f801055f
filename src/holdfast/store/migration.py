"""Records that older versions kept in tables of their own: since schema version 5 they are entries.

Such a record is taken over as it is: a reader of the entry quarantines a corrupt body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from holdfast.model.decoding import EARLIEST, EXECUTION, LATEST, PAUSE
from holdfast.model.records import FOREVER, PLAIN, Entry, Terms, retain_until
from holdfast.model.status import Status

GATE = "service"  # the kind of the entry that says which execution of a service runs, or was the last
_KEPT_SECONDS = 86_400.0  # a line of a service's audit trail; the service removes it earlier if its settings say so

Fields = Mapping[str, Any]


def entry_of_pause(queue: Fields) -> Entry:
    """Return the entry of a queue that is or was paused."""
    operations = queue.get("operations")
    done = operations.split("\n") if isinstance(operations, str) else operations
    body = {"by": queue.get("paused_by"), "reason": queue.get("reason"), "operations": done}
    if queue.get("paused_at") is not None:
        body["paused_at"] = queue["paused_at"]
    return _entry(queue, PAUSE, queue.get("name"), body)


def entries_of_executions(executions: Iterable[Fields]) -> Iterator[Entry]:
    """Yield the entries of executions: for each app and service the gate, and a line for each that has ended."""
    services: dict[tuple[str, str], list[Fields]] = {}
    for execution in executions:
        services.setdefault((str(execution.get("app")), str(execution.get("service"))), []).append(execution)
    for (_, service), found in services.items():
        found.sort(key=lambda each: (each.get("status") == "running", _moment(each.get("started_at"))))
        for execution in found:
            body = {name: execution.get(name) for name in _EXECUTION}
            if execution is found[-1]:
                yield _entry(execution, GATE, service, body)
            else:
                at = _moment(execution.get("started_at"))
                name = f"{service}|{at:018.6f}|{execution.get('id')}"
                until = _moment(execution.get("ended_at")) or at
                yield _entry(execution, EXECUTION, name, body, keep_until=min(until + _KEPT_SECONDS, LATEST))


_EXECUTION = ("id", "service", "runner_id", "started_at", "window_ends_at", "status", "ended_at", "reason")


def _entry(record: Fields, kind: str, name: object, body: Fields, keep_until: float | None = None) -> Entry:
    plain = {key: _text(value) for key, value in body.items() if value is not None}
    encoded = msgspec.json.encode(plain, enc_hook=repr)
    return Entry(
        app=str(_text(record.get("app"))), kind=kind, name=str(_text(name)), body=encoded, keep_until=keep_until
    )


def _text(value: object) -> object:
    """Return a text without surrogates, which JSON cannot have."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _moment(value: object) -> float:
    return float(value) if isinstance(value, int | float) and EARLIEST <= value <= LATEST else 0.0


def kept_until(status: str, key: str | None, terms: Any, changed_at: float) -> float:
    """Return until when an invocation is kept that ended under a version without that field."""
    try:
        agreed = PLAIN if terms is None else msgspec.convert(terms, Terms)
        return retain_until(agreed, key, Status(status), changed_at)
    except Exception:  # a reader of the whole record finds out
        return FOREVER
