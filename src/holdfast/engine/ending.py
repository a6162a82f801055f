"""Ending tasks that may not hear it the first time.

A driver that is in the middle of a network call may turn a cancellation into a network error, which the loop around it
takes for a store that is away. So a task is cancelled again until it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger("holdfast.engine")

_AGAIN_SECONDS = 1.0
_MOST_TIMES = 10


async def end_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel these and wait for them. What they end with is nobody's business any more."""
    for _ in range(_MOST_TIMES):
        left = [task for task in tasks if not task.done()]
        if not left:
            return
        for task in left:  # in their order: a set of tasks has another one in each run
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_SECONDS)
    left = [task for task in tasks if not task.done()]
    for task in left:
        log.error("%r does not end", task)
