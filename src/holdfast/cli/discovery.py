"""Choose the app of a command.

In this order: the app on the command line; the store there, or in ``HOLDFAST_URL`` if the command needs no tasks; the
app of the setting `app`; the only app in this folder. Without any, commands that need no tasks use the store of the
settings. A named store is opened without importing any code.

Given, an app is ``module:attribute`` or a module with one app in it. Not given, the current folder is looked through:
files are read before they are imported, and only a file that mentions Holdfast and makes an `App` is imported. Exactly
one app is an answer; two are a question back to the caller. What modules print while they are imported goes to stderr:
stdout is for the answer of the command.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from holdfast.app import App
from holdfast.cli.output import Output
from holdfast.errors import AppNotFound, ConfigurationError, HoldfastError, UsageError
from holdfast.masking import mask_url
from holdfast.settings import PREFIX, SPECS, Settings
from holdfast.showing import error_text, sentence

HOW = "Name it as module:attribute, for example shop:app."
_SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "build", "dist", "node_modules", "site-packages", "venv"})
_SKIPPED_FILES = frozenset({"setup.py", "conftest.py", "noxfile.py", "__main__.py"})
_LARGEST_FILE_BYTES = 2_000_000


_NO_APP = (
    "; no app was found here. Go to the folder of your code, or name the app (--app shop:app) "
    "or its store (--url sqlite:////path/to/shop.db)."
)
NOT_YET = " yet: the first submit makes it, and so do holdfast run and holdfast store prepare."
_ONLY_NAME = ". --name alone means an app of that store: give its --url, or --app shop:app instead of both."
_WRONG_URL = ". Is the URL right? holdfast store prepare would make a store there."


class Choice(NamedTuple):
    app: App
    if_missing: str
    """How the sentence "there is no store at …" goes on."""
    is_by_url: bool = False  # no code says how the app is called


def app_to_look_at(out: Output, reference: str | None, url: str | None, name: str | None) -> Choice:
    """Choose the app for a command that needs no tasks."""
    if reference and (url or name):
        raise UsageError("give either --app, which knows its store, or --url and --name")
    is_in_environment = os.environ.get(f"{PREFIX}URL") or os.environ.get(SPECS["url"].also)
    if not reference and (url or name or is_in_environment):
        return Choice(
            App(url, name=name),
            _ONLY_NAME if name and not url and not is_in_environment else _WRONG_URL,
            is_by_url=True,
        )
    if (named := _named(reference)) is not None:
        return Choice(named, NOT_YET)
    found = discover(Path.cwd())
    if found.apps:
        return Choice(_only(out, found), NOT_YET)
    if found.broken:
        # Its store may be another than the settings' one: to answer from there would be to answer wrongly.
        raise none_found(found)
    return Choice(App(), _NO_APP)


def app_for_tasks(out: Output, reference: str | None, task: str = "") -> App:
    """Choose the app for a command that needs its tasks. Of several in this folder, take the app with `task`."""
    if (named := _named(reference)) is not None:
        return shared(named)
    found = discover(Path.cwd())
    if not found.apps:
        raise none_found(found)
    return shared(_of_several(found, task) or _only(out, found))


def shared(app: App) -> App:
    """Return the app, if other processes can see what it stores. Raises `ConfigurationError`."""
    if app.url.partition("://")[0] == "memory":
        raise ConfigurationError(
            f"the app '{app.name}' is on {mask_url(app.url)}, and a memory store lives in one process only: this "
            "command would have an empty one of its own. Give the app a store that processes share, such as "
            "sqlite:///shop.db."
        )
    return app


def _named(reference: str | None) -> App | None:
    """Return the app of that name, else the app that the setting `app` names.

    Raises errors of the settings before any code is imported.
    """
    if reference:
        return find_app(reference)
    # The others get their defaults here: whether their values are allowed is for the app to say, as it may have
    # keywords that win. A name that is no setting is wrong for every app.
    others = {name: spec.default for name, spec in SPECS.items() if name != "app"}
    folder = Path.cwd()
    value, source = Settings.load(others, environ=os.environ, folder=folder).origin("app")
    if not isinstance(value, str) or not value:
        return None
    if source.startswith("pyproject.toml"):
        folder = next((f for f in (folder, *folder.parents) if (f / "pyproject.toml").is_file()), folder)
    try:
        return find_app(value, folder)
    except AppNotFound as error:
        error.add_note(f"(The setting app = {value!r} comes from: {source}.)")
        raise


# --- apps in code


class FoundApps(NamedTuple):
    """Apps by reference (``shop:app``), each object once, and why some files could not be imported."""

    apps: dict[str, App]
    broken: list[HoldfastError]


def find_app(reference: str, folder: Path | None = None) -> App:
    """Return the app that ``module:attribute`` or ``module`` means, seen from `folder`, else from here.

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


