"""A store that other users of the host could write to, or put something else in the place of, is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast import App
from holdfast.clock import SystemClock
from holdfast.errors import StoreError
from holdfast.store import open_store
from holdfast.store.contract import Finding

NOBODY = 65534


def use(path: Path) -> None:
    """Make the store, or use the one that is there, as a program would."""
    with App(f"sqlite:///{path}") as app:
        assert app.invocations() == []


async def found(path: Path) -> Sequence[Finding]:
    """What `holdfast store check` says."""
    store = open_store(f"sqlite:///{path}", clock=SystemClock())
    return [finding for finding in await store.check() if not finding.ok]


@pytest.fixture
def deep(folder: Path) -> Path:
    """A store with a path so long that its locks and sockets lie in the temporary folder."""
    path = folder / ("d" * 60) / "store.db"
    path.parent.mkdir()
    return path


@pytest.fixture
def aside(deep: Path, folder: Path) -> Path:
    """Where the locks and sockets of that store lie."""
    use(deep)
    (found,) = folder.glob("holdfast-*")
    return found


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")


@pytest.fixture
def without_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


# --- the file


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_a_file_that_the_world_may_write_is_refused(path: Path, mode: int) -> None:
    use(path)
    os.chmod(path, mode)
    with pytest.raises(StoreError, match=rf"written by every user of this host \(mode {mode:04o}\).*chmod 600 {path}"):
        use(path)
    os.chmod(path, 0o600)
    use(path)


def test_a_check_tells_that_the_world_may_write_the_file_and_its_log(path: Path) -> None:
    use(path)
    os.chmod(path, 0o666)
    (finding,) = asyncio.run(found(path))  # leaves a log behind, with the file's mode
    assert "can write it" in finding.advice
    with pytest.raises(StoreError, match=rf"chmod 600 {path} {path}-wal {path}-shm"):
        use(path)


@pytest.mark.parametrize("name", ["-wal", "-shm"])
def test_a_log_that_the_world_may_write_is_refused(path: Path, name: str) -> None:
    with App(f"sqlite:///{path}") as app:
        assert app.invocations() == []
        beside = Path(f"{path}{name}")
        os.chmod(beside, 0o666)
        with pytest.raises(StoreError, match=rf"{beside} can be written by every user of this host"):
            use(path)


def test_an_empty_file_that_the_world_may_write_is_refused_and_not_touched(path: Path) -> None:
    path.touch()
    os.chmod(path, 0o666)
    with pytest.raises(StoreError, match="every user of this host"):
        use(path)
    assert path.stat().st_size == 0
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_file_that_its_group_may_write_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(path)
    os.chmod(path, 0o660)
    with caplog.at_level(logging.WARNING):
        use(path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "written by its group (mode 0660)" in line
    assert f"chmod 600 {path}" in line


def test_a_file_that_others_may_read_is_used_without_a_word(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(path)
    os.chmod(path, 0o644)  # `holdfast store check` speaks of it
    with caplog.at_level(logging.WARNING):
        use(path)
    assert caplog.records == []


def test_a_file_with_two_names_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(path)
    os.link(path, path.with_name("other name.db"))
    with caplog.at_level(logging.WARNING):
        use(path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has 2 names (hard links)" in line
    (finding,) = [finding for finding in asyncio.run(found(path)) if finding.subject == "hard links"]
    assert "remove the others" in finding.advice


def test_a_new_file_is_for_its_owner_alone_whatever_the_umask(path: Path, without_umask: None) -> None:
    use(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_is_refused(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(StoreError, match="no regular file"):
        use(path)


# --- links


@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_into_a_folder_that_others_may_write_is_refused(folder: Path, mode: int, is_there: bool) -> None:
    shared = folder / "shared"
    shared.mkdir()
    if is_there:
        use(shared / "store.db")
    os.chmod(shared, mode)
    before = sorted(shared.iterdir())
    (folder / "store.db").symlink_to(shared / "store.db")
    (folder / "way").symlink_to(shared)
    for path in (folder / "store.db", folder / "way" / "store.db"):
        with pytest.raises(StoreError, match=rf"symbolic link .* into {shared}.*Move the store.*chmod o-w {shared}"):
            use(path)
    assert sorted(shared.iterdir()) == before
    os.chmod(shared, 0o755)
    use(folder / "store.db")


def test_a_chain_of_links_is_followed(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    os.chmod(shared, 0o777)
    (folder / "b").symlink_to("shared")
    (folder / "a").symlink_to("../" + folder.name + "/b")
    (folder / "store.db").symlink_to("a/store.db")
    with pytest.raises(StoreError, match="symbolic link"):
        use(folder / "store.db")


def test_links_in_a_circle_are_refused(folder: Path) -> None:
    (folder / "store.db").symlink_to("other.db")
    (folder / "other.db").symlink_to("store.db")
    with pytest.raises(StoreError, match=r"circle"):
        use(folder / "store.db")


def test_a_link_into_a_folder_of_ones_own_is_used(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "store.db").symlink_to("own/real.db")
    use(folder / "store.db")
    assert (folder / "own" / "real.db").stat().st_size > 0


def test_a_link_that_another_user_planted_is_refused(folder: Path, as_root: None) -> None:
    use(folder / "own.db")
    shared = folder / "shared"
    shared.mkdir()
    os.chmod(shared, 0o1777)
    (shared / "store.db").symlink_to(folder / "own.db")
    use(shared / "store.db")  # a link that this user made
    os.chown(shared / "store.db", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StoreError, match=rf"another user \(uid {NOBODY}\) made"):
        use(shared / "store.db")


# --- the folder of the locks and sockets


def test_a_planted_side_folder_of_another_user_is_refused(aside: Path, deep: Path, as_root: None) -> None:
    os.chown(aside, NOBODY, NOBODY)
    with pytest.raises(StoreError, match=rf"{aside}.* belongs to another user \(uid {NOBODY}\).*remove it"):
        use(deep)


def test_a_planted_side_folder_that_is_a_link_is_refused(aside: Path, deep: Path, folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for item in aside.iterdir():
        item.unlink()
    aside.rmdir()
    aside.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=rf"{aside}.* is a symbolic link to {elsewhere}.*remove it"):
        use(deep)
    assert list(elsewhere.iterdir()) == []


def test_a_planted_side_folder_that_the_world_may_write_is_refused(aside: Path, deep: Path) -> None:
    os.chmod(aside, 0o777)
    with pytest.raises(StoreError, match=rf"{aside}.*written by every user of this host \(mode 0777\).*remove it"):
        use(deep)


def test_a_planted_lock_is_refused(aside: Path, deep: Path, folder: Path) -> None:
    """A link in it would make us create, or write into, a file of the other's choice."""
    target = folder / "target"
    (aside / "turn.lock").unlink()
    (aside / "turn.lock").symlink_to(target)
    with pytest.raises(StoreError, match=r"turn\.lock|symbolic links"):
        use(deep)
    assert not target.exists()


def test_a_planted_side_folder_beside_the_file_is_refused(path: Path, folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    path.with_name(path.name + "-holdfast").symlink_to(folder / "elsewhere")
    with pytest.raises(StoreError, match="is a symbolic link"):
        use(path)


def test_a_refused_store_is_left_as_it_was(path: Path) -> None:
    use(path)
    os.chmod(path, 0o666)
    with pytest.raises(StoreError):
        use(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM holdfast_invocations").fetchone() == (0,)
