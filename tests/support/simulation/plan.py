"""What a seed means: who works, what is submitted, which faults strike when. Data, so it can be shown and shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec.structs import replace
from tests.support.checker import FaultKind

from holdfast.ids import InvocationId, derived_id
from holdfast.schedules.records import CatchUp, Overlap

APP, TASK = "sim", "work"


def id_of(token: str) -> InvocationId:
    return derived_id("key", APP, TASK, token)


class Ending(StrEnum):
    """How a job ends."""

    RETURN = "return"
    RAISE = "raise"
    CRASH = "crash"  # it takes its process with it, the first times that it is run


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One call to submit."""

    token: str
    at: float
    seconds: float = 0.0
    ending: Ending = Ending.RETURN
    crashes: int = 0
    delay: float = 0.0
    priority: int = 0
    at_most_once: bool = False
    times: int = 1  # how many clients submit it: under one id, or with one key
    limit_key: str | None = None
    rate_key: str | None = None
    keyed: bool = False
    retries: int = 0  # that its policy allows
    failures: int = 99  # attempts that raise, if it raises
    cancel_after: float | None = None  # seconds after its submit
    child: str | None = None  # the token of a job that it submits, and waits for


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a trip: ``step``, ``flaky`` (a step that fails once), ``sleep``, ``child``, ``gather`` of two steps and
    a sleep, ``timeout`` around a sleep that is longer, ``remote`` for a step on a queue of its own, or ``hook`` for two
    payloads of a hook. In tales also ``words`` (a step that writes to a stream), ``stutter`` (it fails once), ``choir``
    (two at once), ``far words`` (one on another queue), and ``said`` (the body writes).
    """

    kind: str
    seconds: float = 0.0


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workflow to submit."""

    token: str
    at: float
    legs: tuple[Leg, ...]
    cancel_after: float | None = None  # seconds after its submit


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """A chain and a group to submit, by the tokens of their jobs. Each calls others when it ends."""

    token: str
    at: float
    links: tuple[str, ...]
    members: tuple[str, ...]
    cancels: bool = False  # the other members, when one has failed

    @property
    def failed_link(self) -> str:
        return f"{self.token} failed"

    @property
    def done(self) -> str:
        return f"{self.token} done"

    @property
    def after_done(self) -> str:
        return f"{self.token} after"


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule."""

    name: str
    every: float
    seconds: float = 0.0  # what each of its calls takes
    catch_up: CatchUp = CatchUp.ALL
    overlap: Overlap = Overlap.ALLOW


class Emission(msgspec.Struct, frozen=True, kw_only=True):
    """One event, for the job with this token. With a `key`, several clients emit it."""

    at: float
    token: str
    kind: str = "box"
    key: str = ""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. A KILL with `step` strikes that many steps of the process later; a CLOCK is set by `shift`."""

    kind: FaultKind
    at: float
    node: int = 0
    seconds: float = 0.0
    step: int = 0
    hurry: bool = False
    shift: float = 0.0


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """How messages fare: shares of them, and seconds."""

    latency: float = 0.005
    slow: float = 0.0  # take up to `slow_seconds`
    slow_seconds: float = 0.5
    refused: float = 0.0  # the request does not arrive, and its sender is told so at once
    unheard: float = 0.0  # the request is carried out, and the reply does not arrive
    late: float = 0.0  # the request is carried out after its sender has given up
    hints_lost: float = 0.0
    hints_doubled: float = 0.0

    @property
    def is_fair(self) -> bool:
        return not (self.refused or self.unheard or self.late)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    nodes: int = 3
    concurrency: int = 3
    disorder: float = 1.0
    costly_claims: bool = False
    limit: int = 1  # how many jobs with one limit key may run at once
    rate: str = "2/s"  # how many jobs with one rate key may start
    burst: int = 1
    skew: float = 0.0  # how far the clocks of nodes are from the server's, at most
    own_clocks: float = 0.0  # how far the clocks are off by which runners stamp heartbeats; 0: the server stamps them
    chaos_seconds: float = 30.0
    weather: Weather = Weather()
    jobs: tuple[Job, ...] = ()
    trips: tuple[Trip, ...] = ()
    parties: tuple[Party, ...] = ()
    strikes: tuple[Strike, ...] = ()
    timers: tuple[Timer, ...] = ()
    emissions: tuple[Emission, ...] = ()  # with any, there are triggers too