def discover(folder: Path) -> FoundApps:
    """Import the modules of the folder that may make an app, and return the apps."""
    found = FoundApps({}, [])
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
    """Return the only app there. Raises `AppNotFound` if there is none or more than one."""
    if len(apps) == 1:
        return next(iter(apps.values()))
    if not apps:
        raise AppNotFound(f"{place} has no App in it. {HOW}")
    first = next(iter(apps))
    raise AppNotFound(
        f"{place} has {len(apps)} apps: {', '.join(apps)}. Say which one you mean: --app {first} "
        f"(or holdfast run {first}), or set HOLDFAST_APP={first}."
    )


def _of_several(found: FoundApps, task: str) -> App | None:
    """Return the app, of several, that declares the task, else the app that the task's module makes."""
    if len(found.apps) < 2 or ":" not in task:
        return None
    declaring = [
        app for app in found.apps.values() if any(task in known.definition.names for known in app.tasks.values())
    ]
    module = task.partition(":")[0]
    beside = [app for reference, app in found.apps.items() if reference.partition(":")[0] == module]
    return next((apps[0] for apps in (declaring, beside) if len(apps) == 1), None)


def _only(out: Output, found: FoundApps) -> App:
    app = only_of(found.apps, "this folder")
    for error in found.broken:
        out.note(f"{sentence(error_text(error))} It was left out.")
    return app


def none_found(found: FoundApps) -> HoldfastError:
    """Return why there is no app: the error that Holdfast raised in a module, if there is one."""
    for error in found.broken:
        if not isinstance(error, AppNotFound):
            return error
    if found.broken:
        return AppNotFound(f"no app was found in {Path.cwd()}: {' And '.join(map(error_text, found.broken))}")
    return AppNotFound(
        f"no app was found in {Path.cwd()}: none of its modules makes an App at its top level. "
        "Go to the folder of your code, or name the app as module:attribute: --app shop:app, or HOLDFAST_APP=shop:app."
    )


def _offer(there: dict[str, App], module_name: str) -> str:
    return f"Did you mean {' or '.join(there)}?" if there else f"The module '{module_name}' has no App in it."


# --- looking for modules


def candidates(folder: Path, package: str = "") -> Iterator[str]:
    """Return the names of modules in the folder that may make an app, judged by their text."""
    for path in sorted(folder.glob("*.py")):  # "__init__.py" comes first: the shortest reference wins
        if _may_make_app(path):
            yield package.rstrip(".") if package and path.name == "__init__.py" else f"{package}{path.stem}"
    for path in sorted(folder.iterdir()):
        is_package = path.name.isidentifier() and (path / "__init__.py").is_file()
        if is_package and path.name not in _SKIPPED_FOLDERS and not path.is_symlink():  # it could lead in a circle
            yield from candidates(path, f"{package}{path.name}.")


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
    """Return where in the user's code an error happened: the last line that is neither ours nor importlib's."""
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, "<frozen")) and "/importlib/" not in frame.filename:
            return form.format(frame.filename, frame.lineno)
    return ""


def apps_in(module: ModuleType) -> dict[str, App]:
    """Return the apps at the top level of a module by reference, each once."""
    apps: dict[str, App] = {}
    for name, value in vars(module).items():
        if isinstance(value, App) and not any(value is known for known in apps.values()):
            apps[f"{module.__name__}:{name}"] = value
    return apps
