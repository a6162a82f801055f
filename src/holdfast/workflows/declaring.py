"""Workflows and steps as they are declared: their options, the fingerprint of a body, and what its source may not call.

The check is a help, not a sandbox: it reads the body's own source for direct calls of clocks, chance, files and
`time.sleep`, and names the line and what to use instead. What a body calls through other functions is not seen.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import hashlib
import inspect
import os
import random
import secrets
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from datetime import date, datetime
from types import CodeType, FunctionType
from typing import Any, TypedDict

import msgspec

from holdfast.clock import Duration, length_of
from holdfast.errors import UsageError
from holdfast.executors.context import STEP
from holdfast.executors.injection import wanted_by
from holdfast.model import parking
from holdfast.model.names import valid_key, valid_name
from holdfast.model.retries import Never, Policy, as_policy
from holdfast.runtime.definition import (
    ExecutorKind,
    TaskDefinition,
    TimeLimits,
    executor_for,
    flag,
    import_name,
    retries_of,
    signature_of,
    where_of,
)
from holdfast.workflows.steps import StepDefinition, StepOptions

GRACE_SECONDS = 600.0  # for a cancelled workflow to compensate


class StepDeclaration(TypedDict, total=False):
    """The options of ``@app.step(…)``."""

    name: str | None
    retries: Policy | int | None
    timeout: Duration | None
    cancel_grace: Duration | None
    repeatable: bool
    at_most_once: bool
    transactional: bool
    queue: str | None
    tags: Iterable[str]
    executor: str | None


class StepCall(TypedDict, total=False):
    """The options of ``step.options(…)``."""

    key: str
    queue: str
    tags: Iterable[str]
    timeout: Duration
    retries: Policy | int


_OF_STEPS = tuple(StepDeclaration.__annotations__)
_OF_CALLS = tuple(StepCall.__annotations__)

REFUSED = {
    "retries": "a replay would raise the same error again: give the steps retries=, and run an ended workflow again "
    "with rerun or fork",
    "at_most_once": "a workflow is replayed after a crash: give the steps at_most_once=True that may not run twice",
    "executor": "a body only coordinates: give the steps an executor=",
    "log_lines": "its lines are logged again in each replay",
    "soft_timeout": "use asyncio.timeout(…) inside of the body",
}


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options of tasks that make no sense for workflows."""
    for name, instead in REFUSED.items():
        if options.get(name) not in (None, False):
            raise UsageError(f"a workflow has no option {name}: {instead}")


def step_of(function: Callable[..., Any], options: StepDeclaration) -> StepDefinition:
    """Return the step that a declaration means. Raises `UsageError`."""
    for name in options:
        if name not in _OF_STEPS:
            raise UsageError(f"a step has no option {name}. There are: {', '.join(_OF_STEPS)}.")
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"a step is made of a function, not of {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{where_of(function)} is a generator; a step returns one result")
    name = options.get("name") or import_name(function).rpartition(":")[2]
    valid_name("step", name)
    if "#" in name or "@" in name or "/" in name:
        raise UsageError(f"name={name!r}: '#', '@' and '/' stand between the name of a step and its number or key")
    at_most_once = flag("at_most_once", options.get("at_most_once", False))
    repeatable = flag("repeatable", options.get("repeatable", False))
    transactional = flag("transactional", options.get("transactional", False))
    queue, tags = options.get("queue"), _tags(options.get("tags", ()))
    executor = executor_for(function, options.get("executor"))
    if repeatable and (at_most_once or transactional):
        raise UsageError(
            "repeatable=True says that a step may run again; at_most_once= and transactional= contradict it"
        )
    if transactional and at_most_once:
        raise UsageError(
            "a transactional step leaves nothing behind when it fails, so it may be run again: leave at_most_once= out"
        )
    if transactional and (queue or tags or executor is ExecutorKind.PROCESS):
        raise UsageError(
            "a transactional step runs in its workflow's own worker: leave queue=, tags= and executor= out"
        )
    timeout = options.get("timeout")
    grace = options.get("cancel_grace")
    return StepDefinition(
        name=name,
        task=f"{STEP}{name}",
        function=function,
        signature=signature_of(function),
        executor=executor,
        retries=retries_of(options.get("retries"), at_most_once),
        timeout=None if timeout is None else length_of("timeout", timeout),
        cancel_grace=10.0 if grace is None else length_of("cancel_grace", grace),
        repeatable=repeatable,
        at_most_once=at_most_once,
        transactional=transactional,
        queue=None if queue is None else valid_name("queue", queue),
        tags=tags,
        wanted=wanted_by(function),
    )


