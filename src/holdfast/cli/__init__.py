"""The command line. `main` is the entry point ``holdfast``; ``python -m holdfast`` is the same."""

from holdfast.cli.program import main

__all__ = ["main"]
