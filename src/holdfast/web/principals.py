"""Whom a request comes from, and what that role may do."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Role(IntEnum):
    """A role may do what the ones below it may."""

    VIEWER = 1  # read everything but secrets
    OPERATOR = 2  # pause, cancel, rerun, resume, change limits
    ADMIN = 3  # purge, tokens, the audit record


class Principal(NamedTuple):
    """The user or program behind a request."""

    name: str
    role: Role
    via: str  # "api_token", "local", "token", "login", "proxy", "host"
    source: str = ""  # the address that it comes from
    csrf: str = ""  # what pages of its session send with a change
