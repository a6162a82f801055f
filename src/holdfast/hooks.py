"""Classes for annotations: what `hook` returns in a body, and what `app.hook` and `app.hooks` return elsewhere."""

from holdfast.workflows.hooks import Hook
from holdfast.workflows.hooks_resuming import HookRecord

__all__ = ["Hook", "HookRecord"]
