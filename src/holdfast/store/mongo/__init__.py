"""The MongoDB store: ``mongodb://host/database?replicaSet=rs0`` or ``mongodb+srv://…``.

TLS, authentication and pool options in the URL pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.clock import Clock
from holdfast.store.contract import Observe
from holdfast.store.mongo.store import MongoOptions, MongoStore


def open_mongo(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> MongoStore:
    """Return the store of a MongoDB URL, with those of the `options` that `MongoOptions` has."""
    known = {name: options[name] for name in MongoOptions.__struct_fields__ if name in options}
    return MongoStore(url, MongoOptions(**known), clock=clock, observe=observe)
