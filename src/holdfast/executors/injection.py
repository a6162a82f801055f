"""Parameters that a worker fills in: ``pool: Injected[Pool]`` gets the value of that type that a lifespan yields.

They are no part of a task's signature: a call is bound, stored and shown without them. Annotations are read when the
task is declared, and again by a process for tasks, which only has the function.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T")


class Inject:
    """A mark in an annotation. `lifespan` names the lifespan that yields the value, where several yield that type."""

    def __init__(self, lifespan: Callable[..., Any] | None = None) -> None:
        if lifespan is not None and not callable(lifespan):
            raise UsageError(f"Inject({lifespan!r:.80}): expected the function that was declared with @app.lifespan")
        self.lifespan = lifespan


Injected = Annotated[T, Inject()]
"""``Injected[Pool]``: the worker gives the value."""


class NotInjected:
    """The default of a parameter that a worker fills in. A plain call has no worker, so any use of it is refused."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"nothing is injected here (.{name} was asked for): in a plain call, pass the value yourself")

    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = NotInjected()
"""A default for type checkers, which else ask for the argument at `submit`."""


class InjectedParameter(NamedTuple):
    """A parameter that a worker fills in."""

    name: str
    kind: Any
    lifespan: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {getattr(self.kind, '__qualname__', self.kind)}"


def wanted_by(function: Callable[..., Any]) -> tuple[InjectedParameter, ...]:
    """Return the parameters that a worker fills in. Raises `UsageError` for one that it could not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return ()
    found = []
    for parameter in parameters:
        hint = _resolved(function, parameter)
        mark = next(_marks(hint), None)
        if mark is not None:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UsageError(f"the parameter {parameter.name} cannot be injected: it has no keyword of its own")
            found.append(InjectedParameter(parameter.name, typing.get_args(hint)[0], mark.lifespan))
        elif parameter.default is INJECTED or any(_inner_marks(hint)):
            raise UsageError(
                f"the parameter {parameter.name} cannot be injected: its whole annotation has to be Injected[…], such "
                "as Injected[Pool] or Injected[Pool | None]"
            )
    return tuple(found)


def _marks(hint: Any) -> Iterator[Inject]:
    for each in getattr(hint, "__metadata__", ()):
        if isinstance(each, Inject):
            yield each
        elif each is Inject:
            yield Inject()


def _inner_marks(hint: Any) -> Iterator[bool]:
    for inner in typing.get_args(hint):
        yield any(_marks(inner)) or any(_inner_marks(inner))


def _resolved(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation, with all names in it looked up; None if that is not possible, and it injects nothing."""
    alone = SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return typing.get_type_hints(alone, getattr(inspect.unwrap(function), "__globals__", {}), include_extras=True)[
            "it"
        ]
    except Exception as error:
        if "Inject" not in str(parameter.annotation):
            return None  # the codec says what is wrong with it, if that matters
        raise UsageError(
            f"the annotation of {parameter.name} cannot be read: {error}. What is injected has to be known at the top "
            "level of the module, at run time"
        ) from None


def without(signature: inspect.Signature, wanted: Iterable[InjectedParameter]) -> inspect.Signature:
    """Return a signature without the parameters that a worker fills in."""
    names = {each.name for each in wanted}
    if not names:
        return signature
    try:
        return signature.replace(parameters=[each for name, each in signature.parameters.items() if name not in names])
    except ValueError as error:  # cannot be: a gap does not change the order of the others
        raise UsageError(f"{signature}: {error}") from None


def filled(
    whole: inspect.Signature, bound: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a function with this signature, from bound ones and from what is injected."""
    given = {**bound, **values}
    arguments = {name: given[name] for name in whole.parameters if name in given}
    # Keywords from the first gap on: a parameter with a default may have been left out before an injected parameter.
    both = inspect.BoundArguments(whole, typing.cast(Any, arguments))
    return both.args, both.kwargs


def fits(value: object, kind: Any) -> bool:
    """Return whether a value is of the type of an annotation, as far as that can be checked at run time."""
    origin = typing.get_origin(kind)
    if origin is typing.Union or origin is UnionType:
        return any(fits(value, each) for each in typing.get_args(kind))
    try:
        return isinstance(value, origin or kind)
    except TypeError:
        return False
