"""What an editor knows about steps and workflows. Checked by mypy (strict), never run."""

from __future__ import annotations

from typing import assert_type

from holdfast import App, Invocation
from holdfast.task import Workflow
from holdfast.workflows.api import AsyncStep, Step

app = App("memory://")


@app.step
async def charge(order: str, *, cents: int = 0) -> str:
    return order


@app.step(retries=3, timeout="30s")
async def pack(order: str) -> bytes:
    return order.encode()


@app.step
def render(order: str) -> int:
    return len(order)


@app.step(repeatable=True)
def read(order: str) -> float:
    return 1.0


@app.workflow
async def invoice(order: str) -> int:
    assert_type(await charge("x"), str)
    assert_type(await charge.options(key="a")("x", cents=3), str)
    assert_type(await pack("x"), bytes)
    return 1


@app.workflow(timeout="1h")
async def checkout(order: str) -> str:
    assert_type(await invoice("x"), int)
    return await charge(order)


@app.workflow
def plain(order: str) -> float:
    assert_type(render("x"), int)
    return read(order)


assert_type(invoice.submit("x"), Invocation[int])
assert_type(checkout.submit("x").result(), str)
assert_type(checkout.options(key="order 42").submit("42").result(), str)
assert_type(plain.submit("x").result(), float)


def wrong_calls(step: AsyncStep[[str], str], other: Step[[str], int], workflow: Workflow[[str], str]) -> None:
    step(1)  # type: ignore[arg-type, unused-coroutine]
    other()  # type: ignore[call-arg]
    workflow.submit(1)  # type: ignore[arg-type]
    step.options(colour="red")  # type: ignore[call-arg]
    app.step(colour="red")  # type: ignore[call-overload]
