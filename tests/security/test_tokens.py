"""S6: tokens of hooks cannot be guessed."""

from __future__ import annotations

import os

from holdfast.workflows.hooks_records import SECRET_BYTES, derived, name_of, random_token


def test_random_tokens_differ() -> None:
    tokens = {random_token(os.urandom(SECRET_BYTES)) for _ in range(100_000)}
    assert len(tokens) == 100_000
    assert SECRET_BYTES * 8 == 256
    assert {len(token) for token in tokens} == {43}


def test_derived_tokens_differ_by_each_part_and_names_do_not_tell_them() -> None:
    parts = [("hook", "run", "call"), ("hookr", "un", "call"), ("hook", "run", "call2"), ("webhook", "run", "call")]
    tokens = {derived("s" * 32, *each) for each in parts} | {derived("t" * 32, *parts[0])}
    assert len(tokens) == 5
    assert not any(token in name_of(token) for token in tokens)
