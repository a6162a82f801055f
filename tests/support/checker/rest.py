"""What holds without looking at one history: the table has no dead end, and at rest nothing is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tests.support.checker.case import Case, covers
from tests.support.checker.evidence import FaultKind, Violation
from tests.support.witness import What

from holdfast.fleet.slots import ExecutionStatus
from holdfast.model.records import digests_in, runner_of
from holdfast.model.status import OWNED, TABLE, Rescuer, Rule, Status

Sweeps = Mapping[Rescuer, frozenset[Status]]
"""Which statuses each duty really looks at."""


def dead_ends(table: Mapping[Status, Rule] = TABLE, sweeps: Sweeps | None = None) -> Iterator[Violation]:
    """I17: from every non-final status an end can be reached when all owners are dead and one healthy runner is there.

    The first step out of a status whose owner is dead is its rescuer's, and a rescuer can do only what the table
    allows to somebody who is not the owner. After a claim the healthy runner is the owner. With `sweeps`, a rescuer
    is counted on only where it looks; a claim looks at everything that is available.
    """
    for status, rule in table.items():
        if rule.is_final:
            continue
        if not _rescued(table, status, sweeps):
            who = rule.rescued_by or "nobody"
            yield Violation("I17", None, f"{status} with a dead owner is rescued by {who}, who has no way out of it")
        elif not _ends(table, status, sweeps):
            yield Violation("I17", None, f"{status} with a dead owner is rescued, but never comes to an end")


def _rescued(table: Mapping[Status, Rule], status: Status, sweeps: Sweeps | None) -> set[Status]:
    """Where the rescuer can bring it."""
    rule = table[status]
    following = {name: table[name] for name in rule.next if name in table}
    if rule.rescued_by is None:
        return set()
    if rule.rescued_by is Rescuer.CLAIM:
        return {name for name, after in following.items() if rule.available_for_run and after.acquires_ownership}
    if sweeps is not None and status not in sweeps.get(rule.rescued_by, frozenset()):
        return set()
    if rule.requires_ownership:
        return {name for name, after in following.items() if after.overrides_ownership and after.releases_ownership}
    return {name for name, after in following.items() if after.releases_ownership}


def _ends(table: Mapping[Status, Rule], start: Status, sweeps: Sweeps | None) -> bool:
    """Whether an end can be reached. A status is visited with a living owner, who may take every edge, or without."""
    seen: set[tuple[Status, bool]] = set()
    frontier = [(start, False)]
    while frontier:
        status, alive = frontier.pop()
        if (status, alive) in seen:
            continue
        seen.add((status, alive))
        if table[status].is_final:
            return True
        for target in table[status].next & table.keys() if alive else _rescued(table, status, sweeps):
            rule = table[target]
            frontier.append((target, rule.acquires_ownership or (alive and not rule.releases_ownership)))
    return False


def table_has_no_dead_end(case: Case) -> Iterator[Violation]:
    """I17, for the table as it is."""
    yield from dead_ends()


def conserved(case: Case) -> Iterator[Violation]:
    """I18: counted by status, by record and by history, there is the same; and nothing could not be read."""
    for record in case.dump.records:
        if record.history and record.history[-1].status is not record.status:
            sentence = f"it is {record.status}, and by its history {record.history[-1].status}"
            yield Violation("I18", record.id, sentence, record.history[-1:])
    found = Counter(record.status for record in case.dump.records)
    counts = found if case.dump.counts is None else case.dump.counts
    for status in Status:
        if found[status] != counts.get(status, 0):
            there = counts.get(status, 0)
            sentence = f"the store counts {there} invocations that are {status}, and {found[status]} were found"
            yield Violation("I18", None, sentence)
    for each in case.dump.quarantined:
        yield Violation("I18", each.id, f"it is in quarantine: {each.why}")


def nothing_left_over(case: Case) -> Iterator[Violation]:
    """I18: at rest nobody owns anything, no slot is held, and who has gone is not on the roster."""
    for record in case.dump.records:
        if record.status in OWNED or record.owner is not None:
            sentence = f"it still belongs to {record.owner or 'nobody'}: {record.status}"
            yield Violation("I18", record.id, sentence, record.history[-1:])
        if record.slot is not None:
            yield Violation("I18", record.id, f"it still holds the slot {record.slot}", record.history[-1:])
    for start, end, _ in case.joined(What.LEASE_ENTER, What.LEASE_EXIT):
        if end is None and start.pid not in case.end_of_pid:
            yield Violation("I18", case.id_of(start), f"the slot of '{start.key}' was never left", (start,))
    gone = [event for event in case.events(What.RUNNER_END) if event.owner]
    killed = [fault for fault in case.faults.all if fault.kind is FaultKind.KILL]
    for runner in case.dump.runners:
        left = [event for event in gone if event.owner == runner.id]
        dead = [fault for fault in killed if any(covers(name, runner.id) for name in case.names_in(fault))]
        if left or dead:
            done = "left" if left else "was killed"
            sentence = f"the runner {runner.id} {done}, and is still on the roster"
            yield Violation("I18", None, sentence, (*left[:1], *dead[:1]))


def _of_entries(case: Case) -> set[str]:
    """Return the payloads that entries refer to."""
    waiting = [each.picked for join in case.dump.joins for group in (*join.members, *join.firings) for each in group]
    given = [schedule.call.arguments for schedule in case.dump.schedules]
    return set(digests_in(*[event.payload for event in case.dump.events], *waiting, *given))


def stock_is_wanted(case: Case) -> Iterator[Violation]:
    """I18: what records refer to is there whole, and what nobody refers to is collected in time."""
    stock, old = case.dump.stock, case.dump.at - case.bounds.unwanted_seconds
    if stock is None:
        return
    there, pieces = {kept.digest: kept for kept in stock.payloads}, {(p.digest, p.number) for p in stock.pieces}
    wanted: set[str] = set()
    chunks: dict[str, set[str]] = {}
    for log, lines in case.dump.streams.items():
        chunks.setdefault(log.partition("/")[0], set()).update(digest for line in lines for digest in line.payloads)
    for record in case.dump.records:
        digests = {*digests_in(record.arguments, record.result, record.error), *chunks.get(record.id, ())}
        wanted |= digests
        for digest in sorted(digests):
            needed = {(digest, number) for number in range(1, there[digest].pieces)} if digest in there else set()
            if digest not in there or not needed <= pieces:
                sentence = f"it refers to the payload {digest}, which is not there, or not whole"
                yield Violation("I18", record.id, sentence, record.history[-1:])
    for digest in sorted(of_entries := _of_entries(case)):
        if digest not in there:
            yield Violation(
                "I18", None, f"an event, a join or a schedule refers to the payload {digest}: it is not there"
            )
    wanted |= of_entries
    for kept in stock.payloads:
        if kept.digest not in wanted and kept.wanted_at < old and not case.dump.quarantined:
            yield Violation("I18", None, f"nobody refers to the payload {kept.digest}, and it is still there")
    for piece in stock.pieces:
        if piece.digest not in there and piece.put_at < old:
            sentence = f"the piece {piece.number} of the payload {piece.digest} is there, and the payload is not"
            yield Violation("I18", None, sentence)


def services_are_over(case: Case) -> Iterator[Violation]:
    """I18: nobody who has gone is at a service still, if there was somebody else who had the time to end that."""
    there = {runner.id for runner in case.dump.runners}
    lives = [(start, min(over, case.last)) for start, _, over in case.joined(What.RUNNER_START, What.RUNNER_END)]
    for execution in case.dump.executions:
        if execution.status is not ExecutionStatus.RUNNING or execution.runner_id in there:
            continue
        over = execution.window_ends_at - case.dump.offset
        others = [
            (start, until) for start, until in lives if start.owner and runner_of(start.owner) != execution.runner_id
        ]
        if any(until - max(start.at, over) > case.bounds.recovery_seconds for start, until in others):
            sentence = f"the runner {execution.runner_id} has gone, and is still at the service '{execution.service}'"
            yield Violation("I18", None, sentence)
