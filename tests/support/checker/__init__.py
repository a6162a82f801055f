"""The checker: did what the store holds come about rightly?

It compares two sources that know nothing of each other: the histories that the store wrote, and the ledgers that
witnesses wrote outside of it (`tests.support.witness`). It is a pure function of these and of the faults that were
injected, so a run can be kept and judged again.

::

    # In each process: a Witness with a ledger of its own, in one folder. Submit, execute, kill, heal. Then:
    ledgers = witness.read(folder)
    left = await checker.dump(store, "shop")
    found = checker.check(left, ledgers, checker.Faults.of(ledgers))
    assert not found, "\\n".join(map(str, found))

Take the dump at rest: faults are over, work has ended, runners may still be there. `Bounds` says what was promised;
tell it the retries of your tasks. Faults are written down by whoever injects them (`Witness.fault`); a runner that was
told to stop and did not wait for its work is one of them. `Witness.runner` in each runner's process tells which pid is
which owner; without it the checker knows less, and says less.

=====  ==============================================================================================================
I1     nothing lost: what was acknowledged, executed or seen is there, and what is there has ended in time
I2     a history is a legal path of the table, with versions 1, 2, 3 …
I3     final is final; what was seen once is what everybody sees
I4     one owner at a time; each claim has the next epoch; an epoch is executed once
I5     a step has one record, which is that of an execution in its epoch, and is not executed in a later one
I6     a write carries the epoch that is current; a result is that of the execution in whose epoch it was written
I7     one submit, one invocation; none or one if its outcome was unknown, none if it was refused. One key, one
       invocation, over all clients and tries, until its time is over
I8     at most K leases under a limit of K, and a free slot is filled while work waits
I9     a tick fires once, nothing fires that is no tick, and none is passed over that its schedule does not count
I10    each event, and each end, calls every task once that has a trigger for it whose conditions hold
I11    a stream is dense, in the order of writing, without a chunk lost or doubled; no writer is behind its successor;
       every reader saw what is there
I12    a payload of a hook is delivered once, to the hook of its token, in the order of the senders, or refused; hooks
       end with their runs
I13    a run and its children agree: each call has one child, and the run has recorded the end that the child has
I14    attempts ≤ 1 + retries + crash recoveries, and those have a cap
I15    executed once, and once more at most for each fault that touched it
I16    a service runs once at a time, and is served within two periods
I17    the table has no dead end, whoever dies
I18    at rest the counts agree, and nothing is owned or left behind
I19    the log of a finished run, replayed, gives the same calls and the same end
I20    the work of the dead runs again in time, and nothing is taken from the living
I21    the end of a link calls the next one, that of a group calls back; each once
=====  ==============================================================================================================

Runs of a World are judged by `check_worlds`, under I1, I5, I11 and I12.

A submit that raised an error of the store, or whose process died, is unknown: it may be there once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.support.checker import (
    causes,
    executions,
    groups,
    history,
    hooks,
    keys,
    replays,
    rest,
    streams,
    ticks,
    timing,
    workflows,
)
from tests.support.checker.case import Body, Case
from tests.support.checker.evidence import Bounds, Dump, Fault, FaultKind, Faults, LogLine, StreamLine, Violation, dump
from tests.support.checker.rest import dead_ends
from tests.support.checker.world_runs import check_worlds, dump_worlds
from tests.support.witness import Ledgers

__all__ = [
    "Bounds",
    "Dump",
    "Fault",
    "FaultKind",
    "Faults",
    "Ledgers",
    "LogLine",
    "StreamLine",
    "Violation",
    "check",
    "check_worlds",
    "dead_ends",
    "dump",
    "dump_worlds",
]

CHECKS: tuple[Callable[[Case], Iterator[Violation]], ...] = (
    executions.nothing_lost,
    history.legal_path,
    history.final_is_final,
    executions.seen_once_seen_for_ever,
    history.one_owner,
    executions.one_execution_of_an_epoch,
    workflows.logs_are_of_one_owner_at_a_time,
    workflows.a_call_ends_once,
    workflows.no_recorded_step_runs_again,
    workflows.a_recorded_step_has_run,
    history.current_epoch,
    executions.result_of_its_epoch,
    executions.one_submit_one_invocation,
    keys.one_key_one_holder,
    keys.one_key_one_invocation,
    timing.limits_hold,
    timing.slots_are_filled,
    ticks.no_tick_twice,
    ticks.no_tick_is_lost,
    causes.everybody_was_told,
    causes.one_call_for_each,
    causes.each_happening_is_used_once,
    groups.chains_go_on,
    groups.groups_call_back_once,
    streams.positions_are_dense_and_fenced,
    streams.chunks_are_as_they_were_said,
    streams.a_call_that_has_ended_has_all_its_chunks,
    streams.readers_saw_what_is_there,
    hooks.payloads_are_delivered_once_or_refused,
    hooks.payloads_come_to_their_own_hook,
    hooks.payloads_come_in_order,
    hooks.hooks_end_with_their_runs,
    workflows.one_child_for_each_call,
    workflows.children_are_accounted_for,
    history.bounded_attempts,
    executions.no_needless_executions,
    timing.services_do_not_overlap,
    timing.services_are_served,
    rest.table_has_no_dead_end,
    rest.conserved,
    rest.nothing_left_over,
    rest.stock_is_wanted,
    rest.services_are_over,
    replays.finished_runs_replay,
    timing.recovery_is_prompt,
    timing.only_the_dead_are_recovered,
)

_NO_FAULTS, _DEFAULTS = Faults(), Bounds()


def check(
    dump: Dump,
    ledgers: Ledgers,
    faults: Faults = _NO_FAULTS,
    bounds: Bounds = _DEFAULTS,
    bodies: Mapping[str, Body] | None = None,
) -> list[Violation]:
    """Every invariant that does not hold, in the order of their numbers."""
    case = Case(dump, ledgers, faults, bounds, bodies)
    return [violation for judge in CHECKS for violation in judge(case)]
