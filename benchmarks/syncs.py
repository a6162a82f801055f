"""Counts how often SQLite asks the operating system to flush a file.

SQLite does all input and output through a table of functions, its VFS. Ours is a copy of the default one in which
`xOpen` gives each file a copy of its method table with an `xSync` that counts before it does the real thing. Every
flush is seen, of the file and of its log, and nothing has to be installed for it. It needs a libsqlite3 whose symbols
can be found, which a Python that was linked statically does not have.

Layouts: https://www.sqlite.org/c3ref/vfs.html and https://www.sqlite.org/c3ref/io_methods.html.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, c_char_p, c_int, c_void_p, cast
from types import TracebackType
from typing import Any, ClassVar, Self

_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
_METHODS_BY_VERSION = {1: 12, 2: 16, 3: 18}


class _Vfs(Structure):
    _fields_: ClassVar[list[Any]] = [
        ("version", c_int),
        ("file_size", c_int),
        ("longest_path", c_int),
        ("following", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("others", c_void_p * 15),
    ]


class _Methods(Structure):
    _fields_: ClassVar[list[Any]] = [
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("others", c_void_p * 13),
    ]


class CannotCount(Exception):
    """This Python's SQLite cannot be reached from outside."""


class SyncCounter:
    """While it is entered, `count` grows by one with every flush of a file that SQLite opens in this process.

    Raises `CannotCount` on entering. SQLite keeps pointers into what is made here, so a counter keeps all of it, and
    every connection that was opened meanwhile has to be closed before the counter is left.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._tables: dict[int, tuple[_Methods, Any]] = {}

    def __enter__(self) -> Self:
        self._library = _library()
        self._original = c_void_p(self._library.sqlite3_vfs_find(None))
        original = cast(self._original, POINTER(_Vfs)).contents
        if original.version > 3:
            raise CannotCount(f"SQLite's VFS has version {original.version}, which is not known here")
        self._open_original = _OPEN(original.open)
        self._open_ours = _OPEN(self._open)
        self._vfs = _Vfs.from_buffer_copy(original)
        self._vfs.following = None
        self._vfs.name = b"holdfast-counts-syncs"
        self._vfs.open = cast(self._open_ours, c_void_p)
        if self._library.sqlite3_vfs_register(addressof(self._vfs), 1):
            raise CannotCount("SQLite refused the counting VFS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._library.sqlite3_vfs_unregister(addressof(self._vfs))
        self._library.sqlite3_vfs_register(self._original, 1)

    def _open(self, _vfs: int, name: int | None, file: int, flags: int, out_flags: int | None) -> int:
        # The original gets its own VFS, not ours: it may compare names, or look beside its table.
        code = int(self._open_original(self._original, name, file, flags, out_flags))
        table = c_void_p.from_address(file)  # an open file begins with the address of its methods
        if code == 0 and table.value:
            table.value = self._counting(table.value)
        return code

    def _counting(self, methods: int) -> int:
        with self._lock:
            if methods not in self._tables:
                self._tables[methods] = self._copy(methods)
            return addressof(self._tables[methods][0])

    def _copy(self, methods: int) -> tuple[_Methods, Any]:
        version = c_int.from_address(methods).value
        known = _METHODS_BY_VERSION[min(version, 3)]  # an older table is shorter, and must not be read beyond its end
        ours = _Methods()
        ctypes.memmove(addressof(ours), methods, _Methods.close.offset + known * ctypes.sizeof(c_void_p))
        original = _SYNC(ours.sync)

        def sync(file: int, flags: int) -> int:
            with self._lock:
                self.count += 1
            return int(original(file, flags))

        callback = _SYNC(sync)
        ours.sync = cast(callback, c_void_p)
        return ours, callback


def _library() -> Any:
    try:
        import _sqlite3

        # The extension module depends on libsqlite3, and a symbol is looked for in what a library depends on too.
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_vfs_find.restype = c_void_p
        library.sqlite3_vfs_find.argtypes = [c_char_p]
        library.sqlite3_vfs_register.argtypes = [c_void_p, c_int]
        library.sqlite3_vfs_unregister.argtypes = [c_void_p]
    except (ImportError, OSError, AttributeError) as error:
        raise CannotCount(f"this Python's SQLite does not show its functions ({error})") from error
    return library