def plan_of(seed: int) -> Plan:
    rng = random.Random(f"plan {seed}")
    chaos = rng.choice((20.0, 30.0))
    nodes = rng.choice((1, 2, 2, 3, 3, 4))
    limits, identity, cancels = (random.Random(f"{what} {seed}") for what in ("limits", "identity", "cancels"))
    plan = Plan(
        seed=seed,
        nodes=nodes,
        concurrency=rng.choice((1, 2, 4)),
        disorder=rng.choice((0.0, 0.1, 0.5, 1.0)),
        costly_claims=rng.random() < 0.5,
        skew=rng.choice((0.0, 0.0, 0.15)),
        chaos_seconds=chaos,
        weather=_weather(rng),
        jobs=_cancelled(cancels, _named(identity, _limited(limits, _jobs(rng, chaos)))),
        limit=limits.choice((1, 1, 2, 3)),
        strikes=_strikes(rng, nodes, chaos),
        timers=(timers := _timers(random.Random(f"timers {seed}"))),
    )
    if timers:
        jumps = _jumps(random.Random(f"jumps {seed}"), nodes, chaos)
        plan = replace(plan, strikes=tuple(sorted([*plan.strikes, *jumps], key=lambda strike: strike.at)))
    own_clocks = random.Random(f"own clocks {seed}").choice((0.0, 0.0, 8.0, 3600.0))
    emissions = _emissions(random.Random(f"emissions {seed}"), chaos, plan.jobs)
    return replace(plan, emissions=emissions, own_clocks=own_clocks)


def trips_of(seed: int) -> Plan:
    """The plan of a seed with runs of workflows beside a few of its jobs. Cancels come in a third of the plans."""
    rng, plan = random.Random(f"trips {seed}"), plan_of(seed)
    cancels = rng.random() < 1 / 3
    trips = [
        Trip(
            token=f"trip{number}",
            at=rng.uniform(0.0, plan.chaos_seconds * 0.9),
            legs=tuple(_leg(rng) for _ in range(rng.randint(2, 7))),
            cancel_after=rng.choice((None, 0.0, 0.3, 1.0, 3.0)) if cancels else None,
        )
        for number in range(rng.randint(3, 8))
    ]
    return replace(plan, jobs=plan.jobs[:4], timers=(), emissions=(), trips=tuple(trips))


def hooks_of(seed: int) -> Plan:
    """The plan of a seed with runs, in which a third of the legs wait for a hook."""
    rng, plan = random.Random(f"hooks {seed}"), trips_of(seed)
    trips = [
        replace(trip, legs=tuple(replace(leg, kind="hook") if rng.random() < 1 / 3 else leg for leg in trip.legs))
        for trip in plan.trips
    ]
    return replace(plan, trips=tuple(trips))


def tales_of(seed: int) -> Plan:
    """The plan of a seed with runs that write to streams, and their readers."""
    rng, plan = random.Random(f"tales {seed}"), trips_of(seed)

    def leg() -> Leg:
        kinds = ("words", "words", "stutter", "choir", "far words", "said", "said", "sleep")
        return Leg(kind=rng.choice(kinds), seconds=rng.choice((0.0, 0.05, 0.3, 1.2, 3.0)))

    trips = [replace(trip, legs=tuple(leg() for _ in trip.legs)) for trip in plan.trips]
    return replace(plan, trips=tuple(trips))


