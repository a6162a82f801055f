"""What stands around a call: listeners, middleware, injected resources, first attempts here, and programs as tasks.

from holdfast.around import INJECTED, Injected, LifecycleEvent
"""

from holdfast.around.programs import CommandFailed, CommandResult
from holdfast.around.rules import STAGES, LifecycleEvent
from holdfast.executors.injection import INJECTED, Inject, Injected

__all__ = ["INJECTED", "STAGES", "CommandFailed", "CommandResult", "Inject", "Injected", "LifecycleEvent"]
