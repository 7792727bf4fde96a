"""accelerate: ENorm registered for checkpointing, made before and after `prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import equinorm


def start(after_prepare: bool, kind: Any, steps: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = kind(model.parameters())
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 6, generator=made), torch.randint(3, (32,), generator=made)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    if after_prepare:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, 6), c=1.2)
    else:
        enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, 6), c=1.2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(enorm)
    enorm.attach()
    return accelerator, model, optimizer, loader, enorm


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, enorm: Any, epochs: int) -> None:
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("after_prepare", [False, True])
@pytest.mark.shows("accelerate", "register_for_checkpointing(enorm), resumed bitwise", "accelerate")
def test_resumes_bitwise(after_prepare: bool, steps: int, kind: Any, tmp_path: Path) -> None:
    whole = start(after_prepare, kind, steps)
    train(*whole, epochs=4)
    first = start(after_prepare, kind, steps)
    train(*first, epochs=2)
    first[0].save_state(tmp_path)
    second = start(after_prepare, kind, steps)
    second[0].load_state(tmp_path)
    train(*second, epochs=2)
    for name, expected in whole[1].state_dict().items():
        assert second[1].state_dict()[name].equal(expected), name
        assert not first[1].state_dict()[name].equal(expected), name
    assert whole[4].calls == second[4].calls == 16 // steps
