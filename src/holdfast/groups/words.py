"""Words of other task queues, with ours for each, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.errors import UsageError

_SUBMIT = "{name}.submit(…)"
_OPTIONS = "{name}.options(delay=…, queue=…).submit(…)"
_CALL = "{name}.s(…), for group() and chain()"

METHODS: Mapping[str, str] = {
    **dict.fromkeys(("delay", "send", "enqueue", "defer", "kiq", "perform_async", "push", "spawn"), _SUBMIT),
    **dict.fromkeys(
        ("apply_async", "send_with_options", "schedule", "enqueue_in", "enqueue_at", "configure"), _OPTIONS
    ),
    **dict.fromkeys(("subtask", "signature", "message"), _CALL),
    **{word: "{name}.s(…)." + word + "(…)" for word in ("then", "on_error")},
    **dict.fromkeys(("starmap", "chunks", "parallelize"), "{name}.map([…])"),
    "apply": "{name}(…), which calls the function here",
    "call_local": "{name}(…), which calls the function here",
    "retry": "raise RetryLater(…), or retries= in @app.task(…)",
}

OPTIONS: Mapping[str, str] = {
    "countdown": "delay= (seconds, or a text such as '5m')",
    "eta": "at= (an aware datetime)",
    "run_at": "at= (an aware datetime)",
    "task_id": "key=, for a call that is to be stored once",
    "job_id": "key=, for a call that is to be stored once",
    "queue_name": "queue=",
    "time_limit": "timeout=",
    "soft_time_limit": "soft_timeout=",
    "max_retries": "retries=",
    "link": "{name}.s(…).then(…)",
    "link_error": "{name}.s(…).on_error(…)",
}


TASK_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("time_limit", "job_timeout"), "timeout="),
    "soft_time_limit": "soft_timeout=",
    "max_age": "expires=",
    "queue_name": "queue=",
    "rate_limit": "rate=, over all workers together",
    "max_retries": "retries=",
    **dict.fromkeys(("autoretry_for", "retry_for", "retry_when", "throws"), "retries=Retries(…, only=…)"),
    **dict.fromkeys(
        ("retry_delay", "default_retry_delay", "retry_backoff", "retry_backoff_max", "min_backoff", "max_backoff"),
        "retries=Retries(…, wait=…, cap=…)",
    ),
    **dict.fromkeys(("ignore_result", "store_results", "result_ttl"), "retention=, which says how long all is kept"),
    **dict.fromkeys(("bind", "context"), "context(), in the function"),
    **dict.fromkeys(
        ("acks_late", "reject_on_worker_lost", "acks_on_failure_or_timeout"),
        "not needed: work of a dead worker runs again, unless at_most_once=True",
    ),
    **dict.fromkeys(("typing", "pydantic"), 'validate="submit"'),
}
"""Options of tasks elsewhere."""


CALLS: Mapping[str, str] = {
    **dict.fromkeys(("delay", "apply_async", "send", "run", "enqueue", "apply", "kiq"), "submit()"),
    **dict.fromkeys(("link", "add_completion_callback"), "then(…)"),
    **dict.fromkeys(("link_error", "error"), "on_error(…)"),
    **dict.fromkeys(("result", "get"), "submit().result(…)"),
    "results": "submit().results(…)",
    **dict.fromkeys(("set", "options"), "options of the task before its call: task.options(delay=…, queue=…).s(…)"),
}
"""Methods of calls, chains and groups elsewhere, or of ours at another place."""


class Composed:
    """Calls that belong together: says our word for what other libraries have on them."""

    if not TYPE_CHECKING:  # else nothing would be known to be missing

        def __getattr__(self, word: str) -> Any:
            ours = CALLS.get(word)
            said = "" if ours is None else f"{self!r:.200} has no method {word}(): write {ours}"
            raise AttributeError(
                said or f"{type(self).__name__!r} object has no attribute {word!r}", name=word, obj=self
            )

    def __or__(self, other: object) -> NoReturn:
        raise UsageError(f"calls are not put together by |: write {self!r:.200}.then({other!r:.200})")


def of_method(name: str, word: str) -> str:
    """Return advice for a method of other libraries; empty for unknown methods."""
    ours = METHODS.get(word)
    return "" if ours is None else f"the task {name} has no method {word}(): write {ours.format(name=_short(name))}"


def of_option(name: str, word: str, given: str) -> str:
    """Return advice for an option of other libraries; empty for unknown options."""
    ours = OPTIONS.get(word)
    if ours is None:
        return ""
    said = ours.format(name=_short(name))
    return f"{given} {word}= is {said} here" + (f": {_short(name)}.options(…).submit(…)" if "= (" in ours else "")


def of_task_option(word: str) -> str:
    """Return our word for a task option of another library; empty for an unknown option."""
    ours = TASK_OPTIONS.get(word)
    return "" if ours is None else f"Here it is {ours}."


def _short(name: str) -> str:
    return name.rpartition(":")[2]
