"""What the code of a call notes: progress, attributes, a checkpoint, log lines.

A call that notes something has `CallNotes`. Its code, on any thread, changes what is there and goes on. One consumer
takes the latest: the engine, or, in a process for tasks, a thread that sends it to the parent.

Nothing is locked: an exception may be raised in a thread anywhere, and must leave no lock behind. Each note is one
assignment, or one operation on a dict or deque, and these are atomic. `is_news` is cleared before notes are taken, so
what comes meanwhile is announced again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.codec import Codec, SizeLimits
from holdfast.errors import UsageError
from holdfast.model.notes import NO_NOTES, CallProgress, LogLine, Notes, check_attributes, last_lines, progress_of
from holdfast.model.records import InvocationRecord


class Said(msgspec.Struct, frozen=True):
    """What a call has noted, as it is to be written; a field that it has not touched is unset."""

    attributes: Mapping[str, str] | UnsetType = UNSET
    notes: Notes | UnsetType = UNSET


class CallNotes:
    """The notes of one call. `notify` wakes the consumer, from any thread."""

    def __init__(
        self,
        codec: Codec,
        limits: SizeLimits,
        *,
        notes: Notes | None = None,
        attributes: Mapping[str, str] | None = None,
        attempt: int = 1,
        lines: int = 0,
        now: Callable[[], float] = lambda: 0.0,
        notify: Callable[[CallNotes], object] = lambda notes: None,
    ) -> None:
        notes = notes or NO_NOTES
        self._codec = codec
        self._limits = limits
        self.attempt = attempt
        self._now = now
        self._notify = notify
        self.is_news = self.is_over = False
        self.attributes = dict(attributes or {})
        self.progress = notes.progress
        self.checkpoint = (notes.checkpoint, notes.checkpoint_at)
        self._lines = lines
        self._log = deque(notes.log, maxlen=lines or None)
        self._has_attributes = self._has_notes = False  # whether this call has touched them
        self._sent = notes.checkpoint

    # --- for the code of the call

    def set(self, changes: Mapping[str, str]) -> None:
        """Note attributes. Raises `UsageError`, and `NotEncodable`."""
        check_attributes(self.attributes, changes)
        self.add(changes)

    def add(self, attributes: Mapping[str, str]) -> None:
        """Note attributes that were checked before."""
        self.attributes.update(attributes)
        self._has_attributes = True
        self._changed()

    def report(self, current: object, total: object, message: object) -> None:
        """Note progress. Raises `UsageError`."""
        self._noted(progress=progress_of(current, total, message, at=self._now(), attempt=self.attempt))

    def keep(self, value: object) -> None:
        """Note a value for the next attempt. Raises `NotEncodable`, and `UsageError` if it is too large."""
        data = self._codec.encode(value, at="checkpoint")
        if len(data) > self._limits.inline:
            raise UsageError(
                f"the checkpoint has {len(data):,} bytes, and the invocation keeps at most {self._limits.inline:,}: "
                "keep the data itself elsewhere, and make a checkpoint of its name or path"
            )
        self._noted(checkpoint=(data, self._now()))

    @property
    def kept(self) -> Any:
        """Return the last checkpoint of this attempt or an earlier one; None if there is none."""
        data, _ = self.checkpoint
        return None if data is None else self._codec.decode(data)

    def log(self, line: LogLine) -> None:
        self._log.append(line)
        self._has_notes = True
        self._changed()

    def _noted(
        self, progress: CallProgress | None = None, checkpoint: tuple[bytes | None, float | None] | None = None
    ) -> None:
        if progress is not None:
            self.progress = progress
        if checkpoint is not None:
            self.checkpoint = checkpoint
        self._has_notes = True
        self._changed()

    def _changed(self) -> None:
        if not self.is_news and not self.is_over:
            self.is_news = True
            self._notify(self)

    # --- for the consumer

    @property
    def said(self) -> Said:
        """Return all that this call has noted until now."""
        if not self._has_notes:
            return Said(dict(self.attributes)) if self._has_attributes else Said()
        data, at = self.checkpoint
        log = last_lines(tuple(self._log), self._lines) if self._lines else tuple(self._log)
        notes = Notes(progress=self.progress, checkpoint=data, checkpoint_at=at, log=log)
        return Said(dict(self.attributes) if self._has_attributes else UNSET, notes)

    # --- to a process for tasks and back

    @classmethod
    def of(cls, seen: NotesSeen, codec: Codec, limits: SizeLimits, notify: Callable[[CallNotes], object]) -> CallNotes:
        """Return the notes of a call in a child process."""
        return cls(codec, limits, notes=Notes(checkpoint=seen.checkpoint), attributes=seen.attributes, notify=notify)

    def taken(self) -> Noted | None:
        """Return what is new, for the process that has the call run; None: nothing."""
        if not self.is_news:
            return None
        self.is_news = False
        progress, data, attributes = self.progress, self.checkpoint[0], self.said.attributes
        is_new, self._sent = data is not self._sent, data
        return Noted(
            None if attributes is UNSET else dict(attributes),
            None if progress is None else (progress.current, progress.total, progress.message),
            data if is_new else None,
        )

    def take(self, noted: Noted) -> None:
        """Take over what a call has noted in a child process."""
        if noted.attributes is not None:
            self.set(noted.attributes)
        if noted.progress is not None:
            self.report(*noted.progress)
        if noted.checkpoint is not None:
            self._noted(checkpoint=(noted.checkpoint, self._now()))


class NotesSeen(msgspec.Struct, array_like=True):
    """What a call in a child process knows of its notes: attributes, and the last checkpoint."""

    attributes: dict[str, str]
    checkpoint: bytes | None = None


def seen_of(record: InvocationRecord) -> NotesSeen:
    return NotesSeen(dict(record.attributes), None if record.notes is None else record.notes.checkpoint)


class Noted(msgspec.Struct, array_like=True, tag=True):
    """What a call in a child process has noted, if it is new: attributes, progress, a checkpoint."""

    attributes: dict[str, str] | None
    progress: tuple[int | float, int | float | None, str] | None
    checkpoint: bytes | None


SEND_SECONDS = 0.1


class NoteSender:
    """Send the notes of the call that runs here to the parent, on its own thread: nothing may be raised in the middle
    of a message, as it may on the main thread. Notes that follow each other soon are sent together.
    """

    def __init__(self, send: Callable[[Noted], object]) -> None:
        self._send = send
        self._notes: CallNotes | None = None
        self._news: SimpleQueue[CallNotes] = SimpleQueue()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, notes: CallNotes) -> None:
        self._notes = notes

    def notify(self, notes: CallNotes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="holdfast-notes", daemon=True)
            self._thread.start()
        self._news.put(notes)

    def _main(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, as the main thread will see
            while True:
                self._say(self._news.get())
                time.sleep(SEND_SECONDS)

    def _say(self, notes: CallNotes) -> None:
        with self._sending:
            if not notes.is_over and (noted := notes.taken()) is not None:
                self._send(noted)

    def end(self) -> None:
        """Send what is left of the call, and forget it."""
        notes, self._notes = self._notes, None
        if notes is not None:
            self._say(notes)
            notes.is_over = True
