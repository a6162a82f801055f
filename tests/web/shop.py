"""A shop for the tests of the web app."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import socket
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import uvicorn
from tests.support.patience import eventually, patient

from holdfast import App, Invocation, context, every, hook, on_event, sleep, stream
from holdfast.errors import InvocationError
from holdfast.retries import Fixed
from holdfast.webhooks import Response, WebhookRequest, github_signature, stripe_signature

PUBLIC = "https://shop.example/holdfast"
SIGNING = "the secret of a sender"
TOKEN = "a-token-of-the-tests-0123456789"
HOSTILE = '<script>alert("1")</script>\u202e\x1b[31m\n\x00é'


@dataclasses.dataclass
class Approval:
    by: str
    score: int = 0


class WebShop:
    """An app on a store in memory, with a runner."""

    def __init__(self, url: str = "memory://", **settings: Any) -> None:
        ours = {"api_token": TOKEN, "public_url": PUBLIC, "poll_interval_seconds": 0.2}
        self.app = app = App(url, name="shop", **ours | settings)

        @app.task(name="add")
        def add(a: int, b: int = 0) -> int:
            return a + b

        @app.task(name="boom")
        def boom(text: str) -> None:
            raise ValueError(text)

        @app.step(name="charge")
        async def charge(order: str) -> str:
            return f"receipt {order}"

        @app.workflow(name="checkout")
        async def checkout(order: str, pause: float = 0.0) -> str:
            first = await charge(order)
            if pause:
                await sleep(pause)
            return f"{first}, {await charge(f'{order}b')}"

        @app.workflow(name="approve")
        async def approve(article: str) -> str:
            said = await hook(f"approve:{article}", Approval, metadata={"article": article})
            return said.by

        @app.workflow(name="receive")
        async def receive(
            options: dict[str, Any], answers: bool = False, many: int = 1, says: bool = True
        ) -> list[Any]:
            """Wait for requests to a webhook. Its URL is among `urls`."""
            made = hook(None, WebhookRequest if answers else Any, **options)
            await tell(made.url)
            found: list[Any] = []
            while len(found) < many:
                said = await made
                found.append([said.method, said.body, said.query] if answers else said)
                if answers and says:
                    await said.respond(201, {"number": len(found)}, {"x-number": f"{len(found)}"})
            return found

        @app.task(name="speak")
        async def speak(chunks: list[Any], waits: bool = False) -> int:
            """Write chunks. If it waits, the test says when the next one comes; None ends it."""
            async with stream("words") as words:
                for chunk in chunks:
                    await words.write(chunk)
                while waits and (chunk := await asyncio.to_thread(self.words.get)) is not None:
                    await words.write(chunk)
            return len(chunks)

        @app.task(name="again", retries=Fixed(1, 0.01))
        def again() -> None:
            stream().write(context().attempt)
            if context().attempt == 1:
                raise OSError("once")

        @app.step(name="tell")
        async def tell(url: str) -> None:
            self.urls.put(url)

        @app.verifier
        def own(request: WebhookRequest) -> bool:
            if b"crash" in request.body:
                raise ValueError(request.body)
            return request.headers.get("x-password") == "open sesame"

        app.register(Response)
        app.verifier(github_signature(SIGNING), name="github")
        app.verifier(stripe_signature(SIGNING), name="stripe")
        self.urls: queue.Queue[str] = queue.Queue()
        self.words: queue.Queue[Any] = queue.Queue()
        self.speak, self.again = speak, again
        self.approve, self.receive = approve, receive
        self.add, self.boom, self.checkout = add, boom, checkout
        self.runner = app.runner()

    def __enter__(self) -> Self:
        self.runner.start()
        self.sum = self.add.submit(1, b=2)
        self.later = self.add.options(delay="1h", queue="later").submit(3)
        self.failure = self.boom.submit(HOSTILE)
        self.run = self.checkout.submit("42")
        self.sleeping = self.checkout.submit("43", 3600.0)
        for ended in (self.sum, self.failure, self.run):
            with contextlib.suppress(InvocationError, ValueError):
                ended.result(timeout=patient(30))
        return self

    def webhook(self, *arguments: Any, **options: Any) -> tuple[Invocation[Any], str]:
        """Start a run that waits for a webhook; return it, and the path of its URL."""
        run = self.receive.submit(options, *arguments)
        url = self.urls.get(timeout=patient(30))
        assert url.startswith(f"{PUBLIC}/hooks/")
        return run, url.removeprefix(PUBLIC)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.runner.end()
        self.app.close()


class BusyShop(WebShop):
    """A shop with a limit, a rate, a schedule and a trigger."""

    def __init__(self, url: str = "memory://", **settings: Any) -> None:
        super().__init__(url, **settings)
        app = self.app

        @app.task(name="pack", limit=2, triggers=[every("1h"), on_event("order.created")])
        def pack(order: Any = None) -> str:
            return "packed"

        @app.task(name="fetch", rate="100/m", rate_by="place")
        def fetch(place: str) -> str:
            return place

        self.pack, self.fetch = pack, fetch


@contextlib.contextmanager
def served(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI app with uvicorn, on a thread. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, **{"log_config": None, "timeout_graceful_shutdown": 1} | options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            eventually(lambda: server.started or not thread.is_alive())
            yield address
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


class Following:
    """A client of server-sent events, on a socket of its own: it shows every byte, and may hang up at any time."""

    def __init__(self, address: str, path: str, **headers: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=patient(30))
        named = {"Host": f"{host}:{port}", "Authorization": f"Bearer {TOKEN}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        lines = [f"GET {path} HTTP/1.1", *[f"{name}: {value}" for name, value in named.items()], "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        self._file = self.socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = dict(iter(self._header, None))

    def _header(self) -> tuple[str, str] | None:
        line = self._file.readline().decode().strip()
        name, _, value = line.partition(":")
        return (name.lower(), value.strip()) if line else None

    def lines(self) -> Iterator[str]:
        """Yield the lines of the body, out of its chunks, until it ends."""
        rest = ""
        while (size := int(self._file.readline() or b"0", 16)) > 0:
            rest += self._file.read(size).decode()
            self._file.readline()
            *whole, rest = rest.split("\n")
            yield from whole

    def events(self) -> Iterator[dict[str, str]]:
        """Yield events, and comments as the field ``:``."""
        event: dict[str, str] = {}
        for line in self.lines():
            if line:
                name, _, value = line.partition(": ")
                event[name or ":"] = value
            elif event:
                yield event
                event = {}

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
