"""A drip campaign over weeks: mails with days between them. While it sleeps, it is a row in the store.

Run it: ``python -m examples.campaign``. It starts a campaign and ends its sleeps by `wake`, as an operator may.
"""

from __future__ import annotations

import time

from holdfast import App, context, sleep
from holdfast.errors import InvocationStatusTransitionError

app = App(name="campaign")

MAILS = ("welcome", "first tips", "what others built", "an offer")


@app.step(retries=5)
def send(to: str, mail: str) -> str:
    return f"{mail} to {to}"


@app.step(repeatable=True)
def has_unsubscribed(to: str) -> bool:
    return to.startswith("gone")


@app.workflow
async def campaign(to: str) -> list[str]:
    sent = []
    for mail in MAILS:
        if await has_unsubscribed(to):
            break
        sent.append(await send(to, mail))
        context().set(last=mail)
        await sleep("7 days")
    return sent


def main() -> None:
    with app.runner():
        run = campaign.options(key="campaign ann").submit("ann@example.org")
        while run.status != "success":
            try:
                run.wake()
            except InvocationStatusTransitionError:
                time.sleep(0.05)  # it is at work
        print(*run.result(timeout=60), sep="\n")


if __name__ == "__main__":
    main()
