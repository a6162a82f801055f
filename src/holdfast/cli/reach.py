"""Access of commands to the store of an app, opened or not."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.app import App
from holdfast.errors import AppNotFound, CorruptRecord, UsageError
from holdfast.masking import mask_url
from holdfast.model.records import Entry, InvocationRecord, RunnerRecord
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Backup, Filter, Finding, Store
from holdfast.telemetry.logs import RETRIES, logging_telemetry
from holdfast.triggers.events import EventRecord
from holdfast.triggers.outbox import Events
from holdfast.web.reading.apps import is_hidden, names_in
from holdfast.workflows.replaying import StoredRun, read_run

T = TypeVar("T")


def with_store(app: App, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the app's store if it is not open, and run `work` with it."""

    async def job() -> T:
        return await work((await app.runtime.engine()).store)

    return app.runtime.run(job())


def with_engine(app: App, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Open the app's store if it is not open, and run `work` with the engine."""

    async def job() -> T:
        return await work(await app.runtime.engine())

    return app.runtime.run(job())


def find(app: App, name: str, where: Filter, limit: int) -> Sequence[InvocationRecord]:
    """Return invocations of the app of that name in the app's store, newest first."""
    return with_store(app, lambda store: store.find(name, where, limit))


def time_of(app: App) -> float:
    """Return the store's time, which may differ from this machine's."""

    async def ask(store: Store) -> float:
        return store.now()

    return with_store(app, ask)


def roster(app: App) -> Sequence[RunnerRecord]:
    return with_store(app, lambda store: store.roster(app.name))


def entries(app: App, kind: str, decode: Callable[[Entry], T]) -> tuple[list[T], dict[str, str]]:
    """Return the records of a kind; and by name why others cannot be read."""
    records, unreadable = [], {}
    for entry in with_store(app, lambda store: store.entries(app.name, kind)):
        try:
            records.append(decode(entry))
        except CorruptRecord as error:
            unreadable[entry.name] = str(error)
    return records, unreadable


def refuse_unknown_name(app: App) -> None:
    """Raise `AppNotFound` for a name under which the store has nothing, while it has other apps."""
    names = with_store(app, names_in)
    if names and app.name not in names and not is_hidden(app.name):
        raise AppNotFound(
            f"the store {mask_url(app.url)} has no app '{app.name}'; it has: {', '.join(names)}. Name one of them: "
            f"--name {names[0]}"
        )


_SHORT_SECONDS = 3.0  # for a user at a terminal; the driver takes 5 s to find that no server answers
_PATIENCE = ("max_retries", "retry_max_time", "retry_indefinitely")


@contextlib.contextmanager
def brief_retries(app: App) -> Iterator[None]:
    """Retry a store that does not answer for a few seconds only, unless the settings say for how long. The command's
    own error says what came of it, so the tries are not logged.
    """
    if all(app.settings.origin(name).source == "default" for name in _PATIENCE):
        app.runtime.settings = dataclasses.replace(app.settings, retry_max_time=_SHORT_SECONDS)
    app.runtime.telemetry = logging_telemetry(app.runtime.clock.monotonic, RETRIES)
    yield


def _with_unopened_store(app: App, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` with the app's store unopened: opening it would create it."""

    async def job() -> T:
        return await work(app.runtime.make_engine()().store)

    return app.runtime.run(job())


def store_exists(app: App) -> bool:
    """Return True if the app's store on a MongoDB server is there. Creates nothing."""
    return bool(_with_unopened_store(app, lambda store: store.exists()))


def check_store(app: App, *, deep: bool) -> Sequence[Finding]:
    """Check the app's store as it is."""
    return _with_unopened_store(app, lambda store: store.check(deep=deep))


def back_up_store(app: App, target: Path, *, overwrite: bool) -> Backup:
    """Copy the app's store to a file."""

    async def copy(store: Any) -> Backup:
        if not hasattr(store, "backup"):
            raise UsageError(f"a store at {mask_url(app.url)} is not backed up from here")
        return await store.backup(target, overwrite=overwrite)  # type: ignore[no-any-return]

    return _with_unopened_store(app, copy)


def event_of(app: App, id: str) -> EventRecord:
    """Return a stored event. Raises `EventNotFound`."""

    async def job() -> EventRecord:
        return await (await app.runtime.engine()).part(Events).get(id)

    return app.runtime.run(job())


def is_run(record: InvocationRecord) -> bool:
    return record.run is not None


def stored_run(app: App, record: InvocationRecord) -> tuple[Engine, StoredRun]:
    """Return a run with its log, and the engine to replay it with. Raises `UsageError`, `NotDecodable`."""

    async def job() -> tuple[Engine, StoredRun]:
        engine = await app.runtime.engine()
        return engine, await read_run(engine, record)

    return app.runtime.run(job())
