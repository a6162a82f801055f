"""Why an invocation stands where it stands, in a sentence or two: what holds it back, and what would release it.

Pure: it looks at the record, at what surrounds it, and at the time. Whether something holds it back is not decided
here but in `holdfast.model.eligibility`, by the conditions that runners go by; here is a sentence for each.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import format_duration
from holdfast.model.cancellation import must_end_by
from holdfast.model.eligibility import Reason, Standing, held_back, lane_obstacle, offer_of
from holdfast.model.limits import Limit
from holdfast.model.names import unversioned
from holdfast.model.parking import LOCKED, what_helps
from holdfast.model.queues import QueuePause
from holdfast.model.rates import WAITS_FOR_START, Bucket, shown_key
from holdfast.model.records import InvocationRecord, RunnerRecord, WorkerRecord, runner_of
from holdfast.model.status import AVAILABLE, FINAL, OWNED, TABLE, Status
from holdfast.showing import length

MAX_NAMED = 3


class RunWait(NamedTuple):
    """A call that a run waits for, in words; and the invocation that performs it elsewhere, if there is one."""

    text: str
    child: str = ""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What `explain` needs besides the invocation: `holders` hold the slots of its limit key, `limit` is their number,
    if known. `children` are some unfinished invocations that it has submitted, `first_child` the explanation of the
    first.
    """

    roster: Sequence[RunnerRecord] = ()
    now: float
    dead_after_seconds: float
    pauses: Sequence[QueuePause] = ()
    holders: Sequence[InvocationRecord] = ()
    limit: Limit | None = None
    bucket: Bucket | None = None  # of the rate that its next claim is under
    children: Sequence[InvocationRecord] = ()
    first_child: str = ""
    waits: Sequence[RunWait] = ()  # what a run waits for, by its log

    @property
    def alive(self) -> list[RunnerRecord]:
        return living(self.roster, self.now, self.dead_after_seconds)

    @property
    def paused(self) -> frozenset[str]:
        return frozenset(pause.name for pause in self.pauses)


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`reasons` keep it from being claimed, the first one first; there are none if a runner may take it now."""

    reasons: tuple[Reason, ...]
    text: str


def living(roster: Sequence[RunnerRecord], now: float, dead_after_seconds: float) -> list[RunnerRecord]:
    """Return the runners with a recent heartbeat."""
    return [runner for runner in roster if now - runner.heartbeat_at <= dead_after_seconds]


def explain(record: InvocationRecord, around: Surroundings) -> Explanation:
    """Explain what an invocation waits for, or how it ended."""
    standing = Standing(record, around.now, around.limit, len(around.holders), around.bucket)
    reasons = tuple(held_back(standing, [offer_of(runner) for runner in around.alive], around.paused))
    if record.status not in AVAILABLE:
        return Explanation(reasons=reasons, text=" ".join([_by_status(record, around), *_followed(record)]))
    first, *others = [f"{_SAYS[reason](record, around)}." for reason in reasons] or [_free(record, around)]
    asked = [f"It is {record.cancellation}: its next owner lets it clean up."] if record.cancellation else []
    if record.reason.startswith(LOCKED):
        asked.append(f"Of late {record.reason}. {what_helps(record)}")
    more = [*asked, *_expires(record, around), *_followed(record)]
    text = " ".join([first, *[f"Besides, {other}" for other in others], *more])
    return Explanation(reasons=reasons, text=text)


def _followed(record: InvocationRecord) -> list[str]:
    """Say what follows its end, and which group waits for that."""
    said, follow, has_ended = [], record.terms.follow, record.status in FINAL
    if follow is not None and follow.rest and (not has_ended or record.outbox):
        more = f" and {len(follow.rest) - 1} more" if len(follow.rest) > 1 else ""
        said.append(f"After a success, {follow.rest[0].call.task}{more} follows it.")
    if record.terms.group is not None and not has_ended:
        said.append(f"The group {record.terms.group} waits for its end: holdfast groups show {record.terms.group}")
    return said


# --- invocations in the queue


def _free(record: InvocationRecord, around: Surroundings) -> str:
    lane = record.lane
    taking = [runner for runner in around.alive if lane_obstacle(lane, offer_of(runner)) is None]
    places = sum(runner.capacity for runner in taking)
    busy = sum(worker.running for runner in taking for worker in runner.workers)
    serve = "1 runner serves" if len(taking) == 1 else f"{len(taking)} runners serve"
    used = "all of its slots are" if busy >= places else f"{busy} of {places} slots are"
    silent = _silent_workers(taking, around)
    silence = min((_silence_of(runner, around) for runner in taking), default=0.0)
    waiting = f"waiting for {_since(record, around)}"
    if silence:
        which = "the only runner that serves it was" if len(taking) == 1 else "the last runner that serves it was"
        return f"{waiting}: {which} {_last_heard(silence, around)}. If it was killed, start one with `holdfast run`."
    if taking and all(runner.lacks_workers for runner in taking):
        none = "none of its worker processes has started" if len(taking) == 1 else "none of their workers has started"
        return f"{waiting} for a worker: {serve} it, and {none}. If that lasts, the runner's log says why they end."
    if busy >= places or silent:
        return f"{waiting} for a free slot; {serve} it, and {used} busy{silent}."
    return f"{waiting} to be claimed; {serve} it, and {used} busy. A runner takes it at its next look, within seconds."


def _silence_of(runner: RunnerRecord, around: Surroundings) -> float:
    """Return for how many seconds a runner has been silent, if that is longer than usual; else 0."""
    silence = around.now - runner.heartbeat_at
    return silence if silence > around.dead_after_seconds * _UNUSUAL else 0.0


def _last_heard(silence: float, around: Surroundings) -> str:
    dead = format_duration(around.dead_after_seconds)
    return f"last heard {seconds_in_words(silence)} ago (it counts as dead after {dead})"


def _silent_workers(runners: Sequence[RunnerRecord], around: Surroundings) -> str:
    """Name workers that take no work, although they have free slots."""
    workers = [worker for runner in runners for worker in runner.workers]
    silent = [worker.unresponsive_since for worker in workers if worker.unresponsive_since is not None]
    if not silent:
        return ""
    longest = seconds_in_words(around.now - min(silent))
    if len(workers) == 1:
        return f"; its only worker has not answered for {longest}"
    have = "1 worker has" if len(silent) == 1 else f"{len(silent)} workers have"
    return f"; {have} not answered, for up to {longest}"


def _expires(record: InvocationRecord, around: Surroundings) -> list[str]:
    if record.start_by is None or record.start_by <= around.now:
        return []
    return [f"It expires in {length(record.start_by - around.now)} unless it is started."]


def _not_due(record: InvocationRecord, around: Surroundings) -> str:
    if around.bucket is not None and record.status is Status.REROUTED:
        when = f"in {length(record.due_at - around.now)}, at {moment_in_words(record.due_at)}"
        return f"waiting for its start under {_rate(record, around.bucket)}, which comes {when}"
    return f"not due for another {length(record.due_at - around.now)}, until {moment_in_words(record.due_at)}"


def _in_backoff(record: InvocationRecord, around: Surroundings) -> str:
    wait = f"the next attempt is due in {length(record.due_at - around.now)}"
    if not record.errors:
        return f"an attempt failed; {wait}"
    times, last = "1 time" if record.failures == 1 else f"{record.failures} times", record.errors[-1].error
    return f"failed {times}, last with {last}; {wait}"


def _no_slot(record: InvocationRecord, around: Surroundings) -> str:
    held = _held_by(around)
    return f"no slot of {record.limit_key} is free, held by {held}; the next look of a runner lets it wait for one"


def _no_start(record: InvocationRecord, around: Surroundings) -> str:
    return f"no start is left under {_next_start(record, around)}"


def _rate(record: InvocationRecord, bucket: Bucket) -> str:
    return f"the rate {bucket.text} of {shown_key(record.terms.rate_key or '')}"


def _next_start(record: InvocationRecord, around: Surroundings) -> str:
    """Name a rate, its next start, and the calls that took the last ones."""
    bucket = around.bucket
    if bucket is None:
        return f"the rate of {shown_key(record.terms.rate_key or '')}"
    at = bucket.next_at()
    when = f"at {moment_in_words(at)}, in {length(at - around.now)}" if at > around.now else "there"
    takers = ", ".join(f"{id} {length(max(0.0, around.now - taken))} ago" for id, taken in bucket.last)
    return f"{_rate(record, bucket)}: the next one is {when}{f'. The last ones went to {takers}' if takers else ''}"


def _queue_paused(record: InvocationRecord, around: Surroundings) -> str:
    pause = next(pause for pause in around.pauses if pause.name == record.queue)
    since = length(max(0.0, round(around.now - pause.at)))
    why = f" ({pause.reason})" if pause.reason else ""
    return (
        f"the queue '{record.queue}' was paused by {pause.by} {since} ago, at {moment_in_words(pause.at)}{why}. "
        f"To let it go on: holdfast queues resume {record.queue}"
    )


def _no_runner(record: InvocationRecord, around: Surroundings) -> str:
    return f"waiting for {_since(record, around)}: no runner is alive on this store. Start one with `holdfast run`"


def _draining(record: InvocationRecord, around: Surroundings) -> str:
    alive = around.alive
    who = f"the only runner, {alive[0].id}, is" if len(alive) == 1 else f"all {len(alive)} runners are"
    return (
        f"waiting for {_since(record, around)}: {who} draining, and takes nothing new; no runner is alive that does. "
        "Start one with `holdfast run`"
    )


def _unknown_task(record: InvocationRecord, around: Surroundings) -> str:
    name, _, version = record.task.partition("@")
    known = {task for runner in around.alive for task in runner.tasks}
    others = sorted(task for task in known if unversioned(task) == name)
    helps = "Start one with the code that declares it; if it was renamed, give the new task aliases=[…]"
    if record.run is not None and (version or others):
        declared = f" (they declare {', '.join(others[:MAX_NAMED])})" if others else ""
        of = f"version {version} of {name}" if version else f"{name} without a version"
        helps = f"It is of {of}: keep a runner with the code that declares that{declared}"
    return f"waiting for {_since(record, around)}: no runner knows the task '{record.task}' ({_named(around)}). {helps}"


def _queue_not_served(record: InvocationRecord, around: Surroundings) -> str:
    tags = f" --tags {','.join(record.tags)}" if record.tags else ""  # without them, a new runner would not take it
    return (
        f"waiting for {_since(record, around)}: no live runner serves the queue '{record.queue}' ({_named(around)}). "
        f"Start one: holdfast run --queues {record.queue}{tags}"
    )


def _tags_missing(record: InvocationRecord, around: Surroundings) -> str:
    tags = f"the tag {record.tags[0]}" if len(record.tags) == 1 else f"all of the tags {', '.join(record.tags)}"
    return (
        f"waiting for {_since(record, around)}: no live runner serves the queue '{record.queue}' with {tags} "
        f"({_named(around)}). Start one: holdfast run --tags {','.join(record.tags)}"
    )


_SAYS: Mapping[Reason, Callable[[InvocationRecord, Surroundings], str]] = {
    Reason.NOT_DUE: _not_due,
    Reason.IN_BACKOFF: _in_backoff,
    Reason.NO_SLOT: _no_slot,
    Reason.NO_START: _no_start,
    Reason.QUEUE_PAUSED: _queue_paused,
    Reason.NO_RUNNER: _no_runner,
    Reason.DRAINING: _draining,
    Reason.UNKNOWN_TASK: _unknown_task,
    Reason.QUEUE_NOT_SERVED: _queue_not_served,
    Reason.TAGS_MISSING: _tags_missing,
}
"""A sentence for each reason, except `NOT_IN_QUEUE`: the sentence for its status is more exact."""


# --- other invocations


def _by_status(record: InvocationRecord, around: Surroundings) -> str:
    if record.status in OWNED:
        return f"{_owned(record, around)}{_said(record, around)}"
    if (says := _OUTSIDE.get(record.status)) is not None:
        return says(record, around)
    reason = f": {record.reason}" if record.reason else ""
    return f"{TABLE[record.status].meaning}{reason}."


def _owned(record: InvocationRecord, around: Surroundings) -> str:
    meaning = f"{TABLE[record.status].meaning} on {record.owner} for {_since(record, around)}"
    entry = next((runner for runner in around.roster if runner.id == runner_of(record.owner)), None)
    worker = _worker_of(record, entry)
    if worker is not None and not _has_begun(record, worker):
        meaning = f"claimed by {record.owner} for {_since(record, around)}, its code has not begun"
    elif record.status is Status.CANCELLING and record.cancellation is not None:
        left = record.cancellation.until - around.now
        grace = f"it has {length(left)} left to clean up" if left > 0 else "its time to clean up is over"
        meaning = f"{record.cancellation}; asked to end on {record.owner} for {_since(record, around)}, {grace}"
    elif record.terms.timeout is not None:
        meaning += f" of the {format_duration(record.terms.timeout)} that it may take"
    if entry is None:
        return f"{meaning}, but that runner is no longer on the roster: {_recovery(around)}."
    if not living([entry], around.now, around.dead_after_seconds):
        silence = length(around.now - entry.heartbeat_at)
        return f"{meaning}, but that runner has been silent for {silence} and counts as dead: {_recovery(around)}."
    if worker is not None and not _has_begun(record, worker):
        since = worker.unresponsive_since
        silent = "its worker does not answer" if since is None else unanswered(since, around.now)
        return f"{meaning}, and {silent}: its runner takes it back in a moment."
    if worker is not None and worker.unresponsive_since is not None:
        return f"{meaning}, but {unanswered(worker.unresponsive_since, around.now)}: {_then(record)}."
    if quiet := _silence_of(entry, around):
        return f"{meaning}; that runner was {_last_heard(quiet, around)}."
    ahead = entry.heartbeat_at - around.now
    if ahead > around.dead_after_seconds:
        meaning += f"; the clock of that runner is {format_duration(ahead)} ahead of this one"
    return f"{meaning}.{_open_calls(around) or _awaited(record, around) or _children(around)}"


def _said(record: InvocationRecord, around: Surroundings) -> str:
    """Say how far its code has come, in its own words."""
    progress = None if record.notes is None else record.notes.progress
    if progress is None:
        return ""
    ago = f"{seconds_in_words(around.now - progress.at)} ago"
    before = f", in attempt {progress.attempt}" if progress.attempt != record.attempt else ""
    return f" It was at {progress} {ago}{before}."


def _awaited(record: InvocationRecord, around: Surroundings) -> str:
    """Name what the code of a task waits for, and say what becomes of its slot."""
    waiting = record.awaited
    if waiting is None:
        return ""
    there = {child.id: child for child in around.children}
    named = ", ".join(
        f"{id} ({there[id].task}, {there[id].status})" if id in there else id for id in waiting.ids[:MAX_NAMED]
    )
    left = len(waiting.ids) + waiting.more - MAX_NAMED
    more = f" and {left} more" if left > 0 else ""
    kept = f" It keeps its slot meanwhile: {waiting.keeps_slot}." if waiting.keeps_slot else ""
    first = around.children[0].id if around.children else ""
    why = f" {first}: {around.first_child}" if around.first_child else ""
    return f" It waits for {named}{more}.{kept}{why}"


def _worker_of(record: InvocationRecord, runner: RunnerRecord | None) -> WorkerRecord | None:
    name = (record.owner or "").partition("/")[2]
    return next((each for each in runner.workers if each.id == name), None) if runner is not None else None


def _has_begun(record: InvocationRecord, worker: WorkerRecord) -> bool:
    """Return False if the runner has seen that its worker, which does not answer, has not begun what is RUNNING."""
    return record.status is not Status.RUNNING or worker.begun is None or record.id in worker.begun


def _recovery(around: Surroundings) -> str:
    """Say what becomes of the work of a dead runner."""
    if around.alive:
        return "its work waits for recovery"
    return (
        "its work waits for recovery, and no runner is alive on this store. Start one with `holdfast run`; it recovers "
        f"this work {format_duration(around.dead_after_seconds)} later"
    )


def unanswered(since: float, now: float) -> str:
    return f"its worker has not answered for {seconds_in_words(now - since)}"


def seconds_in_words(seconds: float) -> str:
    """Return seconds for people that watch them grow: 24 s, and 3m20s when it is long."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < _LONG_SECONDS else format_duration(whole)


