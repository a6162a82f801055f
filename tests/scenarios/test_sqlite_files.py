"""An acknowledged id is found by another process, whatever the user's code or hands do to the files of the store."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.processes import eventually
from tests.scenarios.programs import Failed, Program, a_program, assert_found, look
from tests.support.patience import patient


@pytest.fixture(scope="module")
def submitter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with a_program(tmp_path_factory.mktemp("programs"), "submitter") as program:
        yield program


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with a_program(tmp_path_factory.mktemp("programs"), "other") as program:
        yield program


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def program(submitter: Program, path: Path) -> Iterator[Program]:
    """A program that has the store of this test, and nothing else, open; one for all tests, since it starts slowly."""
    submitter.do(f"app = None; path = {str(path)!r}")
    yield submitter
    submitter.do("app and app.close()")


@pytest.fixture
def runner(neighbour: Program, path: Path) -> Iterator[Program]:
    """A second program, in which a runner works on the same store."""
    neighbour.do(f"app, task = opened({str(path)!r}); runner = app.runner(); runner.start()")
    yield neighbour
    with contextlib.suppress(Failed):
        neighbour.do("app.close()")


# --- what the user's own code does in the same process

USERS_CODE = {
    "a connection of the user that came first": (
        "theirs = sqlite3.connect(path); theirs.execute('PRAGMA journal_mode=WAL');"
        "theirs.execute('CREATE TABLE own (n)'); theirs.commit(); app, task = opened(path)",
        "theirs.execute('SELECT * FROM own').fetchall()",
        "theirs.close()",
    ),
    "two apps": (
        "app, task = opened(path); task.submit(0); second, other = opened(path)",
        "other.submit(0)",
        "second.close()",
    ),
    "open and close": (
        "app, task = opened(path); task.submit(0)",
        "open(path, 'rb').read(); open(path + '-wal', 'rb').read(); open(path + '-shm', 'rb').read()",
        "",
    ),
    "a copy": ("app, task = opened(path); task.submit(0)", "shutil.copy(path, path + '.copy')", ""),
    "a second SQLite library": (
        "app, task = opened(path); task.submit(0); import pysqlite3",
        "second = pysqlite3.connect(path); second.execute('SELECT * FROM sqlite_master').fetchall(); second.close()",
        "",
    ),
    "a pool of SQLAlchemy": (
        "import sqlalchemy as sa; engine = sa.create_engine('sqlite:///' + path);"
        "first = engine.connect(); first.execute(sa.text('PRAGMA journal_mode=WAL'));"
        "first.execute(sa.text('CREATE TABLE own (n)')); first.commit();"
        "app, task = opened(path)",
        "exec('with engine.begin() as c: c.execute(sa.text(\"INSERT INTO own VALUES (1)\"))')",
        "first.close(); engine.dispose()",
    ),
}


@pytest.mark.parametrize("code", USERS_CODE.values(), ids=[name.replace(" ", "-") for name in USERS_CODE])
def test_what_is_acknowledged_is_found_beside_the_users_own_code(
    program: Program, path: Path, code: tuple[str, str, str]
) -> None:
    for library in ("pysqlite3", "sqlalchemy"):
        if library in code[0]:
            pytest.importorskip(library)
    first, between, last = code
    program.do(first)
    ids = program.submit()
    for _ in range(2):
        program.do(between)
        assert_found(path, ids)
        ids += program.submit()
        assert_found(path, ids)
    program.do(last)
    assert_found(path, ids)
    ids += program.submit()
    program.do("app.close()")
    assert_found(path, ids)


def test_what_is_acknowledged_is_found_while_commands_and_runners_come_and_go(
    program: Program, neighbour: Program, path: Path
) -> None:
    """As in a web application: a pool that stays, runners that are restarted, and `holdfast ps` now and then."""
    pytest.importorskip("sqlalchemy")
    program.do(USERS_CODE["a pool of SQLAlchemy"][0])
    ids = program.submit()
    for _ in range(2):
        neighbour.do(f"app, task = opened({str(path)!r}); runner = app.runner(); runner.start()")
        ids += program.submit()
        program.do(USERS_CODE["a pool of SQLAlchemy"][1])
        neighbour.do("app.close()")
        ids += program.submit()
        assert_found(path, ids)
        program.do("app.close(); app, task = opened(path)")
        assert_found(path, ids)
        ids += program.submit()
    command = [sys.executable, "-m", "holdfast.cli", "ps", "--url", f"sqlite:///{path}", "--name", "shop"]
    subprocess.run(command, capture_output=True, timeout=patient(60), check=True)
    ids += program.submit()
    assert_found(path, ids)
    program.do("first.close(); engine.dispose()")


LOCKS = """
import fcntl, struct, sys
for path, start, length in ((sys.argv[1], 0x40000002, 510), (sys.argv[1] + "-shm", 128, 1)):
    with open(path, "r+b") as file:
        wish = struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, start, length, 0)
        print("locked" if fcntl.fcntl(file, fcntl.F_GETLK, wish)[:2] != struct.pack("h", fcntl.F_UNLCK) else "free")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has locks that belong to an open file")
