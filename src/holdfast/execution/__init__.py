"""Execution turns a call into an outcome. It knows nothing of stores, runners or statuses."""
