"""Imports point down, decisions are pure, rooms are small. The rules are those of the design, section 3."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "holdfast"

LAYERS = [
    ["errors", "ids", "clock", "codec", "masking", "crashpoints", "loglines", "schedules", "_version"],
    ["lifecycle"],
    ["store", "wakeup", "execution"],
    ["engine"],
    [
        *("app", "task", "workflow", "invocation", "embedded", "settings", "declaring", "archive", "queues"),
        *("scheduling", "schedule_options", "triggers", "trigger_options", "triggering", "emitting"),
        *("_bridge", "_inside"),
    ],
    ["cli", "monitor", "testing"],
]
LAYER = {area: number for number, areas in enumerate(LAYERS) for area in areas}

# Edges inside a layer. Everything else in one layer is strangers.
SIDEWAYS = {
    "clock": {"errors"},
    "ids": {"clock"},
    "codec": {"errors"},
    "crashpoints": {"errors"},
    "schedules": {"errors", "clock"},
    "invocation": {"_bridge", "settings"},
    "task": {"_bridge", "settings", "invocation", "declaring"},
    "workflow": {"_bridge", "settings", "invocation", "task"},
    "embedded": {"_bridge", "settings"},
    "archive": {"invocation"},
    "_inside": {"_bridge"},
    "declaring": {"schedule_options", "triggers"},
    "triggers": {"trigger_options"},
    "triggering": {"triggers", "scheduling"},
    "emitting": {"trigger_options", "declaring"},
    "scheduling": {"declaring", "invocation", "task", "schedule_options"},
    "app": {
        "scheduling",
        "triggering",
        "emitting",
        "_inside",
        "queues",
        "archive",
        "declaring",
        "_bridge",
        "settings",
        "invocation",
        "task",
        "workflow",
        "embedded",
    },
}
FACE = 4  # modules of this layer may name each other's types

PURE = ("lifecycle", "schedules")
IMPURE = {
    "asyncio",
    "logging",
    "time",
    "random",
    "threading",
    "os",
    "uuid",
    "secrets",
    "socket",
    "subprocess",
    "sqlite3",
}
CLOCK_READERS = {"now", "utcnow", "today"}

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 800, 70


class Import(NamedTuple):
    module: str  # for instance "holdfast.store.contract" or "random"
    names: tuple[str, ...]  # what is taken from it; empty for a plain import
    for_types: bool
    line: int


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import of a module, also those inside functions; `package` is where a relative one starts."""
    for_types = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test)
        for part in outer.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node in for_types, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield Import(module, tuple(alias.name for alias in node.names), node in for_types, node.lineno)


def areas_of(found: Import) -> set[str]:
    """The areas of ours that an import reaches; "" is the public face itself."""
    path = found.module.split(".")
    if path[0] != "holdfast":
        return set()
    if len(path) > 1:
        return {path[1]}
    return {name if name in LAYER else "" for name in found.names} or {""}


def wrong_edge(area: str, found: Import) -> str | None:
    for target in areas_of(found):
        if target == area:
            continue
        if target not in LAYER and target != "":
            return f"{target} is in no layer"
        below = LAYER[target] if target else FACE
        if below > LAYER[area]:
            return f"{area} (layer {LAYER[area]}) reaches up to {target or 'the public face'} (layer {below})"
        beside = below == LAYER[area] and target not in SIDEWAYS.get(area, set())
        if beside and not (below == FACE and found.for_types and target):
            return f"{area} and {target or 'the public face'} stand side by side"
    return None


def wrong_for_the_pure(found: Import) -> str | None:
    root = found.module.split(".")[0]
    return f"lifecycle and schedules are pure, but this imports {root}" if root in IMPURE else None


def wrong_for_engine(found: Import) -> str | None:
    if found.module in ("time", "uuid", "secrets"):
        return f"the engine is handed its time and its ids, but imports {found.module}"
    if found.module == "random" and set(found.names) - {"Random"}:
        return "the engine is handed its randomness, but imports random's functions"
    contract = found.module == "holdfast.store.contract" or found[:2] == ("holdfast.store", ("contract",))
    if found.module.startswith("holdfast.store") and not contract:
        return f"the engine knows the contract, never a store: {found.module}"
    return None


def wrong_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of the host's clock and of global randomness."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner == "random" and node.attr != "Random":
                yield node.lineno, f"random.{node.attr} is global randomness"
            if owner in ("datetime", "date") and node.attr in CLOCK_READERS:
                yield node.lineno, f"{owner}.{node.attr} reads the host's clock"