def families_of(seed: int) -> Plan:
    """The plan of a seed with parents that wait for children, more of them than there are slots. Here and there two
    wait for each other, or a child needs the slot of a limit that its parent holds.
    """
    rng, plan = random.Random(f"families {seed}"), plan_of(seed)
    jobs: list[Job] = []
    for job in plan.jobs:
        if rng.random() < 0.3:
            jobs.append(job)
            continue
        generations = [replace(job, keyed=False)]
        for number in range(rng.randint(1, 3)):
            child = Job(token=f"{job.token}.{number}", at=job.at, seconds=rng.choice((0.0, 0.05, 0.6)), times=0)
            if rng.random() < 0.15:
                child = replace(child, limit_key=job.limit_key)
            generations[-1] = replace(generations[-1], child=child.token)
            generations.append(child)
        if rng.random() < 0.1:
            generations[-1] = replace(generations[-1], child=job.token)  # a circle
        jobs += generations
    return replace(plan, jobs=tuple(jobs), timers=(), emissions=(), concurrency=rng.choice((1, 1, 2, 3)))


def parties_of(seed: int) -> Plan:
    """The plan of a seed with chains and groups beside a few of its jobs. In half of the plans some calls raise."""
    rng, plan = random.Random(f"parties {seed}"), plan_of(seed)
    fails = rng.random() < 0.5
    parties, jobs = list[Party](), list[Job]()
    for number in range(rng.randint(2, 5)):
        links = tuple(f"p{number}.l{place}" for place in range(rng.randint(2, 4)))
        members = tuple(f"p{number}.m{place}" for place in range(rng.randint(1, 12)))
        at = rng.uniform(0.0, plan.chaos_seconds * 0.9)
        party = Party(token=f"p{number}", at=at, links=links, members=members, cancels=rng.random() < 0.3)
        parties.append(party)
        for token in (*links, *members):
            ending = Ending.RAISE if fails and rng.random() < 0.15 else Ending.RETURN
            jobs.append(Job(token=token, at=at, seconds=rng.choice((0.0, 0.0, 0.05, 0.5)), ending=ending, times=0))
        jobs += [Job(token=token, at=at, times=0) for token in (party.failed_link, party.done, party.after_done)]
    few = [replace(job, limit_key=None) for job in plan.jobs[:4]]
    return replace(plan, jobs=(*few, *jobs), parties=tuple(parties), timers=(), emissions=())


def rates_of(seed: int) -> Plan:
    """The plan of a seed with jobs under two rates, some of them under a limit, too, and others beside them."""
    rng, plan = random.Random(f"rates {seed}"), plan_of(seed)
    more = [Job(token=f"r{n}", at=rng.uniform(0.0, plan.chaos_seconds * 0.9), seconds=0.05) for n in range(20)]
    keys = ("one", "one", "one", "other", None)
    jobs = tuple(replace(job, rate_key=rng.choice(keys)) for job in (*plan.jobs, *more))
    rate, burst = rng.choice((("2/s", 1), ("4/s", 2), ("1/s", 3), ("10/s", 1)))
    return replace(plan, jobs=jobs, rate=rate, burst=burst, timers=(), emissions=())


def dying_starters(seed: int) -> Plan:
    """Jobs under rates on runners that are killed all the time. Some are cancelled while they wait."""
    rng = random.Random(f"dying starters {seed}")
    jobs = tuple(
        Job(
            token=f"t{n}",
            at=rng.uniform(0.0, 15.0),
            seconds=0.3,
            rate_key=rng.choice(("one", "one", "other")),
            cancel_after=rng.choice((None, None, 2.0, 6.0, 12.0)),
        )
        for n in range(40)
    )
    rate, burst = rng.choice((("1/s", 1), ("3/s", 3)))
    strikes = _kills(rng, count=16, apart=1.3, steps=60)
    return Plan(seed=seed, nodes=3, concurrency=4, jobs=jobs, rate=rate, burst=burst, strikes=strikes)


