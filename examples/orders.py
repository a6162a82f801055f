"""An order as a workflow with compensation: what was done is undone if a later step fails, or if it is cancelled.

Run it: ``python -m examples.orders``. It uses the store of the setting ``url`` (HOLDFAST_URL), else holdfast.db.
"""

from __future__ import annotations

import asyncio

from holdfast import App, context

app = App(name="orders")


@app.register
class OutOfStock(Exception):
    """The warehouse has none."""


@app.step(retries=3, timeout="30s")
async def charge(order: str, amount: int) -> str:
    """Take the money. A payment service gets the key: a second call with it charges nothing."""
    return f"payment {context().idempotency_key} of {amount}"


@app.step(retries=5)
async def refund(order: str) -> str:
    """Return what was charged for the order. A payment service finds it by the order, and may find nothing."""
    return f"refunded {order}"


@app.step
def reserve(order: str, item: str) -> str:
    if item == "moon":
        raise OutOfStock(item)
    return f"{item} for {order}"


@app.step(retries=5)
def release(order: str, item: str) -> str:
    """Return an item, if it was reserved for the order."""
    return f"released {item} for {order}"


@app.step
def ship(order: str, parcel: list[str]) -> str:
    return f"{order}: {', '.join(parcel)}"


@app.workflow
async def checkout(order: str, items: list[str]) -> str:
    try:
        await charge(order, 10 * len(items))
        return await ship(order, [await reserve(order, item) for item in items])
    except (OutOfStock, asyncio.CancelledError):  # a cancel gives the body ten minutes to clean up
        # A step may complete while it is cancelled, and its result is lost to the body: undo by what the body knows.
        await asyncio.gather(refund(order), *[release(order, item) for item in items])
        raise


def main() -> None:
    with app.runner():
        good = checkout.options(key="order 1").submit("1", ["lamp", "chair"])
        bad = checkout.options(key="order 2").submit("2", ["lamp", "moon"])
        print(good.result(timeout=60))
        try:
            bad.result(timeout=60)
        except OutOfStock as error:
            print("out of stock:", error)
        for step in bad.steps():
            print(f"  {step.id}: {step.status}")


if __name__ == "__main__":
    main()
