"""What no answer may be: a defect, a secret, a document that the description does not have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import requests
from schemathesis import Response
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fuzz.cases import Fuzzed
from tests.fuzz.client import Answer
from tests.fuzz.target import ROLES

from holdfast.web import api
from holdfast.web.openapi import path_of
from holdfast.web.principals import Role
from holdfast.web.problems import Problem
from holdfast.web.routing import PREFIX

_KINDS = {
    "application/json",
    "application/problem+json",
    "text/event-stream",
    "text/html",
    "text/css",
    "text/javascript",
}
_CONFORMS = [status_code_conformance, content_type_conformance]
_STATUSES_BESIDE = (405, 408, 410, 507)


def faults(fuzzed: Fuzzed, answer: Answer, logged: str, secrets: Sequence[bytes]) -> Iterator[str]:
    """Yield what is wrong with an answer, and with the log lines that it has caused."""
    path = fuzzed.sent.target.partition(b"?")[0].decode("ascii", "replace")
    if answer.status == 0:
        yield "no answer"
        return
    if answer.status >= 500:
        yield f"status {answer.status}: {answer.body[:150]!r}; {logged[-600:]}"
    if b"Traceback" in answer.body and answer.status >= 400:
        yield "a traceback in an answer"
    # What a client knows is no secret to it.
    yield from faults_of_secrets(answer, logged, secrets, fuzzed.sent.target + fuzzed.sent.body)
    if answer.status not in (204, 304) and answer.kind not in _KINDS | {"image/svg+xml", "text/plain", ""}:
        yield f"the media type {answer.kind}"
    if path.startswith("/api/v1") and answer.status >= 400 and fuzzed.sent.method != "HEAD":
        yield from _problem(answer)
    if path.startswith("/api/v1") and fuzzed.role == "nobody" and answer.status not in (401, 403, 429):
        yield f"status {answer.status} for a request of nobody"
    needed = _needed(fuzzed)
    if needed is not None and ROLES[fuzzed.role] < needed and answer.status not in (401, 403, 429):
        yield f"status {answer.status} for the role {fuzzed.role}"
    if path == "/" and fuzzed.role == "nobody" and answer.status == 200 and fuzzed.sent.method == "GET":
        yield "a page for nobody"
    if needed is not None and answer.status not in _STATUSES_BESIDE:
        yield from _unlike_description(fuzzed, answer)


def faults_of_secrets(answer: Answer, logged: str, secrets: Sequence[bytes], known: bytes) -> Iterator[str]:
    """Yield which secrets an answer and log lines have that the client did not send."""
    everything = answer.body + repr(answer.headers).encode()
    for secret in secrets:
        if secret in everything and secret not in known:
            yield f"the secret {secret[:16]!r}… in an answer"
        if secret.decode() in logged:
            yield f"the secret {secret[:16]!r}… in a log line"


def _needed(fuzzed: Fuzzed) -> Role | None:
    """Return the role that a case needs; None if its path leads to another route than it was made for, as .. does."""
    case, path = fuzzed.case, fuzzed.sent.target.partition(b"?")[0].decode("ascii", "replace")
    if case is None:
        return None
    try:
        route, _ = api.TABLE.find(fuzzed.sent.method, path.removeprefix(PREFIX))
    except Problem:
        return None
    return route.role if path_of(route) == case.operation.path else None


def _problem(answer: Answer) -> Iterator[str]:
    if answer.kind != "application/problem+json":
        yield f"status {answer.status} as {answer.kind}"
        return
    try:
        found: Any = json.loads(answer.body)
    except ValueError:
        yield "a problem that is no JSON"
        return
    if found.get("status") != answer.status or not found.get("title") or not found.get("detail"):
        yield f"a problem without its facts: {found!r:.200}"


def _unlike_description(fuzzed: Fuzzed, answer: Answer) -> Iterator[str]:
    assert fuzzed.case is not None
    asked = requests.Request(fuzzed.sent.method, "http://127.0.0.1:8090/").prepare()
    response = Response(answer.status, answer.headers, answer.body, asked, 0.01, True)
    checks = _CONFORMS if answer.kind == "text/event-stream" else [*_CONFORMS, response_schema_conformance]
    try:
        fuzzed.case.validate_response(response, checks=checks)
    except FailureGroup as group:
        for each in group.exceptions:
            yield f"unlike the description: {_short(each)}"
    except Failure as failure:
        yield f"unlike the description: {_short(failure)}"


def _short(failure: BaseException) -> str:
    title = getattr(failure, "title", type(failure).__name__)
    return f"{title}: {str(failure)[:200]}"
