"""What one training run is: plain data, so that it can be stored, compared and sent to another machine.

run = Run(Data("cifar10"), Model("fc", {"hidden": 19}), Method("enorm", {"c": 1.2}), Optim(lr=0.05), epochs=60)
run.key            # "cifar10-fc-enorm-1f0c9a7be2d4": the same numbers always have the same key
replace(run, seed=1)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .schedules import SCHEDULES, Linear, Schedule

__all__ = ["Data", "Method", "Model", "Optim", "Run"]

Options = Mapping[str, Any]

LATER = {"later": True}
"""Of fields that were added when there were measured runs: where they have their default they are not in the key."""


@dataclass(frozen=True)
class Data:
    """A data set and how its images reach the network."""

    name: str = "digits"
    options: Options = field(default_factory=dict)  # of `lab.data.load`
    train: int | None = None  # so many training images, drawn once for all runs; None: all
    held_out: int = 0  # training images kept aside; drawn once for all runs
    evaluate: str = "test"  # or "held_out": what a choice of hyper-parameters may look at
    inputs: str = "standard"  # minus mean over deviation, per channel; "unit": pixels in [0, 1], as EquiNorm wants
    mean: tuple[float, ...] | None = None  # what "standard" subtracts, where a paper prints it; None: the data's own
    std: tuple[float, ...] | None = None  # and divides by
    crop: int | None = None  # random crops of this size in training, the centre at test time; None: the image's own
    padding: int = 0  # zeros around the image before it is cropped
    flip: bool = False
    scale: tuple[float, float] | None = None  # random magnification, from and to
    mixup: float = 0.0  # α of Beta(α, α); 0: none
    manifold: bool = False  # mix at a random depth instead of at the input
    clients: int = field(default=0, metadata=LATER)  # that train in turn and are averaged after each epoch; 0: nobody
    dirichlet: float = field(default=0.0, metadata=LATER)  # how even clients' labels are: α of Dirichlet(α)


@dataclass(frozen=True)
class Model:
    """A model of `lab.nets` with its options; `norm` is one of them."""

    name: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """What acts on the weights while they are trained, or once before: see `parts.METHODS`."""

    name: str = "none"
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Optim:
    """An optimizer with a schedule: SGD, Adam and AdamW with their usual constants, or orthogonalized momentum
    (Muon)."""

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_norms: bool = True  # whether gains, offsets and biases decay too
    schedule: Schedule = field(default_factory=Linear)
    name: str = "sgd"  # or "adam", "adamw", "muon"
    norm_rate: float = field(default=1.0, metadata=LATER)  # of gains, offsets and biases, over that of the weights
    bias_rate: float = field(default=1.0, metadata=LATER)  # of offsets and biases, besides
    kernel_rate: float = field(default=1.0, metadata=LATER)  # of V in e^g V (mean shift rejection)
    classifier_rate: float = field(default=1.0, metadata=LATER)  # of the classifier's weights
    clip: float = field(default=0.0, metadata=LATER)  # the longest gradient of an example (DP-SGD); 0: no such limit
    noise_multiplier: float = field(default=0.0, metadata=LATER)  # of the noise that is added to their sum, over `clip`


@dataclass(frozen=True)
class Run:
    """One training run. Two runs with equal fields are the same run; `label` is only what a plot calls it."""

    data: Data
    model: Model
    method: Method = field(default_factory=Method)
    optim: Optim = field(default_factory=Optim)
    epochs: float = 1
    batch: int = 128
    seed: int = 0
    precision: str = "tf32"  # float32 | tf32 | bfloat16 (autocast and channels_last); float32 on a CPU
    record: tuple[str, ...] = ()  # what is measured besides loss and accuracy: see `recording.RECORDED`
    label: str = field(default="", compare=False)
    loss: str = field(default="cross_entropy", metadata=LATER)  # what is trained; or "binary": see `losses.LOSSES`

    @cached_property
    def key(self) -> str:
        """A name that says what it is, and a hash that says exactly which."""
        config = self.to_dict()
        del config["label"]
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.data.name}-{self.model.name}-{self.method.name}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        plain = _plain(self)
        plain["optim"]["schedule"] = {"name": type(self.optim.schedule).__name__, **_plain(self.optim.schedule)}
        return plain

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Run:
        """The run that `to_dict` described; unknown fields are an error, missing ones take their default."""
        config = dict(config)
        optim = dict(config.get("optim", {}))
        if "schedule" in optim:
            schedule = dict(optim["schedule"])
            optim["schedule"] = _make(SCHEDULES[schedule.pop("name")], schedule)
        parts = {"data": Data, "model": Model, "method": Method}
        made = {name: _make(part, config[name]) for name, part in parts.items() if name in config}
        return _make(cls, {**config, **made, "optim": _make(Optim, optim)})


def _plain(value: Any) -> Any:
    """Nested dataclasses, mappings and tuples as what JSON knows; the same values always give the same text."""
    if hasattr(value, "__dataclass_fields__"):
        values = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: _plain(v) for f, v in values if not ("later" in f.metadata and v == f.default)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 60 epochs are 60.0 epochs
    return value


def _make(cls: Any, config: Mapping[str, Any]) -> Any:
    unknown = set(config) - {f.name for f in fields(cls)}
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}: written by a newer version?")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items()})
