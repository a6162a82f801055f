"""Keys of limits and rates for people. A key has a digest; what its calls have in common is in their arguments."""

from __future__ import annotations

from holdfast.codec.payloads import references
from holdfast.errors import NotDecodable
from holdfast.model.rates import is_rate_key
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import brief, call_without_named, describe, printable

_LONGEST = 60


def label_of(runtime: AppRuntime, record: InvocationRecord, key: str) -> str:
    """Return the arguments by which a call has this key, as ``customer=c-17``. Empty where they cannot be read: without
    the code of the task, or the key of encryption, or if they are large.
    """
    task = runtime.tasks.get(record.task)
    if task is None or references(record.arguments):
        return ""
    codec, definition = runtime.codec, task.definition
    try:
        args, kwargs = codec.decode_call(record.arguments, describe=True)
        shown, named = call_without_named(args, kwargs, codec.parameters.get(definition.name, ()))
        by = definition.rate_by if is_rate_key(key) else definition.limit_by
        shared = definition.shared(by, tuple(shown), named)
    except (NotDecodable, TypeError):  # of an older version of the code, perhaps
        return ""
    return brief(", ".join(f"{name}={_text(value)}" for name, value in shared.items()), _LONGEST)


def _text(value: object) -> str:
    return printable(value) if isinstance(value, str) else describe(value)
