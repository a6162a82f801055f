"""``holdfast status render``: the state machine, drawn from its table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from holdfast.cli.command import Needs, command
from holdfast.cli.output import FAILED, Output
from holdfast.errors import ConfigurationError, UsageError


class DiagramFormat(StrEnum):
    SVG = "svg"
    MERMAID = "mermaid"
    TEXT = "text"


_SUFFIXES = {".svg": "svg", ".mmd": "mermaid", ".mermaid": "mermaid", ".txt": "text"}
_DOCUMENTED = (Path("docs/reference/state-machine.svg"), Path("docs/reference/state-machine.mmd"))


@command(Needs.NOTHING)
def render(
    out: Output,
    format: Annotated[DiagramFormat | None, Option(help="Else as the file's name says, else text.")] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="Write it there instead of here.")] = None,
    check: Annotated[bool, Option("--check", help="Fail if the file (else those in docs) is stale.")] = False,
) -> None:
    """Draw the state machine from its table."""
    from holdfast.model import diagram

    if check:
        if format is not None and output is None:
            raise UsageError("--check with --format needs --output: the file to compare with")
        return _check(out, [output] if output else list(_DOCUMENTED), format)
    kind = _format_of(output, format)
    text = diagram.render(kind.value)
    if output is None:
        out.document({"format": kind, "text": text})
        if not out.json:
            print(text, end="")  # as it is: it is ours, and its line ends are wanted
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}.") from error
    out.document({"format": kind, "output": str(output)})
    out.line(f"wrote {output}")


def _format_of(output: Path | None, format: DiagramFormat | None) -> DiagramFormat:
    if format is not None or output is None:
        return format or DiagramFormat.TEXT
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"the name '{output}' has no known ending; give --format svg, mermaid or text")
    return DiagramFormat(_SUFFIXES[output.suffix])


def _check(out: Output, paths: list[Path], format: DiagramFormat | None) -> None:
    from holdfast.model import diagram

    states: dict[str, str] = {}
    for path in paths:
        expected = diagram.render(_format_of(path, format).value).encode()
        try:
            states[str(path)] = "fresh" if path.read_bytes() == expected else "stale"
        except OSError as error:
            states[str(path)] = f"not readable ({error.strerror})"
    fresh = all(state == "fresh" for state in states.values())
    out.document({"fresh": fresh, "files": states})
    for path_text, state in states.items():
        advice = "" if state == "fresh" else f"; run: holdfast status render --output {path_text}"
        out.line(f"{path_text} is {state}{advice}")
    if not fresh:
        raise typer.Exit(FAILED)
