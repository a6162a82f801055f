"""What runs in a worker: which invocations, since when, and at what places.

Work is handed over as records that are RUNNING in the store; large arguments are fetched first. Outcomes come back with
their records, on the engine's loop. Nothing is written here: what an outcome means, and whether work may begin at all,
is for the worker to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.codec import MARK, Codec, Limits, references
from holdfast.engine.definition import Place, TaskDefinition
from holdfast.engine.depot import Depot
from holdfast.engine.ending import end_all
from holdfast.engine.patience import Patience
from holdfast.engine.stopping import Stopping
from holdfast.engine.suspects import CROWDED_SECONDS, Suspects
from holdfast.errors import PayloadLost, StoreError, StoreReadOnly, StoreUnavailable
from holdfast.execution.call import INTERRUPTED, Call, Outcome, Unfit
from holdfast.execution.context import cancelled, deadline_in
from holdfast.execution.places import Deliver, Execution
from holdfast.lifecycle.records import PLAIN, InvocationRecord

log = logging.getLogger("holdfast.worker")

MakePlaces = Callable[[Place, Deliver], Execution]


class Ended(NamedTuple):
    """User code is done with it, after so many seconds."""

    record: InvocationRecord
    outcome: Outcome
    seconds: float


class Employer(NamedTuple):
    """What the worker wants to be told and asked."""

    ended: Callable[[Sequence[Ended]], None]
    began: Callable[[int], None]  # so many; fewer than none if one begins anew
    apart: Callable[[], None]  # some are about to begin in processes of their own
    begin: Callable[[Sequence[InvocationRecord]], None]  # these once more, if they still may
    hand_back: Callable[[list[InvocationRecord], str, float], None]  # not begun: why, and for how long at least
    why_not: Callable[[], str]  # nothing may begin now; empty if it may
    given_up: Callable[[bool], None]  # one that cannot be stopped; True: it blocks the loop of all coroutines


class Running:
    def __init__(
        self,
        tasks: Mapping[str, TaskDefinition],
        codec: Codec,
        limits: Limits,
        depot: Depot,
        search: Patience,
        make_places: MakePlaces,
        employer: Employer,
        *,
        max_crashes: int,
    ) -> None:
        self._tasks = tasks
        self._codec = codec
        self._limits = limits
        self._depot = depot
        self._search = search
        self._make_places = make_places
        self._employer = employer
        self._suspects = Suspects(codec, max_crashes=max_crashes)
        self._places: dict[Place, Execution] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self._began: dict[str, float] = {}
        self.records: dict[str, InvocationRecord] = {}
        self._stopping = Stopping(self._tell, self._give_up)
        self.abandoned: set[str] = set()  # calls that cannot be stopped, and have their places
        self._keys: dict[str, str] = {}  # of calls that are not called by their id, since an abandoned one is

    def __len__(self) -> int:
        return len(self.records)

    @property
    def fetching(self) -> int:
        """How many wait for their arguments."""
        return len(self._fetching)

    @property
    def apart(self) -> tuple[str, ...]:
        """Those that were moved into processes of their own."""
        return self._suspects.apart

    # --- beginning

    def begin(self, records: Sequence[InvocationRecord]) -> None:
        """Take a place for each of these, and call them; those with large arguments when these are here."""
        here: list[InvocationRecord] = []
        for record in records:
            self.records[record.id] = record
            if record.arguments[:1] == MARK:
                task = asyncio.create_task(self._fetch_and_call(record))
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
            else:
                here.append(record)
        self._call([(record, {}) for record in here])

    async def _fetch_and_call(self, record: InvocationRecord) -> None:
        found: dict[str, bytes] | Unfit | None = None

        async def fetch(again: bool) -> dict[str, bytes] | Unfit:
            try:
                return await self._depot.fetch(references(record.arguments))
            except (StoreUnavailable, StoreReadOnly):
                raise  # it may pass
            except Exception as error:
                why = error if isinstance(error, PayloadLost) else f"{type(error).__name__}: {error}"
                return Unfit(f"its arguments cannot be had: {why}")

        try:
            found = await self._search.until_answered(f"fetching the arguments of {record.id}", fetch)
        except (StoreError, asyncio.CancelledError) as error:
            log.debug("the arguments of %s were not fetched: %s", record.id, error)  # a stop
        why_not = self._employer.why_not()
        if isinstance(found, Unfit):
            self._deliver([(record.id, found)])
        elif record.id not in self.records:
            pass  # it was cancelled meanwhile
        elif found is not None and not why_not:
            self._call([(record, found)])
        elif self.records.pop(record.id, None) is not None:
            self._employer.hand_back([record], why_not, 0.0)

    def _call(self, records: Sequence[tuple[InvocationRecord, dict[str, bytes]]]) -> None:
        batches: dict[Place, list[Call]] = {}
        crowded: list[InvocationRecord] = []
        now = _loop_time()
        for record, payloads in records:
            task = self._tasks[record.task]
            place = task.place if record.attempt < 2 else self._suspects.place_for(record, task)
            if place is None:
                crowded.append(self.records.pop(record.id))
                continue
            self._began[record.id] = now
            call = Call(
                record.id,
                task.name,
                task.function,
                task.signature,
                record.arguments,
                self._codec,
                self._limits,
                payloads,
                record,
            )
            if self.abandoned or record.terms is not PLAIN:
                call = self._limited(call, record)
            batches.setdefault(place, []).append(call)
        if crowded:
            why = "as many as can run apart from others do so already"
            self._employer.hand_back(crowded, why, CROWDED_SECONDS)
        self._employer.began(len(records) - len(crowded))
        if Place.APART in batches:
            self._employer.apart()  # before they can do any harm
        for place, calls in batches.items():
            self._at(place).start(calls)

    def _limited(self, call: Call, record: InvocationRecord) -> Call:
        """The call, with what its terms say about time; watched, if they do."""
        terms = record.terms
        if record.id in self.abandoned:
            self._keys[record.id] = key = f"{record.id}~{record.epoch}"
            call = call._replace(key=key)
        if terms.timeout is None and terms.soft_timeout is None:
            return call
        self._stopping.watch(record)
        deadline = None if terms.timeout is None else deadline_in(terms.timeout)
        return call._replace(deadline=deadline, softly=terms.soft_timeout is not None)

    def _at(self, place: Place) -> Execution:
        if place not in self._places:
            self._places[place] = self._make_places(place, self._deliver)
        return self._places[place]

    # --- ending

    def _deliver(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """User code is done with these; called on the engine's loop."""
        ended, now = [], _loop_time()
        for key, outcome in outcomes:
            id = key
            if self.abandoned or self._keys:
                if key in self.abandoned:
                    self.abandoned.discard(key)
                    cancelled.discard(key.partition("~")[0])
                    continue
                id = key.partition("~")[0]
                self._keys.pop(id, None)
            record = self.records.pop(id, None)
            began = self._began.pop(id, now)
            if record is None:
                self._stopping.forget(id)
                cancelled.discard(id)
                continue  # it was marked as killed already when the drain timeout was over
            if record.attempt > 1 and self._suspects.come_home(id, outcome):
                self._employer.began(-1)
                self._employer.begin([record])
                continue
            if self._stopping.watched and id in self._stopping.watched:
                outcome = self._stopping.ended(record, outcome)
            ended.append(Ended(record, outcome, now - began))
        self._employer.ended(ended)

    def cancel(self, record: InvocationRecord, grace_seconds: float) -> None:
        """This is to end, which its owner runs; called once or more."""
        mine = self.records.get(record.id)
        if mine is None or mine.epoch != record.epoch or mine.status is record.status:
            return
        self.records[record.id] = record
        if record.id in self._began:
            self._stopping.cancel(record, grace_seconds)
        else:  # it waits for its arguments
            del self.records[record.id]
            self._employer.ended([Ended(record, INTERRUPTED, 0.0)])

    def _tell(self, what: str, id: str) -> None:
        keys = [self._keys.get(id, id)]
        for places in self._places.values():
            match what:
                case "cancel":
                    places.cancel(keys)
                case "soften":
                    places.soften(keys)
                case "force":
                    places.force(keys)

    def _give_up(self, id: str, outcome: Outcome) -> None:
        """Go on without the code of this one, which cannot be stopped. Its place is taken until it ends."""
        record = self.records.pop(id, None)
        if record is None:
            return
        log.error("%s %s cannot be stopped; its place is taken until it ends", record.task, id)
        self._stopping.forget(id)
        key = self._keys.pop(id, id)
        self.abandoned.add(key)
        self._suspects.come_home(id, outcome)
        self._employer.ended([Ended(record, outcome, _loop_time() - self._began.pop(id, 0.0))])
        self._employer.given_up(any(places.is_blocked(key) for places in self._places.values()))

    def interrupt(self) -> None:
        """Tell user code to end, where that is possible."""
        for places in self._places.values():
            places.interrupt(list(self.records))

    def stop_fetching(self) -> None:
        for task in self._fetching:
            task.cancel()

    async def close(self) -> None:
        self._stopping.close()
        await end_all(*self._fetching)
        for places in self._places.values():
            places.close()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
