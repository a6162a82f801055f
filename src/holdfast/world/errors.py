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
        WORLD_ERROR: (400, 404, 500, 503),
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


def too_large(message: str) -> WorldError:
    return WorldError(TOO_LARGE, 413, message)


def conflict(message: str) -> WorldError:
    return WorldError(CONFLICT, 409, message)


def expired(message: str) -> WorldError:
    return WorldError(RUN_EXPIRED, 410, message)


def run_not_found(run: str) -> WorldError:
    return WorldError(RUN_NOT_FOUND, 404, f"the run {run:.80} is not in this store")


def step_not_found(step: str, run: str) -> WorldError:
    return WorldError(STEP_NOT_FOUND, 404, f"the step {step:.80} of {run:.80} is not in this store")


def event_not_found(what: str) -> WorldError:
    return WorldError(EVENT_NOT_FOUND, 404, f"{what} is not in this store")


def hook_not_found(what: str) -> WorldError:
    return WorldError(HOOK_NOT_FOUND, 404, f"the hook {what:.80} is not there, was disposed of, or its run has ended")


def attribute_error(message: str) -> WorldError:
    return WorldError(ATTRIBUTES, 400, message)


def not_supported(spec: int, newest: int) -> WorldError:
    message = f"the run has spec version {spec}, and this World knows those up to {newest}; upgrade the server"
    return WorldError(NOT_SUPPORTED, 409, message)


def too_early(step: str, seconds: float) -> WorldError:
    message = f"the step {step:.80} waits for its retryAfter: it may start in {seconds:g} s"
    return WorldError(TOO_EARLY, 425, message, seconds)
