"""What torch itself offers around a training: compilation, precision, memory, functional transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import equinorm
from support.short_training import (
    IMAGE,
    Short,
    adamw,
    assert_resumes,
    assert_same,
    convolutional,
    dense,
    sgd,
    with_enorm,
    with_method,
)

METHODS = ["equinorm", "msr"]


def enormed(kind: Any, **options: Any) -> Short:
    model = dense()
    return with_enorm(model, kind(model), **options)


def compiled(short: Short) -> Short:
    torch._dynamo.reset()
    short.run = torch.compile(short.model, fullgraph=True)  # type: ignore[assignment]
    return short


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.shows("torch.compile", "a compiled model with ENorm: as eager, resumed bitwise")
def test_compiled_with_enorm(kind: Any, tmp_path: Path) -> None:
    eager = enormed(kind)
    eager.train()
    whole = assert_resumes(lambda: compiled(enormed(kind)), tmp_path)
    assert_same(eager, whole, 1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.shows("torch.compile", "compiled EquiNorm and mean shift rejection: as eager, resumed bitwise")
def test_compiled_methods(method: str, tmp_path: Path) -> None:
    eager = with_method(method)
    eager.train()
    whole = assert_resumes(lambda: compiled(with_method(method)), tmp_path)
    assert_same(eager, whole, 1e-3)


def bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.shows("AMP", "autocast to bfloat16 with ENorm, resumed bitwise")
def test_autocast_with_enorm(kind: Any, tmp_path: Path) -> None:
    whole = assert_resumes(lambda: enormed(kind, around=bfloat16), tmp_path)
    assert whole.train() < 2.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.shows("AMP", "autocast to bfloat16 with EquiNorm and mean shift rejection, resumed bitwise")
def test_autocast_methods(method: str, tmp_path: Path) -> None:
    assert_resumes(lambda: with_method(method, around=bfloat16), tmp_path)


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.shows("GradScaler", "with ENorm: as without a scaler, resumed bitwise")
def test_grad_scaler_with_enorm(kind: Any, tmp_path: Path) -> None:
    plain = enormed(kind)
    plain.train()
    assert_same(plain, assert_resumes(lambda: enormed(kind, scaler=scaler()), tmp_path), 1e-4)


@pytest.mark.shows("GradScaler", "with mean shift rejection: as without a scaler, resumed bitwise")
def test_grad_scaler_with_mean_shift_rejection(tmp_path: Path) -> None:
    plain = with_method("msr")
    plain.train()
    assert_same(plain, assert_resumes(lambda: with_method("msr", scaler=scaler()), tmp_path), 1e-4)


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.shows("accumulation", "gradients over two batches with ENorm: as one batch, resumed bitwise")
def test_accumulation(kind: Any, tmp_path: Path) -> None:
    whole, joined = (
        assert_resumes(lambda: enormed(kind, accumulate=2), tmp_path),
        enormed(kind, accumulate=2, joined=True),
    )
    assert whole.methods[0].calls == 6
    joined.train()
    assert_same(joined, whole, 1e-4)


class Checkpointed(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.training else part(x)
        return x


@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.shows("checkpointing", "activation checkpointing with ENorm: as without, resumed bitwise")
def test_activation_checkpointing(kind: Any, tmp_path: Path) -> None:
    def make() -> Short:
        net = dense()
        model = Checkpointed(net[:2], net[2:4], net[4:])
        return with_enorm(model, kind(model))

    plain, whole = enormed(kind), assert_resumes(make, tmp_path)
    plain.train()
    for expected, found in zip(plain.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.shows("checkpointing", "activation checkpointing of EquiNorm and mean shift rejection, resumed bitwise")
def test_activation_checkpointing_of_methods(method: str, tmp_path: Path) -> None:
    def make() -> Short:
        short = with_method(method)
        short.run = lambda x: checkpoint(short.model, x, use_reentrant=False)
        return short

    plain, whole = with_method(method), assert_resumes(make, tmp_path)
    plain.train()
    for expected, found in zip(plain.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    if method == "equinorm":  # what is computed twice is tracked twice, as by BatchNorm
        assert whole.model[0].num_batches_tracked == 2 * plain.model[0].num_batches_tracked


def last(short: Short) -> Short:
    short.model.to(memory_format=torch.channels_last)
    short.prepare = lambda x: x.contiguous(memory_format=torch.channels_last)
    return short


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.shows("channels_last", "EquiNorm and mean shift rejection: as contiguous, resumed bitwise")
def test_channels_last_methods(method: str, tmp_path: Path) -> None:
    plain = with_method(method)
    plain.train()
    assert_same(plain, assert_resumes(lambda: last(with_method(method)), tmp_path), 1e-4)


@pytest.mark.shows("channels_last", "ENorm: as contiguous, resumed bitwise")
def test_channels_last_with_enorm(tmp_path: Path) -> None:
    def make() -> Short:
        model = convolutional()
        return with_enorm(model, sgd(model), shape=IMAGE)

    def make_last() -> Short:
        model = convolutional().to(memory_format=torch.channels_last)
        return last(with_enorm(model, sgd(model), shape=IMAGE))

    plain = make()
    plain.train()
    assert_same(plain, assert_resumes(make_last, tmp_path), 1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.shows("torch.func", "vmap of grad per example equals a loop, in evaluation")
def test_functional_transforms(method: str) -> None:
    short = with_method(method)
    short.train()
    model = short.model.eval().double()
    x, y = torch.randn(4, *IMAGE, dtype=torch.float64), torch.randint(3, (4,))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, (parameters, buffers), (image[None],))
        return nn.functional.cross_entropy(output, label[None])

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(4):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found[name][i], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.shows("torch.func", "functional_call of a balanced model")
def test_functional_call_of_a_balanced_model() -> None:
    model, x = dense(), torch.randn(4, 6)
    twin = dense()
    expected = model(x)
    equinorm.balance_(model, x)
    torch.testing.assert_close(torch.func.functional_call(twin, dict(model.named_parameters()), (x,)), expected)
