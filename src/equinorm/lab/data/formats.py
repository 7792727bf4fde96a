"""Readers of the files in which data sets are handed out: bytes in, arrays out.

Every reader takes the raw files of one part of a data set and returns images (uint8, N x C x H x W) and labels
(int64, N). A file that is cut short or is something else gives an error with its name.

    images, labels = cifar_binary([Raw("test_batch.bin", path.read_bytes())], label_bytes=1)
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from ...errors import UserError

__all__ = ["Arrays", "Raw", "cifar_binary", "cifar_python", "gunzip", "idx", "idx_pair", "need", "svhn_mat", "untar"]

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]

CIFAR_SHAPE = (3, 32, 32)
CIFAR_BYTES = math.prod(CIFAR_SHAPE)


@dataclass(frozen=True)
class Raw:
    """The content of a file, and where it came from (for errors)."""

    where: str
    data: bytes

    def wrong(self, why: str) -> UserError:
        return UserError(f"{self.where}: {why}; the file is cut short or is something else, fetch it again")


def need(module: str, what: str) -> Any:
    """A module that only some data sets need; the error says which extra brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise UserError(f"{what} needs {package}: pip install 'equinorm[lab]'") from error


# -- containers --------------------------------------------------------------------------------------------------------


def gunzip(file: Raw) -> Raw:
    try:
        return Raw(file.where, gzip.decompress(file.data))
    except (EOFError, OSError, zlib.error) as error:
        raise file.wrong(f"cannot be unpacked ({error})") from error


def untar(archive: Raw, members: Iterable[str]) -> dict[str, Raw]:
    """The named members of a .tar.gz, in memory: nothing is written to disk."""
    wanted = set(members)
    found: dict[str, Raw] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(gunzip(archive).data), mode="r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                content = tar.extractfile(member) if name in wanted else None
                if content is not None:
                    found[name] = Raw(f"{archive.where}/{name}", content.read())
    except tarfile.TarError as error:
        raise archive.wrong(f"cannot be unpacked ({error})") from error
    if missing := wanted - found.keys():
        raise archive.wrong(f"does not hold {', '.join(sorted(missing))}")
    return found


# -- CIFAR -------------------------------------------------------------------------------------------------------------


def cifar_binary(files: Sequence[Raw], *, label_bytes: int) -> Arrays:
    """Records of labels and 3072 pixels; the last label counts (CIFAR-100: first the coarse one, then the fine one)."""
    record = label_bytes + CIFAR_BYTES
    parts = []
    for file in files:
        if not file.data or len(file.data) % record:
            raise file.wrong(f"{len(file.data):,} bytes are not a number of {record}-byte records")
        parts.append(np.frombuffer(file.data, np.uint8).reshape(-1, record))
    rows = np.concatenate(parts)
    return rows[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), rows[:, label_bytes - 1].astype(np.int64)


def cifar_python(files: Sequence[Raw], *, labels: str) -> Arrays:
    """Pickled dictionaries with `data` (N x 3072) and a list of labels under the key `labels`."""
    parts = [_cifar_batch(file, labels) for file in files]
    return np.concatenate([images for images, _ in parts]), np.concatenate([y for _, y in parts])


def _cifar_batch(file: Raw, key: str) -> Arrays:
    batch = unpickle(file)
    if not isinstance(batch, Mapping):
        raise file.wrong(f"holds a {type(batch).__name__} instead of a dictionary")
    batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
    if not {"data", key} <= batch.keys():
        raise file.wrong(f"has no {key!r} or no 'data'")
    images, labels = batch["data"], np.asarray(batch[key])
    rows = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape == (len(labels), CIFAR_BYTES)
    if not rows or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise file.wrong(f"'data' is not one row of {CIFAR_BYTES} bytes for every label")
    return images.reshape(-1, *CIFAR_SHAPE), labels.astype(np.int64)


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


_rebuild: Any = np.empty(0).__reduce__()[0]  # taken from an array, because numpy moves it about
ADMITTED: Mapping[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _rebuild,
    ("numpy._core.multiarray", "_reconstruct"): _rebuild,
    ("_codecs", "encode"): _encode,
}


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numbers, texts, lists, dictionaries and numpy arrays. Anything else could run code, and is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images and labels do not need")


def unpickle(file: Raw) -> Any:
    """What a pickle holds, as long as that is plain data and arrays."""
    try:
        return _ArraysOnly(io.BytesIO(file.data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise file.wrong(f"cannot be read as a pickle of arrays ({error})") from error


# -- MNIST and its kin -------------------------------------------------------------------------------------------------


def idx(file: Raw) -> np.ndarray:
    """An array of bytes in the idx format: two zeros, the type (8: bytes), the number of axes, their sizes, data."""
    data = file.data
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise file.wrong("does not begin like an idx file of bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise file.wrong("ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", data[3], 4))
    if len(data) - start != math.prod(shape):
        raise file.wrong(f"holds {len(data) - start:,} bytes where {' x '.join(map(str, shape))} are announced")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def idx_pair(files: Sequence[Raw]) -> Arrays:
    """A file of images and a file of labels."""
    pixels, labels = (idx(file) for file in files)
    if pixels.ndim != 3:
        raise files[0].wrong(f"holds an array with {pixels.ndim} axes instead of images")
    if labels.shape != pixels.shape[:1]:
        raise files[1].wrong(f"does not hold one label for each of the {len(pixels):,} images")
    return pixels[:, None].copy(), labels.astype(np.int64)


# -- SVHN --------------------------------------------------------------------------------------------------------------


def svhn_mat(files: Sequence[Raw]) -> Arrays:
    """Matlab files with X (32 x 32 x 3 x N) and y, in which the digit 0 is labelled 10."""
    (file,) = files
    scipy_io = need("scipy.io", "reading SVHN")
    try:
        content = scipy_io.loadmat(io.BytesIO(file.data), variable_names=("X", "y"))
    except Exception as error:  # scipy raises what its parser met
        raise file.wrong(f"cannot be read as a Matlab file ({error})") from error
    if not {"X", "y"} <= content.keys():
        raise file.wrong("has no X or no y")
    images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise file.wrong(f"X is {images.dtype} {images.shape} instead of bytes, 32 x 32 x 3 x {len(labels)}")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10
