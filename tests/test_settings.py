"""Settings: who wins, what is refused and in which words, and that no secret is ever shown."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import App
from holdfast.errors import ConfigurationError, InvalidSetting, UnknownSetting
from holdfast.fleet.slots import SlotSettings
from holdfast.masking import mask_url
from holdfast.schedules import cron
from holdfast.settings import SPECS, SettingOrigin, Settings, _Spec


def load(folder: Path, environ: dict[str, str] | None = None, **overrides: object) -> Settings:
    return Settings.load(overrides, environ=environ or {}, folder=folder)


def write_pyproject(folder: Path, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text("\n".join(["[tool.holdfast]", *lines]), encoding="utf-8")


# --- Who wins ---------------------------------------------------------------------------------------------------------


def test_defaults(tmp_path: Path) -> None:
    write_pyproject(tmp_path)
    settings = load(tmp_path)
    assert settings == Settings()
    assert {row.name: row.value for row in settings.explain()} == {
        "url": "",
        "name": "",
        "app": "",
        "concurrency": 10,
        "poll_interval_seconds": 1.0,
        "drain_timeout_seconds": 30.0,
        "cancel_grace_seconds": 10.0,
        "note_interval_seconds": 1.0,
        "waiting_threads": 100,
        "waiting_processes": 10,
        "waiting_coroutines": 1000,
        "runner_heartbeat_seconds": 2.0,
        "runner_considered_dead_after_minutes": 0.25,
        "atomic_service_interval_minutes": 1.0,
        "atomic_service_spread_margin_minutes": 1 / 60,
        "atomic_service_check_interval_minutes": 1 / 60,
        "atomic_service_max_start_slot_fraction": 0.9,
        "atomic_service_membership_stabilization_minutes": 0.0,
        "atomic_service_min_run_margin_seconds": 0.05,
        "atomic_service_execution_retention_minutes": 60.0,
        "atomic_service_execution_max_records": 1000,
        "atomic_service_max_members": 3,
        "recover_pending_invocations_cron": "*/15 * * * * *",
        "max_pending_seconds": 5.0,
        "recover_running_invocations_cron": "*/15 * * * * *",
        "worker_unresponsive_seconds": 10.0,
        "workflow_linger_seconds": 1.0,
        "workflow_max_events": 50_000,
        "encryption_keys": "",
        "encryption_keys_file": "",
        "secret_names": "",
        "workflow_cache": 1_000,
        "hook_secret": "",
        "hook_secret_previous": "",
        "public_url": "",
        "webhook_limit": 2**20,
        "webhook_token_rate": 10.0,
        "webhook_source_rate": 100.0,
        "api_token": "",
        "metrics": False,
        "metrics_token": "",
        "runner_http": "",
        "tracing": False,
        "max_crash_recoveries": 3,
        "world_token": "",
        "world_service_url": "",
        "world_hosts": "",
        "world_concurrency": 20,
        "world_delivery_timeout": 3600.0,
        "world_message_retention_seconds": 604_800.0,
        "world_body_limit": 2**25,
        "world_database": "workflow",
        "validate": "off",
        "payload_cache": 67_108_864,
        "archive_retention_seconds": 604_800.0,
        "stream_retention_seconds": 3_153_600_000.0,
        "trigger_task_modules": "",
        "event_retention_seconds": 604_800.0,
        "stats_retention_seconds": 30 * 86_400.0,
        "session_seconds": 43_200.0,
        "allowed_hosts": "",
        "proxy_address": "",
        "proxy_user_header": "",
        "proxy_role": "viewer",
        "proxy_role_header": "",
        "audit_retention_seconds": 400 * 86_400.0,
        "release": "",
        "trigger_max_depth": 100,
        "sqlite_synchronous": "full",
        "sqlite_busy_timeout_seconds": 10.0,
        "max_waiting": 0,
        "inline_limit": 64 * 2**10,
        "chunk_threshold": 15 * 2**20,
        "payload_limit": 512 * 2**20,
        "use_change_streams": True,
        "signal_retention_seconds": 3600.0,
        "max_retries": 5,
        "retry_base_delay": 0.1,
        "retry_max_delay": 60.0,
        "retry_max_time": 300.0,
        "retry_indefinitely": False,
    }
    assert {row.source for row in settings.explain()} == {"default"}


def test_keyword_beats_environment_beats_pyproject_beats_default(tmp_path: Path) -> None:
    environ = {"HOLDFAST_CONCURRENCY": "3"}
    assert load(tmp_path).origin("concurrency") == SettingOrigin(10, "default")
    write_pyproject(tmp_path, "concurrency = 2")
    assert load(tmp_path).origin("concurrency") == SettingOrigin(2, f"pyproject.toml ({tmp_path})")
    assert load(tmp_path, environ).origin("concurrency") == SettingOrigin(3, "environment HOLDFAST_CONCURRENCY")
    assert load(tmp_path, environ, concurrency=4).origin("concurrency") == SettingOrigin(4, "keyword")


def test_the_app_of_the_command_line_can_be_named(tmp_path: Path) -> None:
    write_pyproject(tmp_path, 'app = "shop:app"')
    assert load(tmp_path).origin("app") == SettingOrigin("shop:app", f"pyproject.toml ({tmp_path})")
    assert load(tmp_path, {"HOLDFAST_APP": "other:app"}).app == "other:app"


def test_each_setting_is_merged_by_itself(tmp_path: Path) -> None:
    write_pyproject(tmp_path, 'name = "shop"', 'poll_interval_seconds = "250ms"')
    settings = load(tmp_path, {"HOLDFAST_URL": "memory://"}, concurrency=1)
    assert (settings.name, settings.poll_interval_seconds) == ("shop", 0.25)
    assert (settings.url, settings.concurrency) == ("memory://", 1)
    assert settings.drain_timeout_seconds == 30.0


def test_a_keyword_that_repeats_the_default_is_still_a_keyword(tmp_path: Path) -> None:
    assert load(tmp_path, {"HOLDFAST_CONCURRENCY": "3"}, concurrency=10).origin("concurrency") == SettingOrigin(
        10, "keyword"
    )


def test_the_nearest_pyproject_counts_and_only_that(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "concurrency = 2", 'name = "outer"')
    write_pyproject(tmp_path / "a", "concurrency = 3")
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    settings = load(tmp_path / "a" / "b" / "c")
    assert settings.origin("concurrency") == SettingOrigin(3, f"pyproject.toml ({tmp_path / 'a'})")
    assert settings.name == ""


@pytest.mark.parametrize("content", ["", "[project]\nname = 'x'\n", "[tool.ruff]\nline-length = 1\n", "tool = 3\n"])
def test_a_pyproject_of_others_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "pyproject.toml").write_text(content)
    assert load(tmp_path) == Settings()


def test_none_and_an_empty_variable_mean_not_given(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "concurrency = 2")
    settings = load(tmp_path, {"HOLDFAST_CONCURRENCY": "", "HOLDFAST_URL": ""}, concurrency=None)
    assert settings.concurrency == 2
    assert settings.origin("url") == SettingOrigin("", "default")


def test_the_process_environment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "77")
    assert load(tmp_path).concurrency == 10


def test_a_relative_folder_is_searched_upwards_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pyproject(tmp_path, "concurrency = 2")
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert load(Path()).concurrency == 2


def test_settings_are_frozen_equal_by_value_and_survive_a_pickle(tmp_path: Path) -> None:
    settings = load(tmp_path, {"HOLDFAST_CONCURRENCY": "3"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.concurrency = 4  # type: ignore[misc]
    assert settings == Settings(concurrency=3)
    assert hash(settings) == hash(Settings(concurrency=3))
    copy = pickle.loads(pickle.dumps(settings))
    assert copy.origin("concurrency") == SettingOrigin(3, "environment HOLDFAST_CONCURRENCY")


# --- Unknown names ----------------------------------------------------------------------------------------------------


def test_unknown_keyword_suggests_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"concurency, given as a keyword.*mean concurrency\?"):
        load(tmp_path, concurency=3)


def test_unknown_variable_suggests_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"HOLDFAST_POLL_INTERVAL, in the env.*HOLDFAST_POLL_INTERVAL_SECONDS\?"):
        load(tmp_path, {"HOLDFAST_POLL_INTERVAL": "3"})


def test_a_variable_in_the_wrong_case_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match=r"HOLDFAST_concurrency.*HOLDFAST_CONCURRENCY\?"):
        load(tmp_path, {"HOLDFAST_concurrency": "3"})


def test_unknown_pyproject_key_names_the_file(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "poll-interval-seconds = 3")
    with pytest.raises(UnknownSetting) as caught:
        load(tmp_path)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)
    assert "Did you mean poll_interval_seconds?" in str(caught.value)


def test_a_name_like_no_other_gets_the_whole_list(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting) as caught:
        load(tmp_path, zzzzzz=1)
    assert all(name in str(caught.value) for name in SPECS)


def test_internals_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting):
        load(tmp_path, _sources={})
    with pytest.raises(UnknownSetting):
        load(tmp_path, {"HOLDFAST__SOURCES": "x"})


def test_asking_for_the_origin_of_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match="concurrency"):
        load(tmp_path).origin("concurrenci")


def test_switches_of_tests_and_other_programs_are_left_alone(tmp_path: Path) -> None:
    environ = {"HOLDFAST_TEST_MONGODB_URL": "x", "HOLDFAST_CRASH_AT": "y", "HOLDFASTER": "z", "PATH": "/bin"}
    assert load(tmp_path, environ) == Settings()


# --- Invalid values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("concurrency", 0),
        ("concurrency", 10_001),
        ("concurrency", 2.0),
        ("concurrency", True),
        ("concurrency", "8"),
        pytest.param("concurrency", 10**6000, id="concurrency-huge"),
        ("poll_interval_seconds", 0.009),
        ("poll_interval_seconds", 61),
        ("poll_interval_seconds", "2m"),
        ("poll_interval_seconds", "soon"),
        ("poll_interval_seconds", "1 month"),
        ("poll_interval_seconds", ""),
        ("poll_interval_seconds", float("nan")),
        ("poll_interval_seconds", float("inf")),
        pytest.param("poll_interval_seconds", 10**400, id="poll-huge"),
        ("poll_interval_seconds", True),
        ("poll_interval_seconds", [1]),
        ("drain_timeout_seconds", -1),
        ("drain_timeout_seconds", "-1s"),
        ("drain_timeout_seconds", 86_401),
        ("runner_considered_dead_after_minutes", 0),
        ("atomic_service_interval_minutes", 0),
        ("atomic_service_interval_minutes", "2 days"),
        ("atomic_service_spread_margin_minutes", -1),
        ("atomic_service_check_interval_minutes", 0),
        ("atomic_service_max_start_slot_fraction", 1.1),
        ("atomic_service_max_start_slot_fraction", "90s"),
        ("atomic_service_membership_stabilization_minutes", "-1s"),
        ("atomic_service_min_run_margin_seconds", 3_601),
        ("atomic_service_execution_retention_minutes", -1),
        ("atomic_service_execution_max_records", 0),
        ("atomic_service_max_members", 0),
        ("max_pending_seconds", 0),
        ("worker_unresponsive_seconds", 0.5),
        ("max_crash_recoveries", -1),
        ("recover_pending_invocations_cron", "*/15 * * * * * *"),
        ("recover_running_invocations_cron", "0 0 31 2 *"),
        ("recover_running_invocations_cron", ""),
        ("recover_running_invocations_cron", 15),
        ("sqlite_synchronous", "off"),
        ("sqlite_synchronous", "FULL"),
        ("sqlite_busy_timeout_seconds", 0.05),
        ("sqlite_busy_timeout_seconds", 601),
        ("url", 5),
        ("url", b"memory://"),
        ("name", ["x"]),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(InvalidSetting, match=rf"{name} = .*\(keyword\) is not allowed; use "):
        load(tmp_path, **{name: value})


@pytest.mark.parametrize("text", ["ten", "1.5", "0", "1e3", "1_000", "٣", "9" * 50, "true"])
def test_a_variable_that_is_no_whole_number_in_range_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"environment HOLDFAST_CONCURRENCY.*a whole number from 1 to 10000"):
        load(tmp_path, {"HOLDFAST_CONCURRENCY": text})


def test_a_variable_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, {"HOLDFAST_CONCURRENCY": "9" * 5000})
    assert len(str(caught.value)) < 500


def test_the_message_has_name_value_source_and_what_is_allowed(tmp_path: Path) -> None:
    write_pyproject(tmp_path, 'sqlite_synchronous = "of"')
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path)
    for part in ("sqlite_synchronous", "'of'", f"pyproject.toml ({tmp_path})", '"full" or "normal"'):
        assert part in str(caught.value)
    with pytest.raises(InvalidSetting, match=r'a number of minutes from 0\.001 to 1440, or a duration such as "15s"'):
        load(tmp_path, sqlite_synchronous="full", runner_considered_dead_after_minutes="1 fortnight")


def test_a_direct_call_is_checked_just_the_same() -> None:
    assert Settings(concurrency=3).origin("concurrency") == SettingOrigin(3, "keyword")
    with pytest.raises(InvalidSetting, match=r"concurrency = 0 \(keyword\)"):
        Settings(concurrency=0)


def test_a_heartbeat_of_more_than_a_quarter_of_dead_after_is_refused_naming_both(tmp_path: Path) -> None:
    assert load(tmp_path, runner_heartbeat_seconds=3.75).runner_heartbeat_seconds == 3.75
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, {"HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "3.76"})
    for part in (
        "runner_heartbeat_seconds = 3.76 (3.76s) (environment HOLDFAST_RUNNER_HEARTBEAT_SECONDS)",
        "runner_considered_dead_after_minutes = 0.25 (15s) (default)",
        "at most 3.75s",
    ):
        assert part in str(caught.value)
    assert load(tmp_path, runner_heartbeat_seconds="5s", runner_considered_dead_after_minutes="20s")


def test_a_margin_that_leaves_nothing_of_a_slot_is_refused_naming_what_it_depends_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, {"HOLDFAST_ATOMIC_SERVICE_INTERVAL_MINUTES": "3s"})
    for part in (
        "atomic_service_spread_margin_minutes = 0.01666666667 (1s) (default)",
        "atomic_service_interval_minutes = 0.05 (3s) (environment HOLDFAST_ATOMIC_SERVICE_INTERVAL_MINUTES)",
        "atomic_service_max_members = 3 (default)",
    ):
        assert part in str(caught.value)
    assert load(tmp_path, atomic_service_interval_minutes="3s", atomic_service_max_members=2)
    # A lone runner has no margin.
    assert load(tmp_path, atomic_service_interval_minutes="1s", atomic_service_max_members=1)


def test_a_cron_setting_takes_five_fields_or_six_and_says_what_is_wrong(tmp_path: Path) -> None:
    settings = load(tmp_path, {"HOLDFAST_RECOVER_RUNNING_INVOCATIONS_CRON": "*/15 * * * *"})
    assert settings.recover_running_invocations_cron == "*/15 * * * *"
    with pytest.raises(
        InvalidSetting, match="a cron expression of five fields, or of six with seconds first"
    ) as caught:
        load(tmp_path, recover_pending_invocations_cron="61 * * * *")
    assert "the minute field" in str(caught.value.__cause__)
    for spec in SPECS.values():  # defaults are not checked when settings are made
        if spec.name.endswith("_cron"):
            assert list(cron(str(spec.default)).ticks(0.0, 60.0)) == [15.0, 30.0, 45.0, 60.0]


@pytest.mark.parametrize("content", [b"[tool.holdfast\n", b"\xff\xfe", b"a = \n"])
def test_a_broken_pyproject_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml cannot be read") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_holdfast_entry_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nholdfast = 3\n")
    with pytest.raises(InvalidSetting, match="not a table"):
        load(tmp_path)


# --- Units and types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "minutes"),
    [(1, 1.0), (0.5, 0.5), ("0.5", 0.5), ("15s", 0.25), ("15 s", 0.25), ("2m", 2.0), (dt.timedelta(seconds=90), 1.5)],
)
def test_a_length_of_time_is_stored_in_the_unit_of_its_name(tmp_path: Path, value: object, minutes: float) -> None:
    settings = load(tmp_path, runner_considered_dead_after_minutes=value)
    assert settings.runner_considered_dead_after_minutes == minutes
    assert type(settings.runner_considered_dead_after_minutes) is float


def test_the_slots_get_their_settings_in_seconds(tmp_path: Path) -> None:
    assert load(tmp_path).slots == SlotSettings(
        interval_seconds=60.0,
        spread_margin_seconds=1.0,
        check_interval_seconds=1.0,
        max_start_slot_fraction=0.9,
        membership_stabilization_seconds=0.0,
        min_run_margin_seconds=0.05,
        execution_retention_seconds=3600.0,
        execution_max_records=1000,
        max_members=3,
    )
    slots = load(tmp_path, atomic_service_interval_minutes=5, atomic_service_spread_margin_minutes="90s").slots
    assert (slots.interval_seconds, slots.spread_margin_seconds) == (300.0, 90.0)


def test_durations_work_from_everywhere(tmp_path: Path) -> None:
    write_pyproject(tmp_path, 'drain_timeout_seconds = "2m"')
    assert load(tmp_path).drain_timeout_seconds == 120.0
    assert load(tmp_path, {"HOLDFAST_DRAIN_TIMEOUT_SECONDS": "1m30s"}).drain_timeout_seconds == 90.0
    assert load(tmp_path, drain_timeout_seconds=0).drain_timeout_seconds == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((t, True) for t in ("true", "1", "yes", "on", "TRUE")),
        *((t, False) for t in ("false", "0", "no", "off", "No")),
    ],
)
def test_a_boolean_setting_reads_the_usual_words(text: str, value: bool) -> None:
    spec = _Spec("verbose", False, "talks more", 0, 1, ())
    assert spec.check(spec.read(text, "environment HOLDFAST_VERBOSE"), "environment HOLDFAST_VERBOSE") is value
    assert spec.show(value) == str(value).lower()


def test_a_boolean_setting_refuses_other_words_and_types() -> None:
    spec = _Spec("verbose", False, "talks more", 0, 1, ())
    with pytest.raises(InvalidSetting, match="true or false"):
        spec.read("maybe", "environment HOLDFAST_VERBOSE")
    with pytest.raises(InvalidSetting, match="true or false"):
        spec.check(1, "keyword")


def test_a_plain_number_reads_from_text_but_takes_no_duration() -> None:
    spec = _Spec("fraction", 0.5, "a share", 0, 1, ())
    assert spec.check(spec.read("0.25", "environment"), "environment") == 0.25
    with pytest.raises(InvalidSetting, match="a number from 0 to 1"):
        spec.read("15s", "environment")
    with pytest.raises(InvalidSetting, match="a number from 0 to 1"):
        spec.check("0.25", "keyword")


# --- Explaining -------------------------------------------------------------------------------------------------------


def test_explain_shows_number_and_duration_source_and_doc(tmp_path: Path) -> None:
    rows = {row.name: row for row in load(tmp_path, {"HOLDFAST_CONCURRENCY": "3"}).explain()}
    assert list(rows) == list(SPECS)
    assert rows["runner_considered_dead_after_minutes"].shown == "0.25 (15s)"
    assert rows["drain_timeout_seconds"].shown == "30 (30s)"
    assert rows["concurrency"].shown == "3"
    assert rows["concurrency"].source == "environment HOLDFAST_CONCURRENCY"
    assert rows["url"].shown == "(empty)"
    assert all(row.doc for row in rows.values())


SECRET = "s3cr3t"


def test_no_secret_in_repr_or_explain(tmp_path: Path) -> None:
    settings = load(tmp_path, url=f"mongodb://me:{SECRET}@host/db", name=f"redis://me:{SECRET}@host")
    assert settings.url.count(SECRET) == 1
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings.explain())
    assert "mongodb://me:***@host/db" in repr(settings)


@pytest.mark.parametrize("value", [f"mongodb://me:{SECRET}@host", [f"mongodb://me:{SECRET}@host"]])
def test_no_secret_in_an_error(tmp_path: Path, value: object) -> None:
    for name in ("sqlite_synchronous", "concurrency", "poll_interval_seconds", "recover_running_invocations_cron"):
        with pytest.raises(InvalidSetting) as caught:
            load(tmp_path, **{name: value})
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert "me:***@host" in str(caught.value)


def test_a_secret_setting_is_never_shown(tmp_path: Path) -> None:
    secret = "0123456789" * 4
    settings = load(tmp_path, hook_secret=secret, hook_secret_previous=secret)
    assert settings.hook_secret == secret
    assert secret not in repr(settings) + str(settings.explain())
    assert [row.shown for row in settings.explain() if row.name.startswith("hook_secret")] == ["***", "***"]


@pytest.mark.parametrize("name", ["hook_secret", "hook_secret_previous"])
@pytest.mark.parametrize("secret", ["s3cr3t", "ä" * 15, 32, "\udcff" * 40])
def test_a_short_secret_is_refused_and_not_repeated(tmp_path: Path, name: str, secret: object) -> None:
    with pytest.raises(
        InvalidSetting, match=r"\*\*\* \(keyword\) is not allowed; use a secret text of 32 bytes or more"
    ) as error:
        load(tmp_path, **{name: secret})
    assert str(secret) not in str(error.value).replace("32 bytes", "")
    assert load(tmp_path, **{name: "ä" * 16})


@pytest.mark.parametrize(
    "url", ["shop.example", "//shop.example", "ftp://shop.example", "https://", "https://a b", "x://y"]
)
def test_a_public_url_needs_its_scheme(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"a URL with its scheme, such as https://shop\.example"):
        load(tmp_path, public_url=url)


def test_a_public_url_may_have_a_path_and_loses_its_last_slash(tmp_path: Path) -> None:
    assert load(tmp_path, public_url="https://shop.example/").public_url == "https://shop.example"
    assert load(tmp_path, public_url="http://localhost:8080/x/").public_url == "http://localhost:8080/x"


def test_the_cause_of_an_unreadable_duration_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(tmp_path, poll_interval_seconds="1 month")
    assert "no fixed length" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("mongodb://user:s3cr3t@host", "mongodb://user:***@host"),
        ("mongodb://user:s3cr3t@a:1,b:2,c/db?replicaSet=rs0", "mongodb://user:***@a:1,b:2,c/db?replicaSet=rs0"),
        ("mongodb+srv://us%40er:s3cr3t%40%2F@host/db", "mongodb+srv://us%40er:***@host/db"),
        (
            "mongodb://user:s3cr3t@[fe80::1%25eth0]:5,%2Ftmp%2Fm.sock/",
            "mongodb://user:***@[fe80::1%25eth0]:5,%2Ftmp%2Fm.sock/",
        ),
        ("redis://:s3cr3t@host:6379/0", "redis://:***@host:6379/0"),
        ("user:s3cr3t@host", "user:***@host"),
        # Not plainly right: nobody can tell where the password begins and ends.
        ("mongodb://u:s3cr3t@ss/s3cr3t@h/db", "mongodb://***@h/db"),
        ("x://user:s3cr3t@s3cr3t/s3cr3t@host/db", "x://***@host/db"),
        ("x://user:s3cr3t/s3cr3t@host/db", "x://***@host/db"),
        ("x://user:12/s3cr3t@host/db", "x://***@host/db"),
        ("x://user%3As3cr3t@host", "x://***@host"),
        ("x:///user:s3cr3t@host/db", "x://***@host/db"),
        ("x://user:s3cr3t?s3cr3t@host", "x://***"),
        ("x://user:12?a=s3cr3t@host", "x://***"),
        ("x://user:12#s3cr3t@host", "x://***"),
        ("x://user:s3cr3t", "x://***"),
        ("x://user%3As3cr3t%40host/db", "x://***"),
        ("x://user:s3cr3t@", "x://user:***@"),
        ("x://user:s3cr3t@ho st/db", "x://***"),
        ("mongodb:/user:s3cr3t@host/db", "***@host/db"),
        ("mongodb//user:s3cr3t@host/db", "***@host/db"),
        ("user:s3cr3t://s3cr3t@host", "***"),
        ("password=s3cr3t url=x://host", "***"),
        # Options: those that are known to be harmless stay.
        ("x://h/d?password=s3cr3t&replicaSet=rs0", "x://h/d?password=***"),
        ("x://h/d?replicaSet=rs0&authToken=s3cr3t", "x://h/d?replicaSet=rs0&authToken=***"),
        ("x://h/d?pass%77ord=s3cr3t", "x://h/d?pass%77ord=***"),
        ("x://h/?colour=s3cr3t", "x://h/?colour=***"),
        ("x://h/?proxyHost=p&proxyUsername=u&proxyPassword=s3cr3t", "x://h/?proxyHost=p&proxyUsername=***"),
        ("x://h/?tlsCertificateKeyFilePassword=s3cr3t&w=1", "x://h/?tlsCertificateKeyFilePassword=***"),
        ("x://h/?tlsCertificateKeyFilePassword=s3c&r3t=s3cr3t&w=1", "x://h/?tlsCertificateKeyFilePassword=***"),
        ("x://h/?tlsCertificateKeyFilePassword=s3c@r3t", "x://***"),
        ("x://h/?authMechanismProperties=AWS_SESSION_TOKEN:s3cr3t", "x://h/?authMechanismProperties=***"),
        ("x://h/d?w=1;client_secret=s3cr3t;s3cr3t&tls=true", "x://h/d?w=***"),
        ("x://h/d?w=1#s3cr3t", "x://h/d?w=1#***"),
        ("x://h/?s3cr3t", "x://h/?***"),
        ("x://h/?w=1&&tls=true&colour=s3cr3t&&&", "x://h/?w=1&&tls=true&colour=***"),
        ("x://h/?=s3cr3t", "x://h/?***"),
        ("x://h/#token=s3cr3t", "x://h/#***"),
        ("x://u:s3cr3t@h:10255/?ssl=true&appName=@shop@", "x://u:***@h:10255/?ssl=true&appName=***"),
        ("sqlite:////srv/a:b@c/shop.db?key=s3cr3t", "sqlite:////srv/a:b@c/shop.db?key=***"),
        ("host=h user=u password=s3cr3t port=1", "host=h user=u password=*** port=1"),
        # Links that a message may hold.
        ("https://u:s3cr3t@h/@me?id=7&token=s3cr3t", "https://u:***@h/@me?id=7&token=***"),
        ("['mongodb://u:s3cr3t@h/db']", "['mongodb://u:***@h/db']"),
        ("mongodb://u:s3cr3t@h.", "mongodb://u:***@h."),
    ],
)
def test_secrets_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
    assert mask_url(masked) == masked


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory://",
        "sqlite:///shop.db",
        "sqlite:////srv/a:b@c/shop.db?mode=ro",
        "mongodb://host:27017/db?replicaSet=rs0&authSource=$external&authMechanism=SCRAM-SHA-256&tlsCertificateKeyFile=/k",
        "mongodb://host/?readPreferenceTags=dc:ny,rack:1&w=majority&appName=a%20b&retryWrites=true",
        "mongodb://user@host/db",
        "mongodb://[::1]:27017,b.example.com/db",
        "'mongodb://host/db?replicaSet=rs0'",
        "(see mongodb://host:27017)",
        "https://example.com/@me/a?id=7#part",
        "me@example.com",
    ],
)
def test_what_is_no_secret_stays_readable(url: str) -> None:
    assert mask_url(url) == url


@given(st.one_of(st.text(), st.text(alphabet=":/@?&=#;% ap"), st.binary(), st.none(), st.integers()))
def test_masking_takes_anything(garbage: object) -> None:
    assert isinstance(mask_url(garbage), str)


def test_masking_takes_very_long_garbage() -> None:
    pieces = (
        "a=",
        "://",
        "@:",
        "&token=",
        "%3a@",
        "?a=",
        "a,",
        "a:1,",
        "%2f",
        "a.sock,",
        "%2fa.sock,",
        "[::]",
        "/",
        "'",
    )
    for piece in pieces:
        for start in ("", "x://", "x://u:p@", "x://h/", "x://h/?"):
            for end in ("", "@", "!"):
                assert isinstance(mask_url(start + piece * 20_000 + end), str)


# Both ends of a password are marked, so that no part of it shows either.
PASSWORDS = st.one_of(
    st.text(),
    st.text(alphabet="@/?#:&=;%,. []'\"\\+-!x1"),
    st.lists(st.sampled_from(["@h", "/", "?", "#", ":1", "://", "&", "?a=", "&w=1", "%40", "%3A", " ", "h.com"])).map(
        "".join
    ),
).map(lambda text: f"{SECRET}{text}{SECRET}")
HOSTS = st.lists(st.sampled_from(["h1", "h2:27017", "[::1]:5"]), min_size=1, max_size=3).map(",".join)


@given(user=st.text("abc%40", max_size=5), password=st.text("xyz%:+-_~.!", min_size=1), hosts=HOSTS)
def test_what_is_plainly_right_stays_readable_but_for_the_password(user: str, password: str, hosts: str) -> None:
    for rest in ("", "/", "/db", "/db?w=1", "?w=1"):
        masked = mask_url(f"mongodb://{user}:{SECRET}{password}{SECRET}@{hosts}{rest}")
        assert masked == f"mongodb://{user}:***@{hosts}{rest}"


@settings(max_examples=500)
@given(
    scheme=st.sampled_from(
        ["mongodb://", "mongodb+srv://", "MONGODB://", "x://", "mongodb:///", "mongodb:/", "mongodb//", "mongodb:", ""]
    ),
    user=st.sampled_from(["", "user", "us%40er", "us/er", "us@er", "a.b"]),
    password=PASSWORDS,
    hosts=HOSTS,
    rest=st.sampled_from(["", "/", "/db", "/db?a=b", "?w=1", "/db?appName=@x@", "/a b", "/?a=b@c", "#x"]),
)
def test_a_password_never_shows(scheme: str, user: str, password: str, hosts: str, rest: str) -> None:
    assert SECRET not in mask_url(f"{scheme}{user}:{password}@{hosts}{rest}")


@settings(max_examples=500)
@given(
    start=st.sampled_from(["mongodb://h", "mongodb://h:1,i/db", "mongodb://u:p@h/", "x:///", "sqlite:////a@b/c.db"]),
    option=st.sampled_from(
        ["tlsCertificateKeyFilePassword", "authMechanismProperties", "proxyPassword", "password", "novel", "a%62c"]
    ),
    password=PASSWORDS,
    rest=st.sampled_from(["", "&w=1", "&a=b", "&appName=@x@"]),
)
def test_a_secret_option_never_shows(start: str, option: str, password: str, rest: str) -> None:
    assert SECRET not in mask_url(f"{start}?{option}={password}{rest}")


@settings(max_examples=200)
@given(password=PASSWORDS)
def test_a_password_never_shows_in_an_app(password: str) -> None:
    app = App(f"mongodb://user:{password}@host/db")
    assert SECRET not in repr(app) + repr(app.settings) + str(app.settings.explain())


def test_a_payload_limit_below_the_inline_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidSetting, match=r"^payload_limit = 2048 \(keyword\) is less than inline_limit = 65536 \(def"
    ):
        Settings.load({"payload_limit": 2048}, environ={}, folder=tmp_path)
    with pytest.raises(InvalidSetting, match=r"payload_limit = 1024 .* inline_limit = 1025 \(environment HOLDFAST_IN"):
        Settings.load({"payload_limit": 1024}, environ={"HOLDFAST_INLINE_LIMIT": "1025"}, folder=tmp_path)
    assert Settings(payload_limit=4096, inline_limit=4096).payload_limit == 4096


# --- variables of Workflow DevKit


def test_variables_of_workflow_devkit_are_settings_that_ours_beat(tmp_path: Path) -> None:
    theirs = {
        "WORKFLOW_MONGODB_URI": "mongodb://h:1,i/",
        "WORKFLOW_MONGODB_CHANGE_STREAMS": "false",
        "WORKFLOW_SERVICE_URL": "http://app:3000/",
        "WORKFLOW_CONCURRENCY": "7",
    }
    found = Settings.load({}, environ=theirs, folder=tmp_path)
    assert found.origin("url") == ("mongodb://h:1,i/workflow", "environment WORKFLOW_MONGODB_URI")
    assert found.origin("use_change_streams") == (False, "environment WORKFLOW_MONGODB_CHANGE_STREAMS")
    assert found.origin("world_service_url") == ("http://app:3000", "environment WORKFLOW_SERVICE_URL")
    assert found.origin("world_concurrency") == (7, "environment WORKFLOW_CONCURRENCY")
    ours = {"HOLDFAST_URL": "sqlite:///a.db", "HOLDFAST_WORLD_CONCURRENCY": "8"}
    found = Settings.load({"world_concurrency": 9}, environ=theirs | ours, folder=tmp_path)
    assert found.origin("url") == ("sqlite:///a.db", "environment HOLDFAST_URL")
    assert found.origin("world_concurrency") == (9, "keyword")
    with pytest.raises(InvalidSetting, match=r"^world_concurrency = 'many' \(environment WORKFLOW_CONC"):
        Settings.load({}, environ={"WORKFLOW_CONCURRENCY": "many"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("mongodb://h", "mongodb://h/flows"),
        ("mongodb://h/?replicaSet=r", "mongodb://h/flows?replicaSet=r"),
        ("mongodb://u:p@h/admin?w=1", "mongodb://u:p@h/flows?w=1&authSource=admin"),
        ("mongodb://u:p@h/admin?authSource=x", "mongodb://u:p@h/flows?authSource=x"),
        ("mongodb://u:p@h/flows", "mongodb://u:p@h/flows"),
        ("mongodb+srv://h/other", "mongodb+srv://h/flows"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_the_database_of_workflow_devkit_has_its_own_variable(tmp_path: Path, uri: str, url: str) -> None:
    theirs = {"WORKFLOW_MONGODB_URI": uri, "WORKFLOW_MONGODB_DATABASE_NAME": "flows"}
    assert Settings.load({}, environ=theirs, folder=tmp_path).url == url


# --- the web app


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proxy_address", "proxy.example"),
        ("proxy_address", "10.0.0.1/24"),
        ("proxy_address", "10.0.0.7,"),
        ("proxy_address", "0.0.0.0/0"),
        ("proxy_address", "::/0"),
        ("proxy_role_header", "X User"),
        ("proxy_role_header", "X-User: ann"),
        ("proxy_role", "emperor"),
        ("allowed_hosts", "https://shop.example"),
        ("allowed_hosts", "shop.example/x"),
        ("allowed_hosts", "*.example"),
        ("session_seconds", "5s"),
        ("audit_retention_seconds", "1h"),
    ],
)
def test_a_wrong_setting_of_access_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        Settings.load({name: text}, environ={}, folder=Path("/"))


def test_settings_of_a_proxy() -> None:
    given = {"proxy_address": "10.0.0.7, fd00::/64", "proxy_user_header": "X-User", "allowed_hosts": "a.example, [::1]"}
    assert Settings.load(given, environ={}, folder=Path("/")).proxy_address == "10.0.0.7/32,fd00::/64"
    with pytest.raises(InvalidSetting, match="needs proxy_address"):
        Settings.load({"proxy_user_header": "X-User"}, environ={}, folder=Path("/"))