def test_open_and_close_does_not_give_up_the_database_and_its_index(program: Program, path: Path) -> None:
    def locks() -> list[str]:
        command = [sys.executable, "-c", LOCKS, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=patient(30), check=True).stdout.split()

    program.do("theirs = sqlite3.connect(path); app, task = opened(path); task.submit(0)")
    program.do("open(path, 'rb').read(); open(path + '-shm', 'rb').read()")
    assert locks() == ["locked", "locked"]
    program.do("theirs.execute('SELECT * FROM sqlite_master').fetchall(); app.close()")
    program.do("open(path, 'rb').read()")
    assert locks()[0] == "free", "what is the user's own is left to the user"
    program.do("theirs.close()")


def test_nobody_deletes_the_log_of_a_process_that_lost_its_locks(program: Program, path: Path) -> None:
    program.do("app, task = opened(path); task.submit(0); open(path, 'rb').read()")
    log = path.with_name("shop.db-wal")
    before = log.stat().st_ino
    look(path)
    assert log.stat().st_ino == before
    program.do("app.close()")
    assert not log.exists(), "the last one out writes the log back and deletes it"


FORKING = """
hears, tells = os.pipe()
child = os.fork()
if child == 0:
    os.read(hears, 1)
    task.submit(1)
    app.close()
    os._exit(0)
task.submit(1)
os.write(tells, b'.')
os.waitpid(child, 0)
os.close(hears), os.close(tells)
open(path, 'rb').read()
"""


@pytest.mark.parametrize("theirs", ["None", "sqlite3.connect(path)"], ids=["ours", "theirs"])
def test_a_forked_child_does_not_give_up_what_its_parent_holds(program: Program, path: Path, theirs: str) -> None:
    """Also not of a connection of the user, whose descriptors both have."""
    program.do("app, task = opened(path); task.submit(0)")
    program.do(f"theirs = {theirs}; theirs and theirs.execute('SELECT * FROM sqlite_master').fetchall()")
    program.do(FORKING)
    before = path.with_name("shop.db-wal").stat().st_ino
    assert len(look(path)) == 3
    assert path.with_name("shop.db-wal").stat().st_ino == before
    program.do("theirs and theirs.close()")


OUTLIVING = """
hears, tells = os.pipe()
child = os.fork()
if child == 0:
    said = ''
    try:
        os.read(hears, 1)
        said = f'{task.submit(1).id}'
        app.close()
        app, task = opened(path)
        said += f' {task.submit(1).id}'
        app.close()
    except BaseException as error:
        said = f'{type(error).__name__}: {error}'
    finally:
        Path(path + '.child').write_text(said)
        os._exit(0)
app.close()
os.write(tells, b'.')
os.waitpid(child, 0)
os.close(hears), os.close(tells)
answer = Path(path + '.child').read_text()
"""


def test_a_forked_child_uses_the_store_after_its_parent_has_closed_it(program: Program, path: Path) -> None:
    """As with a server that loads the app and then forks: the child may not go on with deleted files."""
    program.do("app, task = opened(path); task.submit(0)")
    said = program.do(OUTLIVING)
    assert "StoreUnavailable" not in said
    assert len(said.split()) == 2
    assert_found(path, said.split())


