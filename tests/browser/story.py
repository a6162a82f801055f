"""A shop with a day behind it, for pictures and for tests of pages: some of everything that the monitor shows.

``HOLDFAST_URL=… python -m tests.browser.story`` seeds a store, and has a runner at work until it is interrupted; `app`
is the shop, for ``holdfast monitor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Iterator

from tests.support.patience import eventually, patient

from holdfast import App, chain, context, cron, every, group, hook, on_event, on_status, sleep, stream
from holdfast.errors import InvocationError, ResultTimeout
from holdfast.retries import Fixed
from holdfast.triggers import from_event

app = App(os.environ.get("HOLDFAST_URL"), name="shop", poll_interval_seconds=0.2)
log = logging.getLogger("shop")


class CardDeclined(Exception):
    """A payment that the bank refused."""


@dataclasses.dataclass
class Approval:
    by: str
    approved: bool = True
    note: str = ""


@app.task(name="charge", retries=Fixed(2, 0.05), limit=2, limit_by="customer", log_lines=20)
def charge(customer: str, cents: int) -> str:
    context().set(customer=customer)
    log.warning("the bank is asked for %s cents", cents)
    if cents % 7 == 0:
        raise CardDeclined(f"card of {customer} declined: {cents} cents")
    return f"receipt {customer}/{cents}"


@app.task(
    name="mail",
    queue="mail",
    rate="600/m",
    rate_by="customer",
    triggers=[on_event("order.created", arguments={"customer": from_event("customer")})],
)
async def mail(customer: str, text: str = "Thank you for your order.") -> int:
    return len(text)


@app.task(name="render", queue="slow")
def render(pages: int) -> int:
    for page in range(pages):
        context().progress(page + 1, total=pages, message="pages")
    return pages


@app.task(name="import_rows", queue="slow")
async def import_rows(rows: int) -> int:
    """Stand still in the middle, as long imports seem to."""
    context().progress(rows * 2 // 5, total=rows, message="rows")
    await asyncio.sleep(3600)
    return rows


@app.task(name="stock", triggers=[cron("*/15 * * * *", timezone="Europe/Rome")])
def stock(place: str = "Rome") -> str:
    return f"{place} counted"


@app.task(name="clean", triggers=[every("1h"), on_status(charge, "failed")])
def clean() -> None:
    """Remove what is left of failed payments."""


@app.task(name="report")
def report(totals: list[int], title: str = "Day") -> str:
    return f"{title}: {sum(totals)}"


@app.task(name="total")
def total(day: int) -> int:
    return day * 10


@app.task(name="needs_gpu", queue="gpu")
def needs_gpu(prompt: str) -> str:
    return prompt


@app.step(name="reserve", retries=Fixed(2, 0.05))
async def reserve(order: str) -> str:
    return f"{order} reserved"


@app.step(name="pay", retries=Fixed(2, 0.05))
async def pay(order: str, cents: int) -> str:
    if context().attempt == 1:
        raise TimeoutError("the bank did not answer")
    return f"{order} paid {cents}"


@app.workflow(name="checkout")
async def checkout(order: str, cents: int = 4200, approval: bool = False) -> str:
    await reserve(order)
    await sleep(0.2)
    await pay(order, cents)
    if approval:
        said = await hook(f"approve:{order}", Approval, metadata={"order": order})
        return f"{order} approved by {said.by}"
    async with stream("mail") as lines:
        await lines.write({"to": order, "text": "It is on its way."})
    return f"{order} done"


def seed(app: App) -> dict[str, str]:
    """Let the shop live through its day. Returns ids by what they show."""
    ids: dict[str, str] = {}
    runner = app.runner(concurrency=8, queues=["default", "mail", "slow"])
    runner.start()
    try:
        calls = [charge.options(attributes={"shop": "rome"}).submit(f"c-{n % 23}", 100 + n) for n in range(60)]
        mails = [mail.submit(f"c-{n % 5}") for n in range(40)]
        orders = [app.emit("order.created", {"customer": f"c-{n}", "cents": 999}) for n in range(5)]
        days = group([total.s(day) for day in range(12)]).then(report.s(title="November")).submit()
        linked = chain(total.s(1), render.s()).submit()
        runs = [checkout.submit(f"o-{n}") for n in range(4)]
        waiting = checkout.submit("o-77", 99000, True)
        done = render.submit(30)
        for each in (*calls, *mails, *runs, linked, done):
            with contextlib.suppress(InvocationError, ResultTimeout, CardDeclined):
                each.result(timeout=patient(60))
        days.results(timeout=patient(60))
        failed = next(each for each in calls if each.status == "failed")
        again = app.rerun([failed.id]).invocations[0]
        with contextlib.suppress(InvocationError, CardDeclined):
            again.result(timeout=patient(60))
        eventually(lambda: list(app.hooks()), "the run waits at its hook")
        app.queues.pause("mail", reason="the provider is down", by="ann@desk")
        held = [mail.options(priority=5).submit(f"c-{n}", "A letter") for n in range(14)]
        gpu = needs_gpu.submit("a cat")
        later = render.options(delay="2h", queue="slow").submit(3)
        rests = next(each.name for each in app.schedules.list() if each.call.task == "clean")
        app.schedules.pause(rests, reason="not at night", by="bob@desk")
        ids |= {
            "success": calls[1].id,
            "failed": failed.id,
            "rerun": again.id,
            "run": runs[0].id,
            "waiting run": waiting.id,
            "held": held[0].id,
            "no runner": gpu.id,
            "later": later.id,
            "event": orders[0].id,
            "group": days.callback.id if days.callback is not None else "",
        }
    finally:
        runner.end()
    return ids


@contextlib.contextmanager
def importing(app: App) -> Iterator[str]:
    """Have a runner at work on an import that does not end. Yields its id."""
    call = import_rows.submit(100_000)
    runner = app.runner(concurrency=2, queues=["slow"])
    runner.start()
    try:
        eventually(call.progress, "the import starts")
        yield call.id
    finally:
        runner.end()


if __name__ == "__main__":
    told = seed(app)
    with importing(app) as id:
        print(json.dumps(told | {"running": id}), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
