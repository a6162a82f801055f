"""Reading many invocations where one of them may be damaged."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.lifecycle.records import InvocationRecord
from holdfast.store.contract import Store


async def get_readable(store: Store, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
    """Return the invocations of these ids; None where there is none, or one that cannot be read.

    A store's `get` refuses them all if one cannot be read. Then they are asked for one by one.
    """
    try:
        return await store.get(app, ids)
    except CorruptRecord:
        if len(ids) == 1:
            return [None]
    return [record for id in ids for record in await get_readable(store, app, [id])]
