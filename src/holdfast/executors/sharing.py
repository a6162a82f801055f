"""What a step shares with its run: data, and attributes. A step in a child process gets a copy, and sends back what it
has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from holdfast.codec import Codec
from holdfast.errors import UsageError
from holdfast.model.notes import check_attributes

NO_DELETING = "the data of a run only grows: set the name to None instead of deleting it"


class SharedValues(msgspec.Struct, array_like=True):
    """Encoded data, and attributes, on their way to a child process or back."""

    data: bytes
    attributes: dict[str, str]
    complaint: str = ""  # why the data cannot be sent


class StepData(dict[str, Any]):
    """The shared data of a run, in a step."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise UsageError(NO_DELETING)

    __delitem__ = pop = popitem = clear = _refuse


class StepPort:
    """The run, as one attempt of a step sees it. What the step sets is recorded together with its end."""

    is_cancelled: bool | None = None  # None: the invocation records it
    complaint = ""  # why what it has set cannot be recorded

    def __init__(self, data: dict[str, Any], attributes: dict[str, str]) -> None:
        self.data: MutableMapping[str, Any] = StepData(data)
        self._before = copy.deepcopy(data)
        self._attributes = attributes
        self._set: dict[str, str] = {}
        self._session: Any = None

    @property
    def session(self) -> Any:
        if self._session is None:
            raise UsageError("this step has no transaction: declare it with @app.step(transactional=True)")
        return self._session

    def begin(self, session: object) -> None:
        """Forget what was set: the transaction in which that was done is rolled back, or has just begun."""
        self._session = session
        self.data = StepData(copy.deepcopy(self._before))
        self._set = {}

    @property
    def attributes(self) -> Mapping[str, str]:
        return self._attributes | self._set

    def set(self, attributes: Mapping[str, str]) -> None:
        check_attributes(self._attributes | self._set, attributes)
        self._set |= attributes

    def changes(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the step has set: data, and attributes."""
        before = self._before
        changed = {
            name: value for name, value in self.data.items() if name not in before or _differ(before[name], value)
        }
        return changed, dict(self._set)

    # --- to a child process and back

    def shared(self, codec: Codec) -> SharedValues:
        """Return what a step in a child process is to see."""
        return SharedValues(codec.encode(dict(self.data)), self._attributes)

    @classmethod
    def of(cls, shared: SharedValues, codec: Codec) -> StepPort:
        return cls(codec.decode(shared.data), shared.attributes)

    def changed(self, codec: Codec) -> SharedValues | None:
        """Return what the step has set here, for the process that records it; None: nothing."""
        data, attributes = self.changes()
        if not data and not attributes:
            return None
        try:
            return SharedValues(codec.encode(data, at="data"), attributes)
        except Exception as error:  # the step's result counts all the same
            return SharedValues(codec.encode({}), attributes, f"{type(error).__name__}: {error}")

    def take(self, changed: SharedValues, codec: Codec) -> None:
        """Take over what the step has set in a child process."""
        self.data.update(codec.decode(changed.data))
        self._set |= changed.attributes
        self.complaint = changed.complaint

    # --- for bodies only

    def now(self) -> float:
        raise UsageError("context().now() is for the body of a workflow; in a step, use time.time()")

    random = property(lambda self: _only_in_bodies("random"))

    def uuid4(self) -> UUID:
        raise UsageError("context().uuid4() is for the body of a workflow; in a step, use uuid.uuid4()")

    def restart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise UsageError("context().restart() is for the body of a workflow")


def _differ(before: object, after: object) -> bool:
    """Return whether two values differ, or cannot be compared, as two arrays cannot."""
    try:
        return bool(before != after)
    except Exception:
        return True


def _only_in_bodies(name: str) -> Any:
    raise UsageError(f"context().{name} is for the body of a workflow")
