"""Whether a failed attempt is followed by another, and when.

A policy is data: frozen, named, storable (`dump_policy`, `load_policy`), so that it can be kept with an invocation,
shown to people and read by another process. One pure function, `decide`, turns a policy and the facts of a failure
into `Retry` or `GiveUp`, each with a sentence that says why. Time and chance are arguments.

Words, used the same everywhere: `attempts` in a policy counts the attempts AFTER the first, so ``Fixed(5, 1.0)`` runs a
task at most six times. `attempt` in `decide` counts the attempts made, so it is 1 when the first attempt has just
failed.

Exceptions are named, never held: ``module:qualname``, as `exception_name` writes it. A policy is judged where the
exception's class may not even be importable. Classes given to a policy become names when it is made.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, assert_never

import msgspec

from holdfast.clock import Duration, format_duration, parse_duration
from holdfast.errors import NotDecodable, UsageError
from holdfast.model.names import valid_name

# A mapping's key type is invariant, so each kind of key is spelt out.
_Rows: TypeAlias = (
    Mapping[str, Duration]
    | Mapping[float, Duration]
    | Mapping[timedelta, Duration]
    | Iterable[tuple[Duration, Duration]]
)
ExceptionNames: TypeAlias = type[BaseException] | str | Iterable[type[BaseException] | str]


# --- Policies ---------------------------------------------------------------------------------------------------------


class _Stored(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of stored policies. An unknown parameter is an error: to ignore it would change the policy."""


class Never(_Stored, frozen=True, tag="never"):
    """A failure is final."""


class Fixed(_Stored, frozen=True, tag="fixed"):
    """Up to `attempts` more attempts, `wait_seconds` apart."""

    attempts: int
    wait_seconds: float = 1.0

    if TYPE_CHECKING:

        def __init__(self, attempts: int, wait_seconds: Duration = 1.0) -> None: ...

    def __post_init__(self) -> None:
        _check_attempts(self, self.attempts)
        _set_seconds(self, "wait_seconds")


class Exponential(_Stored, frozen=True, tag="exponential"):
    """Up to `attempts` more attempts; the wait grows by `factor` from `first_seconds` and stays at `cap_seconds`.

    With `jitter`, the wait is drawn evenly from the upper half, [0.5, 1.0] × wait. Tasks that failed together, because
    a service they share was down, are then not retried together. Unlike with full jitter, [0, 1] × wait, no task is
    retried at once and spends its attempts while the service is still down.
    """

    attempts: int
    first_seconds: float = 1.0
    cap_seconds: float = 60.0
    factor: float = 2.0
    jitter: bool = True

    if TYPE_CHECKING:

        def __init__(
            self,
            attempts: int,
            first_seconds: Duration = 1.0,
            cap_seconds: Duration = 60.0,
            factor: float = 2.0,
            jitter: bool = True,
        ) -> None: ...

    def __post_init__(self) -> None:
        _check_attempts(self, self.attempts)
        _set_seconds(self, "first_seconds")
        _set_seconds(self, "cap_seconds")
        if self.cap_seconds < self.first_seconds:
            _refuse(self, f"the cap ({self.cap_seconds}s) is shorter than the first wait ({self.first_seconds}s)")
        if not (_is_number(self.factor) and 1 <= self.factor < math.inf):
            _refuse(self, f"factor={self.factor!r} must be a number from 1 on")


