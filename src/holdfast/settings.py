"""Settings: one frozen object, merged once; each value knows its source.

A keyword beats the environment (``HOLDFAST_<NAME>``), which beats ``[tool.holdfast]`` in the nearest pyproject.toml,
which beats the default. The fields of `Settings` are the only list of settings: name, type, default, bounds and
documentation stand together; parsing, checks, `explain` and the error messages are derived from them. An unknown name
is refused in every source: a misspelt setting that is silently ignored is found in production.

Nothing here reads `os.environ` or the current folder: the caller passes both.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from holdfast.clock import format_duration, parse_duration
from holdfast.codec.sealing import parse_keys
from holdfast.errors import ConfigurationError, HoldfastError, InvalidSetting, UnknownSetting
from holdfast.masking import mask_url
from holdfast.schedules.timing import cron

DEFAULT_FILE = "holdfast.db"
PREFIX = "HOLDFAST_"
# Switches of the test suite and of fault injection. They share the prefix and are no settings.
_FOREIGN_PREFIXES = ("HOLDFAST_TEST_", "HOLDFAST_CRASH_")
DAY, CENTURY = 86_400.0, 3_153_600_000
KiB, MiB = 2**10, 2**20
_UNITS = {"_seconds": 1.0, "_minutes": 60.0}
_HEARTBEAT_PAIR = ("runner_heartbeat_seconds", "runner_considered_dead_after_minutes")
_SLOT_TRIO = tuple(f"atomic_service_{name}" for name in ("spread_margin_minutes", "interval_minutes", "max_members"))
_FORMS = {
    "web": r"https?://[^\s/?#@]+(/[^\s?#]*)?",
    "hosts": r"\*|[\w.\[\]:-]+(\s*,\s*[\w.\[\]:-]+)*",
    "header": r"[A-Za-z0-9-]+",
}
_FORMED = {
    "web": "a URL with its scheme, such as https://shop.example",
    "hosts": 'names without ports, such as "shop.example,10.0.0.7", or "*"',
    "networks": 'addresses or networks, such as "10.0.0.7" or "10.0.0.0/24,fd00::7"',
    "keys": "id:key pairs with commas, each key 32 random bytes in base64 (openssl rand -base64 32)",
    "header": "the name of a header, such as X-Forwarded-User",
}
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class SettingOrigin(NamedTuple):
    """A setting's value and what set it.

    `source` is ``keyword``, ``environment HOLDFAST_…``, ``pyproject.toml (/folder)`` or ``default``.
    """

    value: object
    source: str


class SettingRow(NamedTuple):
    """A line of ``holdfast config``, without secrets; `shown` has a duration in both its forms."""

    name: str
    value: object
    shown: str
    source: str
    doc: str


def _setting(default: object, doc: str, **facts: Any) -> Any:
    """Declare a setting, with the fields of `_Spec`. `seconds` is for a duration whose name does not say its unit."""
    return field(default=default, metadata={"doc": doc, **facts})


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings ``atomic_service_…``, durations in seconds. Their meaning and defaults are in `Settings`."""

    interval_seconds: float
    spread_margin_seconds: float
    check_interval_seconds: float
    max_start_slot_fraction: float
    membership_stabilization_seconds: float
    min_run_margin_seconds: float
    execution_retention_seconds: float
    execution_max_records: int
    max_members: int


