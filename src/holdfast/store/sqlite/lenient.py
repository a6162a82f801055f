"""Jobs that go on where a text in the file is not UTF-8."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import StoreError
from holdfast.store.sqlite.rows import BadText
from holdfast.store.sqlite.threads import ConnectionThread

T = TypeVar("T")


async def do_leniently(thread: ConnectionThread, job: Callable[[sqlite3.Connection], T]) -> T:
    """A text that is not UTF-8 makes Python's sqlite3 refuse the whole query, so one damaged row would stop every
    claim and every list. Then the job runs once more and reads leniently, and the damaged row is found out by itself.
    """
    try:
        return await thread.do(job)
    except StoreError as error:
        if "Could not decode to UTF-8" not in str(error.__cause__):
            raise

    def leniently(connection: sqlite3.Connection) -> T:
        connection.text_factory = _lenient
        try:
            return job(connection)
        finally:
            connection.text_factory = str

    return await thread.do(leniently)


def _lenient(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return BadText(raw.decode(errors="surrogateescape"))
