"""Folders of image files, such as ImageNet: `train/CLASS/*` and `val/CLASS/*` (or `test`), decoded in worker processes.

    folder = find_folder("imagenet", data_folder())
    for images, labels in stream(folder, run.data, 256, workers=8, seed=0, epoch=3, training=True):
        x = augment(images.cuda(), run.data, mean, std, training=True, generator=generator)

The workers cut and resize; flips and normalisation are left to `augment`, on the device. Every image's crop depends on
(seed, epoch, image) only, whatever the number of workers, so an epoch can be resumed at any batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...errors import UserError
from ..training.runs import Data
from .loading import data_folder, names
from .splits import Split

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Files",
    "ImageFolder",
    "batches",
    "centre_box",
    "find_folder",
    "random_box",
    "read_folder",
    "stream",
]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLACES = {"imagenet": ("imagenet", "ImageNet", "ILSVRC2012", "imagenet/ILSVRC/Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")}
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp")
SIZE = 224  # of a crop, unless the run says another
MARGIN = 256 / 224  # at test time the shorter side is this much longer than the crop
MEMORY = 32 * 2**30

Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Files:
    """The image files of a split: paths as one array of bytes (which workers share, unlike a list), and labels."""

    paths: np.ndarray
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(bytes(self.paths[index])))


@dataclass(frozen=True, eq=False)
class ImageFolder:
    path: Path
    classes: tuple[str, ...]
    train: Files
    test: Files
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


def find_folder(name: str, data_dir: Path | None = None) -> ImageFolder:
    """The image folder of that name below the data directory; classes are numbered in the order of their names."""
    return _scan(name, data_folder(data_dir).resolve())


@lru_cache(maxsize=4)
def _scan(name: str, data_dir: Path) -> ImageFolder:
    places = [data_dir / place for place in PLACES.get(name, (name,))]
    path = next((place for place in places if (place / "train").is_dir()), None)
    test = None if path is None else next((path / p for p in ("val", "test") if (path / p).is_dir()), None)
    if path is None or test is None:
        raise UserError(
            f"there is no data set {name!r}: known are {', '.join(names())}, and {data_dir / name} does not hold "
            "images as train/CLASS/* and val/CLASS/* (or test/CLASS/*). Put them there, or name another folder with "
            "--data-dir or EQUINORM_DATA"
            + (". ImageNet comes from the ILSVRC 2012's page" if name == "imagenet" else "")
        )
    classes = tuple(sorted(entry.name for entry in os.scandir(path / "train") if entry.is_dir()))
    return ImageFolder(path, classes, _files(path / "train", classes), _files(test, classes))


def _files(folder: Path, classes: tuple[str, ...]) -> Files:
    found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if unknown := set(found) - set(classes):
        raise UserError(f"{folder} has classes that train has not: {', '.join(sorted(unknown)[:5])}")
    number = {name: i for i, name in enumerate(classes)}
    paths: list[bytes] = []
    labels: list[int] = []
    for name in found:
        files = sorted(e.path for e in os.scandir(folder / name) if e.name.lower().endswith(SUFFIXES))
        paths += map(os.fsencode, files)
        labels += [number[name]] * len(files)
    if not paths:
        raise UserError(f"{folder} holds no images in class folders ({', '.join(SUFFIXES)}): sort them into CLASS/*")
    return Files(np.array(paths), torch.tensor(labels))


# -- one image ---------------------------------------------------------------------------------------------------------


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A random part of an image: 8 to 100 % of its area, sides between 3:4 and 4:3 (Szegedy et al. 2014).

    After ten parts that do not fit, the largest central one whose sides do.
    """
    area = width * height
    for _ in range(10):
        part = area * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(part * ratio)), round(math.sqrt(part / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return _middle(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


def centre_box(width: int, height: int, margin: float = MARGIN) -> Box:
    """The square in the middle; its side is the image's shorter one over `margin`."""
    side = min(width, height) / margin
    return _middle(width, height, side, side)


def _middle(width: int, height: int, w: float, h: float) -> Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def decode(path: Path, size: int, rng: np.random.Generator | None = None, margin: float = MARGIN) -> Tensor:
    """A part of an image file (random with `rng`, else the centre) as 3 x size x size bytes."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except OSError as error:  # also what pillow raises for files that are cut short or are no images
        raise UserError(f"{path}: cannot be read as an image ({error}); fetch it again or delete it") from error
    width, height = image.size
    box = centre_box(width, height, margin) if rng is None else random_box(width, height, rng)
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def read_folder(files: Files, size: int) -> Split:
    """All images of a split in memory: the central square of each, resized."""
    if len(files) * 3 * size**2 > MEMORY:
        raise UserError(
            f"{len(files):,} images at {size} x {size} need {len(files) * 3 * size**2 / 2**30:.0f} GiB: "
            "leave out the size to stream them, or choose a smaller one"
        )
    with ThreadPoolExecutor() as pool:  # pillow decodes without holding Python's lock
        images = pool.map(lambda i: decode(files.path(i), size, margin=1.0), range(len(files)))
        return Split(torch.stack(list(images)), files.labels)


# -- many images -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Decoded(Dataset[tuple[Tensor, Tensor]]):
    files: Files
    size: int
    draw: tuple[int, int] | None  # (seed, epoch) of random crops; None: the centre

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = None if self.draw is None else np.random.default_rng((*self.draw, index))
        return decode(self.files.path(index), self.size, rng), self.files.labels[index]


def batches(
    n: int, batch: int, *, training: bool, seed: int = 0, epoch: int = 0, rank: int = 0, world: int = 1
) -> list[list[int]]:
    """The images of every batch of an epoch. Training: shuffled, and the last, smaller batch is left out.

    Of `world` processes each gets its own images, `batch` at a time; in training all get the same number of batches.
    """
    if not training:
        order = torch.arange(n)
    else:
        entropy = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(int(entropy) >> 1))
        order = order[: n - n % (batch * world)]
        if not len(order):
            raise UserError(f"{n:,} training images do not fill one batch of {batch * world:,}: choose a smaller batch")
    return [part.tolist() for part in order[rank::world].split(batch)]


def stream(
    folder: ImageFolder,
    data: Data,
    batch: int,
    *,
    training: bool,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images (uint8, N x 3 x S x S) and labels of one epoch, from batch `start` on.

    S is `data.crop` or 224. Training images are random parts (`random_box`), test images the centre (`centre_box`).
    The same arguments always give the same batches.
    """
    if data.scale is not None or data.padding:
        raise UserError(f"{folder.path}: streamed images are cut as in Szegedy et al.; leave out scale and padding")
    files = folder.train if training else folder.test
    order = batches(len(files), batch, training=training, seed=seed, epoch=epoch, rank=rank, world=world)
    images = _Decoded(files, data.crop or SIZE, (seed, epoch) if training else None)
    private = torch.Generator().manual_seed(seed)  # else the loader would draw from the global one
    loader = DataLoader(
        images, batch_sampler=order[start:], num_workers=workers, pin_memory=pin_memory, generator=private
    )
    return iter(loader)
