"""What is fuzzed: a shop with something of everything, whose secrets are canaries, and a way to ask for it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from tests.fuzz.client import Answer, Sent, answered
from tests.support.patience import eventually, patient
from tests.web.shop import HOSTILE, BusyShop

from holdfast import group
from holdfast.access.tokens import AccessTokens
from holdfast.ids import derived_id
from holdfast.web.asgi import WebApp
from holdfast.world.queue import Messages
from holdfast.world.records import run_name
from holdfast.world.storage import WorldStorage

API_TOKEN = "canary-of-the-api-token-0123456789"
HOOK_SECRET = "canary-of-the-hook-secret-0123456789-0123456789"
BASE = "http://127.0.0.1:8090"
ROLES = {"nobody": 0, "api_token": 3, "viewer": 1, "operator": 2, "admin": 3, "login": 2}
"""Whom a request comes from, and the role that this has; 0 for none."""
Headers = list[tuple[bytes, bytes]]


class Lines(logging.Handler):
    """Keeps what was logged since it was last asked. A context: it hears all loggers within."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        logging.getLogger("holdfast").setLevel(logging.DEBUG)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("holdfast").setLevel(logging.NOTSET)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def taken(self) -> str:
        lines, self._lines = self._lines, []
        return "\n".join(lines)


class FuzzShop(BusyShop):
    """A shop with a limit, a rate, a schedule, triggers, a webhook, a stream, a group and a run of a World."""

    def __init__(self, url: str) -> None:
        super().__init__(url, api_token=API_TOKEN, hook_secret=HOOK_SECRET)
        self._loop = asyncio.Runner()
        self.web = WebApp(self.app)
        self.lines = Lines()
        self.secrets: tuple[bytes, ...] = (API_TOKEN.encode(), HOOK_SECRET.encode())
        self.known: dict[str, list[str]] = {}
        self.senders: dict[str, Headers] = {"nobody": [], "api_token": _bearer(API_TOKEN)}

    def __enter__(self) -> Self:
        self.lines.__enter__()
        self._loop.__enter__()
        super().__enter__()
        self._let_in()
        _, path = self.webhook()
        self.secrets = (*self.secrets, path.rpartition("/")[2].encode())
        asked = self.approve.submit("canary")
        spoken = self.speak.submit(["a", {"b": 1}, 3])
        event = self.app.emit("order.created", {"text": HOSTILE})
        both = group([self.add.s(1), self.add.s(2)]).submit()
        ended = self.speak.submit([])
        ended.result(timeout=patient(30))
        hooks = eventually(lambda: self._document("/api/v1/hooks")["hooks"])
        runner = eventually(lambda: self._document("/api/v1/runners")["runners"])[0]["id"]
        schedules = [each["name"] for each in self._document("/api/v1/schedules")["schedules"]]
        world, message = self.app.runtime.run(self._world())
        calls = [self.sum, self.later, self.failure, self.run, self.sleeping, asked, spoken, ended]
        self.known = {
            "id": [*(each.id for each in calls), event.id, world, run_name(world), runner, message, both.id],
            "name": ["add", "pack", "fetch", "checkout", "default", "later", "words", *schedules]
            + [each["name"] for each in hooks],
            "step": ["charge#1", "charge", "sleep#1"],
        }
        return self

    def _let_in(self) -> None:
        """Make a token of each role, and log in with one."""
        tokens = self.app.runtime.ready().part(AccessTokens)
        for role in ("viewer", "operator", "admin"):
            _, text = self.app.runtime.run(tokens.create(f"a {role}", role, 86_400, "a test"))
            self.senders[role] = _bearer(text)
            self.secrets = (*self.secrets, text.encode())
        host = [(b"host", BASE.removeprefix("http://").encode()), (b"origin", BASE.encode())]
        form = self.ask(Sent("GET", b"/login", host))
        fields = dict(re.findall(r'name="(csrf|next)" value="([^"]*)"', form.body.decode()))
        body = urlencode({**fields, "token": self.secrets[-2].decode()}).encode()
        made = [*host, (b"content-type", b"application/x-www-form-urlencoded"), *_cookies(form)]
        inside = _cookies(self.ask(Sent("POST", b"/login", made, body)))
        shown = self.ask(Sent("GET", b"/", [*host, *inside])).body.decode()
        csrf = re.search(r'<meta name="csrf" content="([^"]+)">', shown)
        assert csrf is not None, shown[:500]
        self.senders["login"] = [*inside, (b"x-holdfast-csrf", csrf[1].encode())]

    async def _world(self) -> tuple[str, str]:
        """Store a run of a World with a message; return its invocation and the message."""
        engine = await self.app.runtime.engine()
        id = derived_id("fuzz", "world", at=engine.store.now())
        data = {"deploymentId": "dpl", "workflowName": "checkout", "input": b"devl[[]]"}
        event = {"eventType": "run_created", "specVersion": 5, "eventData": data}
        await engine.part(WorldStorage).events_create(run_id=run_name(id), event=event)
        queue = "__wkf_workflow_checkout"
        sent = await engine.part(Messages).send(queue_name=queue, message={"runId": run_name(id)}, operation_id=id)
        return id, str(sent["messageId"])

    def _document(self, path: str) -> Any:
        answer = self.ask(Sent("GET", path.encode(), self.senders["api_token"]))
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def ask(self, sent: Sent) -> Answer:
        return self._loop.run(answered(self.web, sent))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lines.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)
        self._loop.close()


def _bearer(token: str) -> Headers:
    return [(b"authorization", f"Bearer {token}".encode())]


def _cookies(answer: Answer) -> Headers:
    """Return the header with the cookies that an answer has set."""
    pairs = [each.partition(";")[0] for each in answer.headers.get("set-cookie", [])]
    return [(b"cookie", "; ".join(each for each in pairs if not each.endswith('=""')).encode())]