def test_a_child_that_was_forked_while_the_store_was_busy_is_refused(program: Program, path: Path) -> None:
    """It has copies of its parent's connections, and none of their locks: SQLite would go on with them."""
    program.do("app, task = opened(path); task.submit(0)")
    program.do("from holdfast.store.sqlite import files; (known,) = files._watched; owner = known._owners[0]")
    program.do("begun = threading.Event(); work = lambda connection: (begun.set(), time.sleep(4))")
    program.do("busy = threading.Thread(target=owner.do_blocking, args=(work,)); busy.start(); begun.wait()")
    child = OUTLIVING.replace("app.close()\nos.write", "os.write")
    said = program.do(child)
    assert "StoreUnavailable" in said
    assert "was forked while its parent used" in said
    program.do("busy.join()")
    ids = program.submit()
    ids += program.do(child).split()
    assert_found(path, ids)
    assert len(look(path)) == len(ids) + 1, "a child that was forked while nothing went on is served"


FORKING_UNDER_LOAD = """
errors, ids, over = [], [], threading.Event()
def load():
    while not over.is_set():
        try:
            ids.append(task.submit(0).id)
            app.invocations(limit=10)
        except Exception as error:
            errors.append(repr(error))
threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
began = time.monotonic()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
took = time.monotonic() - began
over.set()
for thread in threads:
    thread.join()
answer = [errors, ids, took]
"""


def test_forks_do_not_disturb_who_uses_the_store(program: Program, path: Path) -> None:
    program.do("app, task = opened(path); task.submit(0)")
    errors, ids, took = program.do(FORKING_UNDER_LOAD)
    assert errors == []
    assert took < 5
    assert_found(path, ids)


