"""Readers of the streams of a story: one follows from the beginning, others come anew again and again."""

from __future__ import annotations

import secrets
import threading
from types import TracebackType
from typing import Any, Self

from tests.faults import tasks
from tests.faults.session import Session

from holdfast import Invocation
from holdfast.invocation import Chunk

STREAMS = {"chant": ("words",), "novel": ("words", "titles")}


class Followers:
    """Read the streams of a chant and a novel while their owners die, and compare at the end what was read."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._followed: dict[tuple[str, str], list[Chunk]] = {}
        self._pieces: dict[tuple[str, str], list[Chunk]] = {}
        self._threads: list[threading.Thread] = []
        self._ids: dict[str, str] = {}
        self._errors: list[BaseException] = []

    def __enter__(self) -> Self:
        return self

    def submit(self, *tasks: str) -> None:
        for task in tasks or tuple(STREAMS):
            (self._ids[task],) = self._session.submit(task, task=task)
            for name in STREAMS[task]:
                for read in (self._follow, self._come_again):
                    thread = threading.Thread(target=self._guarded, args=(read, task, name), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _guarded(self, read: Any, task: str, name: str) -> None:
        try:
            read(task, name)
        except BaseException as error:
            self._errors.append(error)

    def _invocation(self, task: str) -> Invocation[Any]:
        return self._session.app.invocation(self._ids[task])

    def _follow(self, task: str, name: str) -> None:
        span, found = secrets.token_hex(6), self._followed.setdefault((task, name), [])
        for chunk in self._invocation(task).stream(name):
            found.append(self._session.witness.read(span, self._ids[task], name, chunk))

    def _come_again(self, task: str, name: str) -> None:
        """Leave after each item, and come anew behind it."""
        found = self._pieces.setdefault((task, name), [])
        while True:
            for chunk in self._invocation(task).stream(name, start=len(found)):
                found.append(chunk)
                break
            else:
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a reader does not come to an end"
        if self._errors:
            raise BaseExceptionGroup("readers have failed", self._errors)
        for key, followed in self._followed.items():
            task, name = key
            now = list(self._invocation(task).stream(name))
            assert followed == now, f"the reader that followed {key} has seen something else"
            assert self._pieces[key] == now, f"the reader that came again to {key} has seen something else"
            assert [chunk.index for chunk in now] == list(range(len(now)))
        self._judge()

    def _judge(self) -> None:
        """What the last attempts wrote is there, once and in order."""
        words = {"chant": ["chant"], "novel": ["novel first", "novel second"]}
        for task, tokens in words.items():
            if task not in self._ids:
                continue
            last = list(self._invocation(task).stream("words", attempts="last").values())
            expected = [
                f"{token} {n} {tasks.PADDING if n == 2 else ''}" for token in tokens for n in range(tasks.WORDS)
            ]
            assert last == expected
        if "novel" in self._ids:
            assert list(self._invocation("novel").stream("titles").values()) == tasks.TITLES
