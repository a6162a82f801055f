"""Verifiers of webhooks: whether a request is genuine. Pure: the time is in the request.

A verifier takes a `WebhookRequest` and returns whether its sender knows the secret. It may return a text instead of
True, which names the delivery and must be covered by the signature: a repeated delivery is then recognised, by
whatever way it comes. Comparisons take the same time wherever the first difference is.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec

from holdfast.clock import Duration, length_of
from holdfast.errors import UsageError
from holdfast.workflows.hooks_requests import WebhookRequest

Verifier = Callable[[WebhookRequest], bool | str]
GITHUB_HEADER = "x-hub-signature-256"
STRIPE_HEADER = "stripe-signature"


def github_signature(*secrets: str) -> Verifier:
    """Return a verifier of GitHub's form: ``X-Hub-Signature-256: sha256=…``, the HMAC of the body.

    Several secrets are tried in turn, while one takes the place of another. The form has no time: give
    ``hook(resume_id="X-GitHub-Delivery")``, so that GitHub's retries are recognised.
    """
    keys = _keys(secrets)

    def verify(request: WebhookRequest) -> bool:
        given = request.headers.get(GITHUB_HEADER, "").removeprefix("sha256=")
        return _matches(keys, request.body, [given]) is not None

    return verify


def stripe_signature(*secrets: str, window: Duration = "5m") -> Verifier:
    """Return a verifier of Stripe's form: ``Stripe-Signature: t=…,v1=…``, the HMAC of a time and the body.

    A time outside of the `window` is refused. The id of the event in the body names the delivery, else the signature
    does: what is repeated within the window is delivered once.
    """
    keys, seconds = _keys(secrets), length_of("window", window)

    def verify(request: WebhookRequest) -> bool | str:
        parts = [part.strip().partition("=") for part in request.headers.get(STRIPE_HEADER, "").split(",")]
        times = [value for name, _, value in parts if name == "t"]
        if len(times) != 1 or not (times[0].isascii() and times[0].isdigit() and len(times[0]) <= 12):
            return False
        signed = times[0].encode() + b"." + request.body
        found = _matches(keys, signed, [value for name, _, value in parts if name == "v1"][:10])
        if found is None or abs(request.received_at - int(times[0])) > seconds:
            return False
        return _event_id(request.body) or found

    return verify


def _keys(secrets: tuple[str, ...]) -> list[bytes]:
    if not secrets or not all(isinstance(secret, str) and secret for secret in secrets):
        raise UsageError("a signature needs a secret: a text that is not empty (is its environment variable set?)")
    return [secret.encode() for secret in secrets]


def _matches(keys: list[bytes], signed: bytes, given: list[str]) -> str | None:
    """Return the signature that one of the keys makes; None if none does. All are compared."""
    found = None
    for key in keys:
        wanted = hmac.digest(key, signed, "sha256").hex()
        for each in given:
            if hmac.compare_digest(wanted.encode(), each.encode("utf-8", "replace")):
                found = wanted
    return found


class _Event(msgspec.Struct):
    id: str = ""


def _event_id(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Event).id
    except (msgspec.DecodeError, RecursionError):
        return ""
