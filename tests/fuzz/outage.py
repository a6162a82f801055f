"""What an app gives away whose store does not answer: each request is sent to one on a port where nothing listens."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterable, Iterator

from tests.fuzz.client import Sent, answered
from tests.fuzz.judging import faults_of_secrets
from tests.fuzz.target import API_TOKEN, Lines
from tests.web.entrance import filled

from holdfast import App
from holdfast.web import api
from holdfast.web.asgi import WebApp
from holdfast.web.pages import table

PASSWORD = "canary-of-the-database"
URL = f"mongodb://ann:{PASSWORD}@127.0.0.1:9/shop?serverSelectionTimeoutMS=1"
ALL = (
    *((route.method, f"/api/v1{filled(route.path)}") for route in api.ROUTES),
    *(("GET", filled(page.path)) for page in table.PAGES),
)


def faults_of_outage(asked: Iterable[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the answers to these methods and paths."""
    with warnings.catch_warnings():  # the driver leaves sockets behind that never were connected
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(_faults(asked))
        gc.collect()
    return found


def _faults(asked: Iterable[tuple[str, str]]) -> Iterator[str]:
    secrets = (PASSWORD.encode(), API_TOKEN.encode())
    with App(URL, api_token=API_TOKEN, max_retries=0, retry_max_time=0) as app, Lines() as lines:
        with asyncio.Runner() as loop:
            web = WebApp(app)
            for method, path in asked:
                accept = b"application/json" if path.startswith("/api") else b"text/html"
                sent = [(b"authorization", b"Bearer " + API_TOKEN.encode()), (b"accept", accept)]
                headers = [*sent, (b"content-type", b"application/json")]
                answer = loop.run(answered(web, Sent(method, path.encode(), headers, b"{}")))
                if answer.status in (0, 500):
                    yield f"{method} {path}: status {answer.status}, {answer.body[:200]!r}"
                for fault in faults_of_secrets(answer, lines.taken(), secrets, b""):
                    yield f"{method} {path}: {fault}"