def _tags(given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):  # it would be read as its letters
        raise UsageError(f"tags={given!r}: expected a list of names, such as [{given!r}]")
    return tuple(sorted(valid_name("tag", tag) for tag in given))


def step_task(step: StepDefinition) -> TaskDefinition:
    """Return the task that runs a step which is sent to other runners."""
    return TaskDefinition(
        name=step.task,
        function=step.function,
        signature=step.signature,
        wanted=step.wanted,
        executor=step.executor,
        queue=step.queue or "default",
        tags=step.tags,
        at_most_once=step.at_most_once,
        retries=step.retries,
        time=TimeLimits(timeout=step.timeout, cancel_grace=step.cancel_grace),
        is_hidden=True,
    )


def step_options(step: StepDefinition, before: StepOptions, given: StepCall) -> StepOptions:
    """Return the options of a call of a step, with these changes. Raises `UsageError`."""
    for name in given:
        if name not in _OF_CALLS:
            hint = (
                f"It is declared: @app.step({name}=…)." if name in _OF_STEPS else f"There are: {', '.join(_OF_CALLS)}."
            )
            raise UsageError(f"a single call of the step {step.name} has no option {name}. {hint}")
    fields: dict[str, Any] = {}
    if "key" in given:
        fields["key"] = valid_key("key", given["key"])
    if "queue" in given:
        fields["queue"] = valid_name("queue", given["queue"])
    if "tags" in given:
        fields["tags"] = _tags(given["tags"])
    if "timeout" in given:
        fields["timeout"] = length_of("timeout", given["timeout"])
    if "retries" in given:
        policy = as_policy(given["retries"])
        if step.at_most_once and not isinstance(policy, Never):
            raise UsageError(f"the step {step.name} is to be run at most once, so it has no retries=")
        fields["retries"] = policy
    if step.transactional and ("queue" in fields or "tags" in fields):
        raise UsageError(f"the transactional step {step.name} runs in its workflow's own worker")
    return msgspec.structs.replace(before, **fields)


