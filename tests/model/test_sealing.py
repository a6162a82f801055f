"""Entries whose values are encrypted: which key they need, without and with values in the clear."""

from __future__ import annotations

import base64
import json

import pytest

from holdfast.codec.sealing import CipherKeys
from holdfast.model.records import Entry
from holdfast.model.sealing import SealTurn, missing_for_entry, turned_entry

RING = CipherKeys([("k2", b"2" * 32)])
VALUE = base64.b64encode(b"\x92\x90\x80").decode()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("schedule", {"name": "nightly", "call": {"task": "shop:report", "arguments": VALUE}}),
        ("event", {"payload": VALUE}),
        ("join", {"members": [[{"picked": VALUE}]]}),
        ("hook", {"metadata": {"who": "wilma"}}),
        ("hook", {"token": "approve:42"}),
    ],
)
def test_the_key_of_an_encrypted_entry_is_found(kind: str, body: dict[str, object]) -> None:
    entry = Entry(app="shop", kind=kind, name="n", body=json.dumps(body, separators=(",", ":")).encode())
    sealed = turned_entry(entry, SealTurn(RING))
    assert sealed.body != entry.body
    assert missing_for_entry(sealed) == "k2"
    assert missing_for_entry(entry) == ""
