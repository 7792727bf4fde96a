"""Optimizers of other libraries with ENorm: trained, stopped, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equinorm
from support.short_training import Short, assert_resumes, dense, with_enorm


def make(build: Any, **options: Any) -> Short:
    model = dense()
    return with_enorm(model, build(model.parameters()), **options)


def schedulefree(name: str) -> Any:
    import schedulefree

    def build(parameters: Any) -> Any:
        optimizer = getattr(schedulefree, name)(parameters, lr=0.02)
        optimizer.train()
        return optimizer

    return build


@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree"])
@pytest.mark.shows("schedulefree", "ENorm, resumed bitwise, evaluated in both modes", "schedulefree")
def test_schedule_free(name: str, tmp_path: Path) -> None:
    def made() -> Short:
        model = dense()
        optimizer = schedulefree(name)(model.parameters())
        enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, 6), c=1.0, bias="plain")
        enorm.attach()
        return Short(model, optimizer, [enorm])

    whole = assert_resumes(made, tmp_path)
    x, plain = torch.randn(8, 6), dense()
    other = Short(plain, schedulefree(name)(plain.parameters()))
    other.train()
    for mode in ("eval", "train", "eval"):
        getattr(whole.optimizer, mode)()
        getattr(other.optimizer, mode)()
        assert torch.isfinite(whole.model(x)).all()
        assert float((whole.model(x) - other.model(x)).abs().max()) < 0.5


def lion(parameters: Any) -> Any:
    from lion_pytorch import Lion

    return Lion(parameters, lr=3e-3, weight_decay=0.01)


def adafactor(parameters: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=False)


def adam8bit(parameters: Any) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(parameters, lr=1e-2, min_8bit_size=16)


@pytest.mark.shows("lion-pytorch", "ENorm, resumed bitwise", "lion-pytorch")
def test_lion(tmp_path: Path) -> None:
    assert_resumes(lambda: make(lion), tmp_path)


@pytest.mark.shows("transformers", "its Adafactor with ENorm, resumed bitwise", "transformers")
def test_adafactor(tmp_path: Path) -> None:
    assert_resumes(lambda: make(adafactor), tmp_path)


@pytest.mark.shows("bitsandbytes", "Adam8bit with ENorm on the CPU, resumed", "bitsandbytes")
def test_bitsandbytes(tmp_path: Path) -> None:
    assert_resumes(lambda: make(adam8bit), tmp_path)


@pytest.mark.shows("torch.optim", "Muon for matrices and AdamW for the rest, one ENorm, resumed bitwise")
def test_muon_and_adamw(tmp_path: Path) -> None:
    class Both:
        """Two optimizers that are stepped one after the other."""

        def __init__(self, *optimizers: Any) -> None:
            self.optimizers = optimizers

        def zero_grad(self) -> None:
            for each in self.optimizers:
                each.zero_grad()

        def step(self) -> None:
            for each in self.optimizers:
                each.step()

        def state_dict(self) -> Any:
            return [each.state_dict() for each in self.optimizers]

        def load_state_dict(self, states: Any) -> None:
            for each, state in zip(self.optimizers, states, strict=True):
                each.load_state_dict(state)

    def made() -> Short:
        model = dense()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        both = Both(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2))
        enorm = equinorm.ENorm(model, list(both.optimizers), torch.zeros(2, 6), c=1.2)
        enorm.attach()
        return Short(model, both, [enorm])

    assert_resumes(made, tmp_path)


ELEMENTWISE = ["sgd", "adamw", "nadamw", "lamb", "lars", "adafactor", "lion", "adan", "rmsprop_tf", "adopt", "mars"]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.shows("timm", "its optimizers with ENorm, resumed bitwise", "timm")
def test_timm(name: str, tmp_path: Path) -> None:
    from timm.optim import create_optimizer_v2

    def made() -> Short:
        model: nn.Module = dense()
        return with_enorm(model, create_optimizer_v2(model, opt=name, lr=1e-2))

    assert_resumes(made, tmp_path)
