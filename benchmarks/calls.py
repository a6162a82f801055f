"""Counts calls of Python functions, in all threads.

Only Holdfast's own functions count: what the standard library does inside differs between versions of Python. For
the same reason list, set and dict comprehensions do not count, which are functions up to Python 3.11 and not after.
A coroutine counts once more each time it is resumed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import holdfast

_HOME = str(Path(holdfast.__file__).parent)
_NOT_COUNTED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})


class CallCounter:
    """While it is entered, every thread that is started counts, and so does the one that entered it."""

    def __init__(self) -> None:
        self._threads: list[Counter[CodeType]] = []  # one each: adding to a shared number is not atomic

    def __enter__(self) -> Self:
        threading.setprofile(self._begin)
        sys.setprofile(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _begin(self, frame: FrameType, event: str, argument: Any) -> None:
        """The first event of a thread: from now on it has a counter of its own."""
        counter: Counter[CodeType] = Counter()
        self._threads.append(counter)
        ours: dict[CodeType, bool] = {}

        def count(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                if code not in ours:
                    ours[code] = code.co_filename.startswith(_HOME) and code.co_name not in _NOT_COUNTED
                if ours[code]:
                    counter[code] += 1

        sys.setprofile(count)
        count(frame, event, argument)

    @property
    def by_function(self) -> Counter[str]:
        """To be read when the threads that were counted are done."""
        total: Counter[str] = Counter()
        for counter in self._threads:
            for code, calls in counter.items():
                file = Path(code.co_filename).relative_to(_HOME)
                total[f"{file}:{code.co_firstlineno} {getattr(code, 'co_qualname', code.co_name)}"] += calls
        return total
