"""Crash points: places with a name at which a process can be made to die, for the fault tests.

What a crash loses is decided between two writes, so the places before, between and after the writes have names here.
``HOLDFAST_CRASH_AT=claim.after`` lets the process kill itself with SIGKILL, without a last word, when it comes there;
``claim.after:3`` when it comes there for the third time. Without the variable, which is to say in production, a point
is the comparison of two short texts.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Callable, Mapping
from itertools import count

from holdfast.errors import ConfigurationError

VARIABLE = "HOLDFAST_CRASH_AT"

POINTS: Mapping[str, str] = {
    "submit.before": "a submitter has encoded a call and written nothing",
    "submit.kept": "the large arguments are stored, the record is not",
    "submit.after": "the record is stored; neither the caller nor the runners know of it",
    "here.failed": "a first attempt in its caller's process has failed, and its invocation is not stored",
    "claim.before": "a worker is about to claim",
    "claim.after": "the work is claimed and RUNNING, and no user code has begun",
    "user.before": "the arguments are decoded, and user code is about to begin",
    "user.after": "user code has returned, and nothing is written",
    "result.kept": "the large result is stored, the end is not written",
    "settle.before": "a group of ends is about to be written",
    "settle.after": "the ends are written, and no hint is sent",
    "slot.freed": "a slot of a limit is released, and its waiters know nothing",
    "sweep.found": "a sweep has found a free slot with waiters, and none of them goes on yet",
    "rate.taken": "starts are taken from the buckets of a claim, and it is not known to be written",
    "rate.claimed": "calls are claimed with their starts, and the next waiters do not go on yet",
    "handback.before": "a worker that was asked to end still holds its work",
    "handback.after": "a worker that was asked to end has released its work, and has not ended",
    "takeback.before": "a runner has seen its worker end, and has not taken back its work",
    "takeback.after": "a runner has taken back the work of its worker",
    "recovery.found": "the work of one dead owner is found, and none of it is taken",
    "recovery.written": "a part of the work of the dead is taken, perhaps not all of it",
    "death.before": "an observer is about to declare a runner dead",
    "death.declared": "a runner is declared dead, and its work is not recovered yet",
    "death.buried": "the dead runner's core tasks are taken back, and recovery is not fired yet",
    "death.fired": "recovery is fired for a dead runner",
    "core.before": "a core task is due and not inserted",
    "core.after": "a core task is inserted",
    "schedule.kept": "the large arguments of a schedule are stored, and the schedule is not",
    "schedule.decided": "ticks of a schedule are due, and none is fired",
    "schedule.inserted": "the ticks of a schedule are fired, and it has not moved on",
    "schedule.moved": "a schedule has moved on",
    "outbox.written": "ends are written with the names of their triggers, and none was called",
    "outbox.delivered": "the triggers of ends were called, and the outbox is empty",
    "event.kept": "the large payload of an event is stored, and the event is not",
    "event.stored": "an event is stored with the names of its triggers, and none was called",
    "event.told": "the triggers of an event were called, and their invocations are in its record",
    "trigger.fired": "the calls of triggers are submitted, and the outbox is not empty yet",
    "trigger.joined": "a happening is put with others that a trigger waits for, and nothing is fired",
    "follow.made": "the call that follows an end is submitted, and the outbox of that end is not empty",
    "group.stored": "a watched group is stored, and none of its members",
    "group.members": "all members of a group are stored, and the record of the group does not show it",
    "group.ended": "all members of a group have ended, and its callback is not submitted",
    "group.called": "the callback of a group is submitted, and the record of the group does not show it",
    "stats.folded": "files of counters are folded into a coarser one, and they are still there",
    "audit.begun": "the record of an action is stored, and the action is not done",
    "takeover.before": "a new owner of a run has read its log, and has not taken it over",
    "takeover.after": "a new owner of a run has taken over its log, and has not replayed it",
    "append.before": "a page of a log is about to be written",
    "append.after": "a page of a log is written, and its run has not gone on",
    "stream.listed": "a stream is in the list of its invocation's, which is not marked as one with streams",
    "stream.marked": "an invocation is marked as one with streams, and has no page",
    "chunk.kept": "a large chunk is stored, and no page refers to it",
    "chunk.before": "a page of a stream is about to be written",
    "chunk.after": "a page of a stream is written; neither its writer nor its readers know",
    "transaction.ran": "the code of a transactional step has ended, and its page is not in its transaction",
    "transaction.appended": "the page of a transactional step is in its transaction, which is not committed",
    "transaction.committed": "a transactional step is committed, and its run has not gone on",
    "note.before": "a group of notes of running calls is about to be written",
    "note.after": "the notes of running calls are written, and their code has gone on",
    "pause.before": "the code of a task waits for another, and the store does not know",
    "pause.after": "a task is paused in the store, and its slot is not given back",
    "resume.before": "the wait of a paused task is over, and the store does not know",
    "resume.after": "a task is resumed in the store, and its code has not gone on",
    "suspend.before": "a run has written what it waits for, and is still owned",
    "suspend.after": "a run is suspended, and its worker still has it in memory",
    "push.before": "a message to a run is about to be written",
    "push.after": "a message to a run is written, and no hint is sent",
    "child.inserted": "a child of a run is stored, and the run's log does not have it",
    "child.created": "the log of a run has its new child, and the run has not gone on",
    "child.told": "a run has the message of its child's end, and the child's outbox is not empty",
    "hook.stored": "a hook is stored, and neither its webhook nor the log of its run has it",
    "hook.addressed": "a hook and its webhook are stored, and the log of its run does not have it",
    "hook.created": "the log of a run has its new hook, and the run has not gone on",
    "hook.released": "a hook is removed, and the log of its run does not show it",
    "hook.disposed": "the log of a run has the end of its hook, and the run has not gone on",
    "hook.ended": "the hooks of an ended run are removed, and its outbox is not empty",
    "hook.answered": "the answer to a webhook is stored, and no hint is sent",
    "world.inserted": "the invocation of a World run is stored, and its log is empty",
    "world.claimed": "the token of a World hook is claimed; neither its id nor the log of its run has it",
    "world.before": "a page of a World run is about to be written",
    "world.appended": "a page of a World run is written, and its client has no answer",
    "world.projected": "the invocation of a World run follows its log, and its hooks are there",
    "world.released": "the token of a World hook is free, and its client has no answer",
    "world.listed": "a stream of a World run has an entry, and no page",
    "world.chunk": "chunks of a World run are about to be written",
    "world.chunked": "chunks of a World run are written, and neither the client nor the readers know",
    "service.recorded": "the start of the services is recorded, and no duty is done",
    "service.performed": "the duties are done, and the end of the services is not recorded",
    "service.ended": "the end of the services is recorded",
    "roster.before": "a runner is about to join the roster",
    "roster.joined": "a runner has joined the roster, and has neither a heartbeat nor workers",
    "roster.leaving": "a runner has ended its work and is still on the roster",
    "roster.left": "a runner has left the roster and not ended",
    "worker.spawned": "a worker process is started, and its runner has not sent its orders",
    "worker.granted": "a runner has permitted its workers to begin",
    "worker.permitted": "a worker has received the permit to begin",
}
"""Every point, and how things stand there."""


def kill(name: str) -> None:
    """Kill this process, at an armed point."""
    os.kill(os.getpid(), signal.SIGKILL)


strike: Callable[[str], None] = kill  # a test may want to write down that it happens, or to freeze instead

_given: str | None = None
_armed = ""  # no point has this name
_times = 1
_visits = count(1)  # counts without a lock: user code runs on many threads


def crashpoint(name: str) -> None:
    """Mark a point of the code at which a test may kill the process."""
    if name == _armed and next(_visits) == _times:
        strike(name)


def arm(given: str | None) -> None:
    """Arm the point that the variable names: ``name`` or ``name:times``, or none. Doing so again changes nothing."""
    global _given, _armed, _times, _visits
    if given == _given:
        return
    armed, times = _parsed(given) if given else ("", 1)
    _given, _armed, _times, _visits = given, armed, times, count(1)


def _parsed(given: str) -> tuple[str, int]:
    found = re.fullmatch(r"([a-z.]+)(?::([1-9][0-9]{0,8}))?", given)
    if found is None:
        raise ConfigurationError(f"{VARIABLE}={given:.80}: expected the name of a crash point, or name:times")
    name, times = found[1], int(found[2] or 1)
    if name not in POINTS:
        near = difflib.get_close_matches(name, POINTS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "holdfast.crashpoints has the list."
        raise ConfigurationError(f"{VARIABLE}={given}: there is no crash point '{name}'; {hint}")
    return name, times
