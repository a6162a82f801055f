"""The web app: the HTTP API, webhooks and server-sent events.

::

    from holdfast.web import web_app

    api = FastAPI()
    api.mount("/holdfast", web_app(app))

It needs the extra `monitor`, and importing this module does not: `web_app` says so if it is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import MissingExtra

if TYPE_CHECKING:
    from starlette.responses import Response

    from holdfast.web.asgi import ServedApp, WebApp
    from holdfast.web.authentication import HostUser

__all__ = ["stream_response", "web_app"]


def web_app(app: ServedApp, *, user: HostUser | None = None) -> WebApp:
    """Return an ASGI application that serves pages, webhooks under ``/hooks`` and the API under ``/api/v1``.

    With `user`, users of the program that mounts it are let in: it gets the request, and returns the name and role of
    its user, ``("ann", "operator")``, or None. It may be a coroutine function; a plain one is called on a thread. Roles
    are viewer, operator and admin.

    Without it, pages and API need a token (``holdfast access token create``, or the setting `api_token`); where there
    is none, they answer 403. Raises `MissingExtra`.
    """
    try:
        from holdfast.web.asgi import WebApp
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    return WebApp(app, user=user)


async def stream_response(
    app: ServedApp, id: str, name: str = "default", *, start: int = 0, last_event_id: str | None = None
) -> Response:
    """Return a response of server-sent events with the chunks of a stream, for a route of your own::

        @api.get("/answers/{id}")
        async def answer(id: str, request: Request):
            ...  # may this user read it?
            return await stream_response(app, id, last_event_id=request.headers.get("last-event-id"))

    A browser that comes back sends Last-Event-ID, and goes on where it was. Raises `InvocationNotFound`, `StreamGone`,
    `UsageError`, `MissingExtra`.
    """
    try:
        from holdfast.web.streaming import answer_stream
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    return await answer_stream(app.runtime, id, name, start=start, last_event_id=last_event_id)


def missing_extra(error: ModuleNotFoundError) -> MissingExtra:
    """Return the error for a missing library of the extra. An import that fails for another reason keeps its own."""
    if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio", "jinja2"):
        raise error
    return MissingExtra(
        f"the web app needs the library '{error.name}', which is not installed: pip install 'holdfast[monitor]'"
    )
