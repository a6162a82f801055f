"""An approval by webhook, with reminders and a deadline. While it waits, a run is a row in the store.

Run it: ``python -m examples.approval``. It starts a runner and ``holdfast monitor``. A reviewer ignores the first mail
about one article, and follows the link in the reminder. For another article no answer comes before the deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from holdfast import App, hook, stream
from holdfast.hooks import Hook

PUBLIC_URL = os.environ.get("HOLDFAST_PUBLIC_URL", "http://127.0.0.1:8080")

app = App(name="approval", public_url=PUBLIC_URL)


@dataclasses.dataclass
class Approval:
    by: str
    ok: bool = True


@app.step(retries=5)
async def mail(subject: str, link: str = "") -> None:
    """Send a mail. Here it is a chunk of a stream; a mail server would get `context().idempotency_key` with it."""
    await stream("mails").write({"subject": subject, "link": link})


async def answer_of(approval: Hook[Approval], article: str, remind_every: float) -> Approval:
    """Wait for the reviewer, and send a reminder from time to time."""
    while True:
        try:
            async with asyncio.timeout(remind_every):
                return await approval
        except TimeoutError:
            await mail(f"reminder: may {article} be published?", approval.url)


@app.workflow
async def publish(article: str, remind_every: float = 2 * 86_400, deadline: float = 7 * 86_400) -> str:
    """Ask for an approval, and publish the article. All times count over crashes, deploys and evictions."""
    async with hook(f"approve:{article}", Approval, metadata={"article": article}) as approval:
        await mail(f"may {article} be published?", approval.url)
        try:
            async with asyncio.timeout(deadline):
                said = await answer_of(approval, article, remind_every)
        except TimeoutError:
            await mail(f"{article} is not published: no answer came")
            return "no answer"
    return f"published, approved by {said.by}" if said.ok else f"refused by {said.by}"


@contextmanager
def monitor() -> Iterator[None]:
    """Serve webhooks, in a process of their own."""
    port = str(urlsplit(PUBLIC_URL).port or 80)
    command = [sys.executable, "-m", "holdfast", "monitor", "examples.approval:app", "--port", port]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        print(server.stdout.readline().decode().strip())  # it listens
        yield
    finally:
        server.terminate()
        server.wait()


def follow(link: str, said: dict[str, object]) -> int:
    """Do what a page of the reviewer would do. Return the status of the answer."""
    request = urllib.request.Request(link, json.dumps(said).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


def main() -> None:
    app.prepare()  # the server opens a store, and makes none
    with monitor(), app.runner():
        forgotten = publish.submit("On sharks", remind_every=0.5, deadline=2.0)
        wanted = publish.submit("On ships", remind_every=0.5, deadline=600.0)
        for letter in wanted.stream("mails").values():
            print(letter["subject"])
            if letter["subject"].startswith("reminder"):
                print(f"the link answers {follow(letter['link'], {'by': 'Ada'})}")
                break
        print(f"On ships: {wanted.result(timeout=60)}")
        print(f"On sharks: {forgotten.result(timeout=60)}")
    assert app.hooks() == []


if __name__ == "__main__":
    main()
