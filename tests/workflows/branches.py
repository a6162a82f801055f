"""A workflow whose child is on another queue, for runners in processes of their own."""

from __future__ import annotations

import os
from typing import Any

from holdfast import App
from holdfast.workflows.api import sleep


def declare(app: App) -> tuple[Any, Any]:
    @app.workflow(name="branch", queue="branches")
    async def branch(n: int) -> int:
        return 2 * n

    @app.workflow(name="trunk")
    async def trunk(n: int) -> int:
        found: int = await branch(n)
        await sleep(3600)
        return found

    return trunk, branch


if "HOLDFAST_URL" in os.environ:
    app = App()
    declare(app)
