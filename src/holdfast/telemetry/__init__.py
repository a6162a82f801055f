"""Events of the engine, and their subscribers.

The engine emits typed events (`events.py`) on one `Telemetry` per engine; logging (`logs.py`) subscribes to it.
`TaskFields` is for users: it lets log records that are made inside a task carry the task's call.
"""

from holdfast.telemetry.events import Subscriber, Telemetry
from holdfast.telemetry.tasks import TaskFields

__all__ = ["Subscriber", "TaskFields", "Telemetry"]
