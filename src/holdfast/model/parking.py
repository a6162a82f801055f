"""Why work is parked, and which code may help. Processes pass a reason on as text, so its beginning decides.

A parked invocation has the fingerprint of the code that did not fit: a runner with other code tries again. The log of a
run may fit the Python version that wrote it, and no other one. So a run that is parked by its log names that version,
and only a runner on that version tries again. Otherwise runners on two versions would wake and park it in turns.
"""

from __future__ import annotations

import sys

from holdfast.model.records import InvocationRecord

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_PYTHON = "python "
DAMAGED = "its stored arguments are damaged"
GONE = "its arguments cannot be had"
MISMATCH = "the code does not fit the recorded log"
MISSING = "a resource is missing"
LOCKED = "it is encrypted with the key"
_LONGEST_LOCK_SECONDS = 60.0


def lacks_key(key: str, owner: str) -> str:
    """Return why a worker hands back what it cannot read: another worker may have the key."""
    return f"{LOCKED} '{key}', which the worker {owner} lacks"


def lock_seconds(epoch: int) -> float:
    """Return how long such an invocation waits for a worker with the key, by how often it was claimed."""
    return min(_LONGEST_LOCK_SECONDS, 2.0 ** min(epoch, 10))


def unfit_code(fingerprint: str, recorded_python: str, why: str = "") -> str | None:
    """Return the fingerprint that a parked invocation stores: that of the code that did not fit. None if it lacks a
    resource, which is in no fingerprint: each worker that starts tries again. A run that is parked by its log stores
    the Python version that wrote the log, and the code if it ran on that version too.
    """
    if not recorded_python:
        return None if why.startswith(MISSING) else fingerprint
    return f"{_PYTHON}{recorded_python} {fingerprint if recorded_python == PYTHON else ''}"


def may_fit(parked: str | None, fingerprint: str) -> bool:
    """Return whether a runner with this code is to try again what was parked with that text."""
    if parked is None or not parked.startswith(_PYTHON):
        return parked != fingerprint
    python, _, unfit = parked.removeprefix(_PYTHON).partition(" ")
    return python == PYTHON and unfit != fingerprint


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
    if record.reason.startswith(LOCKED):
        return "Give that runner the key (encryption_keys), or start a runner that has it."
    if record.reason.startswith(MISSING):
        return (
            "Let a lifespan of the app yield it, see docs/guides/around-a-call.md. Each worker that starts tries "
            f"again, or you do: holdfast wake {record.id}"
        )
    if record.fingerprint is not None and record.fingerprint.startswith(_PYTHON):
        python = record.fingerprint.removeprefix(_PYTHON).partition(" ")[0]
        return (
            f"To see where they differ: holdfast workflow replay {record.id} --pdb. A runner with other code on Python "
            f"{python}, which wrote its log, wakes it when it starts, or you do: holdfast wake {record.id}"
        )
    return f"A runner with other code wakes it when it starts, or you do: holdfast wake {record.id}"
