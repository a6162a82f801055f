"""Errors as ``application/problem+json``: the class's name, what happened, and what to do. No stack traces.

The text of an error of Holdfast is written for its users, and only users with the token see it. Of any other exception
a client learns nothing but that there was one; the log has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.responses import Response

from holdfast import errors
from holdfast.showing import as_json, error_text, without_secrets

# The first class that fits decides.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (errors.InvocationNotFound, 404),
    (errors.StepNotFound, 404),
    (errors.HookNotFound, 404),
    (errors.StreamGone, 410),
    (errors.LogEventNotFound, 404),
    (errors.EventNotFound, 404),
    (errors.UnknownTask, 404),
    (errors.UnknownSchedule, 404),
    (errors.KeyTaken, 409),
    (errors.HookConflict, 409),
    (errors.NotEncodable, 422),
    (errors.PayloadDoesNotFit, 422),
    (errors.QueueFull, 429),
    (errors.UsageError, 400),
    (errors.LifecycleError, 409),
    (errors.InboxFull, 503),
    (errors.StoreReadOnly, 403),
    (errors.EncryptionKeyMissing, 409),
    (errors.PayloadLost, 410),
    (errors.StoreUnavailable, 503),
    (errors.StoreFull, 507),
)
_RETRY_AFTER_SECONDS = 1
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Problem(Exception):
    """An answer that is no success. `path` leads to what is wrong in the request: ``query.limit``, ``body.payload``."""

    def __init__(
        self, status: int, title: str, detail: str, *, path: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail, self.path = status, title, detail, path
        self.headers = dict(headers or {})

    def document(self) -> dict[str, object]:
        facts: dict[str, object] = {"title": self.title, "status": self.status, "detail": self.detail}
        return facts | {"path": self.path} if self.path else facts

    def for_strangers(self) -> Problem:
        """Return it without its text, which may name hosts and users of the store."""
        detail = "the server cannot answer now; it shows the reason to authenticated users only"
        return Problem(self.status, self.title, detail, headers=self.headers)

    def response(self) -> Response:
        return Response(
            as_json(self.document()),
            status_code=self.status,
            headers=SAFE_HEADERS | self.headers,
            media_type="application/problem+json",
        )


def wrong(path: str, detail: str, *, status: int = 400) -> Problem:
    """Return the problem with a part of the request."""
    return Problem(status, "UsageError", detail, path=path)


@contextmanager
def about(path: str) -> Iterator[None]:
    """Let a `UsageError` in this block be about that part of the request."""
    try:
        yield
    except errors.UsageError as error:
        raise wrong(path, str(error)) from error


def too_many(what: str, seconds: int = 10) -> Problem:
    return Problem(429, "TooManyRequests", f"{what}: try again later", headers={"retry-after": f"{seconds}"})


def not_found() -> Problem:
    return Problem(404, "NotFound", "there is nothing at this address")


def problem_of(error: Exception) -> Problem | None:
    """Return the problem that an error of Holdfast is; None for any other exception."""
    if isinstance(error, Problem):
        return error
    if not isinstance(error, errors.HoldfastError):
        return None
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    headers = {"retry-after": str(_RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    path = getattr(error, "path", "")
    text = without_secrets(error_text(error))
    return Problem(status, type(error).__name__, text, path=path if isinstance(path, str) else "", headers=headers)


def internal_error() -> Problem:
    return Problem(500, "InternalError", "the server failed to answer; its log says why")
