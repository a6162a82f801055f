"""What is wrong with an app and its store, and what to do: for ``holdfast doctor``. Nothing is changed, but
that a damaged record is set aside by whatever reads it; then it is among the findings.

The store is checked unopened first. If its schema or an index is not as it should be, the rest of it is not looked at:
to open it would repair it. Each question reads a bounded number of records: the head of an index, runners, lanes,
queues. What is decided from settings is pure.
"""

from __future__ import annotations

import ipaddress
import platform
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from holdfast._version import __version__
from holdfast.clock import format_duration
from holdfast.errors import HoldfastError
from holdfast.model.eligibility import RUNNER, Lane, Reason, lane_obstacle, offer_of
from holdfast.model.explain import living
from holdfast.model.names import counted
from holdfast.model.rates import is_rate_key, shown_key
from holdfast.model.records import Quarantined, RunnerRecord, runner_of
from holdfast.model.status import FINAL, OWNED
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.fitting import secret_parameters
from holdfast.runtime.naming import declared
from holdfast.runtime.queues import Queue, Queues
from holdfast.runtime.runs import WORLD_QUEUE
from holdfast.schedules.records import KIND as SCHEDULE
from holdfast.settings import Settings
from holdfast.showing import at_least, error_text, moment
from holdfast.store.contract import EntryOrder, Filter, Finding, Order, Store
from holdfast.web.documents import Document
from holdfast.web.reading.apps import names_in
from holdfast.web.reading.queues import MOST_COUNTED
from holdfast.web.rules import is_loopback

OK, HINT, WRONG, UNCHECKED = "ok", "hint", "wrong", "not checked"
LATE_SECONDS = 60.0  # for the services; they look every few seconds
LONG_WAIT_SECONDS = 300.0
_AHEAD_SECONDS = 2.0
_STARTING_SECONDS = 15.0
_LONG_TOKEN = 32
_NAMED = 5
_HOLDERS = 1000
_UNCHECKED = ("tlsInsecure", "tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames")
_WITH_TLS = frozenset({"tlscafile", "tlscertificatekeyfile", "tlscrlfile"})  # these turn it on


class Symptom(NamedTuple):
    """A line of the diagnosis: the subject, one of the four states, what was found, and what to do."""

    subject: str
    state: str
    detail: str
    advice: str = ""


class Diagnosis(NamedTuple):
    """All that was looked at, in order."""

    symptoms: Sequence[Symptom]

    @property
    def is_well(self) -> bool:
        """Return whether nothing is wrong; there may be hints."""
        return all(each.state != WRONG for each in self.symptoms)

    def document(self) -> Document:
        return {"ok": self.is_well, "findings": [each._asdict() for each in self.symptoms]}


