"""What `context()` gives in bodies, beside what it gives in every task. For steps: `holdfast.executors.sharing`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from random import Random
from typing import Any, Protocol
from uuid import UUID

from holdfast.errors import UsageError
from holdfast.executors.context import Context
from holdfast.executors.sharing import NO_DELETING
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.workflows.life import Life, RestartRequest


class HasLife(Protocol):
    """The owner of a body."""

    @property
    def life(self) -> Life | None: ...


class BodyPort:
    """The run, as its body sees it. Everything follows from the log."""

    def __init__(self, run: HasLife, root_id: InvocationId | None = None) -> None:
        self._run = run
        self.root_id = root_id  # of the run at the top; None: it is this one

    @property
    def _life(self) -> Life:
        assert self._run.life is not None
        return self._run.life

    def now(self) -> float:
        return self._life.now

    @property
    def random(self) -> Random:
        return self._life.random

    def uuid4(self) -> UUID:
        return self._life.uuid4()

    def set(self, attributes: Mapping[str, str]) -> None:
        self._life.set_attributes(attributes)

    @property
    def attributes(self) -> Mapping[str, str]:
        return self._life.attributes

    @property
    def data(self) -> MutableMapping[str, Any]:
        return BodyData(self._life)

    @property
    def session(self) -> Any:
        raise UsageError("context().session is for a step that is declared with transactional=True")

    def restart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise RestartRequest(args, kwargs)


class BodyData(MutableMapping[str, Any]):
    """The shared data of a run. What the body sets is recorded."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def __getitem__(self, name: str) -> Any:
        return self._life.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._life.set_data(name, value)

    def __delitem__(self, name: str) -> None:
        raise UsageError(NO_DELETING)

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._life.data))

    def __len__(self) -> int:
        return len(self._life.data)


def body_context(record: InvocationRecord, owner: HasLife) -> Context:
    """Return what `context()` returns in a body."""
    return Context(
        invocation_id=record.id,
        app=record.app,
        task=record.task,
        attempt=record.attempt,
        epoch=record.epoch,
        idempotency_key=record.key_of_effects,
        is_last_attempt=None,
        origin=record.origin,
        run=BodyPort(owner, record.root_id),
    )
