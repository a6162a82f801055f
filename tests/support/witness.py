"""A witness: what clients and tasks did and saw, written down outside the system under test.

Each process has a ledger of its own, a file of JSON lines. A line is one `write` to a file that is opened for
appending, so it is there whole as soon as the call returns, and a `kill -9` afterwards takes nothing back (a power cut
may). Times are those of `holdfast.clock`'s elapsed clock, which all processes of one host share: whether two things
overlapped is known without trusting anybody's wall clock.

What links a submit to what became of it is a token: any text of your choice that is unlike all others, given to the
submit and handed to the task as an argument. So what was executed is known even if the submitter never learnt an id.

::

    witness = Witness.in_folder(folder, "client")
    with witness.submission("t1") as accepted:
        accepted(work.submit("t1").id)

    @app.task
    def work(token: str) -> str:
        with witness.execution(token) as execution:
            return execution.returns(f"{token} {execution.stamp}")

A result that carries the execution's `stamp` lets the checker see which execution it came from. Judge with
`tests.support.checker`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.codec import Codec
from holdfast.errors import CodecError, ConfigurationError, TaskFailed, UsageError
from holdfast.invocation import Chunk

T = TypeVar("T")

_NOTHING_WAS_WRITTEN = (UsageError, CodecError, ConfigurationError)
_HEAD_CHARACTERS = 4096  # of an error's text: a store may keep no more than its head and tail


class What(StrEnum):
    """The kinds of lines."""

    SUBMIT_INVOKE = "submit.invoke"  # before it is sent
    SUBMIT_OK = "submit.ok"  # it was acknowledged, with this id
    SUBMIT_FAIL = "submit.fail"  # it was refused, and nothing was written
    SUBMIT_UNKNOWN = "submit.unknown"  # it may be there or not
    EMIT_OK = "emit.ok"  # an event was acknowledged, with this id
    RESUME_INVOKE = "resume.invoke"  # a payload for the hook with the token `key`, named `idempotency_key`, is sent
    RESUME_OK = "resume.ok"
    RESUME_FAIL = "resume.fail"  # it was refused, and nothing was written
    RESUME_UNKNOWN = "resume.unknown"
    PAYLOAD_SEEN = "payload.seen"  # a replay was shown this payload as number `index` of the hook with the token `key`
    EXEC_START = "exec.start"
    EXEC_END = "exec.end"
    STEP_START = "step.start"  # an attempt of a step of a run, in its owner's epoch
    STEP_END = "step.end"
    CHUNK_SAID = "chunk.said"  # user code is about to write a chunk to a stream
    CHUNK_READ = "chunk.read"  # a reader was given this item of a stream
    LEASE_ENTER = "lease.enter"  # user code holds a slot of a limit
    LEASE_EXIT = "lease.exit"
    FENCED = "fenced"  # an owner was told that it is one no longer
    RESULT_SEEN = "result.seen"
    SERVICE_START = "service.start"
    SERVICE_END = "service.end"
    RUNNER_START = "runner.start"  # a runner, or a worker of one, is on the roster
    RUNNER_BEAT = "runner.beat"  # its heartbeat was accepted
    RUNNER_END = "runner.end"
    FAULT_START = "fault.start"
    FAULT_END = "fault.end"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `span` joins a start with its end; `at` is elapsed time."""

    what: What
    at: float
    pid: int
    token: str | None = None
    id: str | None = None
    span: str = ""
    step: str = ""  # the call of a run (``charge#2``); behind its generation, if that is not the first (``1/charge#2``)
    attempt: int | None = None
    epoch: int | None = None
    owner: str | None = None  # "runner", or "runner/worker"
    key: str | None = None  # of a limit; the name of a stream; the token of a hook
    index: int | None = None  # in a stream
    idempotency_key: str | None = None
    limit: int | None = None
    digest: str | None = None
    status: str | None = None
    raised: bool = False
    service: str | None = None
    kind: str | None = None  # of a fault
    victim: int | None = None  # the pid that it strikes
    ids: tuple[str, ...] = ()
    why: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def digest_of(value: object, codec: Codec | None = None) -> str:
    """What stands for a result: equal values have equal digests, in every process."""
    return _digest(b"result", (codec or Codec()).encode(value))


def digest_of_error(error: BaseException | str) -> str:
    """What stands for an error: its text, which is the same whether its class is known here or not."""
    text = error if isinstance(error, str) else error.message if isinstance(error, TaskFailed) else str(error)
    return _digest(b"error", text[:_HEAD_CHARACTERS].encode("utf-8", "backslashreplace"))


def _digest(kind: bytes, data: bytes) -> str:
    return hashlib.sha256(kind + b" " + data).hexdigest()[:32]


