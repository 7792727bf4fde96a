"""Plain copies of data sets below the data directory: one .npz per part, written atomically, read without pickle.

What was downloaded is kept like this. A copy also serves a machine that lacks a reader's library, such as one without
scikit-learn for the digits (`keep`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...errors import UserError
from ...files import replacing
from .formats import Arrays

__all__ = ["copy_path", "read_copy", "write_copy"]


def copy_path(data_dir: Path, name: str, part: str) -> Path:
    return data_dir / "equinorm" / f"{name}-{part}.npz"


def write_copy(data_dir: Path, name: str, arrays: Mapping[str, Arrays]) -> None:
    """Keep the parts of a data set; a part that is there already is replaced."""
    for part, (images, labels) in arrays.items():
        path = copy_path(data_dir, name, part)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, images=images, labels=labels)
        except OSError as error:
            raise UserError(f"cannot keep {name} in {path.parent}: {error.strerror or error}") from error


def read_copy(data_dir: Path, name: str, parts: Sequence[str]) -> dict[str, Arrays] | None:
    """The parts as they were kept; None unless all of them are there."""
    paths = {part: copy_path(data_dir, name, part) for part in parts}
    if not all(path.is_file() for path in paths.values()):
        return None
    return {part: _read(path) for part, path in paths.items()}


def _read(path: Path) -> Arrays:
    try:
        with np.load(path) as content:
            images, labels = content["images"], content["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it, and it is made again") from error
    if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
        raise UserError(f"{path}: does not hold images and their labels; delete it, and it is made again")
    return images, labels.astype(np.int64)
