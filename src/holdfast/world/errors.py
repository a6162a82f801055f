"""The errors of a World, as its clients match them.

Cores from 4.2 on match the class `name`, older ones the `status`. Both are in one table, and a `WorldError` carries
both. `retry_after` is a number of seconds, and there with 425 and 429 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WORLD_ERROR = "WorkflowWorldError"
RUN_NOT_FOUND = "WorkflowRunNotFoundError"
STEP_NOT_FOUND = "StepNotFoundError"
HOOK_NOT_FOUND = "HookNotFoundError"
EVENT_NOT_FOUND = "EventNotFoundError"
CONFLICT = "EntityConflictError"
RUN_EXPIRED = "RunExpiredError"
PRECONDITION = "PreconditionFailedError"
TOO_LARGE = "PayloadTooLargeError"
ATTRIBUTES = "AttributeValidationError"
NOT_SUPPORTED = "RunNotSupportedError"
TOO_EARLY = "TooEarlyError"
THROTTLE = "ThrottleError"
UNAUTHORIZED = "Unauthorized"

STATUSES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        WORLD_ERROR: (400, 500, 503),
        UNAUTHORIZED: (401,),
        RUN_NOT_FOUND: (404,),
        STEP_NOT_FOUND: (404,),
        HOOK_NOT_FOUND: (404,),
        EVENT_NOT_FOUND: (404,),
        CONFLICT: (409,),
        RUN_EXPIRED: (410,),
        PRECONDITION: (412,),
        TOO_LARGE: (413,),
        ATTRIBUTES: (400,),
        NOT_SUPPORTED: (409,),
        TOO_EARLY: (425,),
        THROTTLE: (429,),
    }
)
"""Which statuses an error of each name may have."""


class WorldError(Exception):
    """A request that a World refuses. Nothing was written, unless the status is 503: then the same call, with the same
    operation id, may be repeated.
    """

    def __init__(self, name: str, status: int, message: str, retry_after: float | None = None) -> None:
        assert status in STATUSES[name], (name, status)
        super().__init__(message)
        self.name, self.status, self.message, self.retry_after = name, status, message, retry_after

    def __repr__(self) -> str:
        return f"<WorldError {self.status} {self.name}: {self.message}>"


def bad_request(message: str) -> WorldError:
    return WorldError(WORLD_ERROR, 400, message)