class DiagnosisReading:
    """Look into one app, whose store is in a `file` if it is a SQLite store."""

    def __init__(self, runtime: AppRuntime, file: Path | None) -> None:
        self._runtime = runtime
        self._file = file
        self._queues = Queues(runtime)

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis, for commands. What cannot be reached is part of it."""
        runtime = self._runtime
        found = [_versions(), *of_settings(runtime.settings, runtime.url), *_open_secrets(runtime)]
        if self._file is not None and not self._file.exists():  # to look into it would be to make it
            return Diagnosis([*found, Symptom("store", WRONG, "it is not there yet", "holdfast store prepare")])
        try:
            checked = [_of_check(each) for each in runtime.run(self._check())]
            found += [*(() if self._file is None else _file_place(self._file)), *checked]
            if any(each.state == WRONG and each.subject.startswith(_BY_OPENING) for each in checked):
                why = "to open the store would repair it"
                found.append(Symptom("work", UNCHECKED, why, "repair the problems above, and run this again"))
            else:
                before = runtime.run(self._quarantined())
                found += runtime.run(self._work())
                found += _queues(self._queues.list(most=MOST_COUNTED + 1))
                found += map(_of_quarantined, [each for each in runtime.run(self._quarantined()) if each not in before])
        except HoldfastError as error:
            advice = "see docs/operations/troubleshooting.md"
            found.append(Symptom("store", WRONG, f"it cannot be read: {error_text(error)}", advice))
        return Diagnosis(found)

    async def _check(self) -> Sequence[Finding]:
        return await self._runtime.make_engine()().store.check()

    async def _quarantined(self) -> Sequence[Quarantined]:
        engine = await self._runtime.engine()
        return await engine.store.quarantined(engine.app, latest=_NAMED)

    async def _work(self) -> list[Symptom]:
        engine = await self._runtime.engine()
        roster, now = await engine.store.roster(engine.app), engine.store.now()
        settings, apps = self._runtime.settings, await names_in(engine.store)
        alive = living(roster, now, settings.dead_after_seconds)
        found = [
            _clock(self._runtime.clock.now() - now),
            *_name(engine.app, apps),
            *_runners(roster, alive, now, engine),
        ]
        lanes = await engine.store.lanes(engine.app)
        found += _lanes(lanes, alive)
        found += await _owners(engine, {each.id for each in roster}, {each.id for each in alive})
        found += await _services(engine, now)
        found += await _holders(engine.store, engine.app)
        stuck = ("lane", "owner", "limit", "services")
        if not any(each.subject.startswith(stuck) for each in found):
            found.append(Symptom("stuck work", OK, "none: no call waits for a missing runner, slot or owner"))
        return found


def _name(app: str, apps: Sequence[str]) -> Iterator[Symptom]:
    if apps and app not in apps:
        detail = f"the store has nothing of an app '{app}'; it has: {', '.join(apps)}"
        yield Symptom("name", HINT, detail, f"unless '{app}' is new, name one of them: --name {apps[0]}")


_BY_OPENING = ("schema", "index", "integrity")


def _of_check(finding: Finding) -> Symptom:
    if not finding.checked:
        return Symptom(finding.subject, UNCHECKED, finding.detail, finding.advice)
    state = WRONG if not finding.ok else HINT if finding.advice else OK
    return Symptom(finding.subject, state, finding.detail, finding.advice)


def _of_quarantined(record: Quarantined) -> Symptom:
    detail = f"this look met it damaged and set it aside, whole: nothing of it is lost. {record.why}"
    return Symptom(f"{record.kind} {record.id}", WRONG, detail, "see docs/operations/damaged-records.md")


def _versions() -> Symptom:
    return Symptom("versions", OK, f"Holdfast {__version__}, Python {platform.python_version()}, {platform.system()}")


# --- settings


def of_settings(settings: Settings, url: str) -> list[Symptom]:
    """Return what is unsafe or contradictory in the settings; pure."""
    found = [*_addresses(settings, url), *_secrets(settings)]
    if not settings.stats_retention_seconds:
        found.append(
            Symptom(
                "stats", HINT, "stats_retention_seconds is 0: nothing is counted", "stats, top and pages stay empty"
            )
        )
    if settings.cancel_grace_seconds > settings.drain_timeout_seconds:
        grace, drain = (
            format_duration(each) for each in (settings.cancel_grace_seconds, settings.drain_timeout_seconds)
        )
        found.append(
            Symptom(
                "cancel_grace_seconds",
                HINT,
                f"cancelled code has {grace} to clean up, but a runner that stops gives it {drain}",
                "raise drain_timeout_seconds to at least that",
            )
        )
    return found or [Symptom("settings", OK, "nothing unsafe or contradictory")]


def _addresses(settings: Settings, url: str) -> Iterator[Symptom]:
    for name in ("public_url", "world_service_url"):
        try:
            parts = urlsplit(getattr(settings, name))
        except ValueError as error:
            yield Symptom(name, WRONG, f"{name} is no address: {error}", "write https://host")
            continue
        if parts.scheme == "http" and not _is_private(parts.hostname or ""):
            yield Symptom(
                name, WRONG, f"{name} begins with http://: its secrets cross the network in clear", "use https://"
            )
    if settings.world_hosts.strip() == "*":
        yield Symptom("world_hosts", HINT, "world_hosts is *: the World may deliver to any host", "name the hosts")
    if url.startswith(("mongodb://", "mongodb+srv://")):
        yield from _mongo_url(url)


def _mongo_url(url: str) -> Iterator[Symptom]:
    # Not by urlsplit, as the driver does not: a password may have any character but a few.
    scheme, _, rest = url.partition("://")
    user, _, place = re.split(r"[/?]", rest, maxsplit=1)[0].rpartition("@")
    hosts = [re.sub(r":[0-9]*$", "", each).strip("[]") for each in place.split(",")]
    options = {name.lower(): value for name, value in parse_qsl(rest.partition("?")[2])}
    for name in _UNCHECKED:
        if options.get(name.lower()) == "true":
            detail = f"{name} is true: another server may take the place of yours, and get what is stored"
            yield Symptom("url", WRONG, detail, "name the CA of the server instead: tlsCAFile=…")
    if all(map(is_loopback, hosts)):
        return
    by_default = scheme == "mongodb+srv" or not _WITH_TLS.isdisjoint(options)
    if options.get("tls", options.get("ssl", "true" if by_default else "")) != "true":
        yield Symptom("url", WRONG, "the MongoDB server is on another host, and TLS is off", "add tls=true to the URL")
    if not user and "authmechanism" not in options:
        advice = "make a user: holdfast store roles"
        yield Symptom("url", WRONG, "the MongoDB server is on another host, and the URL names no user", advice)


def _is_private(host: str) -> bool:
    """Return whether a host is this machine, or a name or address that only a network of one's own has."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return is_loopback(host) or "." not in host


