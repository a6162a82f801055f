"""A model answers in a browser, word by word. Kill the runner in mid-sentence, start it again, and the answer goes on.

    holdfast run examples.chat:app     # in one terminal: it may be killed
    python -m examples.chat            # in another; then open http://127.0.0.1:8000

The words of an answer are chunks of a stream, so a page that is loaded again shows them again, from any process.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from holdfast import App, stream
from holdfast.errors import InvocationNotFound
from holdfast.web import stream_response

app = App(name="chat")
PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "0.1"))


async def model(question: str) -> str:
    """Stand in for a model."""
    return f"You asked {question!r} and here is a long answer that comes word by word so that one can watch it grow."


@app.step
async def complete(question: str) -> str:
    """Write the answer as it comes. After a crash the step runs again, and its readers are told: an event `restart`."""
    text = await model(question)
    async with stream("words") as words:
        for word in text.split():
            await words.write(word)
            await asyncio.sleep(PAUSE_SECONDS)
    return text


@app.workflow
async def answer(question: str) -> str:
    return await complete(question)


# --- the web part


async def page(request: Request) -> Response:
    return FileResponse(Path(__file__).with_name("chat.html"))


async def ask(request: Request) -> Response:
    run = await answer.asubmit((await request.body())[:1000].decode(errors="replace"))
    return JSONResponse({"id": run.id})


async def words(request: Request) -> Response:
    """Follow the answer. A program for several users asks here whether this one may read it."""
    last = request.headers.get("last-event-id")
    try:
        return await stream_response(app, request.path_params["id"], "words", last_event_id=last)
    except InvocationNotFound:
        return Response(status_code=404)


web = Starlette(routes=[Route("/", page), Route("/ask", ask, methods=["POST"]), Route("/answers/{id}", words)])

if __name__ == "__main__":
    app.prepare()
    uvicorn.run(web, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=1)
