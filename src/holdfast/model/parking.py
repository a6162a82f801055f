"""Reasons for parking that other code does not help against. Processes pass a reason on as text, so its beginning
decides.
"""

from __future__ import annotations

from holdfast.model.records import InvocationRecord

DAMAGED = "its stored arguments are damaged"
GONE = "its arguments cannot be had"


def what_helps(record: InvocationRecord) -> str:
    """Return the advice for a parked invocation."""
    if record.reason.startswith(DAMAGED):
        return (
            f"No code can read them: submit the call again and end this one: holdfast cancel {record.id}. "
            f"Or repair them, see docs/operations/damaged-records.md, and then: holdfast wake {record.id}"
        )
    if record.reason.startswith(GONE):
        return (
            "Submit a call with the same value, or restore the payload from a backup, see docs/guides/payloads.md, "
            f"and then: holdfast wake {record.id}"
        )
    return f"A runner with other code wakes it when it starts, or you do: holdfast wake {record.id}"
