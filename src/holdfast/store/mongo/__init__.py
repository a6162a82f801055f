"""The MongoDB store:

``mongodb://host/database?replicaSet=rs0`` or ``mongodb+srv://…``. TLS, authentication and pool options in the URL
pass through.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from holdfast.clock import Clock
from holdfast.store.contract import Observe
from holdfast.store.mongo.connection import database_name, hosts_of
from holdfast.store.mongo.retry import RetryPolicy
from holdfast.store.mongo.schema import SIGNAL_SECONDS
from holdfast.store.mongo.store import MongoStore


def open_mongo(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> MongoStore:
    """The store of a MongoDB URL. Options: those of `RetryPolicy`, ``use_change_streams`` and
    ``signal_retention_seconds``.
    """
    return MongoStore(
        url,
        where=f"{hosts_of(url)}/{database_name(url)}",
        process=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        clock=clock,
        rng=random.SystemRandom(),
        observe=observe,
        retry=RetryPolicy(**{name: options[name] for name in RetryPolicy.__struct_fields__ if name in options}),
        use_change_streams=options.get("use_change_streams", True),
        signal_seconds=int(options.get("signal_retention_seconds", SIGNAL_SECONDS)),
    )
