"""Write files so that a full disk, an error or Ctrl-C leaves the old file as it was and nothing half-written."""

from __future__ import annotations

import os
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


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those any new file gets."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
