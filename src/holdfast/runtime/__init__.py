"""The path of an invocation: submit, claim, execute, settle, wait."""