class Timetable(_Stored, frozen=True, tag="timetable"):
    """Waits by age, counted since the first attempt was due: ``Timetable({"5m": "1m", "1h": "5m", "24h": "1h"})``.

    While the task is at most five minutes old, retry after a minute. Up to an hour, retry after five minutes. Up to a
    day, retry after an hour. Then give up. The number of attempts does not matter. Kept as (age, wait) in seconds,
    ascending.
    """

    rows: tuple[tuple[float, float], ...]

    if TYPE_CHECKING:

        def __init__(self, rows: _Rows) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.rows  # the caller's value, before it is converted to the annotated type
        pairs = given.items() if isinstance(given, Mapping) else given
        try:
            rows = sorted((parse_duration(age), parse_duration(wait)) for age, wait in pairs)
        except (TypeError, ValueError):
            _refuse(self, f"rows={given!r} must map ages to waits, such as {{'5m': '1m', '1h': '5m'}}")
        if not rows:
            _refuse(self, "it has no rows")
        for (age, _), (next_age, _) in itertools.pairwise(rows):
            if age == next_age:
                _refuse(self, f"it has two rows for the age {format_duration(age)}")
        msgspec.structs.force_setattr(self, "rows", tuple(rows))


class Forever(_Stored, frozen=True, tag="forever"):
    """The waits of another policy without its end: its `attempts` do not count, a timetable stays at its last row."""

    wait: Fixed | Exponential | Timetable

    def __post_init__(self) -> None:
        if not isinstance(self.wait, Fixed | Exponential | Timetable):
            _refuse(self, f"it needs a Fixed, Exponential or Timetable to take the waits from, not {self.wait!r}")


class Only(_Stored, frozen=True, tag="only"):
    """`policy` for these exceptions and their subclasses; all others are final."""

    policy: Policy
    exceptions: tuple[str, ...]

    if TYPE_CHECKING:

        def __init__(self, policy: Policy, exceptions: ExceptionNames) -> None: ...

    def __post_init__(self) -> None:
        _check_policy(self, self.policy)
        msgspec.structs.force_setattr(self, "exceptions", _names(self, self.exceptions))


class FirstMatch(_Stored, frozen=True, tag="first-match"):
    """The policy of the first rule, (exceptions, policy), that names the exception or a base of it; none: final.

    ``FirstMatch([(ConnectionError, Retries("forever")), ((ValueError, TypeError), Never()), (Exception, Fixed(3))])``
    """

    rules: tuple[tuple[tuple[str, ...], Policy], ...]

    if TYPE_CHECKING:

        def __init__(self, rules: Iterable[tuple[ExceptionNames, Policy]]) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.rules
        try:
            rules = tuple((_names(self, exceptions), policy) for exceptions, policy in given)
        except (TypeError, ValueError):
            _refuse(self, f"rules={given!r} must be pairs of exceptions and policy")
        if not rules:
            _refuse(self, "it has no rules")
        for _, policy in rules:
            _check_policy(self, policy)
        msgspec.structs.force_setattr(self, "rules", rules)


class MoveTo(_Stored, frozen=True, tag="move-to"):
    """`policy`, but its retries run on `queue`: a slow lane, a machine with more memory. The innermost MoveTo wins."""

    queue: str
    policy: Policy

    def __post_init__(self) -> None:
        valid_name("queue", self.queue)
        _check_policy(self, self.policy)


Policy: TypeAlias = Never | Fixed | Exponential | Timetable | Forever | Only | FirstMatch | MoveTo
_POLICIES = (Never, Fixed, Exponential, Timetable, Forever, Only, FirstMatch, MoveTo)


def Retries(
    attempts: int | Literal["forever"],
    *,
    backoff: Literal["exponential", "fixed"] = "exponential",
    wait: Duration = "1s",
    cap: Duration = "60s",
    jitter: bool = True,
    only: ExceptionNames = (),
) -> Policy:
    """Build one of the usual policies: ``Retries(5)``, ``Retries(3, backoff="fixed", wait="10s", only=OSError)``.

    `wait` is the first wait of an exponential backoff, and every wait of a fixed one, where `cap` and `jitter` have no
    meaning. `attempts` counts the attempts after the first; 0 is `Never`.
    """
    endless = attempts == "forever"
    count: Any = 0 if endless else attempts
    if backoff == "exponential":
        paced: Fixed | Exponential = Exponential(count, parse_duration(wait), parse_duration(cap), jitter=jitter)
    elif backoff == "fixed":
        paced = Fixed(count, parse_duration(wait))
    else:
        raise UsageError(f"backoff={backoff!r} is unknown: it is 'exponential' or 'fixed'.")
    if attempts == 0:
        return Never()
    policy = Forever(paced) if endless else paced
    names = _names_of(only)
    return Only(policy, names) if names else policy


