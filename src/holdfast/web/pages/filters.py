"""Filters of templates: values as text. What they return is escaped like everything else. Pure."""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from holdfast.ids import is_id
from holdfast.model.status import TABLE, Status
from holdfast.showing import as_json, length, moment, plain, printable

_TONES = {
    Status.SUCCESS: "good",
    Status.FAILED: "bad",
    Status.RUNNING: "busy",
    Status.RESUMED: "busy",
    Status.RETRY: "warn",
    Status.KILLED: "warn",
    Status.PENDING_RECOVERY: "warn",
    Status.RUNNING_RECOVERY: "warn",
    Status.CONCURRENCY_CONTROLLED_FINAL: "bad",
    Status.CANCELLING: "warn",
    Status.PARKED: "warn",
}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


# Control characters, characters that turn the direction of text, and halves of characters.
_HARMFUL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def harmless(value: Any) -> Any:
    """Return what a template is about to write, with escapes for characters that no page can show, or that would turn
    the text around them. What templates themselves have made stays as it is.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or not _HARMFUL.search(value):
        return value
    return _HARMFUL.sub(lambda found: printable(found[0]), value)


def tone(status: str) -> str:
    """Return how a status is coloured: good, bad, warn, busy or idle."""
    return _TONES.get(Status(status), "idle") if status in TABLE else "idle"


def words(name: str) -> str:
    return str(name).replace("_", " ")


def ago(seconds: float) -> str:
    """Return how long ago: "3 min ago", "in 2 h"; `times.js` writes the same."""
    for unit, name in _UNITS:
        if abs(seconds) >= unit:
            text = f"{int(abs(seconds) // unit)} {name}"
            return f"{text} ago" if seconds >= 0 else f"in {text}"
    return "now"


def pretty(value: Any, longest: int = 4000) -> str:
    """Return a value as JSON on several lines, cut at a length."""
    text = json.dumps(plain(value), ensure_ascii=False, indent=2)
    return text if len(text) <= longest else f"{text[:longest]}\n… {len(text) - longest:,} more characters"


def number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit, name in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,.0f} bytes"


def command(*words: object) -> str:
    """Return a command line: the twin of an action."""
    return shlex.join(["holdfast", *map(str, words)])


def segment(name: object) -> str:
    """Return a name as one part of a path, whatever is in it."""
    return quote(str(name), safe="")


def epoch(at: float | str | None) -> float | None:
    """Return a time of a document as seconds."""
    if not isinstance(at, str):
        return at
    try:
        return dt.datetime.fromisoformat(at).timestamp()
    except ValueError:
        return None


def with_member(members: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**members, name: value}


_KINDS = {"integer": "number", "number": "number", "boolean": "checkbox", "string": "text"}


def fields_of_schema(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a form for a payload of this JSON schema: one for each member of an object, else one."""
    shape: Any = schema
    for _ in range(10):
        if "$ref" not in shape:
            break
        shape = schema.get("$defs", {}).get(str(shape["$ref"]).rpartition("/")[2], {})
    members = shape.get("properties") if shape.get("type") == "object" else None
    if not members:
        kind = "json" if "type" not in shape else _KINDS.get(str(shape["type"]), "json")
        field = {"name": "payload", "label": "Payload", "kind": kind, "value": "null" if kind == "json" else ""}
        return [field | {"option": "", "as_json": True}]
    required = shape.get("required", ())
    return [_field(name, _present(member), name in required) for name, member in members.items()]


def _present(member: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a member that may be null as that of the value that it has else."""
    arms = [each for each in member.get("anyOf", ()) if each.get("type") != "null"]
    if len(arms) != 1 or "$ref" in arms[0]:
        return member
    return {**arms[0], "default": member.get("default")}


def _field(name: str, member: Mapping[str, Any], required: bool) -> dict[str, Any]:
    field: dict[str, Any] = {"name": f"payload.{name}", "label": name, "optional": not required, "option": ""}
    if "enum" in member:
        choices = ([] if required else [""]) + [str(each) for each in member["enum"]]
        return field | {"kind": "select", "choices": choices, "value": str(member.get("default", choices[0]))}
    kind = _KINDS.get(str(member.get("type")), "json")
    default = member.get("default")
    field |= {"kind": kind, "value": "" if default is None else default}
    if kind == "json":
        field["help"] = "As JSON."
    return field


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "epoch": epoch,
    "fields_of_schema": fields_of_schema,
    "is_id": is_id,
    "json": as_json,
    "length": length,
    "moment": moment,
    "number": number,
    "pretty": pretty,
    "size": size,
    "segment": segment,
    "tone": tone,
    "with_member": with_member,
    "words": words,
}
