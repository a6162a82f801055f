"""Finding apps in code.

Given, an app is ``module:attribute`` or a module with one app in it. Not given, the current folder is looked through:
files are read before they are imported, and only one that speaks of Holdfast and makes an `App` is run at all. Exactly
one app is an answer; two are a question back to the caller. What modules print while they are imported goes to stderr:
stdout is for the answer of the command.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from holdfast.app import App
from holdfast.cli.shown import told
from holdfast.errors import AppNotFound, HoldfastError

HOW = "Name it as module:attribute, for example shop:app."
_SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "build", "dist", "node_modules", "site-packages", "venv"})
_SKIPPED_FILES = frozenset({"setup.py", "conftest.py", "noxfile.py", "__main__.py"})
_LARGEST_FILE_BYTES = 2_000_000


class Found(NamedTuple):
    """Apps by reference (``shop:app``), each object once, and why some files could not be imported."""

    apps: dict[str, App]
    broken: list[HoldfastError]


def find_app(reference: str, folder: Path | None = None) -> App:
    """The app that ``module:attribute`` or ``module`` means, seen from `folder`, else from here.

    Raises `AppNotFound`, or what Holdfast itself raised while the module was imported.
    """
    module_name, colon, attribute = reference.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        name = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise AppNotFound(f"'{reference}' is a file, and an app is named by its module: {name}:app")
    if not module_name or (colon and not attribute):
        raise AppNotFound(f"'{reference}' names no app. {HOW}")
    module = import_module(module_name, folder or Path.cwd())
    there = apps_in(module)
    if not colon:
        return only_of(there, f"the module '{module_name}'")
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
        except HoldfastError as error:
            found.broken.append(error)
            continue
        for reference, app in apps_in(module).items():
            if not any(app is known for known in found.apps.values()):
                found.apps[reference] = app
    return found


def only_of(apps: dict[str, App], place: str) -> App:
    """The one app there. Raises `AppNotFound` if there is none or more than one."""
    if len(apps) == 1:
        return next(iter(apps.values()))
    if not apps:
        raise AppNotFound(f"{place} has no App in it. {HOW}")
    first = next(iter(apps))
    raise AppNotFound(
        f"{place} has {len(apps)} apps: {', '.join(apps)}. Say which one you mean: --app {first} "
        f"(or holdfast run {first}), or set HOLDFAST_APP={first}."
    )


def none_found(found: Found) -> HoldfastError:
    """Why there is no app: an error of Holdfast in a module is that error, not a lack of apps."""
    for error in found.broken:
        if not isinstance(error, AppNotFound):
            return error
    if found.broken:
        return AppNotFound(f"no app was found in {Path.cwd()}: {' And '.join(map(told, found.broken))}")
    return AppNotFound(
        f"no app was found in {Path.cwd()}: none of its modules makes an App at its top level. "
        "Go to the folder of your code, or name the app as module:attribute: --app shop:app, or HOLDFAST_APP=shop:app."
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
    """Import it as if the program had been started in `folder`.

    Raises `AppNotFound`, whatever went wrong; only an error of Holdfast stays what it is, with a note of the place.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder may have been looked at before the file was there
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except HoldfastError as error:
        error.add_note(f"(raised in the module '{name}'{_place(error, ', {}, line {}')})")
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise AppNotFound(f"there is no module '{name}', neither in {folder} nor installed.") from error
        raise _not_imported(name, error) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may well end itself
        raise _not_imported(name, error) from error


def _not_imported(name: str, error: BaseException) -> AppNotFound:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return AppNotFound(f"the module '{name}' cannot be imported: {reason}{_place(error, ' ({}, line {})')}.")


def _place(error: BaseException, form: str) -> str:
    """Where in the user's code it happened: the last line that is neither ours nor the import machinery's."""
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, "<frozen")) and "/importlib/" not in frame.filename:
            return form.format(frame.filename, frame.lineno)
    return ""


def apps_in(module: ModuleType) -> dict[str, App]:
    """The apps at the top level of a module by reference, each once."""
    apps: dict[str, App] = {}
    for name, value in vars(module).items():
        if isinstance(value, App) and not any(value is known for known in apps.values()):
            apps[f"{module.__name__}:{name}"] = value
    return apps
