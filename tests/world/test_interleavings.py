"""Any interleaving of three servers, with lost calls and lost replies, leaves a log without a forbidden transition."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.world.interleaving import Asked, InTurns, Turns, forbidden, write
from tests.world.worlds import Server, World

from holdfast.ids import derived_id
from holdfast.model.status import FINAL, Status
from holdfast.workflows.hooks_records import HOOK
from holdfast.world.errors import WorldError
from holdfast.world.hooks import KIND
from holdfast.world.projection import STATUSES
from holdfast.world.records import decode, invocation_of, run_name

KINDS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("run_created", None, {"deploymentId": "d", "workflowName": "w", "input": b"1"}),
    ("run_started", None, {}),
    ("run_started", None, {"deploymentId": "d", "workflowName": "w", "input": b"1"}),
    ("run_completed", None, {"output": b"1"}),
    ("run_failed", None, {"error": b"1"}),
    ("run_cancelled", None, {}),
    ("attr_set", None, {"changes": [{"key": "a", "value": "1"}]}),
    *[
        (kind, f"step_{number}", {"stepName": "s"} | data)
        for number in (1, 2)
        for kind, data in [
            ("step_created", {"input": b"1"}),
            ("step_started", {}),
            ("step_started", {"input": b"1"}),
            ("step_completed", {"result": b"1"}),
            ("step_failed", {"error": b"1"}),
            ("step_retrying", {"error": b"1"}),
        ]
    ],
    *[("hook_created", f"hook_{number}", {"token": token}) for number in (1, 2) for token in ("t", "u")],
    ("hook_received", "hook_1", {"payload": b"1"}),
    ("hook_disposed", "hook_1", {}),
    ("wait_created", "wait_1", {"resumeAt": 0}),
    ("wait_completed", "wait_1", {}),
]


@settings(max_examples=100)
@given(
    scripts=st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, len(KINDS) - 1)), max_size=7), min_size=3, max_size=3
    ),
    choices=st.lists(st.integers(0, 2**16), min_size=1, max_size=60),
    is_begun=st.booleans(),
)
def test_three_servers_at_once(scripts: list[list[tuple[int, int]]], choices: list[int], is_begun: bool) -> None:
    world = World("memory://")
    try:
        runs = [run_name(derived_id("run", str(number), at=world.clock.now())) for number in range(2)]
        if is_begun:
            for run in runs:
                world.run(id=run, started=True)
        asked: list[list[Asked]] = [[(runs[run], *KINDS[kind]) for run, kind in script] for script in scripts]
        turns = Turns(choices)
        store: Any = world.engine.store
        servers = [Server(world.do, InTurns(store, turns), world.clock, 10 + number) for number in range(3)]  # type: ignore[arg-type]
        answers: list[list[tuple[Asked, Any]]] = [[] for _ in servers]

        async def script(number: int) -> None:
            answers[number] = await write(servers[number], f"writer{number}", asked[number])

        world.do(turns.drive([script(number) for number in range(3)]))
        _check(world, runs, [each for some in answers for each in some])
        _check_tokens(turns, runs)
    finally:
        world.close()


def _check(world: World, runs: list[str], answers: list[tuple[Asked, Any]]) -> None:
    """Check the logs, that each acknowledged event is there once, and that invocations come to agree with them."""
    fresh = world.other()
    logs: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for run in runs:
        with contextlib.suppress(WorldError):  # it was never created
            logs[run] = fresh.events(run)
    assert {run: forbidden(log) for run, log in logs.items()} == {run: [] for run in runs}
    written = [
        (answer["event"]["runId"], answer["event"]["eventId"]) for _, answer in answers if "event" in _of(answer)
    ]
    shown = [ids for ids in written if logs[ids[0]][int(ids[1][5:]) - 1]["eventType"] != "run_cancelled"]
    assert len(set(shown)) == len(shown)
    for asked, answer in answers:
        if "event" in _of(answer):
            stored = logs[asked[0]][int(answer["event"]["eventId"][5:]) - 1]
            assert answer["event"] == stored
            assert stored["eventType"] in (asked[1], "hook_conflict")
    while world.do(fresh.storage.sweep()):
        pass
    for run in runs:
        id = invocation_of(run)
        assert id is not None
        (record,) = world.do(world.engine.store.get("app", [id]))
        if logs[run]:
            assert record is not None
            status = STATUSES[fresh.get(run)["status"]]
            assert record.status is status or (status, record.status) == (Status.REGISTERED, Status.REROUTED)
            assert dict(record.attributes) == fresh.get(run)["attributes"]
            if record.status in FINAL:
                for kind in (HOOK, KIND):
                    assert not [
                        each
                        for each in world.do(world.engine.store.entries("app", kind, subject=id))
                        if fresh.get(run)["status"] and "hook_created" in {e["eventType"] for e in logs[run]}
                    ]


def _of(answer: Any) -> Any:
    return answer if isinstance(answer, dict) else {}


def _check_tokens(turns: Turns, runs: list[str]) -> None:
    """Check that a token never had two open hooks, in the order in which pages were stored."""
    holders: dict[str, tuple[str, str]] = {}
    for page in turns.pages:
        for event in decode(page):
            if event.type == "hook_created":
                token = event.facts["token"]
                assert token not in holders, f"{token} of {holders[token]} is given to {page.run} {event.call}"
                holders[token] = (page.run, event.call)
            elif event.type == "hook_disposed":
                holders = {token: held for token, held in holders.items() if held != (page.run, event.call)}
            elif event.type in ("run_completed", "run_failed", "run_cancelled"):
                holders = {token: held for token, held in holders.items() if held[0] != page.run}


def test_the_judge_of_logs_finds_what_is_forbidden() -> None:
    def log(*kinds: str) -> list[dict[str, Any]]:
        return [
            {
                "eventId": f"evnt_{number:026d}",
                "eventType": kind,
                **({} if kind.startswith("run") else {"correlationId": f"{kind[:4]}_1"}),
            }
            for number, kind in enumerate(kinds, 1)
        ]

    assert forbidden(log("run_created", "run_started", "step_created", "step_started", "step_completed")) == []
    for kinds in (
        ("run_started",),
        ("run_created", "run_created"),
        ("run_created", "run_started", "run_started"),
        ("run_created", "run_completed", "run_failed"),
        ("run_created", "step_created", "step_created"),
        ("run_created", "step_created", "step_completed", "step_started"),
        ("run_created", "hook_created", "hook_disposed", "hook_received"),
        ("run_created", "wait_created", "wait_completed", "wait_completed"),
        ("run_created", "step_created", "run_completed", "step_started"),
    ):
        assert len(forbidden(log(*kinds))) == 1, kinds
