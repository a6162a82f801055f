"""Stores, found by the scheme of a URL.

`open_store` imports a store only when its scheme is asked for, so that an app on SQLite never loads a database driver
it does not use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from holdfast.clock import Clock
from holdfast.errors import MissingExtra, UnknownStore
from holdfast.masking import mask_url
from holdfast.store.contract import Observe, Store, StoreOpener, ignore

GROUP = "holdfast.stores"

# Holdfast's own stores are named here too, so that it works from a source tree that was never installed.
_BUILT_IN = {
    "memory": "holdfast.store.memory.store:open_memory",
    "sqlite": "holdfast.store.sqlite:open_sqlite",
    "mongodb": "holdfast.store.mongo:open_mongo",
    "mongodb+srv": "holdfast.store.mongo:open_mongo",
}
_EXTRAS = {"pymongo": "mongo", "bson": "mongo"}


def schemes() -> dict[str, str]:
    """Return each URL scheme that can be opened, with the object behind it.

    An installed plug-in may not replace a built-in one.
    """
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return found | _BUILT_IN


def open_store(url: str, *, clock: Clock, observe: Observe = ignore, options: Mapping[str, Any] | None = None) -> Store:
    """Return the store for `url`. Nothing is connected yet: `Store.open` does that."""
    scheme = url.partition("://")[0] if "://" in url else ""
    known = schemes()
    if scheme not in known:
        raise UnknownStore(_unknown(scheme, sorted(known)))
    return _opener(scheme, known[scheme])(url, clock=clock, observe=observe, options=options or {})


def _unknown(scheme: str, known: list[str]) -> str:
    forms = ", ".join(f"{name}://" for name in known)
    if not scheme:
        return f"a store URL needs a scheme, such as sqlite:///shop.db or memory://; installed: {forms}"
    near = difflib.get_close_matches(scheme, known, n=1)
    hint = f" Did you mean {near[0]}://?" if near else " A plug-in may provide it: is it installed here?"
    shown = mask_url(f"{scheme}://")  # of a URL without a scheme, what stands there may be a password
    return f"no store for URLs that begin with {shown}; installed: {forms}.{hint}"


def _opener(scheme: str, target: str) -> StoreOpener:
    module, _, attribute = target.partition(":")
    try:
        return cast(StoreOpener, getattr(import_module(module), attribute))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise MissingExtra(
            f"{scheme}:// needs the package '{error.name}', which is not installed: pip install 'holdfast[{extra}]'"
        ) from error


__all__ = ["GROUP", "open_store", "schemes"]
