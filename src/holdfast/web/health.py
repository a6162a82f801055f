"""Health, readiness and `/metrics`, of the web app and of a runner.

Access to `/metrics` is described in docs/decisions/0023-metrics-and-traces.md. Health says "ok" or "no" and nothing
else, so it needs no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from holdfast.errors import StoreError
from holdfast.metrics.exposition import CONTENT_TYPE, Exposition, Gauges, text_of
from holdfast.metrics.measures import Measures
from holdfast.metrics.rules import Tables
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.rules import is_same, names_this_machine

LIVE, READY, METRICS = "/health/live", "/health/ready", "/metrics"
PATHS = (LIVE, READY, METRICS)
SECONDS = 2.0  # for the engine's loop, and for the store
_SCRAPE_SECONDS = 8.0  # of the 10 that Prometheus waits
_FRESH_SECONDS = 1.0  # the store is not asked more often, however many requests come


class ScrapeRefusal(NamedTuple):
    """Why `/metrics` does not answer: the status of HTTP, and what to do."""

    status: int
    why: str


class HealthAnswer(NamedTuple):
    status: int
    body: bytes
    media_type: str = "text/plain; charset=utf-8"


OK, NO = HealthAnswer(200, b"ok\n"), HealthAnswer(503, b"no\n")


class HealthChecks:
    """Answer for one process. `is_ready` is that of a runner; without it, the store is asked."""

    def __init__(
        self,
        runtime: AppRuntime,
        *,
        is_local: bool,
        is_ready: Callable[[], bool] | None = None,
        heartbeat_age: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._runtime = runtime
        self._is_local = is_local
        self._is_ready = is_ready
        measures = cast(Measures | None, runtime.measures)
        self._exposition = Exposition(measures, heartbeat_age, self._declared)
        self._asked_at = float("-inf")
        self._answered = False
        self._lock = asyncio.Lock()

    async def answer(self, method: str, path: str, headers: Mapping[str, str]) -> HealthAnswer:
        """Answer a request for one of `PATHS`, on any loop. `headers` are found whatever their case."""
        if method not in ("GET", "HEAD"):
            return HealthAnswer(405, b"this address takes GET\n")
        if path != METRICS:
            return await self._health(path)
        settings = self._runtime.settings
        if not settings.metrics:
            return HealthAnswer(404, b"metrics are off: set metrics\n")
        if (refusal := refuse_scrape(headers, token=settings.metrics_token, is_local=self._is_local)) is not None:
            return HealthAnswer(refusal.status, f"{refusal.why}\n".encode())
        try:
            gathered = await asyncio.wait_for(self._runtime.arun(self._gathered()), _SCRAPE_SECONDS)
        except (TimeoutError, StoreError):
            return NO  # the store was never reached, or the loop does not turn
        return HealthAnswer(200, await asyncio.to_thread(text_of, *gathered), CONTENT_TYPE)

    async def _gathered(self) -> tuple[Tables, Gauges]:
        return await self._exposition.gather(await self._runtime.engine())

    def _declared(self) -> tuple[list[str], set[str]]:
        tasks = [task for task in self._runtime.definitions if not task.is_hidden]
        return [task.name for task in tasks], {queue for task in tasks for queue in task.queues}

    async def _health(self, path: str) -> HealthAnswer:
        try:
            is_well = await asyncio.wait_for(self._runtime.arun(self._is_well(path)), SECONDS)
        except (TimeoutError, StoreError):
            return NO
        return OK if is_well else NO

    async def _is_well(self, path: str) -> bool:
        if path == LIVE:
            return True  # the loop has come here
        return await self._store_answers() if self._is_ready is None else self._is_ready()

    async def _store_answers(self) -> bool:
        async with self._lock:
            now = self._runtime.clock.monotonic
            if now() - self._asked_at > _FRESH_SECONDS:
                self._answered = False
                engine = await self._runtime.engine()
                try:
                    await engine.store.roster(engine.app)
                    self._answered = True
                finally:
                    self._asked_at = now()
            return self._answered


def refuse_scrape(headers: Mapping[str, str], *, token: str, is_local: bool) -> ScrapeRefusal | None:
    """Return why `/metrics` does not answer; None if it does."""
    if token:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same(given.strip(), token):
            return None
        return ScrapeRefusal(401, "give the token of the setting metrics_token: 'Authorization: Bearer TOKEN'")
    if not is_local:
        return ScrapeRefusal(403, "set metrics_token: others reach this address")
    if not names_this_machine(headers.get("host", "")):
        return ScrapeRefusal(
            403, "the Host header does not name this machine: use http://127.0.0.1 or http://localhost"
        )
    return None
