"""Delivery: a message is posted to the application, and the answer decides whether the message ends or is repeated.

The task `deliver` runs on the engine's loop, since it only waits. A message goes to `world_service_url`; else to the
address that came with it, and if nothing listens there, to the address that was registered last. `judge` is pure.

A delivery that reached the application and failed counts, and so does a crash of the server that made it; 48 in a row
end the message. A refused connection only makes the next wait longer: an application that is down fails no run.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from holdfast.executors.call import CallAgain, CallFailed
from holdfast.ids import derived_id
from holdfast.model.records import Entry, InvocationRecord
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.foreign import MAX_DELIVERIES
from holdfast.store.contract import EntryOrder
from holdfast.telemetry.tasks import here
from holdfast.web.rules import is_loopback
from holdfast.world.errors import bad_request
from holdfast.world.http_client import HttpAddress, NoAnswer, NoConnection, Reply, address_of, post
from holdfast.world.queue import (
    FAILURES,
    HTTP_STATUS,
    LANE_QUEUE,
    PREFIX,
    QUEUE,
    REFUSALS,
    RUN,
    SENT_TO,
    TASK,
    attempt_of,
    count_of,
    route_of,
    valid_address,
)

ADDRESS_KIND = "world_address"
OWN_HEADER = "x-holdfast-world"  # of answers of this server, which is no application
_PATH = "/.well-known/workflow/v1/"
_KEPT_SECONDS = 30 * 86_400.0  # for an address that no program registers any more
_RENEW_SECONDS = 3600.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
_LONGEST_TIMEOUT_SECONDS = 3_153_600_000.0
_NAME = "NotDelivered"
_QUOTED = 200  # characters of an answer in an error


class MessageTaken(NamedTuple):
    """The application has taken the message."""


class WantedAgain(NamedTuple):
    """The application asks for the same message again after this many seconds."""

    seconds: float


class MessageNotTaken(NamedTuple):
    """The delivery failed. `status` is that of HTTP; 0: there was none. It counts if it reached the application."""

    why: str
    status: int
    counts: bool = True


Judgement = MessageTaken | WantedAgain | MessageNotTaken


def judge(reply: Reply) -> Judgement:
    """Return the verdict of an answer."""
    if OWN_HEADER in reply.headers:
        return MessageNotTaken(
            "the address leads to a server of Holdfast, and not to an application", reply.status, False
        )
    if not 200 <= reply.status < 300:
        return MessageNotTaken(f"HTTP {reply.status}{_quoted(reply.body)}", reply.status)
    if not reply.body.strip():
        return MessageTaken()
    try:
        found = json.loads(reply.body)
    except (ValueError, RecursionError):
        return MessageNotTaken(f"HTTP {reply.status} with a body that is no JSON{_quoted(reply.body)}", reply.status)
    if not isinstance(found, dict) or found.get("timeoutSeconds") is None:
        return MessageTaken()
    seconds = found["timeoutSeconds"]
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        return MessageNotTaken(f"HTTP {reply.status} with timeoutSeconds {str(seconds)[:40]}", reply.status)
    return WantedAgain(float(min(seconds, _LONGEST_TIMEOUT_SECONDS)))


def _quoted(body: bytes) -> str:
    text = " ".join(body[: 4 * _QUOTED].decode("utf-8", "replace").split())
    printable = "".join(character if character.isprintable() else "?" for character in text[:_QUOTED])
    return f": {printable}" if printable else ""


def wait_after(failures: int, random_unit: float) -> float:
    """Return the seconds until the next delivery, after this many failures in a row: 1, 2, 4, … 60, with jitter."""
    longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(failures - 1, 10))
    return longest * (0.8 + 0.4 * random_unit)


# --- addresses


class Addresses:
    """The addresses of applications that called `start`. They are entries, so every server knows all of them."""

    def __init__(self, engine: Engine) -> None:
        self._store, self._app = engine.store, engine.app
        self._settings = engine.settings
        self._written: dict[str, float] = {}  # when this process has registered them
        self.allows_any = False  # for a server whose only client is its parent process

    def allowed(self, address: HttpAddress) -> bool:
        """Return whether deliveries may go there: a client must not have this server reach into its network. Where
        `world_hosts` is set, it is the whole list, and this machine has to be on it as well.
        """
        names = {name.strip().lower() for name in self._settings.world_hosts.split(",") if name.strip()}
        by_default = not names and is_loopback(address.host)
        if service := self._settings.world_service_url:
            names.add(address_of(service).host)
        return self.allows_any or "*" in names or address.host.lower() in names or by_default

    def checked(self, base_url: Any) -> HttpAddress:
        """Return the address of a base URL that a client gives. Raises `WorldError`."""
        address = valid_address(base_url)
        if not self.allowed(address):
            raise bad_request(
                f"baseUrl: deliveries may not go to {address.host}; allow it by world_hosts "
                "(HOLDFAST_WORLD_HOSTS), or set world_service_url (WORKFLOW_SERVICE_URL)"
            )
        return address

    async def register(self, base_url: Any) -> None:
        """Note that an application listens there. Raises `WorldError`."""
        url = str(self.checked(base_url))
        latest = await self._entries()
        now = self._store.now()
        if latest and _url(latest[0]) == url and now - self._written.get(url, 0.0) < _RENEW_SECONDS:
            return
        name = str(derived_id(url, at=now)) + "|" + url
        await self._store.put_entry(
            Entry(app=self._app, kind=ADDRESS_KIND, name=name, body=b"{}", keep_until=now + _KEPT_SECONDS)
        )
        self._written[url] = now
        for old in latest:
            if _url(old) == url:
                await self._store.remove_entry(old)

    async def last(self) -> HttpAddress | None:
        """Return the allowed address that was registered last."""
        for entry in await self._entries():
            try:
                address = address_of(_url(entry))
            except ValueError:
                continue
            if self.allowed(address):
                return address
        return None

    async def _entries(self) -> list[Entry]:
        """Return addresses, last registered first."""
        return list(await self._store.entries(self._app, ADDRESS_KIND, order=EntryOrder.LATEST, limit=100))


def _url(entry: Entry) -> str:
    return entry.name.partition("|")[2]


# --- the task


class Post(Protocol):
    """See `holdfast.world.http_client.post`."""

    async def __call__(
        self, address: HttpAddress, path: str, headers: Mapping[str, str], body: bytes, *, seconds: float
    ) -> Reply: ...


class Deliverer:
    """Makes deliveries, for one server. `engine` is that of messages."""

    def __init__(self, engine: Engine, addresses: Addresses, post: Post = post) -> None:
        self._post = post
        self._rng = engine.rng
        self._settings = engine.settings
        self._addresses = addresses

    @property
    def definition(self) -> TaskDefinition:
        return TaskDefinition(
            name=TASK,
            function=self.deliver,
            signature=inspect.signature(self.deliver),
            executor=ExecutorKind.LOOP,
            queue=LANE_QUEUE,
            is_hidden=True,
        )

    async def deliver(self, queue: str, body: bytes, headers: dict[str, str], base_url: str | None = None) -> None:
        """Post a message. Returns if the application has taken it."""
        call = here.get()
        assert call is not None
        assert isinstance(call.about, InvocationRecord)
        record: InvocationRecord = call.about
        attempt = attempt_of(record)
        if attempt > MAX_DELIVERIES:  # its last ones ended with the servers that made them
            self._fail(record, MessageNotTaken("its server died", 0), "", attempt - 1)
        sent = headers | {
            "content-type": "application/json",
            "x-vqs-queue-name": queue,
            "x-vqs-message-id": PREFIX + record.id,
            "x-vqs-message-attempt": str(attempt),
        }
        where, judgement = await self._posted(base_url, _PATH + route_of(queue), sent, body)
        match judgement:
            case WantedAgain(seconds):
                why = "the application wants it again" + (f" in {seconds:g} s" if seconds else " at once")
                raise CallAgain(seconds, why, _plain(record.attributes) | {SENT_TO: where})
            case MessageNotTaken():
                self._fail(record, judgement, where, attempt)

    def _fail(self, record: InvocationRecord, failed: MessageNotTaken, where: str, attempt: int) -> None:
        """Raise the exception that postpones the message, or ends it."""
        refusals = count_of(record.attributes, REFUSALS) + (not failed.counts)
        failures = attempt if failed.counts else attempt - 1
        noted = _plain(record.attributes) | {FAILURES: str(failures), REFUSALS: str(refusals)}
        noted |= {HTTP_STATUS: str(failed.status)} if failed.status else {}
        noted |= {SENT_TO: where} if where else {}
        if failures >= MAX_DELIVERIES:
            why = f"{failed.why}; that was delivery {failures} in a row that failed, and there are {MAX_DELIVERIES}"
            raise CallFailed(_NAME, why, None, noted)
        counted = f"delivery {attempt} of {MAX_DELIVERIES}" if failed.counts else "it does not count"
        raise CallFailed(_NAME, f"{failed.why} ({counted})", wait_after(failures + refusals, self._rng.random()), noted)

    async def _posted(
        self, base_url: str | None, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[str, Judgement]:
        """Post to the first address at which anything listens. Return where that was, and the outcome."""
        refused: dict[str, str] = {}
        for find in (self._first, self._second):
            address = await find(base_url)
            if address is None or str(address) in refused:
                continue
            try:
                reply = await self._post(address, path, headers, body, seconds=self._settings.world_delivery_timeout)
                return str(address), judge(reply)
            except NoConnection as error:
                refused[str(address)] = str(error)
            except NoAnswer as error:
                return str(address), MessageNotTaken(f"{address}: {error}", 0)
        if not refused:
            return "", MessageNotTaken(self._nowhere(base_url), 0, counts=False)
        return next(iter(refused)), MessageNotTaken("; ".join(refused.values()), 0, False)

    def _nowhere(self, base_url: str | None) -> str:
        if base_url is not None and not self._addresses.allowed(address_of(base_url)):
            return f"its address {base_url} is not allowed by world_hosts, and no other one is registered"
        return "no application has registered its address yet, by start()"

    async def _first(self, base_url: str | None) -> HttpAddress | None:
        if service := self._settings.world_service_url:
            return address_of(service)
        address = None if base_url is None else address_of(base_url)
        return address if address is not None and self._addresses.allowed(address) else None

    async def _second(self, base_url: str | None) -> HttpAddress | None:
        return None if self._settings.world_service_url else await self._addresses.last()


def _plain(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of a message without those about its deliveries."""
    return {name: attributes[name] for name in (QUEUE, RUN) if name in attributes}
