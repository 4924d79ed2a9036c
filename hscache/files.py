"""Write files and folders so that a crash leaves either the old state or the new one.

Takes bytes or a finished temporary folder and hands on a durable name: write beside, fsync, rename,
fsync the parent. Temporary names start with `.tmp-<host>-<pid>-<nonce>` and never match a
published name, so nothing half-written is ever read.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from hscache.errors import ConfigError, DiskFullError, HscacheError

TEMPORARY_PREFIX = ".tmp-"

_PROCESS_NONCE = secrets.token_hex(4)
_COUNTER = itertools.count()


def process_name() -> str:
    """Return `<host>-<pid>-<nonce>`: who this process is to others that share a folder."""
    host = socket.gethostname().split(".")[0].replace("-", "_")
    return f"{host}-{os.getpid()}-{_PROCESS_NONCE}"


def temporary_name() -> str:
    """Return a fresh `.tmp-<host>-<pid>-<nonce>-<count>` name."""
    return f"{TEMPORARY_PREFIX}{process_name()}-{next(_COUNTER)}"


@contextlib.contextmanager
def disk_full_named(where: Path) -> Iterator[None]:
    """Re-raise ENOSPC and EDQUOT as `DiskFullError`, naming the place and what to do."""
    try:
        yield
    except Exception as error:
        if not _is_disk_full(error):
            raise
        raise DiskFullError(
            f"disk full while writing {where}: {free_space(where)}. Everything published so far is "
            "intact; free some space and run the same command again to continue."
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents; HscacheError says what is in the way."""
    try:
        with disk_full_named(path):
            while not path.is_dir():
                try:
                    path.mkdir(parents=True)
                except FileExistsError:
                    # Another process may have made it, and may have deleted it again since.
                    if os.path.lexists(path) and not path.is_dir():
                        raise
    except DiskFullError:
        raise
    except OSError as error:
        raise HscacheError(
            f"cannot make the folder {path}: {error.strerror}. Give another place."
        ) from error


def _is_disk_full(error: Exception) -> bool:
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in codes
    # Rust extensions (tokenizers, safetensors) raise plain exceptions that end like this.
    return any(f"(os error {code})" in str(error) for code in codes)


def free_space(where: Path) -> str:
    """Say in words how many bytes and inodes are free on the filesystem that holds `where`."""
    folder = where
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    return f"{free_bytes / 1e6:,.1f} MB and {status.f_favail:,} inodes free on that filesystem"


def fsync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_files(folder: Path) -> None:
    """Make the files that another library wrote into a folder durable."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def write_durable(path: Path, data: bytes) -> None:
    """Write and fsync a new file in place; for files inside a temporary folder."""
    with disk_full_named(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_atomically(path: Path, data: bytes) -> None:
    """Replace a file with `data`: readers see the old bytes or the new, never a mixture."""
    temporary = path.with_name(temporary_name())
    try:
        write_durable(temporary, data)
        with disk_full_named(path):
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def create_once(path: Path, data: bytes) -> bool:
    """Create a file atomically unless it exists; return whether this call created it."""
    temporary = path.with_name(temporary_name())
    try:
        write_durable(temporary, data)
        try:
            with disk_full_named(path):  # a name may need room of its own
                os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True


@contextlib.contextmanager
def only_writer(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on a file for as long as the block runs; it dies with the process.

    Raises ConfigError when another process holds it; `what` says what it is writing.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is writing {what}; wait for it, or choose another place."
            ) from error
        yield


def publish_folder(temporary: Path, final: Path) -> bool:
    """Rename a finished folder onto its final name; return False (and discard it) if taken.

    rename(2) onto a non-empty folder fails, so of two racing writers exactly one wins.
    """
    with disk_full_named(final):
        fsync_folder(temporary)
        try:
            os.rename(temporary, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            shutil.rmtree(temporary)
            return False
        fsync_folder(final.parent)
    return True


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a temporary folder in `parent`; remove it on the way out unless it was renamed."""
    folder = parent / temporary_name()
    make_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def discard_folder(folder: Path) -> None:
    """Delete a folder so that another process, which may make it again, never meets half of it."""
    grave = folder.with_name(temporary_name())
    with contextlib.suppress(FileNotFoundError):
        folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)