@dataclass(frozen=True, repr=False)
class Settings:
    """All settings of one app. Use `load`; a direct call takes keywords only and is checked just the same."""

    url: str = _setting("", "the store; empty: holdfast.db beside pyproject.toml, or here", also="WORKFLOW_MONGODB_URI")
    name: str = _setting("", "the app's name; empty for 'default'")
    app: str = _setting("", "module:attribute of the app, for the command line")
    concurrency: int = _setting(10, "slots of a runner, per worker", low=1, high=10_000)
    poll_interval_seconds: float = _setting(1.0, "between looks of idle runners and waiters", low=0.01, high=60)
    drain_timeout_seconds: float = _setting(30.0, "for running work, when a runner stops", low=0, high=86_400)
    cancel_grace_seconds: float = _setting(10.0, "for cancelled code to clean up; then it is ended", low=0, high=86_400)
    note_interval_seconds: float = _setting(
        1.0, "between writes of the progress and other notes of one call", low=0.05, high=3_600
    )
    waiting_threads: int = _setting(
        100, "of tasks that wait for others, per worker; 0: they keep their slots", low=0, high=10_000
    )
    waiting_processes: int = _setting(10, "likewise, of tasks with a process of their own", low=0, high=10_000)
    waiting_coroutines: int = _setting(1_000, "likewise, of tasks that are coroutines", low=0, high=1_000_000)
    workflow_linger_seconds: float = _setting(1.0, "that a waiting workflow stays in memory", low=0, high=3_600)
    workflow_max_events: int = _setting(50_000, "in the log of a run; then it fails", low=100, high=10_000_000)
    workflow_cache: int = _setting(1_000, "workflows in the memory of a worker", low=1, high=1_000_000)
    encryption_keys: str = _setting(
        "", "that encrypt stored values: id:base64 of 32 bytes, newest first, with commas", form="keys"
    )
    encryption_keys_file: str = _setting("", "a file with these keys, one on each line, in the place of the setting")
    secret_names: str = _setting("", "words in names of arguments that are not shown, beside the usual; with commas")
    hook_secret: str = _setting("", "of which tokens of hooks are derived: 32 bytes or more", form="secret", low=32)
    hook_secret_previous: str = _setting(
        "", "the hook_secret before this one, for runs of that time", form="secret", low=32
    )
    public_url: str = _setting("", "of webhooks, as others reach them: https://shop.example", form="web")
    webhook_limit: int = _setting(MiB, "bytes of a webhook's body; more is refused", low=1024, high=16 * MiB)
    runner_heartbeat_seconds: float = _setting(2.0, "between heartbeats; at most dead-after / 4", low=0.01, high=3_600)
    runner_considered_dead_after_minutes: float = _setting(0.25, "of silence, then it is dead", low=0.001, high=1_440)
    atomic_service_interval_minutes: float = _setting(1.0, "the cycle; each member has one slot", low=0.001, high=1_440)
    atomic_service_spread_margin_minutes: float = _setting(1 / 60, "the gap after a slot", low=0, high=1_440)
    atomic_service_check_interval_minutes: float = _setting(1 / 60, "between looks for a turn", low=0.0001, high=1_440)
    atomic_service_max_start_slot_fraction: float = _setting(0.9, "of a slot to start in; 0, 1: all", low=0, high=1)
    atomic_service_membership_stabilization_minutes: float = _setting(0.0, "before a first start", low=0, high=1_440)
    atomic_service_min_run_margin_seconds: float = _setting(0.05, "left of a slot at the start", low=0, high=3_600)
    atomic_service_execution_retention_minutes: float = _setting(60.0, "for records of executions", low=0, high=525_600)
    atomic_service_execution_max_records: int = _setting(1000, "records of executions kept", low=1, high=1_000_000)
    atomic_service_max_members: int = _setting(3, "how many runners take turns: the oldest", low=1, high=1_000)
    recover_pending_invocations_cron: str = _setting("*/15 * * * * *", "when to look for claimed work that never began")
    max_pending_seconds: float = _setting(5.0, "for claimed work to start before others get it", low=0.1, high=86_400)
    recover_running_invocations_cron: str = _setting("*/15 * * * * *", "when to look for work of dead runners")
    worker_unresponsive_seconds: float = _setting(
        10.0, "without an answer of a worker; then a warning", low=1, high=86_400
    )
    validate: Literal["off", "submit"] = _setting(
        "off", "submit: arguments are checked against annotations when a call is submitted", choices=("off", "submit")
    )
    max_crash_recoveries: int = _setting(3, "crashes in a row, without progress, that work outlives", low=0, high=50)
    archive_retention_seconds: float = _setting(7 * DAY, "for ended work; tasks may differ", low=3_600, high=CENTURY)
    stream_retention_seconds: float = _setting(
        float(CENTURY),
        "for chunks, from the end of their invocation; they go with it at the latest",
        low=60,
        high=CENTURY,
    )
    trigger_task_modules: str = _setting("", "modules that a runner imports at its start, with commas between them")
    event_retention_seconds: float = _setting(7 * DAY, "for events, with what they caused", low=3_600, high=CENTURY)
    stats_retention_seconds: float = _setting(
        30 * DAY, "for counters of ended calls; 0: nothing is counted", low=0, high=CENTURY
    )
    audit_retention_seconds: float = _setting(400 * DAY, "for the audit record of actions", low=DAY, high=CENTURY)
    release: str = _setting(
        "", "the name of your code's version, which marks its deploys; empty: a digest of the tasks"
    )
    trigger_max_depth: int = _setting(100, "triggers in a chain; a longer one is a loop", low=1, high=10_000)
    api_token: str = _setting("", "of the HTTP API, for 'Authorization: Bearer …'", form="token", low=16)
    metrics: bool = _setting(False, "True: metrics are counted, and /metrics answers")
    metrics_token: str = _setting("", "of /metrics, for 'Authorization: Bearer …'", form="token", low=16)
    runner_http: str = _setting("", "where a runner answers /health/live, /health/ready and /metrics: 127.0.0.1:9000")
    tracing: bool = _setting(False, "True: submits, attempts and steps are spans of OpenTelemetry")
    session_seconds: float = _setting(12 * 3600.0, "from a login on a page to its end", low=60, high=30 * DAY)
    allowed_hosts: str = _setting("", "names of the web app's server, with commas; empty, *: any", form="hosts")
    proxy_address: str = _setting("", "of a proxy with a login: addresses or networks, with commas", form="networks")
    proxy_user_header: str = _setting("", "in which that proxy names the user", form="header")
    proxy_role: Literal["viewer", "operator", "admin"] = _setting(
        "viewer", "of its users, if no header says", choices=("viewer", "operator", "admin")
    )
    proxy_role_header: str = _setting("", "in which it names the user's role", form="header")
    webhook_token_rate: float = _setting(10.0, "webhooks per second for one URL", low=0.01, high=100_000)
    webhook_source_rate: float = _setting(100.0, "webhooks per second from one address", low=0.01, high=100_000)
    world_token: str = _setting("", "of the World's server, for 'Authorization: Bearer …'", form="token", low=16)
    world_service_url: str = _setting(
        "", "of the application that runs workflows; empty: as it registers", form="web", also="WORKFLOW_SERVICE_URL"
    )
    world_hosts: str = _setting("", "to which the World may deliver, with commas; * for any; empty: this machine")
    world_concurrency: int = _setting(
        20, "deliveries of the World at once, per server", low=1, high=10_000, also="WORKFLOW_CONCURRENCY"
    )
    world_delivery_timeout: float = _setting(3600.0, "for a delivery of the World", low=1, high=DAY, seconds=True)
    world_message_retention_seconds: float = _setting(
        7 * DAY, "for ended messages of the World", low=3_600, high=CENTURY
    )
    world_body_limit: int = _setting(32 * MiB, "bytes of a request to the World", low=1024, high=512 * MiB)
    world_database: str = _setting(
        "workflow", "the database at WORKFLOW_MONGODB_URI", also="WORKFLOW_MONGODB_DATABASE_NAME"
    )
    sqlite_synchronous: Literal["full", "normal"] = _setting(
        "full", "full survives a power cut; normal may lose the last commits then", choices=("full", "normal")
    )
    sqlite_busy_timeout_seconds: float = _setting(10.0, "for another process that writes the file", low=0.1, high=600)
    max_waiting: int = _setting(
        0, "calls of the app that may wait; then a submit is refused; 0: any", low=0, high=10**9
    )
    inline_limit: int = _setting(64 * KiB, "bytes beyond which a value is stored as a payload", low=1024, high=MiB)
    chunk_threshold: int = _setting(15 * MiB, "bytes beyond which a value is cut into pieces", low=1024, high=15 * MiB)
    payload_cache: int = _setting(
        64 * MiB, "bytes of payloads that were read and stay in memory, per process", low=0, high=2**32
    )
    payload_limit: int = _setting(512 * MiB, "bytes beyond which a value is refused", low=1024, high=2**32)
    use_change_streams: bool = _setting(
        True, "MongoDB: wake up by a change stream; else by polling", also="WORKFLOW_MONGODB_CHANGE_STREAMS"
    )
    signal_retention_seconds: float = _setting(3600.0, "MongoDB: for hints of dead processes", low=60, high=30 * DAY)
    max_retries: int = _setting(5, "MongoDB: retries of an operation after transient errors", low=0)
    retry_base_delay: float = _setting(0.1, "MongoDB: the first pause before a retry", low=0.001, seconds=True)
    retry_max_delay: float = _setting(60.0, "MongoDB: the longest pause before a retry", low=0.001, seconds=True)
    retry_max_time: float = _setting(300.0, "MongoDB: how long to retry altogether", low=0, seconds=True)
    retry_indefinitely: bool = _setting(False, "MongoDB: retry without end, whatever the other limits")
    _sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def load(
        cls, overrides: Mapping[str, object] | None = None, *, environ: Mapping[str, str], folder: Path
    ) -> Settings:
        """Merge all sources. `None` as an override and an empty environment variable both mean "not given".

        Raises `UnknownSetting`, `InvalidSetting`, or `ConfigurationError` for a pyproject.toml that cannot be read.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for layer in (_from_pyproject(folder), _from_environment(environ), _from_keywords(overrides or {})):
            for name, origin in layer.items():
                values[name], sources[name] = origin
        return cls(**values, _sources=sources)

    def __post_init__(self) -> None:
        for spec in SPECS.values():
            # The only write to a frozen object: "15s" becomes 0.25 here, so that no reader meets the unparsed form.
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name), self._source(spec.name)))
        longest = self.runner_considered_dead_after_minutes * 60 / 4
        if self.runner_heartbeat_seconds > longest:
            heartbeat, dead_after = map(self._described, _HEARTBEAT_PAIR)
            raise InvalidSetting(
                f"{heartbeat} is too long for {dead_after}: with fewer than four heartbeats in that time, a living "
                f"runner could be declared dead. Use at most {format_duration(longest)}, or a longer dead-after."
            )
        if self.payload_limit < self.inline_limit:
            inline, payload = map(self._described, ("inline_limit", "payload_limit"))
            raise InvalidSetting(
                f"{payload} is less than {inline}, so no value could be stored as a payload: it would be refused. "
                "Use a larger payload_limit, or a smaller inline_limit."
            )
        if self.proxy_user_header and not self.proxy_address:
            raise InvalidSetting(
                f"{self._described('proxy_user_header')} needs proxy_address: from any other address, the header would "
                "be no proof. Name the address that the proxy connects from."
            )
        slots = self.slots
        if slots.max_members > 1 and slots.interval_seconds / slots.max_members <= slots.spread_margin_seconds:
            margin, interval, members = map(self._described, _SLOT_TRIO)
            raise InvalidSetting(
                f"{margin} leaves nothing of a slot, with {interval} and {members}: with so many runners no service "
                "would run. Use a shorter margin, a longer interval or fewer members."
            )

    @property
    def dead_after_seconds(self) -> float:
        return self.runner_considered_dead_after_minutes * 60

    @property
    def slots(self) -> SlotSettings:
        """Return the settings ``atomic_service_…`` in seconds."""
        own = [spec for spec in SPECS.values() if spec.name.startswith("atomic_service_")]
        names = [spec.name.removeprefix("atomic_service_").replace("_minutes", "_seconds") for spec in own]
        return SlotSettings(**{n: getattr(self, s.name) * (s.unit or 1) for n, s in zip(names, own, strict=True)})

    def _described(self, name: str) -> str:
        return f"{name} = {SPECS[name].show(getattr(self, name))} ({self._source(name)})"

    def _source(self, name: str) -> str:
        given = getattr(self, name) != SPECS[name].default
        return self._sources.get(name, "keyword" if given else "default")

    def origin(self, name: str) -> SettingOrigin:
        """Return the value of a setting, unmasked, and its source."""
        if name not in SPECS:
            raise _unknown(name, "asked for")
        return SettingOrigin(getattr(self, name), self._source(name))

    def explain(self) -> list[SettingRow]:
        """Return every setting in order of declaration, for people: without secrets."""
        rows = []
        for spec in SPECS.values():
            value, source = self.origin(spec.name)
            rows.append(SettingRow(spec.name, _mask(spec.name, value), spec.show(value), source, spec.doc))
        return rows

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={_mask(name, getattr(self, name))!r}' for name in SPECS)})"


@dataclass(frozen=True)
class _Spec:
    """The declaration of one setting."""

    name: str
    default: bool | int | float | str
    doc: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    seconds: bool = False
    form: Literal["", "secret", "token", "web", "hosts", "networks", "header", "keys"] = (
        ""  # of a text; `low` is how many bytes a secret has at least
    )
    also: str = ""  # another variable of the environment, which the one with our prefix beats

    @property
    def is_secret(self) -> bool:
        return self.form in ("secret", "token", "keys")

    @property
    def unit(self) -> float | None:
        """Return the seconds in the unit of the name, or None for a setting that is no duration."""
        by_name = next((seconds for suffix, seconds in _UNITS.items() if self.name.endswith(suffix)), None)
        return 1.0 if self.seconds else by_name

    def read(self, text: str, source: str) -> object:
        """Return the value of an environment variable. Durations are left to `check`: they are text in any source."""
        if isinstance(self.default, bool):
            if text.strip().lower() not in _BOOLEANS:
                raise self.invalid(text, source)
            return _BOOLEANS[text.strip().lower()]
        if isinstance(self.default, int):
            if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
                raise self.invalid(text, source)
            return int(text)
        if isinstance(self.default, float) and self.unit is None:
            try:
                return float(text)
            except ValueError:
                raise self.invalid(text, source) from None
        return text

    def check(self, value: object, source: str) -> object:
        """Return the value in its stored form. Raises `InvalidSetting` for a wrong type or a value out of range."""
        if isinstance(self.default, float):
            value = self._number(value, source)
        if self.name.endswith("_modules"):
            value = self._modules(value, source)
        if type(value) is not type(self.default):  # not isinstance: True is an int, and no number of places
            raise self.invalid(value, source)
        if isinstance(value, str) and self.choices and value not in self.choices:
            raise self.invalid(value, source)
        if isinstance(value, int | float) and not self.low <= value <= self.high:  # so put that NaN fails too
            raise self.invalid(value, source)
        if value and isinstance(value, str) and self.form:
            value = self._formed(value, source)
        if self.name.endswith("_cron") and value != self.default:
            try:
                cron(str(value))
            except HoldfastError as error:
                raise self.invalid(value, source) from (None if mask_url(value) != value else error)
        return value

    def _formed(self, value: str, source: str) -> str:
        """Return a secret that is long enough, or the address of a web site."""
        if self.form == "keys":
            try:
                parse_keys(value)
            except ValueError as error:
                raise InvalidSetting(
                    f"{self.name} = *** ({source}) is not allowed: {error}. Use {self.allowed()}."
                ) from None
            return value
        if self.is_secret:
            # A token is sent in a header, which has no blanks, and letters of ASCII only.
            is_sent = self.form == "secret" or re.fullmatch(r"[\x21-\x7e]*", value)
            try:
                size = len(value.encode())
            except UnicodeEncodeError:  # a variable of the environment that is no UTF-8
                size = -1
            if not is_sent or size < self.low:
                raise self.invalid(value, source) from None
            return value
        if self.form == "networks":
            return self._networks(value, source)
        if not re.fullmatch(_FORMS[self.form], value):
            raise self.invalid(value, source)
        return value.rstrip("/")

    def _networks(self, value: str, source: str) -> str:
        """Return networks with commas between them. Every address would be no proxy."""
        try:
            found = [ipaddress.ip_network(each.strip()) for each in value.split(",")]
        except ValueError:
            raise self.invalid(value, source) from None
        if not all(network.prefixlen for network in found):
            raise self.invalid(value, source)
        return ",".join(map(str, found))

    def _modules(self, value: object, source: str) -> object:
        """Return a text or a list of names as a text."""
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise self.invalid(value, source)
        names = [name.strip() for name in given if name.strip()]
        if not all(part.isidentifier() for name in names for part in name.split(".")):
            raise self.invalid(value, source)
        return ",".join(names)

    def _number(self, value: object, source: str) -> object:
        """Return a number or a duration as a float; anything else as it is, for `check` to refuse."""
        try:
            if type(value) in (int, float) or (self.unit is not None and isinstance(value, str) and _is_number(value)):
                return float(value)  # type: ignore[arg-type]
            if self.unit is not None and isinstance(value, str | dt.timedelta):
                return parse_duration(value, unit=self.unit) / self.unit
        except (HoldfastError, OverflowError) as error:
            # The cause quotes the value as it was given, so it may stay only if there was nothing to mask.
            hidden = isinstance(value, str) and mask_url(value) != value
            raise self.invalid(value, source) from (None if hidden else error)
        return value

    def invalid(self, value: object, source: str) -> InvalidSetting:
        shown = "***" if self.is_secret else _shortened(mask_url(value) if isinstance(value, str) else value)
        return InvalidSetting(f"{self.name} = {shown} ({source}) is not allowed; use {self.allowed()}.")

    def allowed(self) -> str:
        if isinstance(self.default, bool):
            return "true or false"
        if self.name.endswith("_cron"):
            return "a cron expression of five fields, or of six with seconds first"
        if self.name.endswith("_modules"):
            return 'names of modules, such as "shop.tasks,shop.reports"'
        if self.form == "secret":
            return f"a secret text of {self.low:g} bytes or more"
        if self.form == "token":
            return f"a secret text of {self.low:g} characters or more: ASCII, without blanks"
        if self.form in _FORMED:
            return _FORMED[self.form]
        if isinstance(self.default, str):
            return " or ".join(f'"{choice}"' for choice in self.choices) or "a string"
        bounds = "" if math.isinf(self.high) else f" from {self.low:g} to {self.high:g}"
        if self.unit is not None:
            word = "seconds" if self.unit == 1.0 else "minutes"
            return f'a number of {word}{bounds}, or a duration such as "15s" or "2m" within that'
        return f"{'a whole number' if isinstance(self.default, int) else 'a number'}{bounds}"

    def show(self, value: object) -> str:
        """Return the value for people: "0.25 (15s)" for a duration, a URL without its password."""
        if self.unit is not None and isinstance(value, float):
            return f"{value:.10g} ({format_duration(value * self.unit)})"
        if isinstance(value, bool):
            return str(value).lower()
        return str(_mask(self.name, value)) or "(empty)"


SPECS: Mapping[str, _Spec] = {
    item.name: _Spec(item.name, item.default, **item.metadata)  # type: ignore[arg-type]
    for item in dataclasses.fields(Settings)
    if item.metadata
}


def _from_keywords(overrides: Mapping[str, object]) -> dict[str, SettingOrigin]:
    for name in overrides:
        if name not in SPECS:
            raise _unknown(name, "given as a keyword")
    return {name: SettingOrigin(value, "keyword") for name, value in overrides.items() if value is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, SettingOrigin]:
    found = _from_variables_of_workflow(environ)
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable.startswith(_FOREIGN_PREFIXES):
            continue
        name, source = variable.removeprefix(PREFIX).lower(), f"environment {variable}"
        if variable != PREFIX + name.upper() or name not in SPECS:
            raise _unknown(name, "in the environment", prefix=PREFIX, given=variable)
        if environ[variable]:
            found[name] = SettingOrigin(SPECS[name].read(environ[variable], source), source)
    return found


def _from_variables_of_workflow(environ: Mapping[str, str]) -> dict[str, SettingOrigin]:
    """Read the variables by which projects with Workflow DevKit are configured."""
    found: dict[str, SettingOrigin] = {}
    for spec in SPECS.values():
        if spec.also and (text := environ.get(spec.also)):
            source = f"environment {spec.also}"
            found[spec.name] = SettingOrigin(spec.read(text, source), source)
    if "url" in found:
        database = environ.get(PREFIX + "WORLD_DATABASE") or environ.get(SPECS["world_database"].also)
        url = with_database(str(found["url"].value), database or str(SPECS["world_database"].default))
        found["url"] = found["url"]._replace(value=url)
    return found


def with_database(url: str, database: str) -> str:
    """Return the URL of a MongoDB with this database. A database that the URL names stays that of its user."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("mongodb", "mongodb+srv") or not separator:
        return url
    place, _, options = rest.partition("?")
    hosts, _, before = place.partition("/")
    if before and before != database and "@" in hosts and "authsource=" not in options.lower():
        options = f"{options}&authSource={before}" if options else f"authSource={before}"
    return f"{scheme}://{hosts}/{quote(database, safe='')}" + (f"?{options}" if options else "")


