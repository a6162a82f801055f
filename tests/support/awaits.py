"""Stop a run at every await of ours, and let something else happen there.

Most defects of an async program have one shape: something was read, then awaited, and was no longer true. `every_await`
finds them by force. It runs a scene once and notes each await at which a task of the
watched modules stood. Then it
runs the scene again for each of these points: when the task is about to go on there, the intrusion is performed first,
to its end, and only then does the task continue. The scene checks after each run that nothing was lost.

It needs no names in the source: a task factory wraps each coroutine and looks, when it suspends, which line of ours
awaits. Scenes run on virtual time (`holdfast.testing.virtual`), so each run takes milliseconds and is the same each
time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import holdfast
from holdfast.testing.virtual import VirtualClock, run_virtual

_ROOT = str(PurePath(holdfast.__file__).parent) + "/"

LONGEST_SECONDS = 600.0

Intrusion = Callable[[], Awaitable[None]]


class Point(NamedTuple):
    """The n-th time that a task stood at this await."""

    chain: tuple[str, ...]
    time: int

    def __str__(self) -> str:
        return f"{' > '.join(self.chain)}, for the {self.time}. time"


class Stage:
    """One run of a scene. It says from when on awaits count, and what the intrusion is."""

    def __init__(self, clock: VirtualClock, modules: Sequence[str], most: int, chosen: Point | None) -> None:
        self.clock = clock
        self.chosen = chosen
        self.points: list[Point] = []
        self.has_intruded = False
        self.error: BaseException | None = None  # of the intrusion itself
        self._modules = tuple(modules)
        self._most = most
        self._intrusion: Intrusion | None = None
        self._done = asyncio.Event()
        self._times: Counter[tuple[str, ...]] = Counter()

    def begin(self, intrusion: Intrusion) -> None:
        """From now on, awaits count."""
        self._intrusion = intrusion

    def end(self) -> None:
        """From now on, they do not."""
        self._intrusion = None

    def stood_at(self, coroutine: Any) -> Point | None:
        """Return the point at which this coroutine has just suspended, if it counts."""
        if self._intrusion is None:
            return None
        chain = _chain(coroutine)
        if not chain or not chain[0].startswith(self._modules):
            return None
        self._times[chain] += 1
        point = Point(chain, self._times[chain])
        if point.time <= self._most:
            self.points.append(point)
        return point

    def intrusion_at(self, point: Point | None) -> Intrusion | None:
        """Return what is to happen before the task goes on from there."""
        if point is None or point != self.chosen or self.has_intruded or self._intrusion is None:
            return None
        self.has_intruded = True
        return self._intrusion

    async def perform(self, intrusion: Intrusion) -> None:
        """Let it happen. Its error is the test's, not that of the task it interrupts."""
        try:
            await intrusion()
        except Exception as error:
            self.error = error
        self._done.set()

    async def intruded(self) -> None:
        """Wait for the intrusion to end, if it has begun."""
        if self.has_intruded:
            await self._done.wait()


def _chain(coroutine: Any) -> tuple[str, ...]:
    """Return the frames of this package in the chain of awaits, the deepest last, as ``module.function:line``."""
    found = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and frame.f_code.co_filename.startswith(_ROOT):
            module = frame.f_code.co_filename[len(_ROOT) : -3].replace("/", ".")
            found.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return tuple(found)


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that notes where it suspends, and lets the intrusion go first where that is wanted."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], stage: Stage, loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine = coroutine
        self._stage = stage
        self._loop = loop
        self._point: Point | None = None

    def send(self, value: Any) -> Any:
        point, self._point = self._point, None
        if (intrusion := self._stage.intrusion_at(point)) is not None:
            over = self._loop.create_future()  # not the task itself: whoever cancels us must not cancel that
            self._loop.create_task(self._stage.perform(intrusion)).add_done_callback(lambda _: _settle(over))
            over._asyncio_future_blocking = True  # what `await over` would say to the loop
            return over
        suspended = self._coroutine.send(value)
        self._point = self._stage.stood_at(self._coroutine)
        return suspended

    def throw(self, *error: Any) -> Any:
        suspended = self._coroutine.throw(error[0] if len(error) == 1 else error[1] or error[0])
        self._point = self._stage.stood_at(self._coroutine)
        return suspended

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # what `inspect` asks for: cr_frame, cr_running, …

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, and fail if it takes longer: where time is virtual, what never ends would run for ever."""
    task = asyncio.get_running_loop().create_task(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        raise TimeoutError(f"not over after {seconds:g} s")
    task.result()


Scene = Callable[[Stage], Coroutine[Any, Any, None]]


def _run(scene: Scene, modules: Sequence[str], most: int, chosen: Point | None) -> Stage:
    async def main(clock: VirtualClock) -> Stage:
        loop = asyncio.get_running_loop()
        stage = Stage(clock, modules, most, chosen)

        def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
            return asyncio.Task(_Watched(coroutine, stage, loop), loop=loop, **more)

        loop.set_task_factory(factory)
        try:
            await within(LONGEST_SECONDS, scene(stage))
        finally:
            if stage.error is not None:
                raise stage.error
        return stage

    return run_virtual(main)


def every_await(scene: Scene, modules: Sequence[str], *, most: int = 2) -> Iterator[Point]:
    """Run the scene without an intrusion, then once for each point; yield each point that was tried.

    Points are those of tasks whose outermost function is one of these modules, given as ``runtime.worker.``.

    A point counts for the first `most` times that a task stands there. A run in which the intrusion did not come to
    happen, because the run went another way, is no run: the next point is taken.
    """
    for point in _run(scene, modules, most, None).points:
        try:
            stage = _run(scene, modules, most, point)
        except BaseException as error:
            error.add_note(f"the intrusion came at {point}")
            raise
        if stage.has_intruded:
            yield point
