"""Workflows for Vercel's Python SDK, as its manual has them: steps, retries, sleeps, hooks, streams, attributes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from vercel.workflow import (
    BaseHook,
    FatalError,
    RetryableError,
    Workflows,
    get_step_metadata,
    get_writable,
    set_attributes,
    sleep,
)

workflows = Workflows()


@dataclass
class Approval(BaseHook):
    approved: bool


@workflows.step
async def add(first: int, second: int) -> int:
    return first + second


@workflows.step
async def stumble() -> int:
    attempt = get_step_metadata().attempt
    if attempt < 2:
        raise RetryableError("not yet", retry_after=1)
    return attempt


@workflows.step
async def refuse() -> None:
    raise FatalError("no customer")


@workflows.step
async def tell(words: list[str]) -> None:
    async with get_writable(type=str) as out:
        for word in words:
            await out.write(word)


@workflows.workflow
async def order(customer: str, count: int) -> dict[str, object]:
    await set_attributes(customer=customer, phase="adding")
    total = 0
    for number in range(count):
        total = await add(total, number)
    pair = await asyncio.gather(add(1, 2), add(3, 4))
    attempts = await stumble()
    await tell(["a", "b"])
    await sleep("1s")
    await set_attributes(phase="waiting")
    approval = await Approval.wait(token=f"order:{customer}")
    return {"total": total, "pair": list(pair), "attempts": attempts, "approved": approval.approved}


@workflows.workflow
async def fail() -> None:
    await refuse()
