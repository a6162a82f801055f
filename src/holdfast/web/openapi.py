"""The description of the HTTP API, as OpenAPI 3.1, made from the table of routes. Pure.

Bodies come from the types that routes declare. Answers of success are documents; what is in them is written in the
guides, and not promised here field by field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.ids import LENGTH
from holdfast.web.documents import Document
from holdfast.web.principals import Role
from holdfast.web.requests import LONGEST_TEXT, Parameter
from holdfast.web.routing import PREFIX, Act, ApiRoute

_PART = re.compile(r"{(\w+)(?::path)?}")
_IDS = {"type": "string", "pattern": f"^[0-9a-hjkmnp-tv-z]{{{LENGTH}}}$"}
_PROBLEM = {
    "type": "object",
    "description": "The error: its class, and what to do.",
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "path": {"type": "string", "description": "the wrong part of the request: query.limit, body.payload"},
    },
    "required": ["title", "status", "detail"],
}
_TOUCHED = {
    "type": "object",
    "description": "The effect of an action; with `preview`, the effect that it would have.",
    "properties": {
        "summary": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "items": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["summary"],
}
_SAID = {
    "400": "a parameter or the body is wrong",
    "401": "no token, or a wrong one",
    "403": "the role is too low, or the request comes from a page of another site",
    "404": "there is none",
    "409": "the state does not allow it",
    "413": "the body is too large",
    "415": "the body is no JSON",
    "422": "the body does not fit",
    "429": "too many requests: wait for the seconds of `Retry-After`",
    "500": "a defect, or a damaged record",
    "503": "the store does not answer: try again",
}


def described(routes: Sequence[ApiRoute], version: str, root: str = "") -> Document:
    """Return the description of these routes. `version` is that of Holdfast; `root` is where the app is mounted."""
    bodies = sorted({each for route in routes if (each := body_of(route)) is not None}, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(path_of(route), {})[route.method.lower()] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": version,
            "description": "Durable tasks and workflows: see, explain, act. Documents are those that commands print "
            "with --json. Each role has the rights of the roles before it: viewer, operator, admin.",
        },
        "servers": [{"url": root or "/"}],
        "security": [{"bearer": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Problem": _PROBLEM, "Touched": _TOUCHED},
            "responses": {f"Problem{status}": _problem(text) for status, text in _SAID.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "a token"},
                "cookie": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "holdfast",
                    "description": "of a login; with a change, the header X-Holdfast-CSRF has the text of the page",
                },
            },
        },
    }


def path_of(route: ApiRoute) -> str:
    return PREFIX + _PART.sub(r"{\1}", route.path)


def body_of(route: ApiRoute) -> type[msgspec.Struct] | None:
    """Return the type of a route's body, whether the web app reads the body or the endpoint does."""
    return route.body or route.reads


def name_of(route: ApiRoute) -> str:
    """Return the id of an operation: the method, and the path with its parts."""
    words = re.findall(r"\w+", _PART.sub(r"by_\1", route.path))
    return "_".join([route.method.lower(), *words]) if words else f"{route.method.lower()}_routes"


def operation(route: ApiRoute) -> Document:
    """Return one route."""
    found: Document = {
        "operationId": name_of(route),
        "summary": route.summary,
        "description": _rights(route),
        "tags": [next(iter(re.findall(r"\w+", route.path)), "routes")],
        "parameters": [*_parts(route), *(_parameter(name, each) for name, each in route.query.items())],
        "responses": _responses(route),
    }
    if (body := body_of(route)) is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _rights(route: ApiRoute) -> str:
    twin = f" On the command line: `{route.twin}`." if route.twin else ""
    recorded = f" It is recorded as `{route.action}`." if route.action else ""
    return f"Needs the role {route.role.name.lower()}.{recorded}{twin}"


def _parts(route: ApiRoute) -> list[Document]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PART.findall(route.path)
    ]


def _parameter(name: str, parameter: Parameter) -> Document:
    schema = _schema(parameter)
    if parameter.is_list:
        schema = {"type": "array", "items": schema}
    elif parameter.default is not None:
        schema = {**schema, "default": parameter.default}
    return {"name": name, "in": "query", "description": parameter.doc, "schema": schema}


def _schema(parameter: Parameter) -> Document:
    if parameter.kind == "number":
        return {"type": "integer", "minimum": parameter.low, "maximum": parameter.high}
    if parameter.choices:
        return {"type": "string", "enum": list(parameter.choices)}
    return dict(_IDS) if parameter.kind == "id" else {"type": "string", "maxLength": LONGEST_TEXT}


def _responses(route: ApiRoute) -> dict[str, Any]:
    expected = {"400", "401", "403", "429", "500", "503"}
    if _PART.search(route.path):
        expected.add("404")
    if route.method != "GET":
        expected |= {"404", "409", "413", "415", "422"}
    said: Mapping[str, Any] = {status: {"$ref": f"#/components/responses/Problem{status}"} for status in expected}
    return {"200": _success(route)} | {status: said[status] for status in sorted(said)}


def _success(route: ApiRoute) -> Document:
    if route.is_stream:
        return {"description": "server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    is_act = route.body is not None and issubclass(route.body, Act) and route.role > Role.VIEWER
    schema = {"$ref": "#/components/schemas/Touched"} if is_act else {"type": "object"}
    return {"description": route.summary, "content": {"application/json": {"schema": schema}}}


def _problem(text: str) -> Document:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}
