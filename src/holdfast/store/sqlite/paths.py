"""The path of a store: file mode, links that lead to it, file system, and the folder of its locks and sockets.

A user with the right to write to one of these can run code here, or take work away: calls are stored there with their
arguments, and runners execute what they find. So a store that other users of the host can write to or replace is
refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import StoreReadOnly, StoreUnavailable, UnsafeStore, UnsupportedFileSystem

_LONGEST_FOLDER = 60  # leaves room for a socket's name within the kernel's limit
_MAX_LINKS = 40


def resolved(named: Path) -> Path:
    """Return the file itself, so that every process finds the same locks beside it."""
    try:
        return named.resolve()
    except (OSError, RuntimeError) as error:  # before Python 3.13 a RuntimeError
        raise StoreUnavailable(f"the symbolic links of {named} lead in a circle; there is no file.") from error


def create_file(path: Path) -> None:
    """Make the file for this user alone (mode 0600; the files that SQLite puts beside it inherit that).

    Raises: an error with the reason why it cannot be written, or with the users who can write it, too. A descriptor of
    the database is never opened here: to close it would drop the locks of other connections of this process.
    """
    if not path.parent.is_dir():
        raise StoreUnavailable(f"the folder {path.parent} of the store {path.name} does not exist. Create it first.")
    try:
        _make(path)
    except FileExistsError:
        _refuse_unfit(path)
    except PermissionError as error:
        raise StoreReadOnly(f"{path} cannot be written by this user ({error.strerror}).") from error
    except OSError as error:
        kind = StoreReadOnly if error.errno == errno.EROFS else StoreUnavailable
        raise kind(f"{path} cannot be opened for writing: {error.strerror}.") from error
    if not _may_write(path.parent):
        raise StoreReadOnly(f"the folder {path.parent} cannot be written, and SQLite keeps its log beside the file.")


def _make(path: Path) -> None:
    """Raise `FileExistsError` if something is there. Elsewhere than on Linux only root may call mknod."""
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
    except PermissionError:
        if not _may_write(path.parent):
            raise
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # new, so without locks


def _refuse_unfit(path: Path) -> None:
    try:
        there = os.stat(path)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be used: {error.strerror}.") from error
    if stat.S_ISDIR(there.st_mode):
        raise StoreUnavailable(f"{path} is a folder; a SQLite store is a file.")
    if not stat.S_ISREG(there.st_mode):
        raise StoreUnavailable(f"{path} is no regular file; a SQLite store is one.")
    if not _may_write(path):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise StoreReadOnly(f"{path} cannot be opened for writing: {os.strerror(errno.EROFS)}.")
        raise StoreReadOnly(f"{path} cannot be written by this user ({os.strerror(errno.EACCES)}).")
    modes = {f"{path}{name}": mode_of(f"{path}{name}") for name in ("", "-wal", "-shm")}
    exposed = {name: mode for name, mode in modes.items() if mode & stat.S_IWOTH}
    if exposed:
        name, mode = next(iter(exposed.items()))
        raise UnsafeStore(
            f"{name} can be written by every user of this host (mode {mode:04o}), and runners execute what they find "
            f"in it. Look whether all in it is yours, then: chmod 600 {' '.join(exposed)}"
        )


def mode_of(path: str) -> int:
    """Return the permissions; 0 if the file is not there."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return 0


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def risks(path: Path) -> Iterator[str]:
    """Yield warnings about a store that is not refused."""
    there = os.stat(path)
    if there.st_mode & stat.S_IWGRP:
        yield (
            f"{path} can be written by its group (mode {stat.S_IMODE(there.st_mode):04o}), and runners execute what "
            f"they find in it. If only one user works with it: chmod 600 {path}"
        )
    if there.st_nlink > 1:
        yield (
            f"{path} has {there.st_nlink} names (hard links). A process that opens it by another one has another log, "
            "and the two destroy the file. Use a symbolic link, and remove the other names."
        )


