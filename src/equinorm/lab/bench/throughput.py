"""How fast the laboratory trains: seconds per epoch and run, with several runs side by side (`equinorm bench lab`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..data import DataSet, Split
from ..nets import toy
from ..training.inputs import Inputs
from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Constant
from ..training.trainer import make_room
from ..training.training import Training

__all__ = ["CASES", "Speed", "measure", "random_images", "smaller"]

_CROPPED = Data("cifar10", padding=4, flip=True)
_BENT = Optim(0.1, momentum=0.9, weight_decay=1e-4, schedule=Constant())


_ENORM = Method("enorm", {"c": 1.2})


def _fc(norm: str, method: Method | None = None, **options: object) -> Run:
    model = Model("fc", {"hidden": 19, "norm": norm, "init": "he", "bias": False, **options})
    return Run(Data("cifar10"), model, method or Method(), replace(_BENT, momentum=0.0), epochs=60, batch=256)


def _conv(name: str, norm: str, method: Method | None = None, **options: object) -> Run:
    model = Model(name, {"norm": norm, **options})
    return Run(_CROPPED, model, method or Method(), _BENT, epochs=30, batch=128, precision="bfloat16")


CASES: dict[str, Run] = {
    "FC-19": _fc("none"),
    "FC-19, BN": _fc("batchnorm"),
    "FC-19, GN": _fc("groupnorm", norm_options={"groups": 10}),
    "FC-19, ENorm-1.2": _fc("none", _ENORM),
    "FC-19, ENorm-1.2 + BN": _fc("batchnorm", _ENORM),
    "CIFAR-NV": _conv("cifar_nv", "none"),
    "CIFAR-NV, BN": _conv("cifar_nv", "batchnorm"),
    "CIFAR-NV, GN": _conv("cifar_nv", "groupnorm", norm_options={"groups": 16}),
    "CIFAR-NV, ENorm-1.2": _conv("cifar_nv", "none", _ENORM),
    "ResNet-110": _conv("resnet110", "none"),
    "ResNet-110, BN": _conv("resnet110", "batchnorm"),
    "ResNet-110, MSR": _conv("resnet110", "msr", Method("msr"), noise=0.1),
    "WRN-20-96": _conv("wrn_20_96", "none"),
    "WRN-20-96, BN": _conv("wrn_20_96", "batchnorm"),
    "WRN-20-96, GN": _conv("wrn_20_96", "groupnorm"),
    "WRN-20-96, EquiNorm": _conv("wrn_20_96", "equinorm"),
}


@dataclass(frozen=True)
class Speed:
    """Measured with `side_by_side` runs at once; every time is per run."""

    name: str
    side_by_side: int
    step: float  # median milliseconds
    spread: float  # of the middle half of the measurements, milliseconds
    epoch: float  # seconds
    whole: float  # seconds for the run's own number of epochs, without evaluation
    set_up: float  # seconds to build and capture


def random_images(device: torch.device, n: int = 50_000) -> DataSet:
    """The shape of CIFAR-10 without its files: speed does not depend on what is in the images."""
    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        images = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return Split(images, torch.randint(10, (count,), generator=draw)).to(device)

    return DataSet("random", 10, split(n), split(max(n // 5, 1)), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


def smaller(run: Run) -> Run:
    """The same at a size for a CPU: the code is tried, the numbers mean little."""
    return replace(run, model=Model(run.model.name, {**run.model.options, **toy(run.model.name)}), batch=64)


def measure(
    name: str, run: Run, data: DataSet, side_by_side: Sequence[int], steps: int = 60, repeats: int = 5
) -> Iterator[Speed]:
    """Speeds of a run with each of several numbers of copies side by side."""
    inputs = Inputs(data, run)
    copies: list[Training] = []
    for k in sorted(side_by_side):
        start = time.monotonic()
        while len(copies) < k:
            make_room(inputs.device)
            copies.append(Training(replace(run, seed=len(copies)), inputs))
        _advance(copies, 2)
        set_up = (time.monotonic() - start) / k
        times = [_advance(copies, steps) / steps / k for _ in range(repeats)]
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
        per_epoch = middle * copies[0].steps_per_epoch
        yield Speed(name, k, 1e3 * middle, 1e3 * (high - low), per_epoch, per_epoch * run.epochs, set_up)


def _advance(copies: Sequence[Training], steps: int) -> float:
    """Seconds for so many steps of every copy."""
    _wait()
    start = time.monotonic()
    for _ in range(steps):
        for training in copies:
            if training.at_epoch_end:  # stay within an epoch: evaluation is not a step
                training.done = 0
            training.step()
    _wait()
    return time.monotonic() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
