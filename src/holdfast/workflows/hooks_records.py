"""Hooks as they are stored: entries of kind `hook`, `webhook` and `answer`, and the tokens that name them. Pure.

An entry of a hook is named by the SHA-256 of its token. A token that code has chosen is in the entry too, for people. A
token that is a secret (derived or random) is not: only its hash is. The entry of a webhook is named by the SHA-256 of
the secret in its URL, and points to the hook.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment, Seconds
from holdfast.model.records import Entry, entry_reader

HOOK, WEBHOOK, ANSWER = "hook", "webhook", "answer"
PAYLOAD = "hook"  # the kind of an inbox entry that carries a payload
WORLD = "world"  # the receiver of payloads for hooks of World runs
CHOSEN, DERIVED, RANDOM = "chosen", "derived", "random"
MAX_TOKEN_CHARACTERS = 256
MAX_METADATA_BYTES = 16 * 1024
ANSWER_KEPT_SECONDS = 600.0
SECRET_BYTES = 32


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to an HTTP request."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class HookEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a hook's entry. `schema` is a JSON schema of the payload; empty: any value."""

    run: InvocationId
    task: str
    call: str
    created_at: Moment
    generation: Count = 0
    origin: str = CHOSEN
    token: str = ""  # if code has chosen it
    type: str = ""  # of the payload, for people
    schema: Mapping[str, Any] = msgspec.field(default_factory=dict)
    is_request: bool = False  # the payload is a whole HTTP request, and the workflow may answer it
    metadata: Any = None
    receiver: str = ""  # what takes payloads, if that is not the inbox of the run: a name in `Engine.hook_receivers`
    keep_seconds: Seconds | None = None  # for which its token stays taken after the end of its run
    ended_at: Moment | None = None  # its run has ended, and the token is kept
    webhook: str = ""  # the name of its webhook's entry
    methods: tuple[str, ...] = ("POST",)
    answer: Response | None = None
    verify: str = ""  # the verifier that the app declares under this name
    resume_header: str = ""  # the header that names a delivery


class WebhookEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook's entry: the hook that it leads to, and whose it has to be."""

    hook: str
    run: InvocationId
    call: str


class WantedHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that a body asks for. `name` is that of its entry; `secret` what its log has to keep for a replay."""

    name: str
    entry: HookEntry
    url_base: str = ""  # of its webhook
    secret: str = ""


read_hook = entry_reader(HookEntry, HOOK)
read_webhook = entry_reader(WebhookEntry, WEBHOOK)
read_answer = entry_reader(Response, ANSWER)


def hook_entry(app: str, name: str, hook: HookEntry, *, version: int = 1, keep_until: float | None = None) -> Entry:
    return Entry(
        app=app,
        kind=HOOK,
        name=name,
        body=msgspec.json.encode(hook),
        version=version,
        keep_until=keep_until,
        subject=hook.run if hook.ended_at is None else None,
    )


def webhook_entry(app: str, hook_name: str, hook: HookEntry) -> Entry:
    body = msgspec.json.encode(WebhookEntry(hook=hook_name, run=hook.run, call=hook.call))
    return Entry(app=app, kind=WEBHOOK, name=hook.webhook, body=body, subject=hook.run)


def answer_entry(app: str, name: str, answer: Response, now: float) -> Entry:
    until = now + ANSWER_KEPT_SECONDS
    return Entry(app=app, kind=ANSWER, name=name, body=msgspec.json.encode(answer), keep_until=until)


def name_of(token: str) -> str:
    """Return the name of the entry that a token, or the secret in a URL, leads to."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def payload_id(name: str, resume_id: str) -> str:
    """Return the id of the inbox entry: one for each payload of a hook, however often it is sent."""
    return f"hook:{name}:{resume_id}"


def resume_id_of(payload: str) -> str:
    return payload.split(":", 2)[-1]


def address_of(name: str) -> str:
    """Return what the inbox entry of a payload says in the place of a call: the run has to find the hook by its name,
    also after a restart, in which the same call may have another token.
    """
    return f"token:{name}"


def answer_name(name: str, resume_id: str) -> str:
    return hashlib.sha256(f"{name}\0{resume_id}".encode()).hexdigest()


def derived(secret: str, purpose: str, run: str, call: str) -> str:
    """Return the token (or webhook secret) that follows from the setting `hook_secret`, the run and the call."""
    message = "".join(f"{len(part)}:{part}" for part in (purpose, run, call))
    return _text(hmac.digest(secret.encode(), message.encode(), "sha256"))


def random_token(random_bytes: bytes) -> str:
    assert len(random_bytes) == SECRET_BYTES
    return _text(random_bytes)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def webhook_url(base: str, secret: str) -> str:
    return f"{base}/hooks/{secret}"


def valid_token(token: object) -> str:
    """Return a token that code has chosen, or that is to be resumed. Raises `UsageError`."""
    if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN_CHARACTERS:
        raise UsageError(f"token={token!r:.80}: expected a text of 1 to {MAX_TOKEN_CHARACTERS} characters")
    if not token.isprintable():
        raise UsageError(f"token={token!r:.80}: it has characters that cannot be shown")
    return token


def valid_resume_id(resume_id: object) -> str:
    if not isinstance(resume_id, str) or not 0 < len(resume_id) <= MAX_TOKEN_CHARACTERS or not resume_id.isprintable():
        raise UsageError(
            f"resume_id={resume_id!r:.80}: expected a text of 1 to {MAX_TOKEN_CHARACTERS} characters that can be shown"
        )
    return resume_id