def _then(record: InvocationRecord) -> str:
    """Say what happens if the worker goes on not answering."""
    if record.status is Status.PENDING:
        return "its runner takes it back in a moment"
    if must_end_by(record) < float("inf"):
        return "its runner kills that worker when the time of this call is over"
    return (
        "its code may hold the interpreter lock, or the process is stopped. It has no timeout that would end it; "
        "kill the worker to have it run again"
    )


_LONG_SECONDS = 120
_UNUSUAL = 1 / 3  # of the dead-after time: by default two heartbeats are missing


def _children(around: Surroundings) -> str:
    """Name unfinished children. Whether the invocation waits for them is not known."""
    if not around.children:
        return ""
    named = ", ".join(f"{child.id} ({child.task}, {child.status})" for child in around.children[:MAX_NAMED])
    more = " and more" if len(around.children) > MAX_NAMED else ""
    each = "child" if len(around.children) == 1 else "children"
    first = around.first_child and f" {around.children[0].id}: {around.first_child}"
    return f" It may be waiting for its {each} {named}{more}.{first}"


def _parked(record: InvocationRecord, around: Surroundings) -> str:
    return f"parked for {_since(record, around)}: {record.reason}. {what_helps(record)}"


def _open_calls(around: Surroundings) -> str:
    """Name what a run waits for, as its log has it."""
    if not around.waits:
        return ""
    more = f" And {len(around.waits) - MAX_NAMED} more." if len(around.waits) > MAX_NAMED else ""
    named = "; for ".join(call.text for call in around.waits[:MAX_NAMED])
    awaited = next((call.child for call in around.waits[:MAX_NAMED] if call.child), "")
    held_up = f" {awaited}: {around.first_child}" if awaited and around.first_child else ""
    return f" It waits for {named}.{more}{held_up}"


