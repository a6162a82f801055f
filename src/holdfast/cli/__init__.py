"""The command line. `main` is the entry point ``holdfast``; ``python -m holdfast.cli`` is the same."""

from holdfast.cli.program import main

__all__ = ["main"]
