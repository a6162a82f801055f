"""S1, S2: stored data is data. No bytes in the store make this process import, call or make anything by name."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import random
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.msgpack import Ext

from holdfast.codec import Codec, DataCodec, ErrorRecord
from holdfast.errors import NotDecodable, TaskFailed

NAMES = ("os:system", "builtins:eval", "builtins:exec", "subprocess:Popen", "pty:spawn", "holdfast.errors:__import__")
KEYS = ("py/reduce", "py/object", "py/function", "__reduce__", "__class__", "!!python/object/apply", "$type", "@type")


def gadgets(canary: Path) -> list[bytes]:
    """Return 200 documents of the kinds that have run code elsewhere, all of which would make that file."""
    command = f"touch {canary}"

    class Run:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (command,)

    pickled = [pickle.dumps(Run(), protocol=number) for number in range(6)]
    documents: list[bytes] = [*pickled, *map(base64.b64encode, pickled)]
    for name in NAMES:
        for key in KEYS:
            value = {key: name.replace(":", "."), "args": [command], "py/tuple": [command]}
            documents += [msgspec.msgpack.encode(value), json.dumps(value).encode()]
        for code in range(1, 24):
            documents.append(
                msgspec.msgpack.encode(Ext(code, msgspec.msgpack.encode((name, {"args": [command]}, None))))
            )
    return documents


def test_no_gadget_runs(tmp_path: Path) -> None:
    canary, before = tmp_path / "canary", set(sys.modules)
    found = gadgets(canary)
    assert len(found) >= 200
    for data in found:
        for codec in (Codec(), DataCodec()):
            for read in (codec.decode, codec.decode_call):
                with contextlib.suppress(NotDecodable):
                    read(data)
    assert not canary.exists()
    assert {name for name in set(sys.modules) - before if name in ("pty", "antigravity", "this")} == set()


def test_bytes_of_any_kind_raise_nothing_else() -> None:
    drawn, codec = random.Random(7), Codec()
    seeds = [codec.encode(value) for value in ({"a": [1, "b", (2, b"c")]}, {1, 2}, "text", 10**30)]
    for _ in range(20_000):
        data = bytearray(drawn.choice(seeds))
        for _ in range(drawn.randint(1, 4)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        with contextlib.suppress(NotDecodable):
            codec.decode(bytes(data))


@pytest.mark.parametrize("name", [*NAMES, "os.system", "builtins.eval", "__main__:Boom", "holdfast.app:App"])
def test_an_error_is_never_made_from_a_name_that_is_no_registered_exception(name: str) -> None:
    codec = Codec()
    record = ErrorRecord(type_name=name, message="m", traceback="", data=codec.encode([["echo"], None]))
    assert type(codec.decode_error(record)) is TaskFailed