def _suspended(record: InvocationRecord, around: Surroundings) -> str:
    since = f"suspended for {_since(record, around)}"
    until = "until it gets a message"
    if record.wake_at is not None:
        left = record.wake_at - around.now
        late = "which is over: a runner wakes it in a moment" if around.alive else "which is over"
        until = f"until {moment_in_words(record.wake_at)}, {f'in {length(left)}' if left > 0 else late}"
        if record.terms.timeout is not None:
            limit = format_duration(record.terms.timeout)
            until += f" (the end of its wait or of its time limit of {limit}, whichever is first)"
    nobody = "" if around.alive else " No runner is alive on this store: start one with `holdfast run`."
    if not around.waits:
        return f"{since}, {until}{': ' if record.reason else ''}{record.reason}.{nobody}"
    return f"{since}, {until}.{_open_calls(around)}{nobody}"


def _without_slot(record: InvocationRecord, around: Surroundings) -> str:
    if around.bucket is not None and record.reason.startswith(WAITS_FOR_START):
        before = "calls of a higher priority and earlier ones go before it"
        return f"waits for {_since(record, around)} for a start under {_next_start(record, around)}; {before}."
    waits = f"waits for a slot of {record.limit_key} for {_since(record, around)}"
    if not around.holders:
        return f"{waits}; one is free, so it goes back to the queue in a moment."
    return f"{waits}, held by {_held_by(around)}."


