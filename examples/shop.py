"""Charge and confirm orders of a small shop in the background.

Run it with a runner in another terminal:

    holdfast run examples.shop:app
    python -m examples.shop
"""

from __future__ import annotations

import asyncio
import dataclasses

from holdfast import App

app = App()


@dataclasses.dataclass
class Order:
    id: int
    customer: str
    amount: float


class CardDeclined(Exception):
    pass


app.register(CardDeclined)


@app.task
def charge(order: Order) -> str:
    """Charge the card. A plain function runs on a thread."""
    if order.amount > 1000:
        raise CardDeclined(f"the card of {order.customer} was declined")
    return f"receipt-{order.id}"


@app.task(queue="mail")
async def confirm(order: Order, receipt: str) -> str:
    """Send a mail. Coroutines share one event loop."""
    await asyncio.sleep(0.01)
    return f"mail to {order.customer}: thank you, {receipt}"


if __name__ == "__main__":
    order = Order(1, "ada@example.com", 19.90)
    # The key makes it one charge, however often this program is run.
    receipt = charge.options(key=f"order {order.id}").submit(order).result(timeout=30)
    print(confirm.submit(order, receipt).result(timeout=30))
