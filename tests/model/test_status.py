"""The table of the state machine, written out a second time from the design, and what must follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError, LifecycleError
from holdfast.model.status import (
    AVAILABLE,
    FINAL,
    INITIAL,
    OWNED,
    SOURCES,
    TABLE,
    Rescuer,
    Rule,
    Status,
    TableError,
    compute_new_owner,
    validate_ownership,
    validate_table,
    validate_transition,
    walk,
)

S = Status

# DESIGN section 4. Flags: F final, V available for a run, Q requires, A acquires, R releases, O overrides ownership.
DESIGN = """
REGISTERED       VR claim           PENDING CONCURRENCY_CONTROLLED CONCURRENCY_CONTROLLED_FINAL CANCELLED FAILED
CONCURRENCY_CONTROLLED R  sweep_limits    REROUTED CANCELLED FAILED
CONCURRENCY_CONTROLLED_FINAL FR -
REROUTED         VR claim           PENDING CONCURRENCY_CONTROLLED CANCELLED FAILED
PENDING          QA recover_pending RUNNING KILLED REROUTED PENDING_RECOVERY CANCELLING PARKED
PENDING_RECOVERY RO recover_pending REROUTED
RUNNING          Q  recover_running PAUSED SUSPENDED PARKED KILLED RETRY SUCCESS FAILED CANCELLING RUNNING_RECOVERY
PAUSED           Q  recover_running RESUMED KILLED CANCELLING RUNNING_RECOVERY
RESUMED          Q  recover_running PAUSED SUSPENDED PARKED KILLED RETRY SUCCESS FAILED CANCELLING RUNNING_RECOVERY
CANCELLING       QO recover_running CANCELLED SUCCESS FAILED KILLED RUNNING_RECOVERY
RUNNING_RECOVERY RO recover_running REROUTED FAILED CANCELLED
SUSPENDED        R  wake_suspended  REROUTED CANCELLED
PARKED           R  wake_parked     REROUTED FAILED CANCELLED
KILLED           R  recover_running REROUTED FAILED CANCELLED
RETRY            VR claim           PENDING CONCURRENCY_CONTROLLED CANCELLED
SUCCESS          FR -
FAILED           FR -
CANCELLED        FR -
"""
ROWS = {words[0]: words[1:] for words in map(str.split, DESIGN.strip().splitlines())}
FLAGS = {
    "F": "is_final",
    "V": "available_for_run",
    "Q": "requires_ownership",
    "A": "acquires_ownership",
    "R": "releases_ownership",
    "O": "overrides_ownership",
}
NEXT = {S[name]: {S[target] for target in row[2:]} for name, row in ROWS.items()}
HAS = {flag: {S[name] for name, row in ROWS.items() if flag in row[0]} for flag in FLAGS}


# --- The table is the design ------------------------------------------------------------------------------------------


def test_the_design_names_every_status() -> None:
    assert set(ROWS) == {status.name for status in Status}
    assert set(TABLE) == set(Status)
    assert len(Status) == 18


@pytest.mark.parametrize("status", Status)
def test_the_table_is_the_design(status: Status) -> None:
    flags, rescuer, *following = ROWS[status.name]
    rule = TABLE[status]
    assert {target.name for target in rule.next} == set(following)
    assert {flag: getattr(rule, name) for flag, name in FLAGS.items()} == {flag: flag in flags for flag in FLAGS}
    assert (rule.rescued_by or "-") == rescuer
    assert rule.meaning


def test_the_first_status_is_registered() -> None:
    assert INITIAL is S.REGISTERED
    validate_transition(None, S.REGISTERED)


def test_derived_sets_follow_the_table() -> None:
    assert HAS["F"] == FINAL
    assert HAS["V"] == AVAILABLE
    assert HAS["Q"] == OWNED
    assert {t: set(s) for t, s in SOURCES.items()} == {t: {s for s in Status if t in NEXT[s]} for t in Status}


def test_a_status_is_stored_as_its_lower_case_name() -> None:
    assert all(status.value == status.name.lower() for status in Status)


def test_the_table_cannot_be_changed_at_run_time() -> None:
    with pytest.raises(TypeError):
        TABLE[S.SUCCESS] = Rule("reopened", frozenset({S.REROUTED}))  # type: ignore[index]


# --- The table refuses to contradict itself ---------------------------------------------------------------------------


def with_rule(status: Status, **changes: object) -> dict[Status, Rule]:
    return {**TABLE, status: TABLE[status]._replace(**changes)}  # type: ignore[arg-type]


def without_edges_to(target: Status) -> dict[Status, Rule]:
    return {status: rule._replace(next=rule.next - {target}) for status, rule in TABLE.items()}


def without_rule(status: Status) -> dict[Status, Rule]:
    return {other: rule for other, rule in TABLE.items() if other is not status}


def test_the_table_itself_is_sound() -> None:
    validate_table(TABLE)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (lambda: with_rule(S.PENDING, releases_ownership=True), "PENDING both acquires and releases"),
        (lambda: with_rule(S.SUCCESS, next=frozenset({S.REROUTED})), "SUCCESS is final but has exits"),
        (lambda: with_rule(S.FAILED, releases_ownership=False), "FAILED is final but keeps its owner"),
        (lambda: with_rule(S.CANCELLED, rescued_by=Rescuer.CLAIM), "CANCELLED is final but names a rescuer"),
        (lambda: with_rule(S.SUSPENDED, next=frozenset()), "SUSPENDED is a dead end"),
        (lambda: with_rule(S.PARKED, rescued_by=None), "PARKED is not final and nothing rescues"),
        (lambda: without_rule(S.RETRY), "RETRY has no rule"),
        (lambda: without_edges_to(S.SUSPENDED), "SUSPENDED cannot be reached"),
        (lambda: without_edges_to(S.PENDING), "PENDING cannot be reached"),
        (
            lambda: with_rule(S.RETRY, next=frozenset({S.CANCELLED})),
            "RETRY is available for a run but cannot be claimed",
        ),
        (lambda: with_rule(S.PAUSED, next=frozenset({S.RESUMED, S.KILLED})), "PAUSED can be left only by its owner"),
    ],
)
def test_a_contradiction_is_refused_and_named(table: Callable[[], dict[Status, Rule]], problem: str) -> None:
    with pytest.raises(TableError, match=problem):
        validate_table(table())


def test_all_contradictions_are_told_at_once() -> None:
    table = with_rule(S.PENDING, releases_ownership=True, rescued_by=None)
    table[S.SUCCESS] = TABLE[S.SUCCESS]._replace(next=frozenset({S.REROUTED}))
    with pytest.raises(TableError) as caught:
        validate_table(table)
    assert "PENDING both acquires" in str(caught.value)
    assert "PENDING is not final and nothing rescues" in str(caught.value)
    assert "SUCCESS is final but has exits" in str(caught.value)


@pytest.mark.parametrize("status", sorted(set(Status) - HAS["F"]))
def test_no_status_may_lose_its_rescuer(status: Status) -> None:
    with pytest.raises(TableError, match=f"{status.name} is not final and nothing rescues"):
        validate_table(with_rule(status, rescued_by=None))


# --- Single edges: who may take them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", Status)
def test_exactly_the_edges_of_the_design_are_legal(source: Status) -> None:
    for target in Status:
        if target in NEXT[source]:
            validate_transition(source, target)
        else:
            with pytest.raises(InvocationStatusTransitionError):
                validate_transition(source, target)


@pytest.mark.parametrize("target", sorted(set(Status) - {S.REGISTERED}))
def test_nothing_but_registered_can_be_first(target: Status) -> None:
    with pytest.raises(InvocationStatusTransitionError, match=f"the start → {target.name}.*allowed next: REGISTERED"):
        validate_transition(None, target)


def test_a_refused_edge_names_source_target_and_what_is_allowed() -> None:
    with pytest.raises(InvocationStatusTransitionError) as caught:
        validate_transition(S.SUSPENDED, S.RUNNING)
    assert "SUSPENDED → RUNNING" in str(caught.value)
    assert "allowed next: CANCELLED, REROUTED" in str(caught.value)


@pytest.mark.parametrize("status", sorted(HAS["F"]))
def test_a_refused_edge_from_a_final_status_says_that_it_is_final(status: Status) -> None:
    with pytest.raises(InvocationStatusTransitionError, match="none, it is final"):
        validate_transition(status, S.REROUTED)


def test_zombie_result_is_refused_and_both_owners_are_named() -> None:
    with pytest.raises(InvocationStatusOwnershipError) as caught:
        validate_ownership(S.RUNNING, S.SUCCESS, owner="r2/w1", actor="r1/w9")
    for part in ("RUNNING → SUCCESS", "r2/w1", "r1/w9"):
        assert part in str(caught.value)


def test_an_unnamed_actor_is_refused_in_words() -> None:
    with pytest.raises(InvocationStatusOwnershipError, match=r"only by the owner r1/w1, not by \(no actor\)"):
        validate_ownership(S.PENDING, S.RUNNING, owner="r1/w1", actor=None)


@pytest.mark.parametrize(("source", "target"), [(s, t) for s in Status for t in sorted(NEXT[s])])
def test_a_stranger_may_leave_only_what_is_not_owned_unless_the_target_overrides(
    source: Status, target: Status
) -> None:
    validate_ownership(source, target, owner="me", actor="me")
    if source in HAS["Q"] and target not in HAS["O"]:
        with pytest.raises(InvocationStatusOwnershipError):
            validate_ownership(source, target, owner="me", actor="stranger")
    else:
        validate_ownership(source, target, owner="me", actor="stranger")


@pytest.mark.parametrize("target", Status)
def test_the_owner_after_a_change(target: Status) -> None:
    expected = "actor" if target in HAS["A"] else None if target in HAS["R"] else "owner"
    assert compute_new_owner(target, "owner", "actor") == expected


def test_a_claim_needs_somebody_who_claims() -> None:
    with pytest.raises(InvocationStatusOwnershipError, match="PENDING needs an owner"):
        compute_new_owner(S.PENDING, None, None)


def test_cancelling_keeps_the_owner_whoever_asked_for_it() -> None:
    assert walk(S.RUNNING, [S.CANCELLING], owner="r1", actor="a person") == (S.CANCELLING, "r1")
    assert walk(S.CANCELLING, [S.CANCELLED], owner="r1", actor="r1") == (S.CANCELLED, None)


# --- Several edges as one change --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "path", "owner", "actor", "end"),
    [
        (None, [S.REGISTERED], None, None, (S.REGISTERED, None)),
        (S.REGISTERED, [S.PENDING, S.RUNNING], None, "r1", (S.RUNNING, "r1")),
        (S.RETRY, [S.PENDING, S.RUNNING, S.SUCCESS], None, "r1", (S.SUCCESS, None)),
        (S.RUNNING, [S.RUNNING_RECOVERY, S.REROUTED], "dead", "r2", (S.REROUTED, None)),
        (S.PENDING, [S.PENDING_RECOVERY, S.REROUTED], "dead", None, (S.REROUTED, None)),
        (S.PENDING, [S.CANCELLING, S.CANCELLED], "r1", "r1", (S.CANCELLED, None)),
        (S.RUNNING, [S.KILLED, S.REROUTED], "r1", "r1", (S.REROUTED, None)),
        (S.PAUSED, [], "r1", "stranger", (S.PAUSED, "r1")),
    ],
)
def test_a_walk_ends_where_its_last_edge_leads(
    source: Status | None, path: list[Status], owner: str | None, actor: str | None, end: tuple[Status, str | None]
) -> None:
    assert walk(source, path, owner, actor) == end


@pytest.mark.parametrize(
    ("source", "path", "owner", "actor", "error"),
    [
        # The second edge is the owner's: whoever asks for a cancellation cannot also finish it.
        (S.RUNNING, [S.CANCELLING, S.CANCELLED], "r1", "a person", InvocationStatusOwnershipError),
        (S.RUNNING, [S.SUCCESS], "r2", "zombie", InvocationStatusOwnershipError),
        (S.REGISTERED, [S.PENDING, S.SUCCESS], None, "r1", InvocationStatusTransitionError),
        (S.RUNNING, [S.SUCCESS, S.REROUTED], "r1", "r1", InvocationStatusTransitionError),
        (None, [S.PENDING], None, "r1", InvocationStatusTransitionError),
        (S.REGISTERED, [S.PENDING], None, None, InvocationStatusOwnershipError),
    ],
)
def test_a_walk_stops_at_its_first_illegal_edge(
    source: Status | None, path: list[Status], owner: str | None, actor: str | None, error: type[LifecycleError]
) -> None:
    with pytest.raises(error):
        walk(source, path, owner, actor)


# --- Random lives -----------------------------------------------------------------------------------------------------

ACTORS = ("r1/w1", "r2/w1", "a person", None)


def allowed(source: Status, target: Status, owner: str | None, actor: str | None) -> bool:
    """The design's rules, said a second time."""
    if target not in NEXT[source] or (target in HAS["A"] and actor is None):
        return False
    return source not in HAS["Q"] or target in HAS["O"] or actor == owner


