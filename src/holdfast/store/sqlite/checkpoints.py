"""Say whether a database that has changed was checkpointed, or overwritten by something else, such as a restore.

A checkpoint copies pages of the log into the database as they are. So each page that the log says was copied has to be
in the database, in that version or in a later one. In a file that a backup was copied over, some are not.

The files are read by the descriptors that SQLite has of them. The log may be deleted; and to open and close a
descriptor of the database would lose this process's locks on it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_HEADER = struct.Struct(">8xI4xI")  # of the log: the size of a page, and the first salt
_FRAME = struct.Struct(">I4xI")  # of a frame: the number of its page, and the first salt
_INDEX_HEADER_BYTES = 100
_COPIED = struct.Struct("=96xI")  # of the index: how many frames were copied into the database
_GENERATION = 2**32  # the first salt counts how often the log was restarted


def was_checkpointed(database: int, log: int, index: int) -> bool:
    """Return whether the database has the pages that were copied from this log. False also if none was copied.

    The arguments are descriptors. Raises `OSError`.
    """
    page_bytes, salt, copied = _state(log, index)
    if not page_bytes:
        return False
    frames = list(_frames(log, page_bytes))
    # By page: the frame that is in the database, and later ones that may be. First those of before the log was
    # restarted, which is when all is copied: they stand behind the new ones, and are older.
    before = (salt - 1) % _GENERATION
    settled = {page: [number] for number, page, frame_salt in frames if frame_salt == before}
    for number, page, frame_salt in frames:
        if frame_salt == salt and number <= copied:
            settled[page] = [number]
        elif frame_salt == salt and page in settled:
            settled[page].append(number)
    return bool(settled) and all(
        _page(database, page, page_bytes) in [_content(log, number, page_bytes) for number in numbers]
        for page, numbers in settled.items()
    )


def _state(log: int, index: int) -> tuple[int, int, int]:
    """Return the size of a page, the first salt of the log, and how many of its frames were copied."""
    header, state = os.pread(log, _HEADER_BYTES, 0), os.pread(index, _INDEX_HEADER_BYTES, 0)
    if len(header) < _HEADER_BYTES or len(state) < _INDEX_HEADER_BYTES:
        return 0, 0, 0
    page_bytes, salt = _HEADER.unpack_from(header)
    return page_bytes, salt, _COPIED.unpack(state)[0]


def _frames(log: int, page_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Return the frames of the log, in order: their number from 1 on, page and first salt."""
    number = 1
    while len(head := os.pread(log, _FRAME_HEADER_BYTES, _start(number, page_bytes))) == _FRAME_HEADER_BYTES:
        page, salt = _FRAME.unpack_from(head)
        yield number, page, salt
        number += 1


def _start(number: int, page_bytes: int) -> int:
    return _HEADER_BYTES + (number - 1) * (_FRAME_HEADER_BYTES + page_bytes)


def _content(log: int, number: int, page_bytes: int) -> bytes:
    return os.pread(log, page_bytes, _start(number, page_bytes) + _FRAME_HEADER_BYTES)


def _page(database: int, number: int, page_bytes: int) -> bytes:
    return os.pread(database, page_bytes, (number - 1) * page_bytes)
