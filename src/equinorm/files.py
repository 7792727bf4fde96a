"""Write files and folders so that a full disk, an error or Ctrl-C leaves the old ones, and nothing half-written."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`; it takes the place of `path` when the block ends without an exception.

    with replacing(Path("weights.pt")) as temporary:
        torch.save(state, temporary)
    """
    path = path.resolve()  # a link stays a link to the new file
    if path.exists() and not path.is_file():  # as root one would put a file in the place of a device
        raise OSError(f"{path} is not a file")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_mode(path))  # a temporary file is readable by its owner only
        to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe by now
        to_disk(path.parent)


def set_aside(path: Path) -> Path:
    """Give something damaged another name, which is returned: "run.pt" becomes "run.pt.damaged", or ".damaged2".

    >>> set_aside(Path("unfinished/run.pt"))
    """
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in (0, *range(2, 1000)))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return aside


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`; it gets that name, whole, when the block ends without an exception.

    A folder that is not empty is never replaced. What an earlier process that was killed left behind is removed.

    with appearing(Path("llama-balanced")) as temporary:
        (temporary / "config.json").write_text(config)
    """
    folder = folder.resolve()
    start = f".{folder.name}."
    for left in folder.parent.glob(f"{glob.escape(start)}*.tmp"):
        if left.is_dir() and not _is_locked(left):
            shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=start, suffix=".tmp", dir=folder.parent))
    handle: int | None = None
    try:
        handle = os.open(temporary, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when this process ends, however it does
        yield temporary
        temporary.chmod(_mode(folder, 0o777))
        for path in temporary.rglob("*"):
            path.chmod(_new_mode(0o777 if path.is_dir() else 0o666))
            to_disk(path)
        to_disk(temporary)
        os.rename(temporary, folder)  # takes the place of an empty folder, fails on any other
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if handle is not None:
            os.close(handle)
    with suppress(OSError):
        to_disk(folder.parent)


def _is_locked(folder: Path) -> bool:
    """Whether a living process works on a temporary folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return True  # not ours to look at
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _mode(path: Path, new: int = 0o666) -> int:
    """The permissions of what is replaced, or those anything new gets."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    return _new_mode(new)


def _new_mode(mode: int) -> int:
    umask = os.umask(0)
    os.umask(umask)
    return mode & ~umask


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
