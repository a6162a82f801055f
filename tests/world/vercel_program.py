"""``python -m tests.world.vercel_program URL``: live the workflows of Vercel's SDK on that store, print the outcome.

One process has the application, the World's server and the client.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from typing import Any

import uvicorn

from holdfast import App
from holdfast.world.queue import Messages
from holdfast.world.serving import WorldServer
from holdfast.world.storage import WorldStorage
from holdfast.world.vercel import endpoint, use


def taken() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


async def until(look: Any) -> Any:
    """Return what `look` returns, as soon as it raises nothing."""
    for _ in range(400):
        try:
            return await look()
        except Exception as error:
            last = error
            await asyncio.sleep(0.05)
    raise last


async def live(app: App) -> dict[str, Any]:
    from tests.world.vercel_flows import Approval, fail, order
    from vercel.workflow import start

    storage: WorldStorage = (await app.runtime.aready()).part(WorldStorage)
    run = await start(order, "cus_1", 3)
    failing = await start(fail)
    words = [word async for word in run.readable(type=str)]
    await until(lambda: Approval(approved=True).resume("order:cus_1"))
    value = await run.return_value()
    try:
        await failing.return_value()
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"

    async def seen() -> dict[str, Any]:
        events = (await storage.events_list(run_id=run.run_id))["data"]
        messages = await (await app.runtime.engine()).part(Messages).find(run=run.run_id)
        return {"kinds": [event["eventType"] for event in events], "messages": len(messages)}

    return {
        "value": value,
        "words": words,
        "error": error,
        "attributes": await run.attributes(),
        "status": [await run.status(), await failing.status()],
        **await app.runtime.arun(seen()),
    }


def main() -> None:
    app, listening = App(sys.argv[1], name="shop"), taken()
    use(app, f"http://127.0.0.1:{listening.getsockname()[1]}")
    from tests.world.vercel_flows import workflows  # only now: it asks for the World

    server = WorldServer(app, "127.0.0.1", 0)
    is_up = threading.Event()
    threading.Thread(target=server.serve, args=(lambda address: is_up.set(),), daemon=True).start()
    application = uvicorn.Server(uvicorn.Config(endpoint(workflows), lifespan="off", log_level="warning"))
    threading.Thread(target=application.run, args=([listening],), daemon=True).start()
    is_up.wait(30)
    try:
        print(json.dumps(asyncio.run(asyncio.wait_for(live(app), 60))), flush=True)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


if __name__ == "__main__":
    main()
