"""Which app a command is about.

Given, it is ``module:attribute`` or a module with one app in it. Not given, the current folder is looked through:
files are read before they are imported, and only one that speaks of Holdfast and makes an `App` is run at all. Exactly
one app is an answer; two are a question back to the caller.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from holdfast.app import App
from holdfast.cli.output import Output
from holdfast.errors import AppNotFound, UsageError

HOW = "Name it as module:attribute, for example shop:app."
_SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "build", "dist", "node_modules", "site-packages", "venv"})
_SKIPPED_FILES = frozenset({"setup.py", "conftest.py", "noxfile.py", "__main__.py"})
_LARGEST_FILE_BYTES = 2_000_000


class Found(NamedTuple):
    """Apps by reference (``shop:app``), each object once, and why some files could not be imported."""

    apps: dict[str, App]
    broken: list[AppNotFound]


def find_app(reference: str) -> App:
    """The app that ``module:attribute`` or ``module`` means. Raises `AppNotFound`."""
    module_name, colon, attribute = reference.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        name = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise AppNotFound(f"'{reference}' is a file, and an app is named by its module: {name}:app")
    if not module_name or (colon and not attribute):
        raise AppNotFound(f"'{reference}' names no app. {HOW}")
    module = import_module(module_name, Path.cwd())
    there = apps_in(module)
    if not colon:
        return _only(there, f"the module '{module_name}'")
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise AppNotFound(f"the module '{module_name}' has no '{attribute}'. {_offer(there, module_name)}")
        value = getattr(value, part)
    if not isinstance(value, App):
        kind = type(value).__name__
        raise AppNotFound(f"{reference} is no App but of type '{kind}'. {_offer(there, module_name)}")
    return value


def discover(folder: Path) -> Found:
    """Every app that the files and packages of the folder make."""
    found = Found({}, [])
    for module_name in candidates(folder):
        try:
            module = import_module(module_name, folder)
        except AppNotFound as error:
            found.broken.append(error)
            continue
        for reference, app in apps_in(module).items():
            if not any(app is known for known in found.apps.values()):
                found.apps[reference] = app
    return found


def only_app(out: Output) -> App:
    """The one app of the current folder. Raises `AppNotFound` if there is none or more than one."""
    found = discover(Path.cwd())
    if not found.apps:
        raise none_found(found)
    return _told(out, found)


@contextmanager
def opened(out: Output, reference: str | None, url: str | None = None, name: str | None = None) -> Iterator[App]:
    """The app for a command that needs a store but no tasks, closed afterwards.

    In this order: the one that is named, the store that is named, the one in this folder, and if there is none, the
    store that the settings name.
    """
    app = _chosen(out, reference, url, name)
    try:
        yield app
    finally:
        app.close()


def _chosen(out: Output, reference: str | None, url: str | None, name: str | None) -> App:
    if reference and (url or name):
        raise UsageError("give either --app, which knows its store, or --url and --name")
    if reference:
        return find_app(reference)
    if url or name:
        return App(url, name=name)
    found = discover(Path.cwd())
    if found.apps:
        return _told(out, found)
    if found.broken:
        # Its store may be another than the settings' one: to answer from there would be to answer wrongly.
        raise none_found(found)
    return App()


def _told(out: Output, found: Found) -> App:
    app = _only(found.apps, "this folder")
    for error in found.broken:
        out.note(f"{error} It was left out.")
    return app


def _only(apps: dict[str, App], place: str) -> App:
    if len(apps) == 1:
        return next(iter(apps.values()))
    if not apps:
        raise AppNotFound(f"{place} has no App in it. {HOW}")
    raise AppNotFound(f"{place} has {len(apps)} apps: {', '.join(apps)}. Say which one you mean.")


def none_found(found: Found) -> AppNotFound:
    if found.broken:
        return AppNotFound(f"no app was found in {Path.cwd()}. {' '.join(map(str, found.broken))}")
    return AppNotFound(
        f"no app was found in {Path.cwd()}: none of its modules makes an App at its top level. "
        f"Go to the folder of your code, or name the app: module:attribute, for example shop:app."
    )


def _offer(there: dict[str, App], module_name: str) -> str:
    return f"Did you mean {' or '.join(there)}?" if there else f"The module '{module_name}' has no App in it."


# --- looking for modules


def candidates(folder: Path) -> Iterator[str]:
    """The names of modules in the folder that may make an app, by their text alone."""
    for path in sorted(folder.glob("*.py")):
        if _may_make_app(path):
            yield path.stem
    for package in _packages(folder):
        yield from _in_package(package, package.name)


def _in_package(folder: Path, name: str) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):  # "__init__.py" comes first: the shortest reference wins
        if _may_make_app(path):
            yield name if path.name == "__init__.py" else f"{name}.{path.stem}"
    for package in _packages(folder):
        yield from _in_package(package, f"{name}.{package.name}")


def _packages(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.isidentifier()
        and path.name not in _SKIPPED_FOLDERS
        and (path / "__init__.py").is_file()
        and not path.is_symlink()  # it could lead in a circle
    )


def _may_make_app(path: Path) -> bool:
    name = path.name
    if name in _SKIPPED_FILES or name.startswith("test_") or name.endswith("_test.py") or not path.stem.isidentifier():
        return False
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            return False
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "holdfast" in text and "App(" in text


# --- importing


def import_module(name: str, folder: Path) -> ModuleType:
    """Import it as if the program had been started in `folder`. Raises `AppNotFound`, whatever went wrong."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder may have been looked at before the file was there
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise AppNotFound(f"there is no module '{name}', neither in {folder} nor installed.") from error
        raise _not_imported(name, error) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may well end itself
        raise _not_imported(name, error) from error


def _not_imported(name: str, error: BaseException) -> AppNotFound:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return AppNotFound(f"the module '{name}' cannot be imported: {reason}{_place(error)}.")


def _place(error: BaseException) -> str:
    """Where in the user's code it happened: the last line that is neither ours nor the import machinery's."""
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, "<frozen")) and "/importlib/" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def apps_in(module: ModuleType) -> dict[str, App]:
    """The apps at the top level of a module by reference, each once."""
    apps: dict[str, App] = {}
    for name, value in vars(module).items():
        if isinstance(value, App) and not any(value is known for known in apps.values()):
            apps[f"{module.__name__}:{name}"] = value
    return apps