def dying_parties(seed: int) -> Plan:
    """Chains and groups on runners that are killed all the time."""
    rng, plan = random.Random(f"dying parties {seed}"), parties_of(seed)
    strikes = _kills(rng, count=16, apart=1.3, steps=100)
    return replace(plan, nodes=3, concurrency=2, strikes=strikes, weather=Weather(), own_clocks=0.0, skew=0.0)


def dying_families(seed: int) -> Plan:
    """Parents and children on runners that are killed all the time."""
    rng = random.Random(f"dying families {seed}")
    parents = [Job(token=f"t{n}", at=rng.uniform(0.0, 20.0), seconds=0.05, child=f"t{n}.0") for n in range(24)]
    children = [Job(token=f"t{n}.0", at=0.0, seconds=rng.choice((0.0, 0.05, 0.6)), times=0) for n in range(24)]
    strikes = _kills(rng, count=16, apart=1.3, steps=100)
    return Plan(seed=seed, nodes=3, concurrency=2, jobs=(*parents, *children), strikes=strikes)


# --- plans of one kind of fault: some bugs show only where a process freezes or dies between two writes


def zombies(seed: int) -> Plan:
    """Long jobs on runners that freeze for so long that they are declared dead."""
    freezes = [Strike(kind=FaultKind.FREEZE, at=4.0 + 9 * n, node=n % 2, seconds=8.0 + 2 * n) for n in range(3)]
    jobs = tuple(Job(token=job.token, at=job.at, seconds=7.0) for job in plan_of(seed).jobs)
    return Plan(seed=seed, concurrency=4, jobs=jobs, strikes=tuple(freezes))


def zombie_trips(seed: int) -> Plan:
    """Runs of long steps on runners that freeze for so long that they are declared dead."""
    rng = random.Random(f"zombie trips {seed}")

    def legs() -> tuple[Leg, ...]:
        return tuple(Leg(kind="step", seconds=rng.choice((0.3, 1.2, 3.0))) for _ in range(7))

    trips = tuple(Trip(token=f"trip{n}", at=rng.uniform(0.0, 20.0), legs=legs()) for n in range(8))
    freezes = tuple(
        Strike(
            kind=FaultKind.FREEZE, at=3.0 + 8 * n + rng.uniform(0.0, 2.0), node=n % 2, seconds=rng.uniform(8.0, 12.0)
        )
        for n in range(3)
    )
    return Plan(seed=seed, nodes=2, concurrency=4, trips=trips, strikes=freezes)


def dying_parents(seed: int) -> Plan:
    """Runs of quick children on runners that are killed all the time."""
    rng = random.Random(f"dying parents {seed}")

    def legs() -> tuple[Leg, ...]:
        return tuple(Leg(kind="child", seconds=rng.choice((0.0, 0.05))) for _ in range(7))

    trips = tuple(Trip(token=f"trip{n}", at=rng.uniform(0.0, 20.0), legs=legs()) for n in range(8))
    return Plan(seed=seed, nodes=3, concurrency=4, trips=trips, strikes=_kills(rng, count=16, apart=1.3, steps=150))


def zombie_tellers(seed: int) -> Plan:
    """Runs whose steps write to a stream, on runners that freeze for so long that they are declared dead."""
    return _of_kind(zombie_trips(seed), "words")


def dying_tellers(seed: int) -> Plan:
    """Runs whose bodies write to a stream, on runners that are killed all the time."""
    return _of_kind(dying_parents(seed), "said")


def _of_kind(plan: Plan, kind: str) -> Plan:
    trips = (replace(trip, legs=tuple(replace(leg, kind=kind) for leg in trip.legs)) for trip in plan.trips)
    return replace(plan, trips=tuple(trips))


