"""The description of the API is valid, whole, and true to the table of routes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.testclient import TestClient

from holdfast.web.api import ROUTES
from holdfast.web.openapi import body_of, described, name_of, path_of
from holdfast.web.routing import ApiRoute

Get = Any


@pytest.fixture(scope="module")
def document() -> Any:
    return described(ROUTES, "1.0", "/holdfast")


def operation_of(document: Any, route: ApiRoute) -> Any:
    return document["paths"][path_of(route)][route.method.lower()]


def test_it_is_valid_openapi_and_served(get: Get, document: Any) -> None:
    served = get("/openapi.json")
    validate(served)
    assert served["paths"] == document["paths"]
    assert served["openapi"] == "3.1.0"
    assert (served["servers"], document["servers"]) == ([{"url": "/"}], [{"url": "/holdfast"}])


def test_it_has_each_route_once_with_an_id_of_its_own(document: Any) -> None:
    there = [(method, path) for path, methods in document["paths"].items() for method in methods]
    assert sorted(there) == sorted((route.method.lower(), path_of(route)) for route in ROUTES)
    names = [name_of(route) for route in ROUTES]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_an_operation_says_what_its_route_takes(document: Any, route: ApiRoute) -> None:
    found = operation_of(document, route)
    query = {each["name"]: each for each in found["parameters"] if each["in"] == "query"}
    parts = [each["name"] for each in found["parameters"] if each["in"] == "path"]
    assert query.keys() == route.query.keys()
    assert parts == re.findall(r"{(\w+)}", path_of(route))
    for name, parameter in route.query.items():
        schema = query[name]["schema"]
        if parameter.kind == "number":
            assert (schema["minimum"], schema["maximum"]) == (parameter.low, parameter.high)
        assert (schema["type"] == "array") == parameter.is_list
    assert f"role {route.role.name.lower()}" in found["description"]
    assert ("requestBody" in found) == (body_of(route) is not None)
    assert {"400", "401", "403", "429", "500", "503"} <= found["responses"].keys()
    for status, response in found["responses"].items():
        if status != "200":
            target = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
            assert "application/problem+json" in target["content"]


def test_every_route_that_changes_something_describes_its_body(document: Any) -> None:
    assert [name_of(route) for route in ROUTES if route.method != "GET" and body_of(route) is None] == []


def test_streams_and_security_are_named(document: Any, client: TestClient) -> None:
    streams = {path for path, each in document["paths"].items() if "text/event-stream" in str(each)}
    assert streams == {"/api/v1/invocations/{id}/streams/{name}", "/api/v1/live"}
    assert document["components"]["securitySchemes"].keys() == {"bearer", "cookie"}