def refuse_planted_link(named: Path, path: Path) -> None:
    """Refuse the store `path`, if it is `named` by a symbolic link and others can put another file into its place.

    That is: the file lies in a folder that all users may write, or another user made the link in such a folder.
    """
    links = list(_links_of(named))
    folder = path.parent
    if links and folder.is_dir() and _is_open_to_all(folder):
        raise UnsafeStore(
            f"{named} leads by the symbolic link {links[-1]} into {folder}, where every user of this host may write "
            f"(mode {stat.S_IMODE(os.stat(folder).st_mode):04o}) and so could have put the file. Move the store into "
            f"a folder of your own, or: chmod o-w {folder}"
        )
    for link in links:
        if _is_open_to_all(link.parent) and os.lstat(link).st_uid not in (0, os.geteuid()):
            raise UnsafeStore(
                f"{named} leads through the symbolic link {link}, which another user (uid {os.lstat(link).st_uid}) "
                f"made in a folder where every user may write. Look where it leads, remove it, and name the store "
                "itself."
            )


def _links_of(path: Path) -> Iterator[Path]:
    """Yield the symbolic links on the way to a file. Those in the root folder belong to the system (macOS: /tmp,
    /var).
    """
    whole, found = path.absolute(), 0
    while found < _MAX_LINKS:
        link = next((part for part in (*reversed(whole.parents), whole) if part.is_symlink()), None)
        if link is None:
            return
        found += 1
        if link.parent != link.parent.parent:
            yield link
        whole = link.parent / os.readlink(link) / whole.relative_to(link)
        whole = Path(os.path.normpath(whole))


def _is_open_to_all(folder: Path) -> bool:
    return bool(os.stat(folder).st_mode & stat.S_IWOTH)


# --- the folder of the locks and sockets


def side_folder(path: Path) -> Path:
    """Return where the locks and sockets of a store lie:

    beside the file, or in the temporary folder if that path is too long for a socket.
    """
    beside = path.with_name(path.name + "-holdfast")
    if len(str(beside)) <= _LONGEST_FOLDER:
        return beside
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:20]
    return Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}-{digest}"


def make_side_folder(folder: Path, path: Path) -> None:
    """Make it for this user alone. Raises `UnsafeStore` if another user has put something there."""
    try:
        folder.mkdir(mode=0o700)
        return
    except FileExistsError:
        there = os.lstat(folder)
    if stat.S_ISLNK(there.st_mode):
        fault = f"is a symbolic link to {os.readlink(folder)}"
    elif not stat.S_ISDIR(there.st_mode):
        fault = "is no folder"
    elif there.st_uid not in (os.geteuid(), os.stat(path).st_uid):
        fault = f"belongs to another user (uid {there.st_uid})"
    elif there.st_mode & stat.S_IWOTH:
        fault = f"can be written by every user of this host (mode {stat.S_IMODE(there.st_mode):04o})"
    else:
        return
    raise UnsafeStore(
        f"{folder}, where the processes of {path} take turns and send hints, {fault}. "
        f"Nothing was put there. Check its owner; remove it while nothing runs, and Holdfast creates it again."
    )


# --- network file systems

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "afs", "afpfs", "ncpfs", "ceph", "lustre", "gpfs"),
        *("glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.davfs2", "davfs", "webdav", "ocfs2", "gfs2"),
        *("beegfs", "moosefs", "fuse.mfs"),
    )
)


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """Refuse them: SQLite's locks do not hold on network file systems: two hosts would corrupt the file."""
    kind = file_system_of(path, _read_mounts() if mounts is None else mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedFileSystem(
            f"{path} lies on a network file system ({kind}), where SQLite's locks cannot be trusted. "
            "Put the file on a local disk, or use MongoDB to share work between hosts."
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds `path`, from the text of /proc/self/mounts; empty if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = f"{path}/".startswith(point.rstrip("/") + "/")  # a container may mount the file itself
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _read_mounts() -> str:
    proc = Path("/proc/self/mounts")
    try:
        return proc.read_text() if proc.exists() else _mounts_of_macos()
    except OSError:
        return ""


def _mounts_of_macos() -> str:
    try:
        listing = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.findall(r"^(.+?) on (.+?) \((\w+)", listing, re.MULTILINE)
    return "\n".join(
        f"{device.replace(' ', '_')} {point.replace(' ', chr(92) + '040')} {kind}" for device, point, kind in found
    )
