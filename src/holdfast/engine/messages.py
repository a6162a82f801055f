"""What a runner and its worker processes say to each other: one JSON object per line over a socket pair.

Both ends are of one release and on one host. The end of the stream means that the other side is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from holdfast.engine.account import Account


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag="orders"):
    """The first message to a worker: who it is and what it serves."""

    owner: str
    concurrency: int
    queues: tuple[str, ...] | None
    tags: tuple[str, ...]
    drain_timeout_seconds: float
    max_tasks: int | None
    paused: tuple[str, ...] = ()
    weights: Mapping[str, int] = msgspec.field(default_factory=dict)


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Work may be started until then, by the clock of this host that counts suspension."""

    until: float


class Pauses(msgspec.Struct, frozen=True, tag="pauses"):
    """These queues are paused, and no others."""

    queues: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Take no more work, let what runs end within the drain timeout (`hurry`: now), and end."""

    hurry: bool = False


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """Take no more work, let what runs end, and end: another worker carries on."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with `Pong`, from the loop that claims and settles: the runner asks whether the worker hears it."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The worker hears its runner."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker looks for work."""


class News(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """What the worker is doing and has done. `retiring`: it takes no more work. `apart` are the invocations that run in
    processes of their own: these end with the worker, and cannot be the cause of its death. `ended` is how many calls
    of each queue it has ended of late.
    """

    running: int
    account: Account
    retiring: bool = False
    apart: tuple[str, ...] = ()
    ended: Mapping[str, int] = msgspec.field(default_factory=dict)


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The worker's work is over, and it is about to end. `unfinished`: user code still runs and ends with it. `why` is
    for the history of what it leaves behind, if it was not told to end.
    """

    account: Account
    unfinished: bool
    why: str = ""


Message = Orders | Grant | Pauses | Stop | Retire | Ping | Pong | Ready | News | Done
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Say it, if there is still somebody to hear it."""
    if not writer.is_closing():
        writer.write(_encoder.encode(message) + b"\n")


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None if the other side is gone or talks nonsense."""
    try:
        line = await reader.readline()
        return _decoder.decode(line) if line.endswith(b"\n") else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
