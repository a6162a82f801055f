"""What tasks log is in the lines of `holdfast run`, with the call that logged it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command, Process

TALKS = """
import logging

log = logging.getLogger("shop.talk")

@app.task
def thread(): log.warning("said on a thread", extra={"task": "mine"})

@app.task
async def loop(): log.warning("said on the loop", extra={"task": "mine"})

@app.task(executor="process")
def process(): log.warning("said in a process", extra={"task": "mine"})
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["text", "json"])
def test_lines_of_every_kind_of_task_carry_its_call(
    shop: Path, start: Callable[..., Process], holdfast: Command, format: str
) -> None:
    (shop / "shop.py").write_text((shop / "shop.py").read_text().partition("if __name__")[0] + TALKS)
    ids = {name: holdfast("submit", name).out.strip() for name in ("thread", "loop", "process")}
    runner = start("run", "--log-format", format)
    for text in ("said on a thread", "said on the loop", "said in a process"):
        runner.says(text)
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert ended.code == 0
    said = [line for line in ended.err.splitlines() if "shop.talk" in line]
    told = {}
    for line in said:
        found = json.loads(line) if format == "json" else dict(re.findall(r"(\w+)=(\S+?)[ \]]", line))
        told[found["task"].partition(":")[2]] = (found["invocation"], int(found["attempt"]))
    assert told == {name: (id, 1) for name, id in ids.items()}
    assert len(said) == 3, "each once"