@given(st.data())
def test_no_life_leaves_the_table_and_only_the_owner_moves_what_is_owned(data: st.DataObject) -> None:
    status, owner = walk(None, [INITIAL], None, None)
    for _ in range(12):
        assert status is not None
        assert (owner is not None) is (status in HAS["Q"]), "owned statuses have an owner, and no others have one"
        choices = []
        for target in Status:
            for actor in ACTORS:
                if allowed(status, target, owner, actor):
                    choices.append((target, actor))
                else:
                    with pytest.raises(LifecycleError):
                        walk(status, [target], owner, actor)
        if not choices:
            assert status in HAS["F"]
            return
        target, actor = data.draw(st.sampled_from(choices))
        status, owner = walk(status, [target], owner, actor)
        assert status is target


@given(st.sampled_from(sorted(HAS["Q"])), st.sampled_from(sorted(Status)))
def test_an_owner_whose_work_was_recovered_and_claimed_again_is_stale(source: Status, target: Status) -> None:
    recovery = S.PENDING_RECOVERY if source is S.PENDING else S.RUNNING_RECOVERY
    status, owner = walk(source, [recovery, S.REROUTED, S.PENDING, S.RUNNING], "zombie", "r2")
    assert (status, owner) == (S.RUNNING, "r2")
    if target not in HAS["O"]:
        with pytest.raises(LifecycleError):
            walk(status, [target], owner, "zombie")


