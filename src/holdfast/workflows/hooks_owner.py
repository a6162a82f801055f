"""The hooks of a run, as its owner sees them: stored, recorded, given their payloads, and removed.

A hook is stored (its entry), then recorded (`hook_created`), and only then the next step begins. It is removed, then
recorded as disposed of. So a crash between the two is repaired by the next owner, whose body makes the same call.

Payloads come by the inbox, addressed by the name of the hook. A payload for a name that the body has not asked for yet
stays in the inbox: the run was submitted together with it, or was restarted. A payload for a hook that the body has
disposed of is recorded all the same, so that people find it.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.model.records import InboxEntry, RunState
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item
from holdfast.workflows.events import Event
from holdfast.workflows.hooks_records import CHOSEN, PAYLOAD, WantedHook, address_of
from holdfast.workflows.hooks_store import Taken, claim, earlier_payloads, release
from holdfast.workflows.life import Command
from holdfast.workflows.rules import Past

if TYPE_CHECKING:
    from holdfast.workflows.run import Run


class _Arrived(msgspec.Struct):
    """A payload on its way into the log, in its turn."""

    event: Event
    is_fetched: bool = False


class RunHooks:
    """The hooks of one run. `open` are those that are recorded, by name."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.open: dict[str, Command] = {}
        self._pending: set[str] = set()  # calls whose creation is not durable yet
        self._under_way: Counter[str] = Counter()  # names that are being stored or removed
        # Calls that the body has disposed of, by name: for now all that the log has; open ones are taken after it.
        self._disposed = {event.name: event.call for event in run.replay.hooks.values()}
        self._arrived: deque[_Arrived] = deque()
        # Payloads in the log before the last restart: what is repeated late is not delivered again. None: not read yet.
        self._earlier: frozenset[str] | None = None if run.generation else frozenset()
        self._is_reading = False
        state = run.record.run or RunState()
        self.has_any = state.has_hooks or any(entry.kind == PAYLOAD for entry in state.inbox)

    @property
    def is_working(self) -> bool:
        return bool(self._under_way or self._arrived or self._is_reading)

    @property
    def is_pending(self) -> bool:
        """Return whether a hook is asked for and not durable: no step begins before it."""
        return bool(self._pending)

    def holds_up(self, command: Command) -> bool:
        """Return whether this call has to wait for a hook that is being stored or removed. Hooks are stored together,
        unless they have one name.
        """
        if command.hook is None or command.is_cancelled:
            return bool(self._under_way)
        return bool(self._under_way[command.hook.name])

    # --- what the body asks for

    def take(self, command: Command) -> bool:
        """Take a hook. Return True if it is to be stored."""
        past = self._run.replay.past.get(command.call.id)
        self.has_any = True
        self._disposed.pop(_wanted(command).name, None)
        if past is not None and past.created and not past.is_copied:
            self.open[_wanted(command).name] = command
            return False
        self._pending.add(command.call.id)
        return True

    def dispose(self, command: Command) -> bool:
        """Take a hook that the body has disposed of. Return True if it is to be removed."""
        past = self._run.replay.past.get(command.call.id)
        wanted = _wanted(command)
        if wanted.name in self._under_way:
            return True
        self._pending.discard(command.call.id)
        self._disposed[wanted.name] = command.call.id
        return past is not None and past.created

    def start(self, command: Command) -> None:
        """Store a hook, or remove it."""
        run, wanted = self._run, _wanted(command)
        if command.is_cancelled:
            past = run.replay.past.get(command.call.id)
            self._pending.discard(command.call.id)
            if past is None or not past.created or self.open.get(wanted.name, command) is not command:
                return
            self._under_way[wanted.name] += 1
            remove = functools.partial(release, run.host.engine, wanted)
            run.host.perform(run, f"removing a hook of {run.id}", remove, lambda *_: self._released(command))
            return
        other = self.open.get(wanted.name)
        self._under_way[wanted.name] += 1
        if other is not None and other is not command:
            return self._claimed(command, Taken(run.id))
        store = functools.partial(claim, run.host.engine, wanted, is_first_owner=run.record.epoch <= 1)
        run.host.perform(run, f"storing a hook of {run.id}", store, lambda _, taken: self._claimed(command, taken))

    # --- stored, removed

    def _claimed(self, command: Command, taken: Taken) -> None:
        run, id, wanted = self._run, command.call.id, _wanted(command)
        if run.is_over:
            return
        if taken.owner:
            run.ended_calls.add(id)
            event = Event(
                type=e.HOOK_CONFLICT,
                at=run.at(),
                call=id,
                name=wanted.name,
                where=command.call.where,
                child=taken.owner,
                why=_conflict(run.id, wanted, taken),
            )
            run.gather(Item(event, then=functools.partial(self._done, command)))
        else:
            past = run.replay.past.setdefault(id, Past())
            past.created, past.is_copied = True, False
            self.open[wanted.name] = command
            self._disposed.pop(wanted.name, None)
            run.gather(Item(self._created(command), then=functools.partial(self._done, command)))
            if run.record.run is not None:
                run.take_inbox(run.record.run.inbox)
        run.flush()
        run.pump()

    def _created(self, command: Command) -> Event:
        wanted, call = _wanted(command), command.call
        entry = wanted.entry
        facts = {
            "token": entry.token,
            "type": entry.type,
            "url": wanted.url_base,
            "webhook": entry.webhook,
            "metadata": entry.metadata,
        }
        return Event(
            type=e.HOOK_CREATED,
            at=self._run.at(),
            call=call.id,
            name=wanted.name,
            where=call.where,
            data=self._run.codec.encode(facts),
            why="" if entry.origin == CHOSEN else entry.origin,
            secret=wanted.secret,
        )

    def _released(self, command: Command) -> None:
        run, wanted = self._run, _wanted(command)
        if run.is_over:
            return
        self.open.pop(wanted.name, None)
        self._disposed[wanted.name] = command.call.id
        event = Event(type=e.HOOK_DISPOSED, at=run.at(), call=command.call.id, name=wanted.name)
        run.gather(Item(event, True, then=functools.partial(self._done, command)))
        run.flush()
        run.pump()

    def _done(self, command: Command) -> None:
        """Let others begin: the page is durable that says what became of the hook."""
        name = _wanted(command).name
        if command.is_cancelled:
            crashpoint("hook.disposed")
        crashpoint("hook.created")
        self._under_way[name] -= 1
        self._under_way += Counter()  # without those at zero
        self._pending.discard(command.call.id)

    # --- payloads

    def received(self, entry: InboxEntry) -> None:
        """Take a payload, if its hook is there; else leave it in the inbox. So does a body that has ended: the run may
        be about to restart.
        """
        run, name = self._run, entry.call.removeprefix("token:")
        command = self.open.get(name)
        call = self._disposed.get(name, "") if command is None else command.call.id
        if not call or (run.life is not None and run.life.ended is not None):
            return
        if self._earlier is None:
            return self._read_earlier()
        run.handled.add(entry.id)
        if entry.id in self._earlier and entry.generation != run.generation:
            return
        run.updates.unwritten.add(entry.id)
        event = Event(type=e.HOOK_RECEIVED, at=0.0, call=call, data=entry.body, entry=entry.id)
        if command is None or command.is_cancelled:
            event = msgspec.structs.replace(event, why="the body had disposed of the hook")
        arrived = _Arrived(event)
        self._arrived.append(arrived)
        run.host.fetch_then(run, event, functools.partial(self._fetched, arrived))

    def _fetched(self, arrived: _Arrived, event: Event, payloads: Mapping[str, bytes]) -> None:
        run = self._run
        if run.is_over:
            return
        arrived.is_fetched = True
        run.values.add(event.entry, payloads)
        while self._arrived and self._arrived[0].is_fetched:  # in the order of the inbox
            event = self._arrived.popleft().event
            # An event that the body will not get is no reason to wait: it counts as seen.
            run.gather(Item(msgspec.structs.replace(event, at=run.at()), bool(event.why), is_urgent=True))
        run.flush()

    def _read_earlier(self) -> None:
        run = self._run
        if not self._is_reading:
            self._is_reading = True
            read = functools.partial(earlier_payloads, run.host.engine, run.record)
            run.host.perform(run, f"reading the log of {run.id} before its restart", read, self._have_read)

    def _have_read(self, run: Run, payloads: frozenset[str]) -> None:
        self._is_reading, self._earlier = False, payloads
        if not run.is_over and run.record.run is not None:
            run.take_inbox(run.record.run.inbox)
            run.pump()

    def unread(self) -> list[InboxEntry]:
        """Return the payloads that the body has not read, for the next generation of the run."""
        life = self._run.life
        ends = {} if life is None else life.hooks
        return [
            InboxEntry(
                id=event.entry,
                kind=PAYLOAD,
                at=event.at,
                call=address_of(name),
                generation=self._run.generation + 1,
                body=event.data,
            )
            for name, command in self.open.items()
            if not command.is_cancelled and command.call.id in ends
            for event in ends[command.call.id].unread
        ]

    def waits(self) -> list[str]:
        """Name the hooks that the body waits for, for people."""
        life = self._run.life
        ends = {} if life is None else life.hooks
        return [
            f"{command.call.id} (hook {wanted.entry.token or 'with a secret token'})"
            for command in self.open.values()
            if (wanted := command.hook) is not None and command.call.id in ends and ends[command.call.id].is_awaited
        ]


def _wanted(command: Command) -> WantedHook:
    assert command.hook is not None
    return command.hook


def _conflict(run: str, wanted: WantedHook, taken: Taken) -> str:
    token = f"the token '{wanted.entry.token}'" if wanted.entry.token else "the token"
    if taken.owner == run:
        return f"{token} belongs to another hook of this run, which is open: dispose of it first, or use another token"
    if taken.is_kept:
        return f"{token} belongs to the run {taken.owner}, which has ended and keeps it (keep_token)"
    return f"{token} belongs to a hook of the run {taken.owner}, which has not ended"
