"""Workflows whose bodies depend on the hash seed, or do not: for another process to import."""

from __future__ import annotations

from holdfast import App, sleep

app = App("memory://", name="hashed")
SETTING = "as imported"


@app.step
async def charge(order: str) -> str:
    return f"receipt {order}"


@app.task
def mail(to: str) -> None: ...


@app.workflow
async def in_set_order(count: int) -> int:
    orders = {f"order {number}" for number in range(count)}
    receipts = [await charge(order) for order in orders]
    return len(receipts)


@app.workflow
async def in_order(count: int) -> int:
    orders = {f"order {number}" for number in range(count)}
    receipts = [await charge(order) for order in sorted(orders)]
    await sleep("1h")
    mail.submit("a@b.c")
    return len(receipts)


@app.workflow
def plain_in_set_order(count: int) -> int:
    for order in {f"order {number}" for number in range(count)}:
        charge(order)
    return count


@app.workflow
async def by_setting() -> str:
    return SETTING