def _secrets(settings: Settings) -> Iterator[Symptom]:
    for name in ("api_token", "world_token"):
        token = getattr(settings, name)
        if token and (len(token) < _LONG_TOKEN or len(set(token)) < _LONG_TOKEN // 4):
            detail = f"{name} is short or has few different characters: it may be guessed"
            yield Symptom(name, WRONG, detail, "take the output of: openssl rand -hex 32")
    if settings.api_token and settings.api_token == settings.world_token:
        yield Symptom("api_token", HINT, "api_token and world_token are the same", "give each its own")
    if settings.hook_secret and settings.hook_secret == settings.hook_secret_previous:
        advice = "leave hook_secret_previous empty until the next change"
        yield Symptom("hook_secret", HINT, "hook_secret and hook_secret_previous are the same", advice)


def _open_secrets(runtime: AppRuntime) -> Iterator[Symptom]:
    """Find tasks whose secrets would lie in the store as they are."""
    if runtime.codec.name_payload is not None:
        return
    found = [each.name for each in declared(runtime) if secret_parameters(each.function, each.signature)]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        detail = f"parameters of {', '.join(found[:_NAMED])}{more} are Secret, and are stored without encryption"
        yield Symptom("encryption_keys", HINT, detail, "set encryption_keys; see docs/guides/encryption.md")


def _file_place(file: Path) -> Iterator[Symptom]:
    """Look at the folder of a SQLite file: a user who may write there may put another file in its place."""
    folder = file.parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IWOTH:
        detail = f"every user of this host may write in {folder} (mode {mode:04o}), and runners execute what is stored"
        if mode & stat.S_ISVTX:
            yield Symptom("folder", HINT, detail, "move the store into a folder of its own, which no clean-up empties")
        else:
            yield Symptom("folder", WRONG, detail, f"chmod o-w {folder}, or move the store")


# --- clocks and runners


def _clock(difference: float) -> Symptom:
    detail = f"this host and the store differ by {format_duration(round(abs(difference), 3))}"
    state, advice = (OK, "") if abs(difference) < _AHEAD_SECONDS else (HINT, "run NTP; the store's time counts")
    return Symptom("clock", state, detail, advice)


def _runners(
    roster: Sequence[RunnerRecord], alive: Sequence[RunnerRecord], now: float, engine: Engine
) -> Iterator[Symptom]:
    if not alive:
        yield Symptom("runners", HINT, "no runner is alive", "start one: holdfast run")
    else:
        yield Symptom("runners", OK, f"{counted(len(alive), 'runner')} alive")
    for runner in roster:
        name, ahead = f"runner {runner.id}", runner.heartbeat_at - now
        if runner not in alive:
            detail = f"silent for {format_duration(round(-ahead))}, and still on the roster"
            advice = "a live runner declares it dead within 20 s: start one with holdfast run"
            yield Symptom(name, HINT, detail, advice)
            continue
        if ahead > _AHEAD_SECONDS:
            advice = "set the clock of its host right; runners may be declared dead too late"
            yield Symptom(
                name, WRONG, f"its heartbeat is {format_duration(round(ahead, 1))} ahead of the store", advice
            )
        if runner.version != __version__:
            detail = f"it runs Holdfast {runner.version} on {runner.host}, and this is {__version__}"
            yield Symptom(name, HINT, detail, "deploy the same version everywhere; see docs/operations/deploys.md")
        if runner.schema and runner.schema < engine.store.schema_version:
            yield Symptom(name, HINT, "its code is older than the schema that this one brings", "deploy it too")
        here = engine.settings.dead_after_seconds
        if runner.dead_after_seconds and runner.dead_after_seconds != here:
            theirs = format_duration(runner.dead_after_seconds)
            detail = f"runner_considered_dead_after is {theirs} there and {format_duration(here)} here"
            yield Symptom(name, HINT, detail, "give all processes the same settings")
        if runner.lacks_workers and now - runner.started_at > _STARTING_SECONDS:
            advice = "its log says why they end: a lifespan that raises, say. It starts them again and again"
            yield Symptom(name, WRONG, "none of its worker processes has started", advice)
        silent = [each.id for each in runner.workers if each.unresponsive_since is not None]
        if silent:
            detail = f"{counted(len(silent), 'worker')} did not answer: {', '.join(silent[:_NAMED])}"
            yield Symptom(name, WRONG, detail, "see docs/operations/runners.md; holdfast runners shows what it runs")


# --- stuck work


def _lanes(lanes: Sequence[str], alive: Sequence[RunnerRecord]) -> Iterator[Symptom]:
    """Find calls that no live runner takes. Runs of a World are none of theirs: its servers deliver them."""
    for lane in lanes:
        if Lane.of(lane).queue == WORLD_QUEUE:
            continue
        reasons = [lane_obstacle(lane, offer_of(runner), RUNNER) for runner in alive]
        if None in reasons:
            continue
        task, queue = Lane.of(lane).task, Lane.of(lane).queue
        subject = f"lane {queue} {task}"
        if not alive:
            yield Symptom(subject, WRONG, f"calls of '{task}' wait, and no runner is alive", "start one: holdfast run")
            continue
        best = max((reason for reason in reasons if reason), key=_CLOSEST.index)
        says, advice = _ADVICE[best]
        yield Symptom(subject, WRONG, f"calls of '{task}' wait: {says.format(queue=queue)}", advice.format(queue=queue))


_ADVICE = {
    Reason.DRAINING: ("every runner is draining", "start one: holdfast run"),
    Reason.UNKNOWN_TASK: ("no live runner knows the task", "start a runner with its code, or give a task aliases=[…]"),
    Reason.QUEUE_NOT_SERVED: (
        "no live runner serves the queue '{queue}'",
        "start one: holdfast run --queues {queue}",
    ),
    Reason.TAGS_MISSING: ("no live runner has their tags", "start one with them: holdfast run --tags …"),
}
_CLOSEST = list(_ADVICE)


async def _owners(engine: Engine, on_roster: set[str], alive: set[str]) -> list[Symptom]:
    """Find work of runners that are gone."""
    found = []
    for runner in dict.fromkeys(runner_of(owner) for owner in await engine.store.owners(engine.app)):
        if runner in alive:
            continue
        where = "is silent" if runner in on_roster else "is not on the roster"
        held = await engine.store.find(engine.app, Filter(runner=runner, statuses=OWNED), _NAMED)
        names = ", ".join(each.id for each in held)
        advice = "a live runner recovers them within 20 s" if alive else "start a runner: it recovers them"
        detail = f"runner {runner} {where} and owns calls: {names}"
        found.append(Symptom("owners", HINT if alive else WRONG, detail, advice))
    return found


async def _services(engine: Engine, now: float) -> list[Symptom]:
    """Find duties of the services that are late, by the heads of their indexes."""
    store, app, late = engine.store, engine.app, now - LATE_SECONDS
    found: list[tuple[str, float]] = []
    for ended in await store.find(app, Filter(), 1, order=Order.OUTBOX):
        found.append((f"the end of {ended.id} has not been delivered to its triggers", ended.changed_at))
    for waiting in await store.find(app, Filter(), 1, order=Order.START_BY):
        found.append((f"{waiting.id} has expired, and has not been ended", waiting.start_by or now))
    for run in await store.find(app, Filter(), 1, order=Order.WAKE_AT):
        found.append((f"the run {run.id} sleeps past its time", run.wake_at or now))
    for entry in await store.entries(app, SCHEDULE, order=EntryOrder.DUE, limit=1):
        found.append((f"the schedule '{entry.name}' is past its tick", entry.due_at or now))
    advice = "start a runner: holdfast run; if one is alive: holdfast services"
    return [Symptom("services", WRONG, f"{what}, since {moment(at)}", advice) for what, at in found if at < late]


async def _holders(store: Store, app: str) -> list[Symptom]:
    """Find slots that ended calls hold, for which others wait."""
    found = []
    for key in list(await store.waiting_keys(app, most=_HOLDERS))[:_HOLDERS]:
        held = await store.find(app, Filter(limit_key=key), _HOLDERS, order=Order.SLOT)
        if ended := [each.id for each in held if each.status in FINAL]:
            name = f"limit {shown_key(key) if is_rate_key(key) else key}"
            detail = f"calls wait for it, and ended calls hold its slots: {', '.join(ended[:_NAMED])}"
            found.append(Symptom(name, WRONG, detail, "holdfast store check --deep; restore a backup"))
    return found


def _queues(queues: Sequence[Queue]) -> Iterator[Symptom]:
    for queue in queues:
        name, waiting = f"queue {queue.name}", at_least(queue.waiting, MOST_COUNTED)
        if queue.pause is not None:
            why = f": {queue.pause.reason}" if queue.pause.reason else ""
            detail = f"paused by {queue.pause.by} since {moment(queue.pause.at)}{why}; {waiting} calls wait"
            yield Symptom(name, HINT, detail, f"holdfast queues resume {queue.name}")
        elif (queue.oldest_seconds or 0.0) > LONG_WAIT_SECONDS:
            waited = format_duration(round(queue.oldest_seconds or 0.0))
            advice = "more --concurrency or runners; holdfast why ID says what one waits for"
            if queue.name == WORLD_QUEUE:
                advice = "a server of the World delivers them: holdfast world serve"
            yield Symptom(name, HINT, f"{waiting} calls wait, the oldest for {waited}", advice)
