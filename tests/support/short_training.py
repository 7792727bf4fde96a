"""A training of a few steps, whole or stopped and resumed from a checkpoint on disk: for tests of other programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equinorm

STEPS = 6


@dataclass
class Short:
    """What a training is made of; every part with a `state_dict` goes into its checkpoint."""

    model: nn.Module
    optimizer: Any
    methods: list[Any] = field(default_factory=list)
    scaler: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    accumulate: int = 1
    joined: bool = False  # the batches of a step as one
    run: Callable[[Tensor], Tensor] | None = None  # what is called in the place of the model, as a compiled one
    step: Callable[[], Any] | None = None  # what is called in the place of the optimizer's step, as a compiled one
    create_graph: bool = False
    shape: tuple[int, ...] = (6,)
    prepare: Callable[[Tensor], Tensor] = lambda x: x

    def parts(self) -> list[Any]:
        return [self.model, self.optimizer, *self.methods, *([self.scaler] if self.scaler else [])]

    def train(self, start: int = 0, end: int = STEPS) -> float:
        made, loss = torch.Generator().manual_seed(0), torch.zeros(())
        data = [
            (torch.randn(8, *self.shape, generator=made), torch.randint(3, (8,), generator=made))
            for _ in range(STEPS * self.accumulate)
        ]
        forward = self.run or self.model
        self.model.train()
        for step in range(start, end):
            self.optimizer.zero_grad()
            batches = data[step * self.accumulate : (step + 1) * self.accumulate]
            if self.joined:
                xs, ys = zip(*batches, strict=True)
                batches = [(torch.cat(xs), torch.cat(ys))]
            for x, y in batches:
                with self.around():
                    loss = nn.functional.cross_entropy(forward(self.prepare(x)).float(), y) / len(batches)
                (self.scaler.scale(loss) if self.scaler else loss).backward(create_graph=self.create_graph)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                (self.step or self.optimizer.step)()
        return float(loss.detach())


def assert_resumes(make: Callable[[], Short], folder: Path) -> Short:
    """Train whole, and in two parts with a checkpoint between; bitwise the same in the end. Returns the whole one."""
    whole = make()
    whole.train()
    first = make()
    first.train(0, STEPS // 2)
    torch.save([part.state_dict() for part in first.parts()], folder / "half.pt")
    second = make()
    for part, state in zip(second.parts(), torch.load(folder / "half.pt", weights_only=False), strict=True):
        part.load_state_dict(state)
    second.train(STEPS // 2)
    moved = False
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], expected), name
        moved |= not torch.equal(first.model.state_dict()[name], expected)
    assert moved
    return whole


def assert_same(one: Short, other: Short, tolerance: float = 1e-5) -> None:
    """Both trainings end at the same weights."""
    for name, expected in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], expected, rtol=tolerance, atol=tolerance)


def dense(width: int = 12) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def convolutional() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 3),
    )


IMAGE = (3, 8, 8)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def with_enorm(model: nn.Module, optimizer: Any, inputs: Any = None, *, c: float = 1.2, **options: Any) -> Short:
    """ENorm attached; of a model for images, `shape=IMAGE`."""
    shape = options.get("shape", (6,))
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, *shape) if inputs is None else inputs, c=c)
    enorm.attach()
    return Short(model, optimizer, [enorm], **options)


def with_method(method: str, optimizer: Callable[[nn.Module], Any] = sgd, **options: Any) -> Short:
    """The convolutional net converted to a method; mean shift rejection attached where that is the method."""
    model, _ = equinorm.convert(convolutional(), method, torch.randn(4, *IMAGE))
    made = optimizer(model)
    methods = []
    if method == "msr":
        methods.append(equinorm.MeanShiftRejection(model, made))
        methods[0].attach()
    return Short(model, made, methods, shape=IMAGE, **options)
