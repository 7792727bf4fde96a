"""What a run trains on: a data set on the device, or images that worker processes read from a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data as datasets
from ..data import DataSet, augment
from ..data.folder import SIZE, ImageFolder, find_folder, stream
from .precision import is_low
from .runs import Run

__all__ = ["Inputs", "Streamed", "inputs_of"]

TEST_BATCH = 2000


class Inputs:
    """A data set on a device, prepared as a run wants it; runs with the same `Data` share it."""

    streamed = False

    def __init__(self, data: DataSet, run: Run) -> None:
        spec = run.data
        device = data.train.images.device
        self.spec, self.classes, self.channels_last = spec, data.classes, is_low(run.precision, device)
        self.train, self.test_labels = data.train, data.test.labels
        self.mean, self.std = (torch.tensor(x, device=device) for x in (spec.mean or data.mean, spec.std or data.std))
        fixed = not (spec.crop or spec.padding or spec.flip or spec.scale)
        self.prepared = self.seen(data.train.images, training=False) if fixed else None
        self.test = self.seen(data.test.images, training=False)
        channels, height, width = self.test.shape[1:]
        self.shape = (channels, height, width)
        self.device = device

    def __len__(self) -> int:
        return len(self.train)

    def seen(self, images: Tensor, training: bool) -> Tensor:
        """Images as a network sees them; the random part of augmentation only in training."""
        return augment(images, self.spec, self.mean, self.std, training=training, channels_last=self.channels_last)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The training images of `index`, augmented, and their labels."""
        if self.prepared is not None:
            return self.prepared[index], self.train.labels[index]
        return self.seen(self.train.images[index], training=True), self.train.labels[index]

    def examples(self, n: int) -> Tensor:
        """The first n training images, without the random part."""
        return self.seen(self.train.images[:n], training=False)

    def tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.test.split(TEST_BATCH), self.test_labels.split(TEST_BATCH), strict=True)

    @property
    def test_size(self) -> int:
        return len(self.test_labels)


class Streamed:
    """A folder of images that is too large for the device: worker processes decode it, batch by batch."""

    streamed = True

    def __init__(self, folder: ImageFolder, run: Run, device: torch.device, workers: int | None = None) -> None:
        spec = run.data
        self.folder, self.spec, self.device = folder, spec, device
        self.workers = min(8, (os.cpu_count() or 1) - 1) if workers is None else workers
        self.classes, self.channels_last = len(folder.classes), is_low(run.precision, device)
        self.mean, self.std = (
            torch.tensor(x, device=device) for x in (spec.mean or folder.mean, spec.std or folder.std)
        )
        self.shape = (3, spec.crop or SIZE, spec.crop or SIZE)

    def __len__(self) -> int:
        return len(self.folder.train)

    def seen(self, images: Tensor, training: bool) -> Tensor:
        spec = replace(self.spec, crop=None)  # the workers have cut
        return augment(images, spec, self.mean, self.std, training=training, channels_last=self.channels_last)

    def epoch(self, batch: int, **position: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch from a given one on: bytes and labels, on the device."""
        return self._moved(stream(self.folder, self.spec, batch, training=True, workers=self.workers, **position))

    def examples(self, n: int) -> Tensor:
        images, _ = next(iter(self.epoch(min(n, len(self)))))
        return self.seen(images, training=False)

    def tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._moved(stream(self.folder, self.spec, 250, training=False, workers=self.workers)):
            yield self.seen(images, training=False), labels

    def _moved(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images.to(self.device), labels.to(self.device)) for images, labels in batches)

    @property
    def test_size(self) -> int:
        return len(self.folder.test)


def inputs_of(run: Run, data_dir: Path | None, device: torch.device) -> Inputs | Streamed:
    """The data of a run: on the device, or streamed from disk where it is a folder of images."""
    if datasets.is_streamed(run.data):
        return Streamed(find_folder(run.data.name, data_dir), run, device)
    return Inputs(datasets.prepare(run.data.name, run.data, data_dir, device), run)
