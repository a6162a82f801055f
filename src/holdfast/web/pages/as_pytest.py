"""An invocation as a test: a text for pytest that calls the task with the same arguments. Pure."""

from __future__ import annotations

import keyword
import math
import re
import unicodedata
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from holdfast.showing import describe, plain, printable

_LONGEST = 20_000  # characters of arguments


def as_pytest(document: Mapping[str, Any], module: str | None, *, has_payloads: bool = False) -> str:
    """Return the text of a test for an invocation, as its document has it; `module` is that of its task, if its code is
    known.
    """
    task, id, arguments = document["task"], document["id"], document["arguments"]
    call, notes = _call(arguments, id, has_payloads)
    name = re.sub(r"\W+", "_", task.rpartition(":")[2], flags=re.ASCII).strip("_").lower() or "task"
    where = module if module and all(_is_name(part) for part in module.split(".")) else None
    lines = [
        f"# {printable(task)} {id} ({document['status']}), with its arguments.",
        *[f"# {note}" for note in notes],
        "from holdfast.testing import testing_app",
        "",
        f"from {where or 'your_module'} import app" + ("" if where else "  # the module of the app"),
        "",
        "",
        f"def test_{name}_{id[-6:]}() -> None:",
        f"    task = app.tasks[{task!r}]",
        "    with testing_app(app):",
        *[f"        {line}" for line in f"invocation = task.submit({call})".split("\n")],
        *_expectation(document),
    ]
    return "\n".join(lines) + "\n"


def _call(arguments: Mapping[str, Any] | None, id: str, has_payloads: bool) -> tuple[str, list[str]]:
    """Return the arguments as Python, and what has to be said about them."""
    if arguments is None or "unreadable" in arguments:
        why = "there are none" if arguments is None else printable(arguments["unreadable"])
        return "...", [f"The arguments cannot be read here: {why}"]
    parts = [literal(each) for each in arguments["args"]]
    pairs = {name: literal(value) for name, value in arguments["kwargs"].items()}
    parts += [f"{name}={text}" for name, text in pairs.items() if _is_name(name)]
    if odd := {name: text for name, text in pairs.items() if not _is_name(name)}:
        parts.append("**{" + ", ".join(f"{name!r}: {text}" for name, text in odd.items()) + "}")
    text = ", ".join(parts)
    if has_payloads or len(text) > _LONGEST:
        return "...", [f"The arguments are large: GET /api/v1/invocations/{id}/values has them."]
    has_classes = any(plain(each) != each for each in [*arguments["args"], *arguments["kwargs"].values()])
    notes = (
        ["Values of classes are written as plain data: make the objects that the task takes."] if has_classes else []
    )
    if len(text) < 80:
        return text, notes
    return "\n    " + ",\n    ".join(part.replace("\n", "\n    ") for part in parts) + ",\n", notes


def _is_name(text: str) -> bool:
    """Return whether Python reads this text as the name of an argument, and as no other one."""
    is_plain = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    return is_plain and not keyword.iskeyword(text) and text != "__debug__"


def literal(value: Any) -> str:
    """Return a value as Python code. Values of classes become plain data, numbers that no literal has a call."""
    return pformat(_data(value), width=100, sort_dicts=False)


class _Code:
    """A value that is written as code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __repr__(self) -> str:
        return self.code


def _data(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return _Code(f'float("{value}")')
        case dict():
            return {name if isinstance(name, str) else describe(name): _data(each) for name, each in value.items()}
        case list() | tuple():
            return [_data(each) for each in value]
    return plain(value)


def _expectation(document: Mapping[str, Any]) -> list[str]:
    """Return the last lines: what it gave, or that it gives anything."""
    result = document["result"]
    if document["status"] == "success" and result is not None and "value" in result:
        text = literal(result["value"])
        if len(text) < 100 and "\n" not in text and plain(result["value"]) == result["value"]:
            return [f"        assert invocation.result() == {text}"]
    error = document["error"]
    if error is not None:
        first = printable(f"{error['type']}: {error['message']}".split("\n")[0])[:100]
        return [f"        invocation.result()  # it raised {first}"]
    return ["        invocation.result()"]
