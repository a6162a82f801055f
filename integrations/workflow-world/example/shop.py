"""Python beside TypeScript: a task that a step of the workflow submits, and one that follows the workflow's end."""

from holdfast import App
from holdfast.triggers import on_status

app = App()


@app.task
def pack(order: str) -> str:
    return f"{order} is packed"


@app.task(triggers=[on_status("world:order", "success")])
def report() -> str:
    return "an order went through"
