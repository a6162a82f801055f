"""Hooks: code outside of a workflow gives payloads to its body.

    approval = hook(f"approve:{article}", Approval)
    await send_mail(article, approval.url)
    async with asyncio.timeout(7 * 86_400):
        said = await approval

`hook` is called in a body. The hook is stored before the next step begins, and stays until the body disposes of it or
the run ends. Payloads that come before the body waits for them are kept in order. Where a token, a payload and an
answer are at every moment: docs/decisions/0012-hooks-and-streams.md.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

import msgspec

from holdfast.clock import Duration, length_of
from holdfast.errors import HookConflict, UsageError
from holdfast.ids import InvocationId
from holdfast.runtime.app_runtime import runtime_here
from holdfast.settings import Settings
from holdfast.workflows import events as e
from holdfast.workflows.events import Event
from holdfast.workflows.hooks_records import (
    CHOSEN,
    DERIVED,
    MAX_METADATA_BYTES,
    RANDOM,
    SECRET_BYTES,
    HookEntry,
    Response,
    WantedHook,
    derived,
    name_of,
    random_token,
    valid_token,
    webhook_url,
)
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_types import converted, name_of_type, plain, schema_of
from holdfast.workflows.life import AsyncLife, CallAnswer, Command, Life, PlainLife, current_life
from holdfast.workflows.loop import BodyFuture, where
from holdfast.workflows.rules import OpenCall

T = TypeVar("T")
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})


class Hook(Generic[T]):
    """A hook of a workflow's body. ``await`` it for the next payload, or iterate over all of them with ``async for``.

    ``async with hook(…) as approval`` waits until it is stored, and disposes of it at the end of the block. In a plain
    body there are `wait`, ``for`` and ``with``.
    """

    def __init__(self, life: Life, command: Command, type: Any, token: str, url: str) -> None:
        self._life = life
        self._command = command
        self._type = type
        self._url = url
        self.token = token
        self._received: deque[tuple[Event, CallAnswer]] = deque()
        self._waiters: list[BodyFuture] = []
        self._waits = 0
        self._is_stored = self._is_disposed = False
        self._conflict: HookConflict | None = None

    def __repr__(self) -> str:
        return f"<Hook {self._command.call.id}>"  # its token may be a secret

    @property
    def url(self) -> str:
        """Return the URL of its webhook. Anyone who has it can resume the hook."""
        if not self._url:
            raise UsageError("this hook has no URL: public_url was not set when it was created (https://shop.example)")
        return self._url

    # --- for the owner

    @property
    def is_awaited(self) -> bool:
        return self._waits > 0

    @property
    def unread(self) -> list[Event]:
        return [event for event, _ in self._received]

    def take(self, event: Event, answer: CallAnswer) -> None:
        if event.type == e.HOOK_CREATED:
            self._is_stored = True
        elif event.type == e.HOOK_CONFLICT:
            self._conflict = cast(HookConflict, answer.error)
        elif not self._is_disposed:
            self._received.append((event, answer))
        self._wake()

    def _wake(self) -> None:
        """Let all look that wait: the first of them takes the payload, and the others wait on."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- for the body

    def _has_payload(self) -> bool:
        return bool(self._received or self._conflict or self._is_disposed)

    def _has_place(self) -> bool:
        return bool(self._is_stored or self._conflict or self._is_disposed)

    def _next(self) -> T:
        """Return the next payload, which is there, or raise why there is none."""
        if self._received:
            _, answer = self._received.popleft()
            if answer.error is not None:
                raise answer.error
            return cast(T, converted(answer.value, self._type))
        if self._conflict is not None:
            raise HookConflict(str(self._conflict), owner=self._conflict.owner)
        raise UsageError(f"{self._command.call.id} was disposed of, so no payload comes ({where()})")

    async def _until(self, holds: Callable[[], bool]) -> None:
        if not isinstance(self._life, AsyncLife):
            raise UsageError("a plain body does not await a hook: call its wait(), or iterate over it")
        self._waits += 1
        try:
            while not holds():
                waiter = self._life.loop.create_future()
                self._waiters.append(waiter)
                await waiter
        finally:
            self._waits -= 1

    async def _receive(self) -> T:
        await self._until(self._has_payload)
        return self._next()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._receive().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self._until(self._has_payload)
        if self._is_disposed and not self._received:
            raise StopAsyncIteration
        return self._next()

    async def ready(self) -> Self:
        """Wait until the hook is stored. Raises `HookConflict` if another hook has its token."""
        await self._until(self._has_place)
        if self._conflict is not None:
            self._next()
        return self

    async def __aenter__(self) -> Self:
        return await self.ready()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dispose()

    def dispose(self) -> None:
        """End the hook: its token is free, and what was not read is dropped. A second time does nothing."""
        if self._is_disposed or self._conflict is not None:
            return
        self._is_disposed = True
        self._received.clear()
        self._life.dispose_hook(self._command)
        self._wake()

    # --- in a plain body

    def _wait(self, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        if not isinstance(self._life, PlainLife):
            raise UsageError("a coroutine body awaits a hook: 'await approval', 'async for', 'async with'")
        self._waits += 1
        try:
            return self._life.wait_for_hook(self._command.call.id, holds, seconds)
        finally:
            self._waits -= 1

    def wait(self, timeout: Duration | None = None) -> T:
        """Wait for the next payload, in a plain body. Raises `TimeoutError` after `timeout`."""
        seconds = None if timeout is None else length_of("timeout", timeout)
        if not self._wait(self._has_payload, seconds):
            raise TimeoutError(f"no payload for {self._command.call.id} within {timeout}")
        return self._next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._wait(self._has_payload)
        if self._is_disposed and not self._received:
            raise StopIteration
        return self._next()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dispose()

    def wait_until_stored(self) -> None:
        """Wait until the hook is stored: what `hook` does in a plain body. Raises `HookConflict`."""
        self._wait(self._has_place)
        if self._conflict is not None:
            self._next()


@overload
def hook(
    token: str | None = None,
    type: type[T] = ...,
    *,
    metadata: object = None,
    keep_token: Duration | None = None,
    methods: Sequence[str] = ("POST",),
    answer: Response | None = None,
    verify: str | Callable[..., object] | None = None,
    resume_id: str | None = None,
) -> Hook[T]: ...
@overload
def hook(
    token: str | None = None,
    type: Any = Any,
    *,
    metadata: object = None,
    keep_token: Duration | None = None,
    methods: Sequence[str] = ("POST",),
    answer: Response | None = None,
    verify: str | Callable[..., object] | None = None,
    resume_id: str | None = None,
) -> Hook[Any]: ...
def hook(
    token: str | None = None,
    type: Any = Any,
    *,
    metadata: object = None,
    keep_token: Duration | None = None,
    methods: Sequence[str] = ("POST",),
    answer: Response | None = None,
    verify: str | Callable[..., object] | None = None,
    resume_id: str | None = None,
) -> Hook[Any]:
    """Make a hook in the body of a workflow: ``said = await hook(f"approve:{article}", Approval)``.

    `app.resume_hook` gives it a payload of this type, from any process, by its token. Without a `token` it gets a
    secret one. A token belongs to one open hook; where it is taken, `HookConflict` is raised when the hook is awaited.
    `metadata` is shown with it. `keep_token` keeps the token taken for so long after the end of the run.

    If the setting `public_url` is set, the hook is a webhook too: an HTTP request to its `url` resumes it, by one of
    these `methods`. The answer is 202, or `answer`; a hook of type `WebhookRequest` may answer by itself. `verify`
    names a verifier of the app, which checks signatures. `resume_id` names the header by which retries of a sender are
    recognised.
    """
    life = current_life()
    if life is None:
        raise UsageError(
            "hook() is for the body of a workflow. A task or step cannot be suspended: call it from a workflow, or "
            "wait for an event by a trigger (on_event)"
        )
    given = _checked(type, metadata, keep_token, methods, answer, verify, resume_id)
    made = _made(life, None if token is None else valid_token(token), type, given)
    if isinstance(life, PlainLife):
        made.wait_until_stored()
    return made


def _made(life: Life, token: str | None, type: Any, given: dict[str, Any]) -> Hook[Any]:
    at, id, about = where(), life.hook_id(), life.about
    tokens = _tokens(life, id, token)
    entry = HookEntry(
        run=InvocationId(about.invocation_id),
        task=about.task,
        call=id,
        created_at=life.now,
        generation=life.generation,
        origin=tokens.origin,
        token=token or "",
        webhook=name_of(tokens.webhook) if tokens.base else "",
        **given,
    )
    wanted = WantedHook(name=name_of(tokens.token), entry=entry, url_base=tokens.base, secret=tokens.recorded)
    call = OpenCall(id=id, name="hook", where=at, data=wanted.name.encode())
    command = Command(call=call, hook=wanted)
    url = webhook_url(tokens.base, tokens.webhook) if tokens.base else ""
    made = Hook[Any](life, command, type, tokens.token, url)
    life.opened_hook(command, made)
    return made


# --- tokens


class _Tokens(msgspec.Struct):
    """The token of a hook, and the secret of its URL. `recorded` is what no replay could derive again."""

    token: str
    webhook: str
    origin: str
    base: str  # of the URL
    recorded: str = ""


def _tokens(life: Life, call: str, chosen: str | None) -> _Tokens:
    """Return the tokens of a call: as its log has them, else derived, else random."""
    settings: Settings = life.engine.settings
    there = life.replay.hooks.get(call)
    facts = {} if there is None else life.codec.decode(there.data)
    base = settings.public_url if there is None else str(facts.get("url", ""))
    if there is not None and there.secret:
        token, _, webhook = there.secret.partition("|")
        return _Tokens(chosen or token, webhook, RANDOM if chosen is None else CHOSEN, base, there.secret)
    if not settings.hook_secret:
        token, webhook = (random_token(os.urandom(SECRET_BYTES)) for _ in range(2))
        if chosen is not None:
            return _Tokens(chosen, webhook, CHOSEN, base, f"|{webhook}" if base else "")
        return _Tokens(token, webhook, RANDOM, base, f"{token}|{webhook}")
    secrets = [settings.hook_secret, *filter(None, [settings.hook_secret_previous])]
    made = [_derived(life.first_run, call, chosen, base, secret) for secret in secrets]
    # Of a secret that has changed since, the one counts that gave the recorded names.
    names = ("", "") if there is None else (there.name, facts.get("webhook", ""))
    fits = [each for each in made if name_of(each.token) == names[0]]
    return next((each for each in fits if name_of(each.webhook) == names[1]), (fits or made)[0])


def _derived(run: str, call: str, chosen: str | None, base: str, secret: str) -> _Tokens:
    token = derived(secret, "token", run, call) if chosen is None else chosen
    return _Tokens(token, derived(secret, "webhook", run, call), DERIVED if chosen is None else CHOSEN, base)


# --- options


def _checked(
    type: Any,
    metadata: object,
    keep_token: Duration | None,
    methods: Sequence[str],
    answer: Response | None,
    verify: str | Callable[..., object] | None,
    resume_id: str | None,
) -> dict[str, Any]:
    """Return the fields of an entry that the options of a hook mean. Raises `UsageError`."""
    if isinstance(methods, str) or not set(methods) <= _METHODS or not methods:
        raise UsageError(f"methods={methods!r:.80}: expected some of {', '.join(sorted(_METHODS))}, in a list")
    if answer is not None and not isinstance(answer, Response):
        raise UsageError(f"answer={answer!r:.80}: expected a Response of holdfast.webhooks")
    if resume_id is not None and (not isinstance(resume_id, str) or not resume_id.replace("-", "").isalnum()):
        raise UsageError(f"resume_id={resume_id!r:.80}: expected the name of a header, such as 'X-GitHub-Delivery'")
    is_request = type is WebhookRequest
    return {
        "type": name_of_type(type),
        "schema": {} if is_request else _schema(type),
        "is_request": is_request,
        "metadata": _metadata(metadata),
        "keep_seconds": None if keep_token is None else length_of("keep_token", keep_token),
        "methods": tuple(sorted(methods)),
        "answer": answer,
        "verify": _verifier(verify),
        "resume_header": (resume_id or "").lower(),
    }


@functools.lru_cache(maxsize=256)
def _known_schema(type: Any) -> dict[str, Any]:
    return schema_of(type)


def _schema(type: Any) -> dict[str, Any]:
    try:
        return _known_schema(type)
    except TypeError:  # it cannot be hashed
        return schema_of(type)


def _metadata(metadata: object) -> Any:
    values = plain(metadata, "metadata=")
    if (size := len(msgspec.json.encode(values))) > MAX_METADATA_BYTES:
        raise UsageError(f"metadata= has {size:,} bytes, and {MAX_METADATA_BYTES:,} are allowed")
    return values


def _verifier(verify: str | Callable[..., object] | None) -> str:
    """Return the name of a verifier that the app has declared."""
    if verify is None:
        return ""
    runtime = runtime_here()
    known = {} if runtime is None else runtime.verifiers
    name = verify if isinstance(verify, str) else next((each for each in known if known[each] is verify), "")
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise UsageError(
            f"verify={verify!r:.80}: the app declares no such verifier (it has: {listed}). Declare it beside the "
            "workflow, by app.verifier: the web process has to find it by its name"
        )
    return name
