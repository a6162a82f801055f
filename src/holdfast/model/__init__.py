"""Pure decisions about invocations: no I/O, no clock, no async, no logging."""