class Execution:
    """One run of user code, while it lasts."""

    def __init__(self, stamp: str, codec: Codec) -> None:
        self.stamp = stamp  # unlike that of every other execution
        self.digest: str | None = None
        self._codec = codec

    def returns(self, value: T) -> T:
        """Say what the task is about to return, and return it."""
        self.digest = digest_of(value, self._codec)
        return value


class Witness:
    """Writes one ledger. Safe from any thread.

    `codec` has to know the classes of what is returned, like the app's own.
    """

    def __init__(self, path: Path | str, *, clock: Clock | None = None, codec: Codec | None = None) -> None:
        self.path = Path(path)
        self._clock = clock or SystemClock()
        self._codec = codec or Codec()
        # A new file: after a torn line nothing more may come, and whoever died here may have left one.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)

    @classmethod
    def in_folder(
        cls, folder: Path | str, role: str, *, clock: Clock | None = None, codec: Codec | None = None
    ) -> Self:
        """A ledger of a new name in a folder that many processes share."""
        name = f"{role}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        return cls(Path(folder) / name, clock=clock, codec=codec)

    def close(self) -> None:
        """Not needed for the lines: they are there."""
        os.close(self._file)

    def write(self, what: What, **facts: Any) -> None:
        """One line. The facts are fields of `Event`."""
        line = _encode(Event(what=what, at=self._clock.monotonic(), pid=os.getpid(), **facts)) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"the ledger {self.path} takes no more lines; the last one is torn")

    # --- clients

    @contextmanager
    def submission(
        self, token: str, *, key: str | None = None, idempotency_key: str | None = None
    ) -> Iterator[Callable[[str], None]]:
        """Around a submit; call what it gives with the id, as soon as that is known. `key` is that of its limit."""
        span, known = secrets.token_hex(6), False

        def accepted(id: str) -> None:
            nonlocal known
            known = True
            self.write(What.SUBMIT_OK, token=token, span=span, id=id, key=key, idempotency_key=idempotency_key)

        self.write(What.SUBMIT_INVOKE, token=token, span=span, key=key)
        try:
            yield accepted
        except _NOTHING_WAS_WRITTEN as error:
            if not known:
                self.write(What.SUBMIT_FAIL, token=token, span=span, why=str(error))
            known = True
            raise
        finally:
            if not known:
                self.write(What.SUBMIT_UNKNOWN, token=token, span=span)

    def saw(
        self,
        id: str | None = None,
        *,
        token: str | None = None,
        result: object = None,
        error: BaseException | None = None,
        status: str | None = None,
    ) -> None:
        """A client was shown an end: a result, an error, or (with `status` "cancelled", say) neither.

        Tell it at first sight and whenever it is seen again.
        """
        if error is not None:
            digest, status = digest_of_error(error), status or "failed"
        elif status in (None, "success"):
            digest, status = digest_of(result, self._codec), "success"
        else:
            digest = None
        self.write(What.RESULT_SEEN, id=id, token=token, digest=digest, status=status)

    def resume(self, token: str, name: str, send: Callable[[], object], *, digest: str | None = None) -> bool:
        """Send a payload for a hook, named `name`. Return whether it was acknowledged; an outage is unknown."""
        facts = {"key": token, "idempotency_key": name, "span": secrets.token_hex(6), "digest": digest}
        self.write(What.RESUME_INVOKE, **facts)
        try:
            send()
        except LookupError:
            self.write(What.RESUME_FAIL, **facts)
            return False
        except Exception:
            self.write(What.RESUME_UNKNOWN, **facts)
            return False
        self.write(What.RESUME_OK, **facts)
        return True

    # --- user code

    @contextmanager
    def execution(
        self, token: str | None = None, *, id: str | None = None, attempt: int | None = None, epoch: int | None = None
    ) -> Iterator[Execution]:
        """Around the body of a task. Its end is written before the task can return."""
        facts = {"token": token, "id": id, "attempt": attempt, "epoch": epoch, "span": secrets.token_hex(6)}
        execution = Execution(str(facts["span"]), self._codec)
        self.write(What.EXEC_START, **facts)
        try:
            yield execution
        except BaseException as error:
            self.write(What.EXEC_END, **facts, raised=True, digest=digest_of_error(error))
            raise
        self.write(What.EXEC_END, **facts, digest=execution.digest)

    @contextmanager
    def lease(
        self, key: str, limit: int, *, token: str | None = None, id: str | None = None, epoch: int | None = None
    ) -> Iterator[None]:
        """Around what a limit of `limit` at once protects."""
        facts = {"key": key, "limit": limit, "token": token, "id": id, "epoch": epoch, "span": secrets.token_hex(6)}
        with self._around(What.LEASE_ENTER, What.LEASE_EXIT, facts):
            yield

    @contextmanager
    def step(self, step: str, *, id: str, attempt: int, epoch: int) -> Iterator[Execution]:
        """Around an attempt of a step of the run with this id."""
        execution = Execution(secrets.token_hex(6), self._codec)
        facts: dict[str, Any] = {"id": id, "step": step, "attempt": attempt, "epoch": epoch, "span": execution.stamp}
        self.write(What.STEP_START, **facts)
        try:
            yield execution
        except BaseException as error:
            self.write(What.STEP_END, **facts, raised=True, digest=digest_of_error(error))
            raise
        self.write(What.STEP_END, **facts, digest=execution.digest)

    def says(self, value: T, stream: str, *, id: str, step: str, attempt: int, epoch: int) -> T:
        """Say what is about to be written to a stream, and return it."""
        facts: dict[str, Any] = {"id": id, "key": stream, "step": step, "attempt": attempt, "epoch": epoch}
        self.write(What.CHUNK_SAID, **facts, digest=digest_of(value, self._codec))
        return value

    def read(self, span: str, id: str, stream: str, chunk: Chunk) -> Chunk:
        """A reader was given this item. `span` is that of the reader, from its start on."""
        digest = digest_of(chunk.value, self._codec) if chunk.kind == "chunk" else chunk.kind
        self.write(What.CHUNK_READ, span=span, id=id, key=stream, index=chunk.index, digest=digest)
        return chunk

    def fenced(self, id: str | None = None, *, token: str | None = None, epoch: int) -> None:
        """The owner of this epoch was told that somebody else has the invocation now."""
        self.write(What.FENCED, id=id, token=token, epoch=epoch)

    # --- runners, and who disturbs them

    @contextmanager
    def service(self, name: str, *, epoch: int | None = None, owner: str | None = None) -> Iterator[None]:
        """Around one execution of a duty that only one runner may perform at a time."""
        facts = {"service": name, "epoch": epoch, "owner": owner, "span": secrets.token_hex(6)}
        with self._around(What.SERVICE_START, What.SERVICE_END, facts):
            yield

    @contextmanager
    def runner(self, owner: str) -> Iterator[Callable[[], None]]:
        """Around the life of a runner (or, as ``runner/worker``, of a worker) in this process. What it gives is to be
        called after each heartbeat that the store accepted.
        """
        facts = {"owner": owner, "span": secrets.token_hex(6)}
        with self._around(What.RUNNER_START, What.RUNNER_END, facts):
            yield lambda: self.write(What.RUNNER_BEAT, **facts)

    @contextmanager
    def fault(
        self, kind: str, *, pid: int | None = None, owner: str | None = None, ids: tuple[str, ...] = ()
    ) -> Iterator[None]:
        """Around an injected fault (a `tests.support.checker.FaultKind`): of that process, of that runner or
        worker, of what concerns these invocations, or of the database if none of them is named.
        """
        facts = {"kind": kind, "victim": pid, "owner": owner, "ids": ids, "span": secrets.token_hex(6)}
        with self._around(What.FAULT_START, What.FAULT_END, facts):
            yield

    @contextmanager
    def _around(self, start: What, end: What, facts: dict[str, Any]) -> Iterator[None]:
        self.write(start, **facts)
        try:
            yield
        finally:
            self.write(end, **facts)


