"""The storage of a World: its methods take the fields of `docs/reference/world-http.md`, in snake case, by name.

Answers are plain dicts with the keys of the contract in camel case, as `docs/reference/world-http.md` names them. Bytes
are `bytes`, in requests and answers; a time is an aware `datetime` in UTC, to the millisecond. A field without a value
is left out; only `cursor` may be None. `pagination` is a dict of `limit`, `cursor` and `sortOrder` ("asc", "desc").

Every method raises `WorldError`, and nothing else that a caller has to know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from holdfast.runtime.engine import Engine

Answer = dict[str, Any]
Fields = Mapping[str, Any]


class WorldStorage:
    """A part of the engine: ``engine.part(WorldStorage)``. Everything happens on the engine's loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- events

    async def events_create(
        self,
        *,
        run_id: str | None,
        event: Fields,
        params: Fields | None = None,
        operation_id: str | None = None,
    ) -> Answer:
        """Write an event; return it with the run, step, hook or wait that it changed. `event` has `eventType`,
        `correlationId`, `eventData` and `specVersion`; `params` are those of the protocol.

        Called again with the same `operation_id`, it writes nothing, and answers as the first time.
        """
        raise NotImplementedError

    async def events_get(self, *, run_id: str, event_id: str, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    async def events_list(
        self, *, run_id: str, pagination: Fields | None = None, resolve_data: str = "all"
    ) -> Answer:
        raise NotImplementedError

    async def events_list_by_correlation_id(
        self,
        *,
        correlation_id: str,
        run_id: str | None = None,
        pagination: Fields | None = None,
        resolve_data: str = "all",
    ) -> Answer:
        raise NotImplementedError

    # --- runs

    async def runs_get(self, *, run_id: str, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    async def runs_list(
        self,
        *,
        workflow_name: str | None = None,
        status: str | Sequence[str] | None = None,
        pagination: Fields | None = None,
        resolve_data: str = "all",
    ) -> Answer:
        raise NotImplementedError

    async def runs_set_attributes(
        self,
        *,
        run_id: str,
        changes: Sequence[Fields],
        allow_reserved_attributes: bool = False,
        operation_id: str | None = None,
    ) -> Answer:
        """Change the attributes of a run; return ``{"attributes": …}``."""
        raise NotImplementedError

    # --- steps

    async def steps_get(self, *, run_id: str | None, step_id: str, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    async def steps_list(self, *, run_id: str, pagination: Fields | None = None, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    # --- hooks

    async def hooks_get(self, *, hook_id: str, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    async def hooks_get_by_token(self, *, token: str, resolve_data: str = "all") -> Answer:
        raise NotImplementedError

    async def hooks_list(
        self, *, run_id: str | None = None, pagination: Fields | None = None, resolve_data: str = "all"
    ) -> Answer:
        raise NotImplementedError

    # --- streams

    async def streams_write(
        self, *, run_id: str, name: str, chunks: Sequence[bytes | str], operation_id: str | None = None
    ) -> Answer:
        raise NotImplementedError

    async def streams_close(self, *, run_id: str, name: str, operation_id: str | None = None) -> Answer:
        raise NotImplementedError

    async def streams_list(self, *, run_id: str) -> Answer:
        """Return ``{"names": [...]}``."""
        raise NotImplementedError

    async def streams_get_chunks(
        self, *, run_id: str, name: str, limit: int | None = None, cursor: str | None = None
    ) -> Answer:
        raise NotImplementedError

    async def streams_get_info(self, *, run_id: str, name: str) -> Answer:
        """Return ``{"tailIndex": …, "done": …}``; -1 is the tail of a stream without chunks."""
        raise NotImplementedError

    async def streams_read(self, *, run_id: str, name: str, start: int = 0) -> tuple[int, AsyncIterator[bytes]]:
        """Return the index of the first chunk, and the chunks from there on, live. Iteration ends when the stream is
        closed; it may raise `WorldError`. `start` below 0 counts from the end.
        """
        raise NotImplementedError

    # --- for the server and the command line

    async def sweep(self, limit: int = 200) -> bool:
        """Repair projections that lag behind their logs. Return True if there may be more to look at."""
        raise NotImplementedError

    async def close(self) -> None:
        """Forget what is kept warm."""