def dying_holders(seed: int) -> Plan:
    """Jobs in pairs, each pair under a limit of one, on runners that are killed all the time."""
    rng = random.Random(f"dying holders {seed}")
    jobs = tuple(Job(token=f"t{n}", at=0.5 + n // 2 * 0.6, seconds=0.05, limit_key=f"k{n // 2}") for n in range(60))
    return Plan(seed=seed, nodes=3, concurrency=4, jobs=jobs, strikes=_kills(rng, count=16, apart=1.3, steps=60))


def dying_dispatchers(seed: int) -> Plan:
    """Events for triggers that need two of them, on runners that are killed all the time."""
    rng = random.Random(f"dying dispatchers {seed}")
    jobs = tuple(Job(token=f"t{n}", at=0.5) for n in range(6))
    emissions = tuple(
        Emission(at=rng.uniform(0.0, 25.0), token=f"t{n % 6}", kind=rng.choice(("box", "bag"))) for n in range(60)
    )
    strikes = _kills(rng, count=24, apart=0.9, steps=40)
    rough = Weather(unheard=0.06, hints_lost=0.3)
    return Plan(seed=seed, nodes=3, concurrency=4, jobs=jobs, emissions=emissions, strikes=strikes, weather=rough)


def _kills(rng: random.Random, *, count: int, apart: float, steps: int) -> tuple[Strike, ...]:
    return tuple(
        Strike(kind=FaultKind.KILL, at=1.0 + apart * n, node=n % 3, step=rng.randint(1, steps)) for n in range(count)
    )


def _leg(rng: random.Random) -> Leg:
    kind = rng.choice(("step", "step", "step", "flaky", "sleep", "child", "gather", "timeout", "remote"))
    return Leg(kind=kind, seconds=rng.choice((0.0, 0.05, 0.3, 1.2, 3.0)))


def _weather(rng: random.Random) -> Weather:
    fair = Weather(latency=rng.choice((0.001, 0.005, 0.02)), slow=rng.choice((0.0, 0.02)))
    if rng.random() < 0.35:
        return fair
    return replace(
        fair,
        refused=rng.choice((0.0, 0.02, 0.06)),
        unheard=rng.choice((0.0, 0.02, 0.06)),
        late=rng.choice((0.0, 0.0, 0.01)),
        hints_lost=rng.choice((0.0, 0.3, 1.0)),
        hints_doubled=rng.choice((0.0, 0.3)),
    )


def _jobs(rng: random.Random, chaos: float) -> tuple[Job, ...]:
    jobs = []
    burst = rng.uniform(0.0, chaos * 0.8)
    for number in range(rng.randint(8, 20)):
        ending = rng.choices((Ending.RETURN, Ending.RAISE, Ending.CRASH), (16, 3, 1))[0]
        jobs.append(
            Job(
                token=f"t{number}",
                at=burst if rng.random() < 0.3 else rng.uniform(0.0, chaos * 0.9),
                seconds=rng.choice((0.0, 0.0, 0.05, 0.05, 0.3, 1.0, 3.0, 7.0)),
                ending=ending,
                crashes=rng.choice((1, 2, 9)) if ending is Ending.CRASH else 0,
                delay=rng.choice((0.0, 0.0, 0.0, 2.5)),
                priority=rng.choice((0, 0, 5)),
                at_most_once=rng.random() < 0.1,
                times=rng.choice((1, 1, 1, 2, 3)),
            )
        )
    return tuple(sorted(jobs, key=lambda job: job.at))


def _limited(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """In half of the plans, most jobs are under one of two limits; others come between them."""
    if rng.random() < 0.5:
        return jobs
    keys = ("one", "one", "other", None)
    return tuple(replace(job, limit_key=rng.choice(keys)) for job in jobs)


def _named(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Half of them have a key, and most of those that raise are tried again."""
    return tuple(
        replace(
            job,
            keyed=rng.random() < 0.5,
            retries=rng.choice((0, 1, 3, 3)) if job.ending is Ending.RAISE and not job.at_most_once else 0,
            failures=rng.choice((1, 2, 99)) if job.ending is Ending.RAISE else 99,
        )
        for job in jobs
    )


def _cancelled(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """In a third of the plans, some jobs are cancelled: before they begin, in the middle, or too late."""
    if rng.random() < 2 / 3:
        return jobs
    return tuple(replace(job, cancel_after=rng.choice((None, None, 0.0, 0.1, 0.5, 2.0, 6.0))) for job in jobs)


def _timers(rng: random.Random) -> tuple[Timer, ...]:
    """In a third of the plans."""
    if rng.random() < 2 / 3:
        return ()
    return tuple(
        Timer(
            name=f"every {number}",
            every=rng.choice((1.5, 3.0, 5.0)),
            seconds=rng.choice((0.0, 0.2, 4.0)),
            catch_up=rng.choice((CatchUp.ALL, CatchUp.ALL, CatchUp.LAST, CatchUp.NONE)),
            overlap=rng.choice((Overlap.ALLOW, Overlap.ALLOW, Overlap.SKIP, Overlap.QUEUE)),
        )
        for number in range(rng.choice((1, 2)))
    )


def _emissions(rng: random.Random, chaos: float, jobs: tuple[Job, ...]) -> tuple[Emission, ...]:
    """In a third of the plans. One in three has a key; a few are for the same job."""
    if rng.random() < 2 / 3:
        return ()
    return tuple(
        Emission(
            at=rng.uniform(0.0, chaos * 0.95),
            token=rng.choice(jobs).token,
            kind=rng.choice(("box", "box", "bag")),
            key=rng.choice(("", "", f"key {number}")),
        )
        for number in range(rng.randint(3, 10))
    )


def _strikes(rng: random.Random, nodes: int, chaos: float) -> tuple[Strike, ...]:
    makers: tuple[Callable[[float, int], Strike], ...] = (
        lambda at, node: Strike(kind=FaultKind.KILL, at=at, node=node),
        lambda at, node: Strike(kind=FaultKind.KILL, at=at, node=node, step=rng.randint(1, 400)),
        lambda at, node: Strike(kind=FaultKind.FREEZE, at=at, node=node, seconds=rng.choice((0.5, 3.0, 5.0, 9.0))),
        lambda at, node: Strike(kind=FaultKind.CUT, at=at, node=node, seconds=rng.choice((0.5, 3.0, 5.0, 9.0))),
        lambda at, node: Strike(kind=FaultKind.STOP, at=at, node=node, hurry=rng.random() < 0.5),
        lambda at, node: Strike(kind=FaultKind.OUTAGE, at=at, seconds=rng.choice((0.5, 3.0, 6.0, 12.0))),
    )
    weights = [rng.choice((0.0, 1.0, 2.0)) for _ in makers]
    if not any(weights):
        return ()
    strikes = [
        rng.choices(makers, weights)[0](rng.uniform(1.0, chaos * 0.9), rng.randrange(nodes))
        for _ in range(rng.randint(0, 5))
    ]
    return tuple(sorted(strikes, key=lambda strike: strike.at))


def _jumps(rng: random.Random, nodes: int, chaos: float) -> list[Strike]:
    """In half of the plans with schedules, the clock of a host is set, and set right again."""
    return [
        Strike(
            kind=FaultKind.CLOCK,
            at=rng.uniform(1.0, chaos * 0.9),
            node=rng.randrange(nodes),
            seconds=rng.choice((1.0, 5.0)),
            shift=rng.choice((-90.0, -7.0, 7.0, 90.0)),
        )
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """As little of a plan as still fails: without each strike, and then each job, that does not matter."""
    for part in ("strikes", "timers", "emissions", "trips", "jobs"):
        for one in getattr(plan, part):
            smaller = replace(plan, **{part: tuple(each for each in getattr(plan, part) if each is not one)})
            if fails(smaller):
                plan = smaller
    return plan