def test_nobody_changes_the_journal_mode_of_a_process_that_lost_its_locks(program: Program, path: Path) -> None:
    program.do("app, task = opened(path)")
    ids = program.submit()
    change = "sqlite3.connect(path, timeout=0).execute('PRAGMA journal_mode=DELETE').fetchone()"
    program.do("open(path, 'rb').read()")
    command = [sys.executable, "-c", f"import sqlite3, sys; path = sys.argv[1]; {change}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(30), check=False)
    assert "database is locked" in done.stderr
    with pytest.raises(Failed, match="database is locked"):
        program.do(change)
    assert_found(path, ids + program.submit())


WITHOUT_A_HOLD = "from holdfast.store.sqlite import files; files._CAN_HOLD = False"  # as on macOS


@pytest.mark.parametrize(
    "between", ["open(path, 'rb').read()", USERS_CODE["a second SQLite library"][1]], ids=["open", "library"]
)
def test_where_the_log_cannot_be_held_its_loss_is_noticed(tmp_path: Path, path: Path, between: str) -> None:
    pytest.importorskip("pysqlite3")
    with a_program(tmp_path, "program") as program:
        program.do(f"{WITHOUT_A_HOLD}; path = {str(path)!r}; import pysqlite3; app, task = opened(path)")
        ids = program.submit()
        program.do(between)
        assert_found(path, ids)
        assert not path.with_name("shop.db-wal").exists(), "it was to be deleted here"
        with contextlib.suppress(Failed):
            ids += program.submit()
        assert_found(path, ids)
        with contextlib.suppress(Failed):
            program.do("app.close()")
    assert_found(path, ids)


# --- what hands do to the files


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """As a restore does it: with a copy of the store as it once was, and nothing beside it."""
    copy = path.with_name("backup.db")
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    for name in ("shop.db-wal", "shop.db-shm"):
        path.with_name(name).unlink()
    os.replace(copy, path)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


@pytest.mark.parametrize("harm", [delete, replace, move_away])
def test_a_submit_to_a_file_that_is_gone_raises(program: Program, path: Path, harm: Callable[[Path], None]) -> None:
    program.do("app, task = opened(path)")
    program.submit()
    program.do("open(path, 'rb').read()")
    harm(path)
    for _ in range(2):
        with pytest.raises(Failed, match=r"StoreUnavailable.*shop\.db was removed or replaced.*Restart"):
            program.submit(1)
    with pytest.raises(Failed, match=r"StoreUnavailable.*was removed or replaced"):
        program.do("answer = len(app.invocations())")
    assert not path.exists() or len(look(path)) == 5
    program.do("app.close()")
    assert not path.exists() or len(look(path)) == 5, "the old file's log was written to the new file"
    program.do("app, task = opened(path)")
    assert_found(path, program.submit())


@pytest.mark.parametrize("harm", [delete, replace])
def test_a_runner_whose_file_is_gone_says_so_and_acknowledges_nothing(
    runner: Program, path: Path, harm: Callable[[Path], None]
) -> None:
    runner.do("assert task.submit(4).result(timeout=30) == 8")
    harm(path)
    eventually(lambda: "was removed or replaced" in runner.log.read_text(), "the runner's complaint")
    with pytest.raises(Failed, match=r"StoreUnavailable.*was removed or replaced"):
        runner.submit(1)


@pytest.mark.parametrize("names", [["-wal"], ["-shm"], ["-wal", "-shm"]], ids="+".join)
def test_the_only_process_gets_over_the_loss_of_its_log(program: Program, path: Path, names: list[str]) -> None:
    """It still has the log open: what is in it is written back, and a new one is begun."""
    program.do("app, task = opened(path)")
    ids = program.submit()
    for _ in range(2):
        for name in names:
            path.with_name(path.name + name).unlink()
        ids += program.submit()
        assert_found(path, ids)
    assert program.do("answer = len(app.invocations())") == 15


@pytest.mark.parametrize("names", [["-wal"], ["-wal", "-shm"]], ids="+".join)
def test_processes_get_over_the_loss_of_their_log_together(
    program: Program, runner: Program, path: Path, names: list[str]
) -> None:
    program.do("app, task = opened(path)")
    ids = program.submit()
    for name in names:
        path.with_name(path.name + name).unlink()
    ids += program.submit()
    assert_found(path, ids)
    program.do(f"calls = [app.invocation(id) for id in {ids!r}]")
    assert program.do("answer = [call.result(timeout=60) for call in calls]") == [0, 2, 4, 6, 8] * 2
    assert_found(path, ids)


@pytest.mark.parametrize("names", [["-wal"], ["-shm"], ["-wal", "-shm"]], ids="+".join)
def test_a_process_that_has_nothing_to_do_holds_up_nobody(
    program: Program, neighbour: Program, path: Path, names: list[str]
) -> None:
    """It has the deleted files open, and would notice at its next use of the store, which may be tomorrow."""
    neighbour.do(f"app, task = opened({str(path)!r}); idle = task.submit(0).id; app.invocations()")
    program.do("app, task = opened(path, sqlite_busy_timeout_seconds=4)")
    ids = program.submit()
    for name in names:
        path.with_name(path.name + name).unlink()
    ids += program.submit()
    assert_found(path, [*ids, neighbour.do("answer = idle")])
    ids += neighbour.submit()
    neighbour.do("app.close()")
    assert_found(path, ids + program.submit())


def test_a_process_that_keeps_a_deleted_log_is_named(program: Program, neighbour: Program, path: Path) -> None:
    program.do("app, task = opened(path, sqlite_busy_timeout_seconds=0.3)")
    ids = program.submit()
    neighbour.do(f"theirs = sqlite3.connect({str(path)!r}); theirs.execute('SELECT * FROM sqlite_master').fetchall()")
    path.with_name("shop.db-wal").unlink()
    with pytest.raises(Failed, match=rf"shop\.db-wal was deleted while other processes.*\(pids: {neighbour.pid}\)"):
        program.submit()
    neighbour.do("theirs.close()")
    assert_found(path, ids + program.submit())


def test_a_connection_of_the_user_that_keeps_a_deleted_log_is_said(program: Program, path: Path) -> None:
    program.do("theirs = sqlite3.connect(path); theirs.execute('PRAGMA journal_mode=WAL')")
    program.do("theirs.execute('CREATE TABLE own (n)'); theirs.commit(); app, task = opened(path)")
    ids = program.submit()
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink()
    with pytest.raises(Failed, match=r"StoreUnavailable.*other connections of this process.*[Cc]lose them"):
        program.submit()
    program.do("theirs.close()")
    ids = program.submit()
    assert_found(path, ids)


def test_a_connection_of_the_user_that_keeps_a_deleted_index_is_said(program: Program, path: Path) -> None:
    """A new connection would read the log by it."""
    program.do("app, task = opened(path)")
    ids = program.submit()
    program.do("theirs = sqlite3.connect(path); theirs.execute('SELECT * FROM sqlite_master').fetchall()")
    path.with_name("shop.db-shm").unlink()
    with pytest.raises(Failed, match=r"StoreUnavailable.*other connections of this process.*[Cc]lose them"):
        program.submit()
    program.do("theirs.close()")
    assert_found(path, ids + program.submit())


@pytest.mark.parametrize("harm", [delete, replace])
def test_a_submit_in_a_transaction_on_a_file_that_is_gone_raises(
    program: Program, path: Path, harm: Callable[[Path], None]
) -> None:
    program.do("app, task = opened(path); task.submit(0); theirs = sqlite3.connect(path)")
    program.do("task.options(session=theirs).submit(1); theirs.commit()")
    harm(path)
    with pytest.raises(Failed, match=r"StoreUnavailable.*was removed or replaced"):
        program.do("task.options(session=theirs).submit(2)")
    program.do("theirs.close()")


IN_A_TRANSACTION = "answer = task.options(session=theirs).submit(1).id; theirs.commit()"
GONE = [["-wal"], ["-shm"], ["-wal", "-shm"]]


@pytest.fixture
def with_a_session(program: Program) -> tuple[Program, list[str]]:
    """A program that has submitted in transactions of its own, and by itself."""
    program.do("app, task = opened(path); theirs = sqlite3.connect(path); theirs.execute('CREATE TABLE own (n)')")
    return program, [program.do(IN_A_TRANSACTION), *program.submit(1)]


@pytest.mark.parametrize("written", ["", "theirs.execute('INSERT INTO own VALUES (1)')"], ids=["first", "written"])
@pytest.mark.parametrize("names", GONE, ids="+".join)
def test_who_submits_in_a_transaction_gets_over_the_loss_of_the_log(
    with_a_session: tuple[Program, list[str]], path: Path, names: list[str], written: str
) -> None:
    """By what the error asks for: the old log is written back by then, so no connection that comes can lose it."""
    program, ids = with_a_session
    for name in names:
        path.with_name(path.name + name).unlink()
    program.do(written)
    with pytest.raises(Failed, match=r"StoreUnavailable.*Nothing was submitted.*[Cc]lose your own connections"):
        program.do(IN_A_TRANSACTION)
    program.do("theirs.rollback(); theirs.close(); theirs = sqlite3.connect(path)")
    ids += [program.do(IN_A_TRANSACTION), program.do(IN_A_TRANSACTION), *program.submit(1)]
    assert_found(path, ids)
    program.do("theirs.execute('SELECT * FROM own').fetchall(); theirs.close()")


@pytest.mark.parametrize("names", GONE, ids="+".join)
def test_a_connection_that_keeps_the_deleted_log_is_refused_again_and_again(
    with_a_session: tuple[Program, list[str]], path: Path, names: list[str]
) -> None:
    program, ids = with_a_session
    for name in names:
        path.with_name(path.name + name).unlink()
    for _ in range(3):
        with pytest.raises(Failed, match=r"StoreUnavailable.*[Cc]lose (them|your own connections)"):
            program.do(IN_A_TRANSACTION)
        program.do("theirs.rollback()")
    program.do("theirs.close(); theirs = sqlite3.connect(path)")
    assert_found(path, [*ids, program.do(IN_A_TRANSACTION)])
    program.do("theirs.close()")


def test_a_connection_that_keeps_the_deleted_log_is_refused_beside_a_new_one(
    with_a_session: tuple[Program, list[str]], path: Path
) -> None:
    """Somebody without Holdfast has begun a new log, and both use the same index, so also the same lock."""
    program, _ = with_a_session
    path.with_name("shop.db-wal").unlink()
    command = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM sqlite_master').fetchall()"
    subprocess.run([sys.executable, "-c", command, str(path)], capture_output=True, timeout=patient(30), check=False)
    assert path.with_name("shop.db-wal").exists(), "it was to be begun here"
    for _ in range(3):
        with pytest.raises(Failed, match=r"StoreUnavailable.*[Cc]lose (them|your own connections)"):
            program.do(IN_A_TRANSACTION)
        program.do("theirs.rollback()")
    program.do("theirs.close()")


def test_who_submits_in_a_transaction_does_not_wait_for_the_log_to_be_written_back(
    program: Program, path: Path
) -> None:
    """For that waits for the transaction."""
    program.do("app, task = opened(path, sqlite_busy_timeout_seconds=20); theirs = sqlite3.connect(path)")
    ids = [program.do(IN_A_TRANSACTION)]
    program.do("task.options(session=theirs).submit(1)")
    path.with_name("shop.db-wal").unlink()
    eventually(lambda: f"{path}-wal was deleted" in program.log.read_text(), "the idle writer's notice")
    program.do("began = time.monotonic()")
    with pytest.raises(Failed, match=r"StoreUnavailable.*[Cc]lose (them|your own connections)"):
        program.do(IN_A_TRANSACTION)
    assert program.do("answer = time.monotonic() - began") < 10
    program.do("theirs.rollback(); theirs.close(); theirs = sqlite3.connect(path)")
    assert_found(path, [*ids, program.do(IN_A_TRANSACTION), *program.submit(1)])
    program.do("theirs.close()")


def test_a_link_that_names_another_file_now_is_a_replaced_file(program: Program, path: Path) -> None:
    for name in ("one.db", "two.db"):
        program.do(f"app, task = opened({str(path.with_name(name))!r}); task.submit(0); app.close()")
    path.symlink_to("one.db")
    program.do("app, task = opened(path)")
    ids = program.submit()
    assert_found(path, ids)
    path.unlink()
    path.symlink_to("two.db")
    with pytest.raises(Failed, match=r"StoreUnavailable.*was removed or replaced"):
        program.submit(1)


# --- what the user's own transaction writes to

BEGIN = {
    "Python begins": "",
    "a read": "theirs.execute('BEGIN'); theirs.execute('SELECT * FROM sqlite_master').fetchall()",
    "a write": "theirs.execute('CREATE TABLE own (n)'); theirs.execute('INSERT INTO own VALUES (1)')",
}
SUBMIT = {
    "submit": "answer = task.options(session=theirs).submit(1).id; theirs.commit()",
    "a key that is taken": "answer = task.options(session=theirs, key='k').submit(0).id; theirs.commit()",
    "emit": "app.emit('moved', {'n': 1}, session=theirs); theirs.commit()",
}


@pytest.fixture
def with_an_old_file(program: Program, path: Path) -> Program:
    """The user's connection is older than the restore of a backup, the app is younger."""
    program.do("app, task = opened(path); task.options(key='k').submit(0); app.close()")
    program.do("theirs = sqlite3.connect(path); theirs.execute('SELECT * FROM sqlite_master').fetchall()")
    copy, old = path.with_name("backup.db"), path.with_name("old")
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    old.mkdir()
    for name in ("shop.db", "shop.db-wal", "shop.db-shm"):
        path.with_name(name).rename(old / name)
    copy.rename(path)
    program.do("app, task = opened(path)")
    return program


@pytest.mark.parametrize("submit", SUBMIT.values(), ids=[name.replace(" ", "-") for name in SUBMIT])
@pytest.mark.parametrize("begin", BEGIN.values(), ids=[name.replace(" ", "-") for name in BEGIN])
def test_a_transaction_on_the_old_file_is_refused(with_an_old_file: Program, begin: str, submit: str) -> None:
    with_an_old_file.do(begin)
    with pytest.raises(Failed, match=r"StoreUnavailable.*another file.*shop\.db.*[Rr]econnect"):
        with_an_old_file.do(submit)
    with_an_old_file.do("theirs.rollback(); theirs.close(); theirs = sqlite3.connect(path)")
    with_an_old_file.do(submit)
    with_an_old_file.do("theirs.close()")


def test_a_transaction_on_the_old_file_is_refused_while_another_process_writes_to_the_new_one(
    with_an_old_file: Program, neighbour: Program, path: Path
) -> None:
    """So that the lock of the new file is taken, though not by the user's connection."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells who has a lock")
    neighbour.do(f"other = sqlite3.connect({str(path)!r}); other.execute('BEGIN IMMEDIATE')")
    with pytest.raises(Failed, match=r"StoreUnavailable.*another file.*shop\.db"):
        with_an_old_file.do(SUBMIT["submit"])
    neighbour.do("other.close()")
    with_an_old_file.do("theirs.close()")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has a lock")
class TestAThirdConnectionOfThisProcess:
    """It has the lock of the new file, so that this process has it, though not by the session."""

    @pytest.mark.parametrize("submit", SUBMIT.values(), ids=[name.replace(" ", "-") for name in SUBMIT])
    @pytest.mark.parametrize("begin", BEGIN.values(), ids=[name.replace(" ", "-") for name in BEGIN])
    def test_does_not_hide_a_transaction_on_the_old_file(
        self, with_an_old_file: Program, path: Path, begin: str, submit: str
    ) -> None:
        with_an_old_file.do("third = sqlite3.connect(path); third.execute('BEGIN IMMEDIATE')")
        with_an_old_file.do(begin)
        with pytest.raises(Failed, match=r"StoreUnavailable.*shop\.db.*[Nn]othing was submitted.*"):
            with_an_old_file.do(submit)
        with_an_old_file.do("theirs.rollback(); theirs.close(); third.rollback(); theirs = sqlite3.connect(path)")
        with_an_old_file.do(submit)
        with_an_old_file.do("theirs.close(); third.close()")

    def test_does_not_hide_one_on_a_deleted_file(self, program: Program, path: Path) -> None:
        program.do("app, task = opened(path); task.submit(0); app.close(); theirs = sqlite3.connect(path)")
        program.do("theirs.execute('SELECT * FROM sqlite_master').fetchall()")
        copy = path.with_name("backup.db")
        with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        for name in ("shop.db-wal", "shop.db-shm"):
            path.with_name(name).unlink()
        copy.replace(path)
        program.do("app, task = opened(path); third = sqlite3.connect(path); third.execute('BEGIN IMMEDIATE')")
        with pytest.raises(Failed, match="StoreUnavailable"):
            program.do(SUBMIT["submit"])
        program.do("theirs.rollback(); theirs.close(); third.close()")

    def test_that_writes_to_another_database_is_no_reason_to_refuse(self, program: Program, path: Path) -> None:
        program.do("app, task = opened(path); theirs = sqlite3.connect(path)")
        program.do("third = sqlite3.connect(str(path) + '.other'); third.execute('PRAGMA journal_mode = wal')")
        program.do("third.execute('CREATE TABLE own (n)'); third.execute('BEGIN IMMEDIATE')")
        assert_found(path, [program.do(SUBMIT["submit"])])
        program.do("theirs.close(); third.close()")

    def test_that_submits_to_another_store_is_no_reason_to_refuse(self, program: Program, path: Path) -> None:
        program.do("app, task = opened(path); theirs = sqlite3.connect(path)")
        program.do(
            "other_app, other_task = opened(str(path) + '.other'); third = sqlite3.connect(str(path) + '.other')"
        )
        program.do("other_task.options(session=third).submit(1)")
        assert_found(path, [program.do(SUBMIT["submit"])])
        program.do("theirs.close(); third.close(); other_app.close()")


def test_a_transaction_of_the_user_holds_up_nobody_but_our_writer(program: Program, path: Path) -> None:
    """Whoever submits without a session waits for the lock; the user's own transaction goes on."""
    program.do("app, task = opened(path); theirs = sqlite3.connect(path)")
    program.do("first = task.options(session=theirs).submit(1).id")
    program.do("waiting = threading.Thread(target=task.submit, args=(2,)); waiting.start()")
    program.do("began = time.monotonic(); second = task.options(session=theirs).submit(3).id")
    assert program.do("answer = time.monotonic() - began") < 1
    program.do("theirs.commit(); theirs.close(); waiting.join()")
    assert len(look(path)) == 3