class Ledgers(msgspec.Struct, frozen=True):
    """What all witnesses wrote, in the order of time."""

    events: tuple[Event, ...] = ()

    def of(self, *kinds: What) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.what in kinds)


class Reader:
    """Reads ledgers, also while they grow: each a file, or a folder of files that end in ``.jsonl``."""

    def __init__(self, *paths: Path | str) -> None:
        self._paths = [Path(path) for path in paths]
        self._read: dict[Path, int] = {}
        self._events: list[Event] = []

    def ledgers(self) -> Ledgers:
        """All whole lines so far. The last line of a ledger may be torn: whoever wrote it died then."""
        for path in self._files():
            self._events += self._news(path)
        self._events.sort(key=lambda event: event.at)
        return Ledgers(tuple(self._events))

    def _files(self) -> Iterator[Path]:
        for path in self._paths:
            if path.is_dir():
                yield from sorted(path.glob("*.jsonl"))
            elif path.exists():
                yield path

    def _news(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
        for line in whole.split(b"\n") if newline else ():
            try:
                yield _decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} is no ledger, or is damaged: {line[:80]!r}: {error}") from error


def read(*paths: Path | str) -> Ledgers:
    """What lies in these ledgers, or folders of ledgers."""
    return Reader(*paths).ledgers()
