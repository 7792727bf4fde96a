"""A timm model trained without batch statistics, in timm's own way: its optimizers, schedulers and averaged weights.

timm's `test_resnet` is converted to mean shift rejection, trained on scikit-learn's digits with ENorm in every step, a
weight decay that leaves alone what it should, and an average of the weights that is kept in the same coordinates. It is
stopped in the middle, resumed from its checkpoint, and folded into a plain model at the end.

    python examples/timm_training.py [EPOCHS]        prints the accuracy after every epoch
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm

BATCH = 32


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,500 images for training and 297 for testing, of 32 × 32."""
    content = load_digits()
    x = torch.tensor(content.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    x = F.interpolate(x, (32, 32), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    y = torch.tensor(content.target)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


@dataclass
class Training:
    """All that a training is made of, and what a checkpoint holds of it."""

    model: nn.Module
    ema: ModelEmaV3
    optimizer: torch.optim.Optimizer
    scheduler: Any
    enorm: equinorm.ENorm

    @classmethod
    def start(cls, epochs: int) -> Training:
        torch.manual_seed(0)
        example = torch.zeros(2, 3, 32, 32)
        model = timm.create_model("test_resnet", num_classes=10)
        model, report = equinorm.convert(model, "msr", example)
        print(report.summary)
        groups = param_groups_weight_decay(model, 0.01, no_weight_decay_list=equinorm.no_weight_decay(model))
        optimizer = create_optimizer_v2(groups, opt="adamw", lr=5e-3)
        ema = ModelEmaV3(model, decay=0.9)
        enorm = equinorm.ENorm(model, optimizer, example, companions=[ema])
        enorm.attach()
        return cls(model, ema, optimizer, CosineLRScheduler(optimizer, epochs, lr_min=1e-5), enorm)

    def epoch(self, x: Tensor, y: Tensor, number: int) -> None:
        self.model.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        for rows in order.split(BATCH):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x[rows]), y[rows], label_smoothing=0.1).backward()
            self.optimizer.step()
            self.ema.update(self.model)
        self.scheduler.step(number + 1)

    def state_dict(self) -> dict[str, Any]:
        names = ("model", "ema", "optimizer", "scheduler", "enorm")
        return {name: getattr(self, name).state_dict() for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, content in state.items():
            getattr(self, name).load_state_dict(content)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model.eval()(x).argmax(1) == y).float().mean())


def main(epochs: int = 8) -> nn.Module:
    (x, y), test = digits()
    training = Training.start(epochs)
    for number in range(epochs):
        if number == epochs // 2:  # as if the program had been stopped here
            checkpoint = io.BytesIO()
            torch.save(training.state_dict(), checkpoint)
            checkpoint.seek(0)
            training = Training.start(epochs)
            training.load_state_dict(torch.load(checkpoint, weights_only=True))
        training.epoch(x, y, number)
        own, averaged = accuracy(training.model, *test), accuracy(training.ema.module, *test)
        print(f"epoch {number + 1}: {own:.3f}, averaged {averaged:.3f}")
    plain, report = equinorm.fold(training.ema.module, test[0][:2])
    print(report.summary)
    torch.testing.assert_close(plain(test[0]), training.ema.module(test[0]), rtol=1e-4, atol=1e-4)
    return plain


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