def body_fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a body's syntax tree, without docstrings and positions, and of the Python version: another
    version may run the same body in another order.
    """
    function = inspect.unwrap(function)
    tree = _tree_of(function)
    if tree is None:
        code = getattr(function, "__code__", None)
        text = repr(_facts_of(code)) if code else import_name(function)
    else:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and _has_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.decorator_list = []  # the declaration itself
        text = ast.dump(tree)
    return hashlib.sha256(f"{parking.PYTHON}\0{text}".encode()).hexdigest()[:16]


def _has_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _facts_of(code: CodeType) -> tuple[Any, ...]:
    """Return what makes two pieces of compiled code the same. The repr of nested code would hold addresses."""
    consts = [_facts_of(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, consts


_parsing = threading.Lock()  # ast.parse in two threads at once raises SystemError in Python 3.11


def _tree_of(function: Callable[..., Any]) -> ast.Module | None:
    try:
        with _parsing:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None


_CLOCK = "context().now()"
_CHANCE = "context().random"
_STEP = "do that in a step"
_INSTEAD: dict[Any, str] = {
    time.time: _CLOCK,
    time.time_ns: _CLOCK,
    time.monotonic: _CLOCK,
    time.monotonic_ns: _CLOCK,
    time.perf_counter: _CLOCK,
    time.perf_counter_ns: _CLOCK,
    time.process_time: _CLOCK,
    time.sleep: "sleep(…) of holdfast",
    uuid.uuid1: "context().uuid4()",
    uuid.uuid4: "context().uuid4()",
    os.urandom: "context().random.randbytes(…)",
    os.getenv: _STEP,
    builtins.open: _STEP,
    builtins.input: _STEP,
    asyncio.to_thread: _STEP,
    threading.Thread: _STEP,  # on another thread, a step would be a plain call
    threading.Timer: _STEP,
    futures.ThreadPoolExecutor: _STEP,
    futures.ProcessPoolExecutor: _STEP,
}
_CLASS_METHODS = {(datetime, "now"), (datetime, "utcnow"), (datetime, "today"), (date, "today")}


def _instead_of(called: Any, owner: Any, name: str) -> str:
    """Return what to use instead of this function in a body; empty if it may be called."""
    if (owner, name) in _CLASS_METHODS:
        return _CLOCK
    try:
        if called in _INSTEAD:
            return _INSTEAD[called]
    except TypeError:  # it cannot be hashed
        return ""
    if isinstance(called, type):
        return _CHANCE if issubclass(called, random.Random) else ""
    if isinstance(getattr(called, "__self__", None), random.Random) or owner in (random, secrets):
        return _CHANCE
    return _CHANCE if getattr(called, "__module__", None) in ("random", "secrets") else ""


def check_body(function: Callable[..., Any]) -> None:
    """Raise `UsageError` if the source of a body calls the clock, chance, files or the like."""
    function = inspect.unwrap(function)
    tree = _tree_of(function)
    if tree is None or not inspect.isfunction(function):
        return
    known, code = _names_in(tree, function), function.__code__
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node.lineno < _first_line(tree):
            continue
        called, owner, said = _resolved(node.func, known)
        if called is random.Random and (node.args or node.keywords):
            continue  # it has a seed
        if called is not None and (instead := _instead_of(called, owner, said.rpartition(".")[2])):
            line = code.co_firstlineno + node.lineno - 1
            raise UsageError(
                f"the body of a workflow may not call {_full_name(called, said)} ({code.co_filename}:{line}): a replay "
                f"would get another answer. Instead: {instead}; or declare it with check=False if you know better"
            )


def _first_line(tree: ast.Module) -> int:
    """Return the line after the decorators, whose calls are not the body's."""
    return tree.body[0].lineno if tree.body else 1


def _full_name(called: Any, said: str) -> str:
    module, name = getattr(called, "__module__", None), getattr(called, "__name__", "")
    module = {"_io": "", "builtins": "", "_asyncio": "asyncio"}.get(module or "", module)
    full = f"{module}.{name}" if module and name else name or said
    return said if full.rpartition(".")[2] == said.rpartition(".")[2] and "." in said else f"{said} ({full})"


def _names_in(tree: ast.Module, function: FunctionType) -> dict[str, Any]:
    """Return what the names in a body mean: those of its module, of functions around it, and what it imports itself.
    Names that the body binds otherwise are its own, and unknown here.
    """
    closed = dict[str, Any]()
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is bound further down
            closed[free] = cell.cell_contents
    known: dict[str, Any] = {**vars(builtins), **function.__globals__, **closed}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            known.pop(node.arg, None)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.pop(node.id, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                known[each.asname or first] = sys.modules.get(each.name if each.asname else first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                known[each.asname or each.name] = getattr(sys.modules.get(node.module), each.name, None)
    return known


def _resolved(node: ast.expr, known: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """Return what a name in the source means, the object that it is an attribute of, and how it is written."""
    if isinstance(node, ast.Name):
        return known.get(node.id), None, node.id
    if isinstance(node, ast.Attribute):
        owner, _, said = _resolved(node.value, known)
        if owner is None or not (inspect.ismodule(owner) or inspect.isclass(owner)):
            return None, None, ""
        return getattr(owner, node.attr, None), owner, f"{said}.{node.attr}"
    return None, None, ""