def as_policy(value: Policy | int | None) -> Policy:
    """Return the policy that a task's ``retries=`` means: a policy is itself, 5 is ``Retries(5)``, None and 0 are
    `Never`.
    """
    if value is None:
        return Never()
    if isinstance(value, _POLICIES):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"retries={value!r} is not a retry policy: give a number, Retries(…) or None.")
    return Retries(value)


# --- Deciding ---------------------------------------------------------------------------------------------------------


class Retry(msgspec.Struct, frozen=True, tag="retry", tag_field="kind"):
    """Again after `wait_seconds`, on `queue` if that is given and else where it was."""

    wait_seconds: float
    queue: str | None
    why: str


class GiveUp(msgspec.Struct, frozen=True, tag="give-up", tag_field="kind"):
    """This failure is final."""

    why: str


RetryDecision: TypeAlias = Retry | GiveUp


class _Failure(msgspec.Struct, frozen=True):
    """The facts about a failure, as `decide` was given them."""

    attempt: int
    age_seconds: float
    error_types: tuple[str, ...]
    random_unit: float


def decide(
    policy: Policy, *, attempt: int, age_seconds: float, error_types: Sequence[str], random_unit: float
) -> RetryDecision:
    """Decide whether a failed attempt is followed by another, and when.

    `attempt` counts the attempts made, including the failed one. `age_seconds` is the time since the first attempt was
    due; a negative age, after a clock was set back, counts as zero. `error_types` is the result of `exception_names`
    for the exception's class. `random_unit` is a random number from 0 to 1.
    """
    if attempt < 1 or not 0 <= random_unit <= 1:
        raise UsageError(f"attempt={attempt} must be at least 1, and random_unit={random_unit} between 0 and 1.")
    age = age_seconds if age_seconds > 0 else 0.0
    return _decide(policy, _Failure(attempt, age, tuple(error_types), random_unit))


def _decide(policy: Policy, failure: _Failure) -> RetryDecision:
    attempt = failure.attempt
    match policy:
        case Never():
            return GiveUp(f"attempt {attempt} failed; it is not to be retried")
        case Fixed() | Exponential():
            which = f"attempt {attempt} of {policy.attempts + 1} failed"
            if attempt > policy.attempts:
                return GiveUp(f"{which}; none is left")
            return _retry(_wait(policy, failure), which)
        case Timetable():
            which = f"attempt {attempt} failed at the age of {format_duration(failure.age_seconds)}"
            end = policy.rows[-1][0]
            if failure.age_seconds > end:
                return GiveUp(f"{which}; the timetable ends at {format_duration(end)}")
            return _retry(_wait(policy, failure), which)
        case Forever():
            return _retry(_wait(policy.wait, failure), f"attempt {attempt} (without limit) failed")
        case Only():
            if not _matches(policy.exceptions, failure):
                wanted = " or ".join(policy.exceptions)
                return GiveUp(f"attempt {attempt} failed with {_what(failure)}; only {wanted} is retried")
            return _decide(policy.policy, failure)
        case FirstMatch():
            for exceptions, chosen in policy.rules:
                if _matches(exceptions, failure):
                    return _decide(chosen, failure)
            return GiveUp(f"attempt {attempt} failed with {_what(failure)}; no rule of the retry policy names it")
        case MoveTo():
            decision = _decide(policy.policy, failure)
            if isinstance(decision, GiveUp) or decision.queue is not None:
                return decision
            return Retry(decision.wait_seconds, policy.queue, f"{decision.why}, on queue {policy.queue!r}")
        case _:
            assert_never(policy)


