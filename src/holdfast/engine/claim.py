"""Claim: a runner takes work for its free places.

One conditional write gives the work to this owner and marks it RUNNING before any user code starts. If the answer is
lost, the claim is repeated with its own operation id, so that work which was given once is found again instead of
being left to recovery. But a runner that is not heard may be dead in the eyes of the others, and must not be given
more: it asks again when it is heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.engine.patience import Patience
from holdfast.engine.permit import Permit
from holdfast.errors import StoreError, StoreUnavailable
from holdfast.ids import Ids
from holdfast.lifecycle.claims import Claim, Claimed
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.records import FINAL, READY, Hint
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub


class Claimer:
    """`limits` are those of the tasks that have one, by name."""

    def __init__(
        self,
        store: Store,
        hub: Hub,
        ids: Ids,
        patience: Patience,
        permit: Permit,
        *,
        app: str,
        owner: str,
        limits: Mapping[str, Limit],
    ) -> None:
        self._store = store
        self._hub = hub
        self._ids = ids
        self._patience = patience
        self._permit = permit
        self._app = app
        self._owner = owner
        self._limits = limits

    def _now(self) -> float:
        """Return the time that it certainly is: what is due by then is not early, whatever the clock's error."""
        return self._store.now() - self._store.clock_error()

    async def claim(self, lanes: Iterable[str], limit: int, *, start: bool = True, limited: bool = True) -> Claimed:
        """Up to `limit` invocations, ours and RUNNING (PENDING, without `start`); without `limited`, only what lies
        before the first that needs a slot. Waits while the store is away.
        """
        claim = Claim(
            app=self._app,
            lanes=tuple(lanes),
            limit=limit,
            owner=self._owner,
            operation=self._ids.operation(),
            at=self._now(),
            start=start,
            limits=self._limits,
            limited=limited,
        )

        away = ""

        async def attempt(again: bool) -> Claimed:
            nonlocal away
            if again and not self._permit.holds():
                raise StoreUnavailable(f"nothing is claimed until the store hears this runner again. {away}")
            crashpoint("claim.before")
            try:
                claimed = await self._store.claim(replace(claim, at=self._now(), again=True) if again else claim)
            except StoreError as error:
                away = str(error)
                raise
            crashpoint("claim.after")
            return claimed

        claimed = await self._patience.until_answered("looking for work", attempt)
        if claimed.refused or claimed.released:
            told = ((FINAL, claimed.refused), (READY, claimed.released))
            self._hub.send(*[Hint(kind, tuple(dict.fromkeys(names)), len(names)) for kind, names in told if names])
        return claimed
