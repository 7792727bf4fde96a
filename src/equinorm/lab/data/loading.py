"""From a name to a data set: find its files, check them, read them, and give a run its part of it."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ...errors import UserError
from ..training.runs import Data
from . import hub
from .catalogue import CATALOGUE, CatalogueEntry, find, missing
from .copies import read_copy, write_copy
from .digits import digits
from .formats import Arrays
from .splits import DataSet, Split, statistics

__all__ = ["data_folder", "is_streamed", "keep", "load", "names", "prepare"]

DRAW = 20190501  # seeds the one draw of held-out images and of subsets, for all runs


def names() -> dict[str, str]:
    """The data sets known by name, each with a line on what it is. Other names are folders of images."""
    known = {"digits": "scikit-learn's digits, 1,347 + 450 images, always there"}
    for entry in CATALOGUE.values():
        known[entry.name] = f"{entry.title}, {' + '.join(f'{n:,} {part}' for part, n in entry.counts.items())}"
    return known


def data_folder(data_dir: Path | None = None) -> Path:
    """Where data sets are looked for: the argument, else $EQUINORM_DATA, else ./data."""
    return Path(data_dir or os.environ.get("EQUINORM_DATA") or "data").expanduser()


def load(name: str, data_dir: Path | None = None, *, verify: bool = True, **options: Any) -> DataSet:
    """The data set of that name, read once per process.

        load("cifar10"); load("svhn", extra=True); load("digits", size=32, channels=3); load("imagenette", size=64)

        Options: `size` enlarges or shrinks the images to squares (`interpolation="bilinear"` or `"nearest"`),
        `channels=3` repeats grey images, `extra=True` adds SVHN's extra images to the training images. Any other
        name is a folder of image files below the data directory (`train/CLASS/*`, and `val` or `test`), or two tar
        files of such folders (`NAME/train*.tar`, `NAME/val*.tar`), read at `size`; without `size` a folder is left
    on disk for `folder.stream`. With `verify` the files' published md5 sums are compared.
    """
    return _load(name, data_folder(data_dir).resolve(), verify, _frozen(options))


def is_streamed(data: Data) -> bool:
    """Whether the images stay on disk: a folder of images, unless `size` asks for them in memory."""
    return data.name != "digits" and data.name not in CATALOGUE and "size" not in data.options


def prepare(
    name: str, data: Data, data_dir: Path | None, device: torch.device | str, *, verify: bool = True
) -> DataSet:
    """What a run trains and is tested on, on its device: `data.train` images, without `data.held_out` others.

    Which images are held out depends on nothing but their number, so that a choice made on them holds for all runs;
    with `data.evaluate == "held_out"` they are the test set. Runs of one process share the tensors.
    """
    folder, key = data_folder(data_dir).resolve(), _frozen(data.options)
    return _prepared(name, folder, key, data.train, data.held_out, data.evaluate, torch.device(device), verify)


def keep(name: str, data_dir: Path | None = None, *, to: Path, **options: Any) -> None:
    """Write a plain copy of a data set below the data directory `to`, where `load` finds it without other libraries."""
    parts = _parts(name, options)
    write_copy(to, name, _read(name, data_folder(data_dir).resolve(), True, parts))


# -- reading -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _load(name: str, data_dir: Path, verify: bool, frozen: tuple[tuple[str, Hashable], ...]) -> DataSet:
    options: dict[str, Any] = dict(frozen)
    if name != "digits" and name not in CATALOGUE:
        return _load_folder(name, data_dir, options)
    parts = _parts(name, options)
    arrays = _read(name, data_dir, verify, parts)
    classes = 10 if name == "digits" else CATALOGUE[name].classes
    splits = {part: _split(name, part, classes, pair) for part, pair in arrays.items()}
    train = splits["train"]
    for part in parts[2:]:
        images, labels = torch.cat([train.images, splits[part].images]), torch.cat([train.labels, splits[part].labels])
        train = Split(images, labels)
    shape = {key: options.pop(key) for key in ("size", "channels", "interpolation") if key in options}
    if options:
        raise UserError(f"{name} has no option {', '.join(options)}; there are size, channels, interpolation")
    train, test = (Split(_reshaped(split.images, **shape), split.labels) for split in (train, splits["test"]))
    return DataSet(name, classes, train, test, *statistics(train.images))


def _parts(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """The parts to read: training and test images, and those that an option names (which it takes out)."""
    optional = CATALOGUE[name].optional if name in CATALOGUE else ()
    return ("train", "test", *(part for part in optional if options.pop(part, False)))


def _read(name: str, data_dir: Path, verify: bool, parts: tuple[str, ...]) -> dict[str, Arrays]:
    if name == "digits":
        return digits(data_dir)
    entry = CATALOGUE.get(name)
    if entry is None:
        raise UserError(f"there is no data set {name!r}; there are {', '.join(names())}")
    reader = find(entry, data_dir, parts)
    arrays = reader(verify) if reader is not None else read_copy(data_dir, name, parts)
    if arrays is None:
        arrays = _download(entry, data_dir, parts)
    if verify:
        _check_counts(entry, data_dir, arrays)
    return arrays


def _download(entry: CatalogueEntry, data_dir: Path, parts: tuple[str, ...]) -> dict[str, Arrays]:
    if not hub.available():
        install = "pip install 'equinorm[datasets]'"
        raise UserError(f"{missing(entry, data_dir, parts)}\nIt is downloaded for you after {install}.")
    try:
        arrays = hub.download(entry, parts)
    except UserError as error:
        raise UserError(f"{missing(entry, data_dir, parts)}\n{error}.") from error
    _check_counts(entry, data_dir, arrays)
    write_copy(data_dir, entry.name, arrays)
    return arrays


def _check_counts(entry: CatalogueEntry, data_dir: Path, arrays: Mapping[str, Arrays]) -> None:
    for part, (images, _) in arrays.items():
        if len(images) != entry.counts[part]:
            raise UserError(
                f"{entry.title} in {data_dir}: {len(images):,} images in the part {part} instead of "
                f"{entry.counts[part]:,}. Fetch it again from {entry.source}, or say verify=False to take them"
            )


def _split(name: str, part: str, classes: int, arrays: Arrays) -> Split:
    images, labels = arrays
    if not len(labels):
        raise UserError(f"{name}, {part}: the files hold no images")
    low, high = labels.min(), labels.max()
    if low < 0 or high >= classes:
        raise UserError(f"{name}, {part}: labels from {low} to {high} where {classes} classes are expected")
    return Split(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels))


def _reshaped(
    images: Tensor, size: int | None = None, channels: int | None = None, interpolation: str = "bilinear"
) -> Tensor:
    """The images at another size, and grey ones repeated for every channel."""
    if interpolation not in ("bilinear", "nearest"):
        raise UserError(f"interpolation is bilinear or nearest, not {interpolation!r}")
    if size is not None and images.shape[2:] != (size, size):
        options = {"align_corners": False, "antialias": True} if interpolation == "bilinear" else {}
        parts = (interpolate(part.float(), (size, size), mode=interpolation, **options) for part in images.split(5000))
        images = torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])
    if channels is not None and images.shape[1] != channels:
        if images.shape[1] != 1:
            raise UserError(f"images with {images.shape[1]} channels cannot be given {channels}; only grey ones can")
        images = images.expand(-1, channels, -1, -1).contiguous()
    return images


def _load_folder(name: str, data_dir: Path, options: dict[str, Any]) -> DataSet:
    from .folder import find_folder, read_folder  # needs pillow
    from .tars import read_tars

    size = options.pop("size", None)
    tars = None if size is None or options else read_tars(name, data_dir, size)
    if tars is not None:
        classes, arrays = tars
        train, test = (_split(name, part, classes, arrays[part]) for part in ("train", "test"))
        return DataSet(name, classes, train, test, *statistics(train.images))
    folder = find_folder(name, data_dir)
    if options:
        raise UserError(f"{name} is a folder of images and has no option {', '.join(options)}; there is size")
    if size is None:
        raise UserError(f"{name} stays on disk: stream it (equinorm.lab.data.folder.stream), or give a size to load it")
    train, test = read_folder(folder.train, size), read_folder(folder.test, size)
    return DataSet(name, len(folder.classes), train, test, *statistics(train.images))


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    return tuple(sorted(options.items()))


# -- the part of a run -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _prepared(
    name: str,
    data_dir: Path,
    options: tuple[tuple[str, Hashable], ...],
    train: int | None,
    held_out: int,
    evaluate: str,
    device: torch.device,
    verify: bool,
) -> DataSet:
    if evaluate not in ("test", "held_out"):
        raise UserError(f"evaluate is 'test' or 'held_out', not {evaluate!r}")
    if evaluate == "held_out" and not held_out:
        raise UserError("evaluate is 'held_out', but no images are held out: set held_out")
    whole = _load(name, data_dir, verify, options)
    n = len(whole.train)
    wanted = n - held_out if train is None else train
    if held_out < 0 or wanted < 1 or held_out + wanted > n:
        raise UserError(f"{name} has {n:,} training images, too few to hold {held_out:,} out and train on {wanted:,}")
    if held_out == 0 and wanted == n:
        return whole.to(device)
    # raw numbers of this generator are the same in every version of numpy, which is not promised of a permutation
    order = torch.from_numpy(np.argsort(np.random.PCG64(DRAW).random_raw(n), kind="stable"))
    aside, used = order[:held_out].sort().values, order[held_out:][:wanted].sort().values
    test = whole.train[aside] if evaluate == "held_out" else whole.test
    part = DataSet(name, whole.classes, whole.train[used], test, whole.mean, whole.std)
    return part.to(device)
