"""What a task, or one call of it, declares about time. It is stored with each call as part of its terms."""

from __future__ import annotations

import msgspec

from holdfast.clock import Duration, format_duration, length_of
from holdfast.errors import UsageError
from holdfast.lifecycle.records import PLAIN, Terms


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds; None where there is no limit, or for the grace what the settings say."""

    timeout: float | None = None
    soft_timeout: float | None = None
    expires: float | None = None
    cancel_grace: float | None = None
    cancel_children: bool = True

    def __post_init__(self) -> None:
        if self.timeout is not None and self.soft_timeout is not None and self.soft_timeout >= self.timeout:
            soft, hard = format_duration(self.soft_timeout), format_duration(self.timeout)
            raise UsageError(f"soft_timeout={soft} is not before timeout={hard}, so it would never be heard")

    def changed(
        self,
        *,
        timeout: Duration | None,
        soft_timeout: Duration | None,
        expires: Duration | None,
        cancel_grace: Duration | None,
        cancel_children: bool | None,
    ) -> TimeLimits:
        """The same, but for what is given."""
        return TimeLimits(
            timeout=self.timeout if timeout is None else limit_of("timeout", timeout),
            soft_timeout=self.soft_timeout if soft_timeout is None else limit_of("soft_timeout", soft_timeout),
            expires=self.expires if expires is None else limit_of("expires", expires),
            cancel_grace=self.cancel_grace if cancel_grace is None else length_of("cancel_grace", cancel_grace),
            cancel_children=self.cancel_children
            if cancel_children is None
            else flag("cancel_children", cancel_children),
        )

    def added_to(self, terms: Terms) -> Terms:
        agreed = msgspec.structs.replace(
            terms,
            timeout=self.timeout,
            soft_timeout=self.soft_timeout,
            cancel_grace=self.cancel_grace,
            cancel_children=self.cancel_children,
        )
        return PLAIN if agreed == PLAIN else agreed


def limit_of(name: str, limit: Duration | None) -> float | None:
    seconds = seconds_of(name, limit)
    if seconds == 0.0:
        raise UsageError(f"{name}=0 leaves no time at all; leave it out for no limit")
    return seconds


def seconds_of(name: str, limit: Duration | None) -> float | None:
    return None if limit is None else length_of(name, limit)


def flag(name: str, value: bool) -> bool:
    """Of anything else Python would make one too, and of "no" the wrong one."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.80}: expected True or False")
    return value