def as_asked(policy: Policy, error_types: Sequence[str] = ()) -> Policy:
    """Return the policy for code that asks to be tried again (`RetryLater`): whatever exceptions a policy names, the
    number of its attempts decides. Of several rules it is that which names the exception; one that denies it counts
    only if it names that very class. Without such a rule, the most generous one.
    """
    match policy:
        case Only():
            return as_asked(policy.policy, error_types)
        case MoveTo():
            return MoveTo(policy.queue, as_asked(policy.policy, error_types))
        case FirstMatch():
            for exceptions, chosen in policy.rules:
                is_denied = max_retries(chosen) == 0 and exceptions.count(next(iter(error_types), "")) == 0
                if not is_denied and not set(exceptions).isdisjoint(error_types):
                    return as_asked(chosen, error_types)
            return as_asked(max((chosen for _, chosen in policy.rules), key=_generosity), error_types)
        case _:
            return policy


def _generosity(policy: Policy) -> float:
    most = max_retries(policy)
    return math.inf if most is None else most


def max_retries(policy: Policy) -> int | None:
    """Return how many retries a policy can lead to, at most; None: their number does not end them."""
    match policy:
        case Never():
            return 0
        case Fixed() | Exponential():
            return policy.attempts
        case Timetable() | Forever():
            return None
        case Only() | MoveTo():
            return max_retries(policy.policy)
        case FirstMatch():
            each = [max_retries(chosen) for _, chosen in policy.rules]
            return None if None in each else max(count or 0 for count in each)
        case _:
            assert_never(policy)


def queues_of(policy: Policy) -> frozenset[str]:
    """Return the queues that a policy may move a call to."""
    match policy:
        case MoveTo():
            return queues_of(policy.policy) | {policy.queue}
        case Only():
            return queues_of(policy.policy)
        case FirstMatch():
            return frozenset().union(*[queues_of(chosen) for _, chosen in policy.rules])
        case _:
            return frozenset()


def _retry(wait_seconds: float, which: str) -> Retry:
    return Retry(wait_seconds, None, f"{which}; next in {format_duration(wait_seconds)}")


def _wait(policy: Fixed | Exponential | Timetable, failure: _Failure) -> float:
    match policy:
        case Fixed():
            return policy.wait_seconds
        case Exponential():
            share = 0.5 + 0.5 * failure.random_unit if policy.jitter else 1.0
            return share * _grown(policy, failure.attempt - 1)
        case Timetable():
            waits = [wait for age, wait in policy.rows if failure.age_seconds <= age]
            return waits[0] if waits else policy.rows[-1][1]


def _grown(policy: Exponential, times: int) -> float:
    """Return ``first × factor ** times``, at most the cap; past some hundred attempts the power itself overflows."""
    if policy.first_seconds == 0:
        return 0.0
    try:
        return min(policy.cap_seconds, policy.first_seconds * policy.factor**times)
    except OverflowError:
        return policy.cap_seconds


def _matches(exceptions: tuple[str, ...], failure: _Failure) -> bool:
    return not set(exceptions).isdisjoint(failure.error_types)


def _what(failure: _Failure) -> str:
    return failure.error_types[0] if failure.error_types else "an unknown error"


# --- Names of exceptions ----------------------------------------------------------------------------------------------


def exception_name(exception: type[BaseException]) -> str:
    """Return the name by which policies know a class: ``builtins:ConnectionError``."""
    return f"{exception.__module__}:{exception.__qualname__}"


def exception_names(exception: type[BaseException]) -> tuple[str, ...]:
    """Return the names of a class and of all its bases, nearest first: the `error_types` of `decide`."""
    return tuple(exception_name(base) for base in exception.__mro__ if issubclass(base, BaseException))


def _names(owner: _Stored, exceptions: ExceptionNames) -> tuple[str, ...]:
    names = _names_of(exceptions)
    if not names:
        _refuse(owner, "it names no exceptions")
    return names


