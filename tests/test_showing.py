"""Stored text is shown without secrets, at a cost that grows with its length and no faster."""

from __future__ import annotations

import time

import pytest

from holdfast.access.rules import token_text
from holdfast.showing import without_secrets


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000 + " ://",
        "m://" + "a:" * 50_000,
        "m://" + "a@" * 50_000,
        "m://h/?" + "a=b&" * 25_000,
        "m://a " * 15_000,
    ],
    ids=["a long word", "many colons", "many users", "many options", "many addresses"],
)
def test_a_long_text_takes_no_quadratic_time(text: str) -> None:
    began = time.process_time()
    without_secrets(text)
    assert time.process_time() - began < 5  # it is a tenth of a second; quadratic would be minutes


def test_a_long_scheme_hides_its_password_all_the_same() -> None:
    assert "secret" not in without_secrets("x" * 100 + "://ann:secret@host/")


def test_access_tokens_are_hidden_and_their_ids_are_not() -> None:
    token = token_text("abcdefgh", bytes(range(32)))
    assert without_secrets(f"revoke '{token}', hf_else") == "revoke 'hf_abcdefgh_***', hf_else"
