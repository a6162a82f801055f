"""Run user code: on threads, on an event loop, in processes."""