def _names_of(exceptions: ExceptionNames) -> tuple[str, ...]:
    if isinstance(exceptions, str | type):
        exceptions = (exceptions,)
    elif not isinstance(exceptions, Iterable):
        raise UsageError(f"{exceptions!r} is not an exception class, its name, or several of them.")
    return tuple(dict.fromkeys(_name_of(exception) for exception in exceptions))


def _name_of(exception: type[BaseException] | str) -> str:
    if isinstance(exception, type) and issubclass(exception, BaseException):
        return exception_name(exception)
    if isinstance(exception, str):
        builtin = getattr(builtins, exception, None)
        if isinstance(builtin, type) and issubclass(builtin, BaseException):
            return exception_name(builtin)  # also turns IOError into OSError, which is what is raised
        module, colon, qualname = exception.partition(":")
        if module and colon and qualname:
            return exception
    raise UsageError(
        f"{exception!r} is not an exception: give the class, or its name as 'module:qualname' (such as 'app:Busy')."
    )


# --- Checks at construction -------------------------------------------------------------------------------------------


def _refuse(owner: _Stored, problem: str) -> NoReturn:
    raise UsageError(f"Retry policy {type(owner).__name__}: {problem}.")


_MAX_ATTEMPTS = 10**9  # a store may have no room for much larger numbers


def _check_attempts(owner: _Stored, attempts: object) -> None:
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 0:
        _refuse(owner, f"attempts={attempts!r} must be a whole number from 0 on (the attempts after the first)")
    if attempts > _MAX_ATTEMPTS:
        _refuse(owner, f"attempts= is beyond {_MAX_ATTEMPTS:,}; without an end, it is Forever(…)")


def _set_seconds(owner: _Stored, name: str) -> None:
    """Convert any length of time to seconds."""
    given = getattr(owner, name)
    try:
        msgspec.structs.force_setattr(owner, name, float(parse_duration(given)))
    except UsageError as error:
        _refuse(owner, f"{name}={given!r}: {str(error).rstrip('.')}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_policy(owner: _Stored, policy: object) -> None:
    if not isinstance(policy, _POLICIES):
        instead = f"; write Retries({policy})" if isinstance(policy, int) and not isinstance(policy, bool) else ""
        _refuse(owner, f"{policy!r} is not a retry policy{instead}")


# --- Storing ----------------------------------------------------------------------------------------------------------


def dump_policy(policy: Policy) -> dict[str, Any]:
    """Return the policy as plain data: its ``kind`` and its parameters."""
    return dict(msgspec.to_builtins(policy))


def load_policy(data: Mapping[str, Any]) -> Policy:
    """Return the policy that `dump_policy` wrote. Raises `NotDecodable` if this version does not know it."""
    unknown = _unknown_kind(data)
    if unknown is not None:
        raise NotDecodable(
            f"The stored retry policy has the kind {unknown!r}, which this version does not know "
            f"(it knows {', '.join(_KINDS)}). It was probably written by a newer version: upgrade this process."
        )
    try:
        return msgspec.convert(data, type=Policy)  # type: ignore[no-any-return]  # a union is no type[T]
    except (msgspec.ValidationError, UsageError) as error:
        raise NotDecodable(f"The stored retry policy {data!r} cannot be read: {error}") from error


_KINDS = tuple(str(policy.__struct_config__.tag) for policy in _POLICIES)


def _unknown_kind(data: object) -> str | None:
    """Return the first kind, at any depth, that no policy has."""
    if isinstance(data, Mapping):
        kind = data.get("kind")
        if isinstance(kind, str) and kind not in _KINDS:
            return kind
        children: Iterable[object] = data.values()
    elif isinstance(data, list | tuple):
        children = data
    else:
        return None
    return next((found for child in children if (found := _unknown_kind(child)) is not None), None)
