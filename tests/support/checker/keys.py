"""What keys promise: in its time, one key is one invocation, whoever submits it and however often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.support.checker.case import Case
from tests.support.checker.evidence import Violation
from tests.support.witness import Event, What

from holdfast.model.identity import key_is_over
from holdfast.model.records import InvocationRecord


def one_key_one_holder(case: Case) -> Iterator[Violation]:
    """I7, by the store: no two calls of a task have the same key, and no two that wait the same dedup key."""
    holders: dict[tuple[str, str, str], InvocationRecord] = {}
    for record in case.dump.records:
        for kind, name in (("key", record.key), ("dedup key", record.dedup_key)):
            if name is None:
                continue
            before = holders.setdefault((kind, record.task, name), record)
            if before is not record:
                sentence = f"the {kind} '{name}' of {record.task} is that of {before.id} as well"
                yield Violation("I7", record.id, sentence, (*before.history[:1], *record.history[:1]))


def one_key_one_invocation(case: Case) -> Iterator[Violation]:
    """I7, by witnesses: who submitted with a key was given the invocation that had it, until its time was over."""
    answers: dict[tuple[str, str], dict[str, Event]] = defaultdict(dict)  # by task and key: by id, the first answer
    for event in case.events(What.SUBMIT_OK):
        record = case.records.get(event.id or "")
        if record is not None and event.idempotency_key is not None:
            answers[record.task, event.idempotency_key].setdefault(record.id, event)
    for (task, key), given in answers.items():
        records = sorted((case.records[id] for id in given), key=lambda record: (record.created_at, record.id))
        for before, after in pairwise(records):
            answer = given[after.id]
            if not key_is_over(before, answer.at + case.dump.offset + case.slack):
                sentence = f"the key '{key}' of {task} was that of {before.id}, and its time was not over"
                yield Violation("I7", after.id, sentence, (given[before.id], *before.history[-1:], answer))
