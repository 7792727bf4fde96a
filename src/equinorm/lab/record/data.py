"""CIFAR-10 on the device: read once, augmented by tables of addresses.

Augmentation is airbench's: every image is flipped or not by chance in the first epoch, and the other way round in each
next one; it is moved by up to two pixels each way over its reflected edge. All images lie padded in memory, plain and
flipped, and an augmented image is a window into that: one address per image says all, so a table of addresses made
before the run is all that a captured step has to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["HELD_OUT", "Images", "Pixels", "addresses", "as_pixels", "normalized", "read_cifar10", "toy_images"]

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
SIZE, REACH = 32, 2
PADDED = SIZE + 2 * REACH
CHANNELS = 4
"""Three and one of zeros: a pixel is then one word of memory."""
HELD_OUT = 5000
"""The last training images, on which choices are made."""
_WORDS = {2: torch.int64, 4: torch.complex128}


@dataclass(frozen=True)
class Images:
    """uint8 images (n, 3, 32, 32) and labels of the training and the test set."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    def held_out(self) -> Images:
        """The last training images in place of the test set."""
        n = len(self.train) - min(HELD_OUT, len(self.train) // 10)
        return Images(self.train[:n], self.train_labels[:n], self.train[n:], self.train_labels[n:])


def read_cifar10(folder: Path, device: torch.device | str) -> Images:
    """The official binary files, in `folder` or in cifar-10-batches-bin below it."""
    below = folder / "cifar-10-batches-bin"
    folder = below if below.is_dir() else folder
    parts = []
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: unpack cifar-10-binary.tar.gz into --data")
        parts.append(np.fromfile(folder / name, np.uint8).reshape(-1, 3073))
    rows = torch.from_numpy(np.concatenate(parts)).to(device)
    images, labels = rows[:, 1:].reshape(-1, 3, SIZE, SIZE).contiguous(), rows[:, 0].long()
    return Images(images[:50000], labels[:50000], images[50000:], labels[50000:])


def toy_images(device: torch.device | str, n: int = 200) -> Images:
    """Random colours that say the class: a net learns them in a few steps."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2 * n) % 10
    colours = torch.randint(0, 256, (10, 3, 4, 4), generator=generator).float()
    images = F.interpolate(colours[labels], scale_factor=8) * 0.6
    images = images + 100 * torch.rand(images.shape, generator=generator)
    images, labels = images.to(torch.uint8).to(device), labels.to(device)
    return Images(images[:n], labels[:n], images[n:], labels[n:])


def normalized(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 (n, 3, h, w) to (n, 4, h, w), channels last."""
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    deviation = torch.tensor(DEVIATION, device=images.device).view(1, 3, 1, 1)
    n, _, h, w = images.shape
    out = torch.zeros(n, h, w, CHANNELS, dtype=dtype, device=images.device).permute(0, 3, 1, 2)
    for start in range(0, n, 10000):  # in float32 for a part at a time only
        part = images[start : start + 10000].float()
        out[start : start + 10000, :3] = (part.div_(255).sub_(mean).div_(deviation)).to(dtype)
    return out


def as_pixels(images: Tensor) -> Tensor:
    """What `normalized` was made of, in [0, 1]; the channel of zeros stays one."""
    mean, deviation = ((*values, *[0.0] * (CHANNELS - 3)) for values in (MEAN, DEVIATION))
    scale, shift = (torch.tensor(values, device=images.device).to(images.dtype) for values in (deviation, mean))
    return images * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class Pixels:
    """All training images, padded, plain and then flipped."""

    def __init__(self, images: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
        self.images, self.labels, self.n = images, labels, len(images)
        shape = (2 * self.n, PADDED, PADDED, CHANNELS)
        self._memory = torch.zeros(shape, dtype=dtype, device=images.device)
        self._words = self._memory.view(_WORDS[dtype.itemsize]).view(-1)
        self._inside = {size: self._window(size) for size in (SIZE,)}
        self.fill()

    def _window(self, size: int) -> Tensor:
        """Where the pixels of a window lie, seen from its first."""
        side = torch.arange(size, device=self.images.device)
        return (side[:, None] * PADDED + side[None, :]).view(1, -1)

    def fill(self) -> None:
        """From the uint8 images; done in the constructor, and again where its time is to count."""
        for start in range(0, self.n, 10000):
            part = normalized(self.images[start : start + 10000], self._memory.dtype)
            part = F.pad(part, (REACH,) * 4, mode="reflect").permute(0, 2, 3, 1)
            end = start + len(part)
            self._memory[start:end] = part
            self._memory[self.n + start : self.n + end] = part.flip(2)

    def windows(self, at: Tensor, size: int = SIZE) -> Tensor:
        """The images at these addresses, (n, 4, size, size), channels last."""
        if size not in self._inside:
            self._inside[size] = self._window(size)
        words = self._words[at[:, None] + self._inside[size]]
        return words.view(len(at), -1, 1).view(self._memory.dtype).view(-1, size, size, CHANNELS).permute(0, 3, 1, 2)


def addresses(
    labels: Tensor, batch: int, steps: int, generator: torch.Generator, small: int = SIZE, small_steps: int = 0
) -> tuple[Tensor, Tensor]:
    """Where the windows of every step begin in `Pixels`, and their labels: two tables of shape (steps, batch).

    Each epoch has every image at most once, in an order of its own; what does not fill a batch is left out. The first
    `small_steps` steps see windows of side `small`, which may lie anywhere in the padded image.
    """
    n, device = len(labels), labels.device
    if batch > n:
        raise ValueError(f"a batch of {batch} is more than the {n} training images")
    draw = {"device": device, "generator": generator}
    per_epoch = n // batch
    flipped = torch.randint(0, 2, (n,), **draw)  # type: ignore[call-overload]
    tables, chosen = [], []
    for epoch in range(math.ceil(steps / per_epoch)):
        order = torch.randperm(n, **draw)[: per_epoch * batch]  # type: ignore[call-overload]
        move = torch.randint(0, 2 * REACH + 1, (2, len(order)), **draw)  # type: ignore[call-overload]
        if (count := min(small_steps - epoch * per_epoch, per_epoch) * batch) > 0:
            move[:, :count] = torch.randint(0, PADDED - small + 1, (2, count), **draw)  # type: ignore[call-overload]
        image = order + n * (flipped[order] ^ (epoch % 2))
        tables.append((image * PADDED + move[0]) * PADDED + move[1])
        chosen.append(labels[order])
    at, labels = torch.cat(tables).view(-1, batch)[:steps], torch.cat(chosen).view(-1, batch)[:steps]
    return at.contiguous(), labels.contiguous()
