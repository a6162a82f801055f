"""Tasks in processes of their own, of an app that encrypts: the children import this module, too."""

from __future__ import annotations

import os

from holdfast import App, Secret

app = App(os.environ.get("HOLDFAST_URL", "memory://"), name="shop", poll_interval_seconds=0.1)


@app.task(executor="process")
def charge(card: Secret[str], note: str) -> str:
    print(card)
    return f"charged {card.reveal()} {note}"


@app.task(executor="process")
def fail(card: Secret[str]) -> None:
    raise ValueError(f"declined {card.reveal()}")


@app.task(executor="process")
def token(user: str) -> Secret[str]:
    return f"token of {user}"  # type: ignore[return-value]  # bare
