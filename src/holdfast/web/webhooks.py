"""Webhooks over HTTP: ``/hooks/SECRET``. They are public: the secret in the path is what a sender has to know.

Every request passes the same checks in the same order, whatever its secret is: the rate of its source, the rate of its
secret, the size of its body. What the secret leads to is found out last, by `holdfast.workflows.hooks_web`. The path
is taken out of the request's scope at once, so that the access log of a server has no secret to write.
"""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.problems import SAFE_HEADERS, Problem
from holdfast.web.requests import body_of, while_connected
from holdfast.web.rules import Buckets, source_of
from holdfast.workflows.hooks_records import Response as WebhookAnswer
from holdfast.workflows.hooks_records import name_of
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_web import ANSWER_SECONDS, Webhooks

PREFIX = "/hooks/"
HIDDEN = f"{PREFIX}..."  # in a form that no server escapes
GRACE_SECONDS = 5.0  # for a delivery whose sender has hung up
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_BURST_SECONDS = 10.0  # of the rate, that may come at once
_MAX_BYTES_UNDER_WAY = 64 * 2**20  # of bodies that are coming, in memory at a time
_MAX_BYTES_OF_SOURCE = 16 * 2**20  # of those, from one source: a slow one must not take the room of all
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OF_THE_SERVER = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "trailer", "transfer-encoding", "upgrade"}
)


class WebhookEndpoint:
    """Receives the webhooks of one app in one process. Rates are counted in its memory. `source` returns the
    address of a request.
    """

    def __init__(self, runtime: AppRuntime, source: Callable[[Request], str]) -> None:
        self._runtime, self._source = runtime, source
        self._webhooks = Webhooks(runtime)
        settings = runtime.settings
        self._by_source = _buckets(settings.webhook_source_rate)
        self._by_secret = _buckets(settings.webhook_token_rate)
        self._under_way = 0
        self._under_way_of: Counter[str] = Counter()  # by source

    async def answer(self, request: Request, secret: str) -> Response:
        """Deliver a request, and return the response. Raises `Problem`, `ClientDisconnect`."""
        query = request.scope.get("query_string", b"").decode("latin-1")
        hide(request.scope)
        if request.method not in METHODS:
            raise Problem(405, "MethodNotAllowed", "a webhook takes POST", headers={"allow": ", ".join(METHODS)})
        source = source_of(self._source(request))
        self._take(self._by_source, source)
        self._take(self._by_secret, name_of(secret))
        with self._room_for(source) as take_room:
            body = await body_of(request, self._webhooks.limit, came=take_room)
        received = WebhookRequest(method=request.method, headers=_headers(request), body=body, query=query)
        receiving = self._webhooks.receive(secret, received, answer_seconds=ANSWER_SECONDS)
        return _response(await while_connected(request, receiving, GRACE_SECONDS))

    def _take(self, buckets: Buckets, key: str) -> None:
        if seconds := buckets.take(key, self._runtime.clock.monotonic()):
            after = {"retry-after": str(math.ceil(seconds))}
            raise Problem(429, "TooManyRequests", f"too many webhooks; wait for {seconds:.1f} s", headers=after)

    @contextmanager
    def _room_for(self, source: str) -> Iterator[Callable[[int], None]]:
        """Hold room for a body while it comes. Yields what takes room for a part of it, and raises `Problem`."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            largest = self._webhooks.limit  # there is always room for one body
            of_source = self._under_way_of[source] + size > max(largest, _MAX_BYTES_OF_SOURCE)
            if of_source or self._under_way + size > max(largest, _MAX_BYTES_UNDER_WAY):
                raise Problem(503, "Busy", "too many webhooks are under way; try again", headers={"retry-after": "1"})
            taken += size
            self._under_way += size
            self._under_way_of[source] += size

        try:
            yield take
        finally:
            self._under_way -= taken
            self._under_way_of[source] -= taken
            if not self._under_way_of[source]:
                del self._under_way_of[source]


def hide(scope: Scope) -> None:
    """Take the secret, and what a GET carries, out of the scope: servers log what is there when the response starts."""
    path = str(scope["path"])
    start = path.index(PREFIX, len(path) - len(path.removeprefix(str(scope.get("root_path", "")).rstrip("/"))))
    scope["path"] = path[:start] + HIDDEN
    scope["raw_path"] = scope["path"].encode("utf-8", "replace")
    scope["query_string"] = b""


def place_of(error: BaseException) -> str:
    """Return the class of an error and where it was raised, but not its text: that may quote the request."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _buckets(rate: float) -> Buckets:
    return Buckets(rate, max(1.0, rate * _BURST_SECONDS))


def _headers(request: Request) -> Mapping[str, str]:
    """Return the headers, those of one name joined as HTTP allows it."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _response(answer: WebhookAnswer) -> Response:
    """Return the response for an answer of a workflow. Headers that are the server's, or that no server could send,
    are left out.
    """
    given = {
        name.lower(): value
        for name, value in answer.headers.items()
        if name.lower() not in _OF_THE_SERVER and _HEADER.fullmatch(name) and _VALUE.fullmatch(value)
    }
    body = b"" if answer.status in (204, 205, 304) else answer.body
    return Response(body, status_code=answer.status, headers=SAFE_HEADERS | given)
