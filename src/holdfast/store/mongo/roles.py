"""The least privileges of each kind of process, as roles.

A *submitter* may store work and events, and read them. A *runner* may also change and remove Holdfast's records. A
*monitor* may only read. An *admin* may also make and repair collections and indexes: the role for ``holdfast store
prepare``, before other processes start. No role reaches outside Holdfast's own collections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.store.mongo import schema

LOOK = ("find", "listIndexes")
_ADD = ("find", "insert", "update")
_ALL = ("find", "insert", "update", "remove")
_MAKE = ("createCollection", "createIndex", "dropIndex", "collMod", "listIndexes", "collStats")
_HEAR = ("find", "insert", "update", "changeStream")


def _granted(role: str) -> dict[str, Sequence[str]]:
    """Return the actions of a role on each collection."""
    looks: dict[str, Sequence[str]] = dict.fromkeys(schema.COLLECTIONS, LOOK)
    if role == "monitor":
        return looks | {schema.SIGNALS: (*LOOK, "changeStream")}
    if role == "submitter":
        return looks | {
            schema.INVOCATIONS: (*LOOK, "insert"),
            schema.ENTRIES: (*LOOK, "insert"),
            schema.PAYLOADS: (*LOOK, *_ADD),
            schema.PIECES: (*LOOK, *_ADD),
            schema.SIGNALS: (*LOOK, *_HEAR),
        }
    every = dict.fromkeys(schema.COLLECTIONS, _ALL) | {schema.SIGNALS: _HEAR, schema.META: ("find", "update")}
    if role == "runner":
        return {name: (*actions, "listIndexes") for name, actions in every.items()}
    old: dict[str, Sequence[str]] = dict.fromkeys(schema.OLD_COLLECTIONS, ("find", "dropCollection"))
    return old | dict.fromkeys(schema.COLLECTIONS, (*_ALL, *_MAKE, "changeStream"))


ROLES = ("submitter", "runner", "monitor", "admin")


def role_command(role: str, database: str) -> dict[str, Any]:
    """Return the command that creates a role, for the database itself. An empty `database` in a resource means: any."""
    privileges = [
        {"resource": {"db": database, "collection": name}, "actions": sorted(set(actions))}
        for name, actions in _granted(role).items()
    ]
    if role == "admin":
        privileges.append({"resource": {"db": database, "collection": ""}, "actions": ["listCollections"]})
    return {"createRole": f"holdfast{role.capitalize()}", "privileges": privileges, "roles": []}
