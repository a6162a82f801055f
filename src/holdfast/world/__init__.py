"""A World for Workflow DevKit: the storage, queue and streams on which TypeScript workflows run.

::

    from holdfast.world import world_app

    api = FastAPI()
    api.mount("/world", world_app(app))

``holdfast world serve`` is the same as its own server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.world.asgi import AppWithWorld, WorldApp

__all__ = ["world_app"]


def world_app(app: AppWithWorld) -> WorldApp:
    """Return an ASGI application that serves the World of an app (docs/reference/world-http.md), and delivers its
    messages from its first request on.

    It needs the token of the setting `world_token`, and answers 401 without.
    """
    from holdfast.world.asgi import WorldApp

    return WorldApp(app)
