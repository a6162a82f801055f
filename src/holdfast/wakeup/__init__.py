"""Hints that work is ready or done. All of them may be lost: that costs latency, never work."""

from holdfast.wakeup.hub import Hub

__all__ = ["Hub"]
