"""Forms from JSON schemas: the fields of a payload, as `actions.js` draws them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {"string": "text", "integer": "number", "number": "number", "boolean": "checkbox"}
_MOST = 30  # fields; a longer form is one field of JSON


def fields_of(schema: Mapping[str, Any], whole: str = "payload") -> tuple[list[dict[str, Any]], str]:
    """Return the fields, and the member of the body that they go into; empty for one field, which is called `whole`."""
    top = _resolved(schema, schema)
    members = top.get("properties")
    if top.get("type") != "object" or not isinstance(members, Mapping) or not 0 < len(members) <= _MOST:
        return [_field(whole, whole.capitalize(), top, schema, is_required=True)], ""
    required = set(top.get("required", ()))
    return [
        _field(name, name, _resolved(each, schema), schema, is_required=name in required)
        for name, each in members.items()
    ], whole


def _field(
    name: str, title: str, schema: Mapping[str, Any], whole: Mapping[str, Any], *, is_required: bool
) -> dict[str, Any]:
    label = title if is_required else f"{title} (optional)"
    field: dict[str, Any] = {"name": name, "label": label, "kind": "json", "optional": not is_required}
    arms = [each for each in (_resolved(arm, whole) for arm in schema.get("anyOf", ())) if each.get("type") != "null"]
    schema = arms[0] if len(arms) == 1 else schema
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return field | {"kind": "select", "choices": choices, "value": schema.get("default", choices[0])}
    kind = _KINDS.get(str(schema.get("type")), "json")
    help = str(schema.get("format") or schema.get("description") or "")
    if kind == "json":
        help = help or ("JSON" if schema else "JSON of any kind: a text needs its quotes")
    return field | {"kind": kind, "value": schema.get("default", ""), "help": help}


def _resolved(schema: Any, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a reference within the schema leads to."""
    for _ in range(10):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        at: Any = whole
        for part in schema["$ref"].removeprefix("#/").split("/"):
            at = at.get(part, {}) if isinstance(at, Mapping) else {}
        schema = at
    return schema if isinstance(schema, Mapping) else {}
