"""Ended invocations: search, rerun, purge, retention."""
