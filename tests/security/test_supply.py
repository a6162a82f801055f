"""S18: what is imported is declared, and the same source gives the same wheel."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The names of modules that differ from those of their packages, and what users' own code brings along.
MODULES = {
    "jinja2": {"jinja2", "markupsafe"},
    "pymongo": {"pymongo", "bson", "dns"},
    "opentelemetry-api": {"opentelemetry"},
}
OF_USERS = {"pydantic", "sqlalchemy", "pytest", "vercel", "django", "fastapi", "hypothesis", "gridfs"}


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *[each for extra in extras for each in extra]]
    names = {re.split(r"[<>=!\[; ]", each)[0].lower() for each in wanted}
    return {module for name in names for module in MODULES.get(name, {name.replace("-", "_")})}


def imported() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found = [node.module]
            yield from ((path.name, name.partition(".")[0]) for name in found)


def test_what_is_imported_is_declared() -> None:
    known = declared() | sys.stdlib_module_names | {"holdfast", "holdfast_pytest"} | OF_USERS
    assert sorted({(file, name) for file, name in imported() if name not in known}) == []


def test_the_package_imports_with_its_dependencies_alone() -> None:
    extras = [*("pymongo", "bson", "starlette", "uvicorn", "jinja2", "pydantic"), *("cryptography", "opentelemetry")]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras!r})); import holdfast, holdfast.cli; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "ok", done.stderr


def test_the_same_source_gives_the_same_wheel(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        environ = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / name)]
        subprocess.run(command, cwd=ROOT, check=True, env=environ, capture_output=True, timeout=120)
        (wheel,) = (tmp_path / name).iterdir()
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1
