"""Image folders that come as two tar files, `NAME/train*.tar` and `NAME/val*.tar` with SPLIT/CLASS/FILE in them.

They are decoded once; a plain copy is kept beside (`copies`), where the data directory can be written to.

    arrays = read_tars("imagenette", data_dir, size=160)
"""

from __future__ import annotations

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from ...errors import UserError
from .copies import read_copy, write_copy
from .folder import SUFFIXES
from .formats import Arrays

__all__ = ["find_tars", "read_tars"]

PARTS = {"train": ("train",), "test": ("val", "test")}


def find_tars(name: str, data_dir: Path) -> dict[str, Path] | None:
    """The tar file of each part below the data directory, the largest of several; None unless both are there."""
    found = {}
    for part, prefixes in PARTS.items():
        files = [path for prefix in prefixes for path in (data_dir / name).glob(f"{prefix}*.tar")]
        if not files:
            return None
        found[part] = max(files, key=lambda path: path.stat().st_size)
    return found


def read_tars(name: str, data_dir: Path, size: int) -> tuple[int, dict[str, Arrays]] | None:
    """(number of classes, images and labels by part) at so many pixels; None if there are no such files.

    Classes are numbered in the order of their names. An image that is no square is cut to its middle.
    """
    files = find_tars(name, data_dir)
    kept = f"{name}-{size}"
    arrays = read_copy(data_dir, kept, tuple(PARTS))
    if arrays is None:
        if files is None:
            return None
        arrays = {part: _read(path, size) for part, path in files.items()}
        with suppress(UserError):  # a place that is only read from; the images are in memory all the same
            write_copy(data_dir, kept, arrays)
    return int(arrays["train"][1].max()) + 1, arrays


def _read(path: Path, size: int) -> Arrays:
    try:
        with tarfile.open(path) as tar:
            members = sorted((m for m in tar if m.isfile() and m.name.lower().endswith(SUFFIXES)), key=lambda m: m.name)
            contents = [(member.name, tar.extractfile(member)) for member in members]
            read = [(member, file.read()) for member, file in contents if file is not None]
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch it again or delete it") from error
    classes = sorted({PurePosixPath(member).parent.name for member, _ in read})
    if not classes:
        raise UserError(f"{path} holds no images ({', '.join(SUFFIXES)}) in class folders")
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[PurePosixPath(member).parent.name] for member, _ in read], dtype=np.int64)
    with ThreadPoolExecutor() as pool:  # pillow decodes without holding Python's lock
        images = list(pool.map(lambda one: _decode(f"{path}: {one[0]}", one[1], size), read))
    return np.stack(images), labels


def _decode(where: str, content: bytes, size: int) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(content)) as file:
            image = file.convert("RGB")
    except OSError as error:
        raise UserError(f"{where}: cannot be read as an image ({error}); fetch the archive again") from error
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    if (width, height) != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