def _from_pyproject(folder: Path) -> dict[str, SettingOrigin]:
    start = folder.absolute()
    path = next((f / "pyproject.toml" for f in (start, *start.parents) if (f / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read for [tool.holdfast]: {error}. Repair the file.") from error
    tool = content.get("tool", {})
    table = tool.get("holdfast", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise InvalidSetting(f"tool.holdfast in {path} is not a table; write its settings under [tool.holdfast].")
    for name in table:
        if name not in SPECS:
            raise _unknown(name, f"in [tool.holdfast] of {path}")
    return {name: SettingOrigin(value, f"pyproject.toml ({path.parent})") for name, value in table.items()}


def _unknown(name: object, place: str, *, prefix: str = "", given: str | None = None) -> UnknownSetting:
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), SPECS, n=1, cutoff=0.5)
    names = [prefix + (n.upper() if prefix else n) for n in near or SPECS]
    advice = f"Did you mean {names[0]}?" if near else f"The settings are: {', '.join(names)}."
    return UnknownSetting(f"{given or name}, {place}, is not a setting. {advice}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shortened(value: object) -> str:
    """Return the value for a message, without secrets, and without digits that Python refuses to print."""
    try:
        text = mask_url(repr(value))
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _mask(name: str, value: object) -> object:
    if SPECS[name].is_secret:
        return "***" if value else value
    return mask_url(value) if isinstance(value, str) and (name == "url" or "://" in value) else value


def default_url(folder: Path) -> str:
    """Return the URL of `holdfast.db` beside the nearest pyproject.toml at or above `folder`, else in it.

    So every process of a project finds the same file.
    """
    for place in (folder, *folder.parents):
        if (place / "pyproject.toml").is_file():
            return f"sqlite:///{place / DEFAULT_FILE}"
    return f"sqlite:///{folder / DEFAULT_FILE}"


def absolute_url(url: str, folder: Path) -> str:
    """Make a relative SQLite path absolute when the app is made: a later chdir must not lead to another file."""
    path = url.removeprefix("sqlite:///")
    if path == url or not path or path.startswith(("/", "~", ":")):
        return url
    return f"sqlite:///{folder / path}"
