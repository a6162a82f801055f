"""Runs in the simulated world: a workflow whose legs the plan names, and steps that write down what they do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.support.checker import Violation
from tests.support.simulation.plan import APP, Leg, Trip
from tests.support.simulation.scheduler import PROCESS
from tests.support.witness import What, digest_of, digest_of_error

from holdfast import App, context, hook, stream
from holdfast.ids import InvocationId, derived_id
from holdfast.retries import Fixed
from holdfast.runtime.definition import TaskDefinition

if TYPE_CHECKING:
    from tests.support.simulation.world import World

TRIP, DETOUR = "trip", "detour"
STREAMS = ("words", "said")
WORDS = 4


def id_of(token: str) -> InvocationId:
    return derived_id("key", APP, TRIP, token)


class Trips:
    """The workflows of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.app = App("memory://", name=APP)
        self._by_token = {trip.token: trip for trip in world.plan.trips}
        self._declare()

    @property
    def definitions(self) -> list[TaskDefinition]:
        if not self._by_token:
            return []
        return list(self.app.runtime.definitions)

    @property
    def bodies(self) -> dict[str, Any]:
        return {each.name: each.function for each in self.definitions if each.is_workflow}

    @staticmethod
    def tokens(trip: Trip) -> list[str]:
        """The tokens of the hooks of a trip. Each is the beginning of others: ``trip1 1`` of ``trip1 10``."""
        return [f"{trip.token} {number}" for number, leg in enumerate(trip.legs) if leg.kind == "hook"]

    def _declare(self) -> None:
        app, by_token = self.app, self._by_token

        @app.step(name="pace")
        async def pace(token: str, seconds: float) -> str:
            return await self._step(token, seconds)

        @app.step(name="flaky", retries=Fixed(3, 0.4))
        async def flaky(token: str, seconds: float) -> str:
            return await self._step(token, seconds, fails=context().attempt == 1)

        @app.step(name="remote", queue="remote")
        async def remote(token: str, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return token

        @app.step(name="words")
        async def words(token: str, seconds: float) -> str:
            return await self._words(token, seconds)

        @app.step(name="stutter", retries=Fixed(3, 0.4))
        async def stutter(token: str, seconds: float) -> str:
            return await self._words(token, seconds, fails=context().attempt == 1)

        @app.step(name="far_words", queue="remote")
        async def far_words(token: str, seconds: float) -> str:
            for number in range(WORDS):
                await stream("words").write(f"{token} {number}")
                await asyncio.sleep(seconds / WORDS)
            return token

        @app.workflow(name=DETOUR)
        async def detour(token: str, seconds: float) -> str:
            first = await pace(f"{token} detour", 0.0)
            await asyncio.sleep(seconds)
            return f"{first}, {await pace(f'{token} back at {context().now().timestamp()}', 0.0)}"

        async def walk(leg: Leg, token: str) -> str:
            match leg.kind:
                case "step":
                    return await pace(token, leg.seconds)
                case "flaky":
                    return await flaky(token, leg.seconds)
                case "sleep":
                    await asyncio.sleep(leg.seconds)
                case "child":
                    return await detour(token, leg.seconds)
                case "hook":
                    answers = hook(token, str)
                    found = f"{await answers} {await answers}"
                    if leg.seconds:  # else it ends with the run
                        answers.dispose()
                    return found
                case "remote":
                    return await remote(token, leg.seconds)
                case "gather":
                    sides = await asyncio.gather(
                        pace(f"{token} left", leg.seconds), asyncio.sleep(leg.seconds), pace(f"{token} right", 0.0)
                    )
                    return str(sides)
                case "words":
                    return await words(token, leg.seconds)
                case "stutter":
                    return await stutter(token, leg.seconds)
                case "far words":
                    return await far_words(token, leg.seconds)
                case "choir":
                    return str(await asyncio.gather(words(f"{token} high", leg.seconds), words(f"{token} low", 0.0)))
                case "said":
                    await stream("said").write(token)
                case "timeout":
                    try:
                        async with asyncio.timeout(leg.seconds):
                            await asyncio.sleep(leg.seconds + 20)
                    except TimeoutError:
                        return "late"
            return leg.kind

        @app.workflow(name=TRIP)
        async def trip(token: str) -> list[str]:
            seen: list[str] = []
            try:
                for number, leg in enumerate(by_token[token].legs):
                    seen.append(await walk(leg, f"{token} {number}"))
            except asyncio.CancelledError:
                await pace(f"{token} home", 0.0)
                raise
            return seen

    async def _words(self, token: str, seconds: float, *, fails: bool = False) -> str:
        """A step that writes to a stream: some of it waits for the store, some does not."""
        about = context()
        facts = {"id": about.invocation_id, "key": "words", "step": about.idempotency_key.rpartition("/")[2]}
        for number in range(WORDS):
            value = f"{token} {number}"
            digest = digest_of(value, self._world.codec)
            self._world.ledger.write(
                What.CHUNK_SAID, PROCESS.get().pid, **facts, attempt=about.attempt, epoch=about.epoch, digest=digest
            )
            await stream("words").write(value)
            if seconds and number % 2 == 0:
                await stream("words").flush()
            await asyncio.sleep(seconds / WORDS)
        if fails:
            raise OSError(f"{token} fails at first")
        return token

    async def _step(self, token: str, seconds: float, *, fails: bool = False) -> str:
        world, process, about = self._world, PROCESS.get(), context()
        facts: dict[str, Any] = {
            "id": about.invocation_id,
            "step": about.idempotency_key.rpartition("/")[2],
            "attempt": about.attempt,
            "epoch": about.epoch,
            "span": world.ledger.span(),
        }
        world.ledger.write(What.STEP_START, process.pid, **facts)
        if why := world.why_no_permit(process):
            world.refuted.append(Violation("permit", about.invocation_id, f"{facts['step']}: {why}"))
        try:
            await asyncio.sleep(seconds)
            if fails:
                raise OSError(f"{token} fails at first")
        except BaseException as error:
            world.ledger.write(What.STEP_END, process.pid, **facts, raised=True, digest=digest_of_error(error))
            raise
        world.ledger.write(What.STEP_END, process.pid, **facts, digest=digest_of(token, world.codec))
        return token