def _cancelled(record: InvocationRecord, around: Surroundings) -> str:
    asked = record.cancellation
    if asked is None:
        return f"{TABLE[record.status].meaning}{': ' if record.reason else ''}{record.reason}."
    how = record.reason.removeprefix(str(asked)).removeprefix("; ")
    return f"{asked}{f' ({how})' if how else ''}, {length(max(0.0, around.now - asked.at))} ago."


_OUTSIDE: Mapping[Status, Callable[[InvocationRecord, Surroundings], str]] = {
    Status.PARKED: _parked,
    Status.SUSPENDED: _suspended,
    Status.CONCURRENCY_CONTROLLED: _without_slot,
    Status.CANCELLED: _cancelled,
}


# --- words


def _since(record: InvocationRecord, around: Surroundings) -> str:
    return length(max(0.0, around.now - record.changed_at))


def moment_in_words(at: float) -> str:
    try:
        return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # no date
        return f"{at:g}"


def _named(around: Surroundings) -> str:
    alive = around.alive
    more = f" and {len(alive) - MAX_NAMED} others" if len(alive) > MAX_NAMED else ""
    return f"{len(alive)} alive: {', '.join(runner.id for runner in alive[:MAX_NAMED])}{more}"


def _held_by(around: Surroundings) -> str:
    runners = {runner.id for runner in around.alive}
    named = [_holder(holder, runners, around.now) for holder in around.holders[:MAX_NAMED]]
    more = f" and {len(around.holders) - len(named)} others" if len(around.holders) > len(named) else ""
    return f"{'; '.join(named)}{more}"


def _holder(holder: InvocationRecord, alive: set[str], now: float) -> str:
    claimed_at = next(
        (line.at for line in reversed(holder.history) if line.status is Status.PENDING), holder.changed_at
    )
    text = f"invocation {holder.id} on {holder.owner} for {length(max(0.0, now - claimed_at))}"
    if runner_of(holder.owner) in alive:
        return text
    return f"{text}, whose runner is not alive: its work waits for recovery"
