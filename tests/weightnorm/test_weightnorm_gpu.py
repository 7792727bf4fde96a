"""The weight norm family on CUDA: its kernels against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import equinorm
from equinorm.launch import plain_only
from equinorm.weightnorm import centred_weight_norm_, scaled_weight_norm_, weight_standardization_

pytestmark = pytest.mark.gpu
FAMILY = [equinorm.weight_norm_, centred_weight_norm_, scaled_weight_norm_, weight_standardization_]


def net(apply: Any, layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 8, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    apply(model)
    return model.cuda().to(memory_format=layout)  # type: ignore[call-overload]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("apply", FAMILY)
def test_kernels_equal_plain_torch(apply: Any, layout: torch.memory_format) -> None:
    model = net(apply, layout)
    twin, x = copy.deepcopy(model), torch.randn(4, 3, 9, 9, device="cuda")
    assert "Normalized" in str(model[0].weight.grad_fn)  # type: ignore[index]
    for _ in range(2):  # launched by Triton, and then by ourselves
        model.zero_grad()
        model(x).square().mean().backward()
    with plain_only():
        assert "Normalized" not in str(twin[0].weight.grad_fn)
        twin(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-3 * float(q.grad.abs().max()))


@pytest.mark.parametrize("apply", FAMILY)
def test_under_autocast_weights_are_made_as_they_are_used(apply: Any) -> None:
    model = net(apply, torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        weight = model[0].weight  # type: ignore[index]
        assert weight.dtype == torch.bfloat16
        model(torch.randn(4, 3, 9, 9, device="cuda")).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model[0].weight.dtype == torch.float32  # type: ignore[index]
    with torch.no_grad(), plain_only():
        torch.testing.assert_close(weight.float(), model[0].weight, rtol=1e-2, atol=1e-3)  # type: ignore[index]
