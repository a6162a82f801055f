"""A lone id is refused where many are expected. Checked by mypy: strict, it complains of an ignore that is needless.

A text is a sequence of texts: what takes ``Sequence[str]`` takes a lone id for its letters. ``overlap="cancel"`` never
cancelled anything because of that.
"""

from __future__ import annotations

from typing import assert_type

from holdfast.ids import Ids, InvocationId, derived_id
from holdfast.model.records import InvocationRecord
from holdfast.runtime.cancel import Canceller
from holdfast.runtime.wait import Watcher
from holdfast.store.contract import Store


async def many_ids(store: Store, canceller: Canceller, watcher: Watcher, record: InvocationRecord, text: str) -> None:
    assert_type(record.id, InvocationId)
    await canceller.cancel([record.id], by="me")
    await canceller.cancel(record.id, by="me")  # type: ignore[arg-type]
    await canceller.cancel(text, by="me")  # type: ignore[arg-type]
    await canceller.cancel([text], by="me")  # type: ignore[list-item]
    await watcher.ends([record.id], None)
    await watcher.ends(record.id, None)  # type: ignore[arg-type]
    await store.get("shop", (record.id,))
    await store.get("shop", record.id)  # type: ignore[arg-type]
    await store.get("shop", text)  # type: ignore[arg-type]
    await store.remove_ended("shop", record.id)  # type: ignore[arg-type]


def where_ids_come_from(ids: Ids, text: str) -> None:
    assert_type(ids.new(), InvocationId)
    assert_type(derived_id("tick", text), InvocationId)
    assert_type(InvocationId(text), InvocationId)
    as_text: str = ids.new()  # an id is a text, and a text is no id
    as_id: InvocationId = as_text  # type: ignore[assignment]
    del as_id