def violations(module: str, source: str) -> list[str]:
    """What is wrong with a module, named relative to the package: ``engine.claim``."""
    area = module.split(".")[0]
    if area in ("__init__", "__main__"):
        return []  # the public face may take from everywhere
    if area not in LAYER:
        return [f"{module}: {area} is in no layer"]
    tree = ast.parse(source)
    found = list(imports_of(tree, "holdfast." + module.rpartition(".")[0] if "." in module else "holdfast"))
    wrong = [(each.line, wrong_edge(area, each)) for each in found]
    if area in PURE:
        wrong += [(each.line, wrong_for_the_pure(each)) for each in found]
    if area == "engine":
        wrong += [(each.line, wrong_for_engine(each)) for each in found]
    if area in (*PURE, "engine"):
        wrong += wrong_calls(tree)
    return [f"{module}:{line}: {what}" for line, what in wrong if what is not None]


def too_large(module: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    complaints = [f"{module} has {lines} lines"] if lines > MOST_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                complaints.append(f"{module}.{node.name} has {length} lines")
    return complaints


def modules() -> dict[str, str]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_imports_point_down() -> None:
    everything = modules()
    assert len(everything) > 30
    assert [complaint for name, source in everything.items() for complaint in violations(name, source)] == []


def test_rooms_are_small() -> None:
    assert [complaint for name, source in modules().items() for complaint in too_large(name, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lifecycle.status", "from holdfast.store.contract import Store"),
        ("lifecycle.status", "def f():\n    from holdfast.engine import core"),
        ("lifecycle.status", "if TYPE_CHECKING:\n    from holdfast.app import App"),
        ("lifecycle.status", "from ..engine import core"),
        ("store.memory", "from holdfast.wakeup.hub import Hub"),
        ("wakeup.hub", "import holdfast.store.memory"),
        ("execution.call", "from holdfast import store"),
        ("engine.core", "from holdfast import App"),
        ("engine.core", "import holdfast"),
        ("engine.core", "from holdfast.settings import Settings"),
        ("cli.program", "from holdfast.testing import FakeClock"),
        ("monitor.pages", "from holdfast.cli.output import Output"),
        ("errors", "from holdfast.clock import Clock"),
        ("clock", "from holdfast.ids import Ids"),
        ("codec.values", "from holdfast.ids import Ids"),
        ("settings", "from holdfast.app import App"),
        ("invocation", "from holdfast.task import Task"),
        ("schedules.timing", "import time"),
        ("schedules.timing", "from holdfast.lifecycle.status import Status"),
        ("novelty", "import os"),
        ("app", "from holdfast.novelty import thing"),
        *[("lifecycle.status", f"import {name}") for name in sorted(IMPURE)],
        ("lifecycle.status", "from time import monotonic"),
        ("lifecycle.status", "import os.path"),
        ("lifecycle.status", "import datetime as dt\nmoment = dt.datetime.now()"),
        ("engine.core", "import time"),
        ("engine.core", "from time import time"),
        ("engine.core", "from uuid import uuid4"),
        ("engine.core", "from datetime import datetime\nmoment = datetime.now(tz)"),
        ("engine.core", "import random\nchance = random.random()"),
        ("engine.core", "from random import choice"),
        ("engine.core", "from holdfast.store import open_store"),
        ("engine.core", "from holdfast.store.sqlite.store import SqliteStore"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str) -> None:
    assert len(violations(module, source)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lifecycle.changes", "from holdfast.lifecycle.status import Status\nfrom holdfast.codec import ErrorRecord"),
        ("lifecycle.changes", "from . import status\nfrom datetime import timedelta"),
        ("store.sqlite.store", "from holdfast.lifecycle.changes import Change\nimport os, sqlite3, threading"),
        ("engine.core", "import random\nfrom holdfast.store.contract import Store\nrng: random.Random"),
        ("engine.core", "from holdfast.wakeup.hub import Hub\nfrom holdfast.execution import call"),
        ("app", "from holdfast.task import Task\nfrom holdfast.store import open_store"),
        ("task", "if TYPE_CHECKING:\n    from holdfast.app import App"),
        ("ids", "from holdfast.clock import Clock"),
        ("cli.program", "from holdfast import App\nimport holdfast"),
        ("testing.stateful", "from holdfast.store.memory import MemoryStore"),
        ("__init__", "from holdfast.app import App"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_large_rooms_are_caught() -> None:
    long = "def f():\n" + "    x = 1\n" * 80
    assert too_large("m", long) == ["m.f has 81 lines"]
    assert too_large("m", "x = 1\n" * 801) == ["m has 801 lines"]
    assert too_large("m", "def f():\n" + "    x = 1\n" * 69) == []
