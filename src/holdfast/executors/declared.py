"""Which functions are tasks in this process, and how another process finds them again.

A function cannot be sent to another process, only its address: that process imports the module, and the import
declares the task there too, with the app's own codec. So declarations are noted here by name, as weak references: a
forgotten app is released. It does not matter what became of the module's attribute (a task, a wrapper, or something
else by now).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.codec import Codec
from holdfast.errors import UsageError
from holdfast.executors.lifespan import Hooks

MAIN = "__main__"
SECOND_MAIN = "__mp_main__"  # what children of `multiprocessing` call their parent's program, and ours if they must
MAINS = frozenset({MAIN, SECOND_MAIN})


class Address(NamedTuple):
    """Where another process finds a task: in the module of its function, or else in the module that declared it."""

    app: str
    task: str
    module: str
    qualname: str
    declared_in: str


class Program(NamedTuple):
    """How a process was started: ``python -m name`` or ``python path``. One of the two is empty."""

    name: str
    path: str

    @property
    def module(self) -> str:
        """Return the name under which others import it."""
        return self.name or Path(self.path).stem


class Unreachable(Exception):
    """A process cannot find a task. The text says why, and what to do."""


class _Entry(NamedTuple):
    app: str
    function: weakref.ref[Callable[..., Any]]
    codec: weakref.ref[Codec]
    hooks: weakref.ref[Hooks]
    declared_in: str


class Found(NamedTuple):
    """What a process needs to run a task."""

    function: Callable[..., Any]
    codec: Codec
    hooks: Hooks


_entries: dict[str, list[_Entry]] = {}  # by the task's name
_importing: list[str] = []  # modules that a child is importing for its parent


# --- declaring


def remember(app: str, task: str, function: Callable[..., Any], codec: Codec, hooks: Hooks) -> None:
    """Note that this app declares this task, and which module does so."""
    with contextlib.suppress(TypeError):  # no weak reference to it, nor a name to find it by
        references = weakref.ref(function), weakref.ref(codec), weakref.ref(hooks)
        entry = _Entry(app, *references, _caller() or _module_of(function))
        _entries[task] = [known for known in _entries.get(task, ()) if known.function() is not None] + [entry]


def _caller() -> str:
    """Return the module whose import declares: a function of another module may do it on its behalf. If no import is
    under way, the module of the first caller outside of Holdfast.
    """
    frame: types.FrameType | None = sys._getframe(1)
    first = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "holdfast":
            first = first or name
            if frame.f_code.co_name == "<module>" and getattr(frame.f_globals.get("__spec__"), "_initializing", False):
                return _normal(name)
        frame = frame.f_back
    return _normal(first)


def why_unreachable(function: Callable[..., Any]) -> str | None:
    """Return why no other process can find this function, or None if it can."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return f"{function!r} has no name by which another process could find it"
    if "<" in qualname:
        return f"{qualname} is made inside another function (a decorator keeps the name with functools.wraps)"
    if module in MAINS and this_program() is None:
        return f"{qualname} is declared at a prompt, in a notebook or in `-c`, which another process cannot import"
    return None


def this_program() -> Program | None:
    """Return the program that runs here, unless it is a prompt or the like."""
    main = sys.modules.get(MAIN)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name not in MAINS:
        return Program(spec.name, "")
    return None if file is None else Program("", os.path.abspath(file))


# --- finding


def address_of(task: str, function: Callable[..., Any], codec: Codec) -> Address:
    """Return where another process finds it. Raises `Unreachable`."""
    if why := why_unreachable(function):
        raise Unreachable(why)
    module, qualname = _module_of(function), function.__qualname__
    for entry in reversed(_entries.get(task, ())):
        if entry.function() is function and entry.codec() is codec:
            return Address(entry.app, task, module, qualname, entry.declared_in)
    raise Unreachable(f"{qualname} of {module} is not declared as the task '{task}'")


def find(address: Address, program: Program | None) -> Found:
    """Return the task at this address in this process. Raises `Unreachable`."""
    failure: Unreachable | None = None
    for module in dict.fromkeys((address.module, address.declared_in)):
        try:
            _import(module, program)
        except Unreachable as error:
            failure = failure or error
        else:
            if found := _look_up(address, program):
                return found
    raise failure or Unreachable(
        f"importing {_in_words(address.module)} declares no task '{address.task}' of the app '{address.app}'. Declare "
        'it at the top level of its module, and not under `if __name__ == "__main__"`.'
    )


def _look_up(address: Address, program: Program | None) -> Found | None:
    modules = {address.module}
    if address.module == MAIN and program is not None:
        modules.add(program.module)
    for entry in reversed(_entries.get(address.task, ())):
        function, codec, hooks = entry.function(), entry.codec(), entry.hooks()
        if function is None or codec is None or hooks is None or entry.app != address.app:
            continue
        if _module_of(function) in modules and function.__qualname__ == address.qualname:
            return Found(function, codec, hooks)
    return None


def _module_of(function: Callable[..., Any]) -> str:
    return _normal(str(getattr(function, "__module__", "")))


def _normal(module: str) -> str:
    return MAIN if module in MAINS else module


# --- importing


_failed: dict[str, str] = {}
_program_is_here: list[Program] = []


def _import(module: str, program: Program | None) -> None:
    """Import a module, once: a failed import is not tried again, since half of it may have happened."""
    if module not in _failed:
        _importing.append(module)
        try:
            if module == MAIN:
                _import_program(program)
            else:
                importlib.import_module(module)
        except BaseException as error:  # a script without a guard may well end itself
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _failed[module] = f"a process for tasks cannot import {_in_words(module)}: {reason}"
        finally:
            _importing.remove(module)
    if why := _failed.get(module):
        raise Unreachable(why)


def _in_words(module: str) -> str:
    return "the program" if module == MAIN else f"'{module}'"


def refuse_while_importing() -> None:
    """Raise `UsageError` if the caller runs only because a process for tasks imports its module.

    A program without a main guard would otherwise start a runner in its runner's child, and so on without end.
    """
    if _importing:
        raise UsageError(
            "a runner is started while a process for tasks imports this module; "
            'start it under `if __name__ == "__main__":`'
        )


def _import_program(program: Program | None) -> None:
    """Import the parent's main module under the name by which others import it: code under its main guard does not run,
    and its tasks and classes have the same names as in the parent.
    """
    if program is None:
        raise Unreachable("it is a prompt or the like")
    if program in _program_is_here:
        return
    if program.path and not _leads_to(program.module, program.path):
        _load(program.path, SECOND_MAIN if program.module in sys.modules else program.module)
    else:
        sys.modules[MAIN] = importlib.import_module(program.module)
    _program_is_here.append(program)


def _leads_to(name: str, path: str) -> bool:
    """Return whether importing this name gives this file; a script may be called like a module of
    the standard library.
    """
    try:
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, path)
    except (ImportError, ValueError, OSError):
        return False


def _load(path: str, name: str) -> None:
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, path))
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    if name == SECOND_MAIN:
        module.__spec__ = None  # so that it goes by its file's name
    sys.modules[MAIN] = sys.modules[name] = module
    spec.loader.exec_module(module)
