"""The calls that have begun: a table in memory that a worker process shares with its runner.

A worker holds calls that are RUNNING in the store and have not begun: they were claimed ahead, or wait in an executor
for the interpreter lock. While user code holds that lock, or the process is stopped, no message leaves the worker. Its
runner can still read memory. So each call is entered here before its code starts, marked when its code is over, and
taken out when its end is in the store. A call that is RUNNING in the store and not in the table has never begun.

**Revoking.** A runner that gives such calls to others has to be sure that they do not begin here a moment later. It
sets the byte `_REVOKED`, reads the table at its next look, and gives back the calls that are not in it. A worker enters
a call first and compares that byte with the ticket of the call afterwards. Whichever came first: either the runner sees
the entry, or the worker sees the byte, and the call does not begin. A ticket is the value of `_ACCEPTED` when the call
was handed to its executor. The worker sets that to the value of `_REVOKED` when it has handed back all that it had
claimed.

**Steps.** The header also has the moment by which the steps of runs have to have ended, the earliest of them: they are
in no record.

Each byte has one writer, and is written in one step. An entry that is half written belongs to a call that has not yet
compared its ticket. While there is no room for an entry, `_IS_FULL` says that the table is not complete.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterable

_REVOKED, _ACCEPTED, _IS_USED, _IS_FULL = range(4)
_STEPS_END_BY = 8
_HEADER_BYTES = 16
_MOMENT = struct.Struct("d")  # native and aligned: written in one step
_ENTRY = struct.Struct("B63s")
_FREE, _RUNS, _IS_OVER = range(3)  # the first byte of an entry
_TIMES = 12  # as many entries as slots: the ends of ten times as many calls may wait for the store


class BegunCalls:
    """The worker's side. Without shared `memory` no runner looks: the worker is in its runner's process."""

    def __init__(self, memory: mmap.mmap | None = None, *, slots: int = 0) -> None:
        self._memory = bytearray(_size_for(slots)) if memory is None else memory
        self._free = deque(range(_HEADER_BYTES, len(self._memory), _ENTRY.size))
        self._places: dict[str, int] = {}
        self._unlisted: set[str] = set()  # there was no room for them
        self._listing = threading.Lock()  # of these
        self._memory[_IS_USED] = 1

    @classmethod
    def attach(cls, descriptor: int) -> BegunCalls:
        """Use the table of the runner, and close the descriptor. Raises `OSError`."""
        try:
            return cls(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def ticket(self) -> int:
        """Return the ticket of calls that are handed to an executor now."""
        return self._memory[_ACCEPTED]

    def begin(self, mark: str, ticket: int) -> bool:
        """Enter a call whose code is about to start, on any thread. Return False if it may not."""
        memory = self._memory
        if mark not in self._places:  # it may begin once more, in another executor
            try:
                place = self._free.pop()
            except IndexError:
                self._enter_unlisted(mark)
            else:
                _ENTRY.pack_into(memory, place, _RUNS, mark.encode())
                self._places[mark] = place
        if memory[_REVOKED] == ticket:
            return True
        self.remove([mark])
        return False

    def _enter_unlisted(self, mark: str) -> None:
        with self._listing:
            self._unlisted.add(mark)
            self._memory[_IS_FULL] = 1

    def over(self, mark: str) -> None:
        """Note that the code of a call is over. Its end is not in the store yet."""
        place = self._places.get(mark)
        if place is not None:
            self._memory[place] = _IS_OVER

    def remove(self, marks: Iterable[str]) -> None:
        """Remove calls whose ends are in the store, or that have not begun."""
        for mark in marks:
            place = self._places.pop(mark, None)
            if place is not None:
                self._memory[place] = _FREE
                self._free.append(place)
        if self._unlisted:
            with self._listing:
                self._unlisted.difference_update(marks)
                self._memory[_IS_FULL] = bool(self._unlisted)

    def set_steps_end_by(self, moment: float) -> None:
        """Set the time by which the first of the running steps has to end; infinity: none has a limit."""
        _MOMENT.pack_into(self._memory, _STEPS_END_BY, 0.0 if moment == float("inf") else moment)

    def has(self, mark: str) -> bool:
        """Return whether the code of a call has begun."""
        return mark in self._places or mark in self._unlisted

    @property
    def is_revoked(self) -> bool:
        """Return whether the runner takes back calls that have not begun: nothing may begin."""
        return self._memory[_REVOKED] != self._memory[_ACCEPTED]

    def accept(self) -> None:
        """Let calls begin again: all that was claimed before the runner revoked it is handed back."""
        self._memory[_ACCEPTED] = self._memory[_REVOKED]


class BegunTable:
    """The runner's side. An entry is named ``id~epoch``. The descriptor is for the worker, and is closed when that is
    started.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self._memory = memory
        self.descriptor = descriptor

    @classmethod
    def create(cls, slots: int) -> BegunTable:
        """Make a table for a worker with this number of slots. Raises `OSError`."""
        descriptor = _descriptor()
        try:
            os.ftruncate(descriptor, _size_for(slots))
            return cls(mmap.mmap(descriptor, _size_for(slots)), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def marks(self) -> dict[str, bool] | None:
        """Return the calls that have begun, and whether their code still runs; None if that is not known."""
        if not self._memory[_IS_USED] or self._memory[_IS_FULL]:
            return None
        entries = _ENTRY.iter_unpack(self._memory[_HEADER_BYTES:])
        return {mark.rstrip(b"\0").decode(errors="replace"): state == _RUNS for state, mark in entries if state}

    @property
    def steps_end_by(self) -> float:
        """Return by when the first of the running steps has to end."""
        (moment,) = _MOMENT.unpack_from(self._memory, _STEPS_END_BY)
        return moment or float("inf")

    def revoke(self) -> None:
        """Let nothing begin until the worker has accepted that. Calls that `marks` lacks at the next look will not
        begin.
        """
        self._memory[_REVOKED] = (self._memory[_ACCEPTED] + 1) % 256

    @property
    def is_revoked(self) -> bool:
        """Return whether the worker has yet to accept the revocation."""
        return self._memory[_REVOKED] != self._memory[_ACCEPTED]


def _size_for(slots: int) -> int:
    return _HEADER_BYTES + _TIMES * max(slots, 1) * _ENTRY.size


def _descriptor() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("holdfast-begun")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
