"""Retry policies: what is decided, why, and that policies survive being stored."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import parse_duration
from holdfast.errors import NotDecodable, UsageError
from holdfast.model.retries import (
    Exponential,
    FirstMatch,
    Fixed,
    Forever,
    GiveUp,
    MoveTo,
    Never,
    Only,
    Policy,
    Retries,
    Retry,
    RetryDecision,
    Timetable,
    as_policy,
    decide,
    dump_policy,
    exception_names,
    load_policy,
)

TIMETABLE = Timetable({"5m": "1m", "1h": "5m", "24h": "1h"})


def after_failure(
    policy: Policy, attempt: int = 1, *, age: str = "0s", error: type[BaseException] = ValueError, random: float = 1.0
) -> RetryDecision:
    return decide(
        policy,
        attempt=attempt,
        age_seconds=parse_duration(age),
        error_types=exception_names(error),
        random_unit=random,
    )


def wait(policy: Policy, attempt: int = 1, **facts: Any) -> float:
    decision = after_failure(policy, attempt, **facts)
    assert isinstance(decision, Retry), decision
    return decision.wait_seconds


# --- Never, Fixed, Exponential, Forever -------------------------------------------------------------------------------


def test_never_gives_up_after_the_first_failure() -> None:
    assert after_failure(Never()) == GiveUp("attempt 1 failed; it is not to be retried")


def test_attempts_count_those_after_the_first() -> None:
    policy = Fixed(2, 10.0)
    assert after_failure(policy, 1) == Retry(10.0, None, "attempt 1 of 3 failed; next in 10s")
    assert after_failure(policy, 2) == Retry(10.0, None, "attempt 2 of 3 failed; next in 10s")
    assert after_failure(policy, 3) == GiveUp("attempt 3 of 3 failed; none is left")


def test_exponential_waits_double_up_to_the_cap() -> None:
    policy = Exponential(10, jitter=False)
    assert [wait(policy, attempt) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert after_failure(Exponential(5, jitter=False), 3).why == "attempt 3 of 6 failed; next in 4s"


def test_exponential_takes_its_factor_and_first_wait() -> None:
    policy = Exponential(10, first_seconds=0.5, cap_seconds=100.0, factor=3.0, jitter=False)
    assert [wait(policy, attempt) for attempt in (1, 2, 3)] == [0.5, 1.5, 4.5]


def test_no_first_wait_stays_no_wait() -> None:
    assert wait(Exponential(10**9, first_seconds=0.0), 10**6) == 0.0


@pytest.mark.parametrize("policy", [Exponential(10**9), Exponential(10**9, factor=1.5), Forever(Exponential(0))])
def test_a_million_attempts_do_not_overflow(policy: Policy) -> None:
    assert wait(policy, 10**6) == 60.0


@given(attempt=st.integers(1, 100), random_unit=st.floats(0, 1))
def test_jitter_stays_in_the_upper_half_of_the_wait(attempt: int, random_unit: float) -> None:
    full = wait(Exponential(100, jitter=False), attempt)
    jittered = wait(Exponential(100), attempt, random=random_unit)
    assert full / 2 <= jittered <= full
    assert jittered == pytest.approx(full / 2 + full / 2 * random_unit)


def test_without_jitter_chance_plays_no_part() -> None:
    assert wait(Exponential(5, jitter=False), random=0.0) == wait(Exponential(5, jitter=False), random=1.0)


def test_forever_ignores_the_number_of_attempts() -> None:
    policy = Forever(Fixed(0, 30.0))
    assert after_failure(policy, 1000) == Retry(30.0, None, "attempt 1000 (without limit) failed; next in 30s")


# --- Timetable --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "expected"),
    [("0s", 60), ("5m", 60), ("5m1ms", 300), ("1h", 300), ("61m", 3600), ("24h", 3600)],
)
def test_timetable_waits_by_age_and_a_row_holds_up_to_its_age(age: str, expected: float) -> None:
    assert wait(TIMETABLE, 7, age=age) == expected


def test_past_its_last_row_a_timetable_gives_up() -> None:
    assert after_failure(TIMETABLE, 40, age="24h1s") == GiveUp(
        "attempt 40 failed at the age of 1d1s; the timetable ends at 1d"
    )


def test_forever_keeps_to_the_last_row_of_a_timetable() -> None:
    assert wait(Forever(TIMETABLE), age="3 days") == 3600


def test_the_order_in_which_rows_are_written_does_not_matter() -> None:
    assert Timetable([("24h", "1h"), ("5m", "1m"), ("1h", "5m")]) == TIMETABLE


def test_an_age_below_zero_counts_as_zero() -> None:
    decision = decide(TIMETABLE, attempt=1, age_seconds=-5.0, error_types=(), random_unit=0.5)
    assert decision == Retry(60.0, None, "attempt 1 failed at the age of 0s; next in 1m")


# --- Only, FirstMatch, MoveTo -----------------------------------------------------------------------------------------


def test_only_the_named_exceptions_and_their_subclasses_are_retried() -> None:
    policy = Only(Fixed(3, 1.0), (ConnectionError,))
    assert wait(policy, error=ConnectionError) == 1.0
    assert wait(policy, error=ConnectionResetError) == 1.0
    assert after_failure(policy, error=OSError) == GiveUp(
        "attempt 1 failed with builtins:OSError; only builtins:ConnectionError is retried"
    )


def test_exception_classes_become_names_when_the_policy_is_made() -> None:
    assert Only(Never(), ConnectionError).exceptions == ("builtins:ConnectionError",)
    assert Only(Never(), ["IOError", "app.errors:Busy"]).exceptions == ("builtins:OSError", "app.errors:Busy")
    rules = FirstMatch([(KeyError, Never()), ((msgspec.DecodeError, "a:B"), Fixed(1))]).rules
    assert rules == ((("builtins:KeyError",), Never()), (("msgspec:DecodeError", "a:B"), Fixed(1)))


def test_exception_names_are_those_of_the_class_and_its_bases_nearest_first() -> None:
    assert exception_names(KeyError) == (
        "builtins:KeyError",
        "builtins:LookupError",
        "builtins:Exception",
        "builtins:BaseException",
    )


def test_the_first_rule_that_matches_decides_not_the_nearest() -> None:
    policy = FirstMatch([(LookupError, Fixed(1, 1.0)), (KeyError, Fixed(1, 2.0)), (OSError, Never())])
    assert wait(policy, error=KeyError) == 1.0
    assert after_failure(policy, error=TimeoutError) == after_failure(Never())
    assert after_failure(policy, error=ValueError) == GiveUp(
        "attempt 1 failed with builtins:ValueError; no rule of the retry policy names it"
    )


def test_move_to_sends_retries_but_not_ends_to_another_queue() -> None:
    policy = MoveTo("big", Fixed(1, 5.0))
    assert after_failure(policy, 1) == Retry(5.0, "big", "attempt 1 of 2 failed; next in 5s, on queue 'big'")
    assert after_failure(policy, 2) == after_failure(Fixed(1, 5.0), 2)


def test_the_innermost_move_wins() -> None:
    decision = after_failure(MoveTo("slow", FirstMatch([(MemoryError, MoveTo("big", Fixed(1)))])), error=MemoryError)
    assert isinstance(decision, Retry)
    assert decision.queue == "big"


def test_an_error_of_unknown_type_matches_no_rule() -> None:
    decision = decide(Only(Fixed(1), Exception), attempt=1, age_seconds=0, error_types=(), random_unit=0)
    assert decision == GiveUp("attempt 1 failed with an unknown error; only builtins:Exception is retried")


# --- Retries and as_policy --------------------------------------------------------------------------------------------


def test_retries_makes_the_usual_policies() -> None:
    assert Retries(5) == Exponential(5, 1.0, 60.0, 2.0, True)
    assert Retries(5, wait="2s", cap="5m", jitter=False) == Exponential(5, 2.0, 300.0, 2.0, False)
    assert Retries(3, backoff="fixed", wait="10s") == Fixed(3, 10.0)
    assert Retries("forever", backoff="fixed", wait=2) == Forever(Fixed(0, 2.0))
    assert Retries(3, only=OSError) == Only(Exponential(3), ("builtins:OSError",))
    assert Retries(0, only=OSError) == Never()


def test_a_number_means_so_many_attempts_after_the_first() -> None:
    policy = as_policy(5)
    assert isinstance(after_failure(policy, 5), Retry)
    assert isinstance(after_failure(policy, 6), GiveUp)


def test_none_and_zero_mean_never_and_a_policy_means_itself() -> None:
    assert as_policy(None) == as_policy(0) == Never()
    assert as_policy(TIMETABLE) is TIMETABLE


def test_waits_are_lengths_of_time_and_are_kept_in_seconds() -> None:
    assert Fixed(3, "10s") == Fixed(3, dt.timedelta(seconds=10)) == Fixed(3, 10)
    assert Exponential(3, "100ms", "1m") == Exponential(3, 0.1, 60)
    assert dump_policy(Fixed(3, "10s")) == {"kind": "fixed", "attempts": 3, "wait_seconds": 10.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_policy(True), "not a retry policy"),
        (lambda: as_policy("5"), "not a retry policy"),  # type: ignore[arg-type]
        (lambda: as_policy(-1), "attempts=-1"),
        (lambda: Fixed(1.5, 1.0), "Fixed: attempts=1.5"),  # type: ignore[arg-type]
        (lambda: Fixed(1, -1.0), "negative"),
        (lambda: Fixed(1, "5x"), "Fixed: wait_seconds='5x': .*unknown unit 'x'"),
        (lambda: Exponential(1, float("nan")), "not a number"),
        (lambda: Exponential(1, 5.0, 1.0), "cap .* shorter than the first wait"),
        (lambda: Exponential(1, factor=0.5), "factor=0.5"),
        (lambda: Exponential(1, factor=float("inf")), "factor=inf"),
        (lambda: Timetable({}), "no rows"),
        (lambda: Timetable({"60s": "1s", "1m": "2s"}), "two rows for the age 1m"),
        (lambda: Timetable({"5 moons": "1s"}), "unknown unit 'moons'"),
        (lambda: Timetable(5), "must map ages to waits"),  # type: ignore[arg-type]
        (lambda: Forever(Never()), "needs a Fixed"),  # type: ignore[arg-type]
        (lambda: Only(Fixed(1), ()), "names no exceptions"),
        (lambda: Only(5, OSError), "5 is not a retry policy"),  # type: ignore[arg-type]
        (lambda: Only(Fixed(1), "errors.Busy"), "'errors.Busy' is not an exception.*module:qualname"),
        (lambda: Only(Fixed(1), int), "is not an exception"),  # type: ignore[arg-type]
        (lambda: Only(Fixed(1), 5), "is not an exception"),  # type: ignore[arg-type]
        (lambda: FirstMatch([]), "no rules"),
        (lambda: FirstMatch([OSError]), "pairs of exceptions and policy"),  # type: ignore[list-item]
        (lambda: FirstMatch([(OSError, 3)]), r"3 is not a retry policy; write Retries\(3\)"),  # type: ignore[list-item]
        (lambda: MoveTo("slow|mail", Fixed(1)), "'slow.mail' is no name for a queue"),
        (lambda: MoveTo(" ", Fixed(1)), "no name for a queue"),
        (lambda: Retries(1, backoff="linear"), "'exponential' or 'fixed'"),  # type: ignore[arg-type]
        (lambda: Retries(1, wait="2m"), "shorter than the first wait"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("facts", [{"attempt": 0}, {"random": 1.5}, {"random": float("nan")}])
def test_facts_that_cannot_be_are_refused(facts: Any) -> None:
    with pytest.raises(UsageError, match=r"attempt=.*random_unit="):
        after_failure(Fixed(1), **facts)


# --- Storing ----------------------------------------------------------------------------------------------------------

_seconds = st.floats(0, 1e6)
_names = st.lists(st.sampled_from([OSError, KeyError, "app:Busy"]), min_size=1)
_paced = st.one_of(
    st.builds(Fixed, st.integers(0, 100), _seconds),
    st.builds(
        lambda attempts, waits, factor, jitter: Exponential(attempts, min(waits), max(waits), factor, jitter),
        st.integers(0, 100),
        st.tuples(_seconds, _seconds),
        st.floats(1, 10),
        st.booleans(),
    ),
    st.builds(Timetable, st.dictionaries(_seconds, _seconds, min_size=1, max_size=4)),
)
policies: st.SearchStrategy[Policy] = st.recursive(
    st.one_of(st.just(Never()), _paced, st.builds(Forever, _paced)),
    lambda inner: st.one_of(
        st.builds(Only, inner, _names),
        st.builds(FirstMatch, st.lists(st.tuples(_names, inner), min_size=1, max_size=3)),
        st.builds(MoveTo, st.sampled_from(["big", "slow"]), inner),
    ),
    max_leaves=5,
)


@given(policies)
def test_a_stored_policy_is_read_back_unchanged_also_through_json(policy: Policy) -> None:
    assert load_policy(dump_policy(policy)) == policy
    assert load_policy(json.loads(json.dumps(dump_policy(policy)))) == policy
    assert hash(load_policy(dump_policy(policy))) == hash(policy)


@given(
    policy=policies,
    attempt=st.integers(1, 10**6),
    age=st.floats(-1e6, 1e9),
    error=st.sampled_from([OSError, KeyError, SystemExit]),
    random_unit=st.floats(0, 1),
)
def test_every_policy_decides_about_every_failure(
    policy: Policy, attempt: int, age: float, error: type[BaseException], random_unit: float
) -> None:
    decision = decide(
        policy, attempt=attempt, age_seconds=age, error_types=exception_names(error), random_unit=random_unit
    )
    assert decision.why.startswith(f"attempt {attempt} ")
    if isinstance(decision, Retry):
        assert 0 <= decision.wait_seconds <= 1e6


def test_a_policy_is_stored_by_name_and_parameters() -> None:
    assert dump_policy(Fixed(3, 5.0)) == {"kind": "fixed", "attempts": 3, "wait_seconds": 5.0}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"kind": "fibonacci", "attempts": 3}, "kind 'fibonacci'.*exponential.*newer version"),
        ({"kind": "move-to", "queue": "q", "policy": {"kind": "fibonacci"}}, "kind 'fibonacci'"),
        ({"kind": "first-match", "rules": [[["a:B"], {"kind": "fibonacci"}]]}, "kind 'fibonacci'"),
        ({}, "cannot be read"),
        (None, "cannot be read"),
        ({"kind": None}, "cannot be read"),
        ({"kind": "fixed"}, "attempts"),
        ({"kind": "fixed", "attempts": "3"}, "attempts"),
        ({"kind": "fixed", "attempts": -3}, "attempts=-3"),
        ({"kind": "fixed", "attempts": 3, "spread": 2}, "spread"),
        ({"kind": "forever", "wait": {"kind": "never"}}, "cannot be read"),
    ],
)
def test_a_stored_policy_that_this_version_does_not_know_is_refused(stored: Any, message: str) -> None:
    with pytest.raises(NotDecodable, match=message):
        load_policy(stored)


@pytest.mark.parametrize("queue", ["a|b", "a b", "a,b", "", "x" * 201, "\ud800", None])
def test_a_policy_moves_only_to_what_can_be_a_queue(queue: Any) -> None:
    """A lane is made of it: with a bar in it, no runner would ever find what was moved there."""
    with pytest.raises(UsageError):
        MoveTo(queue, Fixed(1))
    with pytest.raises(NotDecodable):
        load_policy({"kind": "move-to", "queue": queue, "policy": {"kind": "fixed", "attempts": 1}})


@pytest.mark.parametrize("attempts", [2**63, 10**400])
def test_no_policy_has_more_attempts_than_a_store_can_count(attempts: int) -> None:
    with pytest.raises(UsageError, match="attempts="):
        Fixed(attempts)