# --- Nothing is stuck -------------------------------------------------------------------------------------------------


def lives(start: tuple[Status, str | None], actor: str, avoid: Iterable[Status] = ()) -> set[tuple[Status, str | None]]:
    """Every (status, owner) that `actor` alone can bring about from `start`."""
    seen, frontier = {start}, [start]
    while frontier:
        status, owner = frontier.pop()
        for target in TABLE[status].next - set(avoid):
            try:
                after = walk(status, [target], owner, actor)
            except InvocationStatusOwnershipError:
                continue
            assert after[0] is not None
            if after not in seen:
                seen.add((after[0], after[1]))
                frontier.append((after[0], after[1]))
    return seen


def test_every_status_is_reached_from_the_start() -> None:
    assert {status for status, _ in lives((INITIAL, None), "r1")} == set(Status)


@pytest.mark.parametrize("status", sorted(set(Status) - HAS["F"]))
def test_when_all_owners_are_dead_one_healthy_runner_is_enough(status: Status) -> None:
    abandoned = (status, "dead" if status in HAS["Q"] else None)
    reached = lives(abandoned, "healthy")
    assert reached & {(final, None) for final in HAS["F"]}
    # More than an end: the work itself can still be done, without cancelling it and without the dead owner.
    assert (S.SUCCESS, None) in lives(abandoned, "healthy", avoid=[S.CANCELLING])
    assert (S.RUNNING, "healthy") in reached


@pytest.mark.parametrize("status", sorted(HAS["Q"]))
def test_a_dead_owner_loses_its_work_only_to_a_recovery(status: Status) -> None:
    taken = {target for target in NEXT[status] if target in HAS["O"] and target in HAS["R"]}
    assert taken == {S.PENDING_RECOVERY if status is S.PENDING else S.RUNNING_RECOVERY}
