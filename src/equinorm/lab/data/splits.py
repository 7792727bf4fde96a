"""What a data set is once it is read: images as bytes, labels, and the statistics of the training images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DataSet", "Split", "statistics"]


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, N x C x H x W) and their labels (int64, N). `split[index]` is the part that a tensor selects."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> Split:
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test images; mean and deviation of the training pixels per channel, on the scale from 0 to 1."""

    name: str
    classes: int
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device | str) -> DataSet:
        return DataSet(self.name, self.classes, self.train.to(device), self.test.to(device), self.mean, self.std)


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel's pixels in [0, 1], from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.zeros(256, dtype=torch.int64)
        for part in channel.split(10_000):  # bincount makes an int64 copy
            counts += torch.bincount(part.reshape(-1), minlength=256)
        share = counts.double() / counts.sum()
        mean = (share * values).sum()
        means.append(float(mean))
        deviations.append(float((share * (values - mean) ** 2).sum().sqrt()))
    return tuple(means), tuple(deviations)
