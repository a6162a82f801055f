"""Tracing: spans of OpenTelemetry for submits, attempts and steps. Nothing of it is imported before a `Tracer` is made.

The context of a submit is stored with the invocation, in the form of W3C, so that its attempts are below it in whatever
process they run. User code runs with the span of its attempt as the current one; a child process gets its context with
the call.
"""

from holdfast.tracing.spans import CallSpan, PassedSpan, Tracer, linked

__all__ = ["CallSpan", "PassedSpan", "Tracer", "linked"]
