"""The laboratory's kernels beside what torch does in float64; used on a CPU (interpreted) and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 0.0) -> None:
    """`scale`: of what was summed, where most of it may have cancelled."""
    tolerance = 8 * torch.finfo(dtype).eps
    scale = max(scale, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale)


def check_convolution(
    kernels: Any,
    images: tuple[int, int, int],
    channels: tuple[int, int],
    precision: torch.dtype,
    plus: bool = False,
    relu: bool = False,
    scaled: bool = False,
    biased: bool = False,
    device: str = "cpu",
    **kernel: Any,
) -> None:
    """`kernel`: dtype and memory_format of the weight."""
    (n, height, width), (a, b) = images, channels
    x = torch.randn(n, a, height, width, device=device).to(precision).contiguous(memory_format=torch.channels_last)
    weight = (0.1 * torch.randn(b, a, 3, 3, device=device)).to(**kernel)
    added = torch.randn(n, b, height, width, device=device).to(precision) if plus else None  # not in channels_last
    log_scale = torch.randn(b, 1, 1, 1, device=device) if scaled else None
    bias = torch.randn(b, device=device) if biased else None
    tensors = [t.requires_grad_() for t in (x, weight, added, log_scale, bias) if t is not None]
    exact = {id(t): t.detach().double().requires_grad_() for t in tensors}
    assert kernels.fits(x, weight)
    out = kernels.conv3x3(x, weight, added, relu, log_scale, bias)
    assert out.dtype == precision
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_weight = exact[id(log_scale)].exp() * exact[id(weight)] if scaled else exact[id(weight)]
    rounded = exact_weight + (exact_weight.to(precision).double() - exact_weight).detach()
    expected = F.conv2d(exact[id(x)], rounded, exact.get(id(bias)), padding=1)
    expected = expected + exact[id(added)] if plus else expected
    if relu:  # where rounding decides what is positive, follow it
        assert_close(out, expected.relu(), precision, scale=1.0)
        expected = expected * (out > 0)
    expected.backward(grad.double())
    assert_close(out, expected, precision, scale=1.0)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    steepest = max(float(log_scale.detach().exp().max()), 1.0) if log_scale is not None else 1.0  # gradients have e^g
    for mine in tensors:
        many = 1.0 if mine is x or mine is added else 40 * steepest * (n * height * width) ** 0.5
        assert_close(mine.grad, exact[id(mine)].grad, mine.dtype, scale=many)


def check_residuals(
    kernels: Any,
    images: tuple[int, int, int],
    channels: int,
    number: int,
    precision: torch.dtype,
    scaled: bool,
    noise: float = 0.0,
    biased: bool = False,
    device: str = "cpu",
) -> None:
    """So many units, against the same of single convolutions; within a unit these round in the same places."""
    n, height, width = images
    shape = (n, channels, height, width)
    x = torch.randn(shape, device=device).to(precision, memory_format=torch.channels_last).requires_grad_()
    units, leaves = [], [x]
    for _ in range(number):
        tensors = [0.1 * torch.randn(channels, channels, 3, 3, device=device) for _ in range(2)]
        scales = [0.3 * torch.randn(channels, 1, 1, 1, device=device) for _ in range(2 * scaled)]
        biases = [0.3 * torch.randn(channels, device=device) for _ in range(2 * biased)]
        tensors += scales + biases
        leaves += [t.requires_grad_() for t in tensors]
        units.append(kernels.Unit(*tensors[:2], *(scales or [None] * 2), *biases))
    torch.manual_seed(5)
    out = kernels.residuals(x, units, noise)
    torch.manual_seed(5)
    with torch.no_grad():
        assert torch.equal(kernels.residuals(x, units, noise), out)
    torch.manual_seed(5)
    seeds = torch.randint(2**31, (number, 4), dtype=torch.int32, device=device)
    expected = x
    for i, unit in enumerate(units):
        if i and noise:
            expected = (expected * factors(seeds[i], shape, noise)).to(precision)
        inside = kernels.conv3x3(expected, unit.first, None, True, unit.first_scale, unit.first_bias)
        expected = kernels.conv3x3(inside, unit.second, expected, True, unit.second_scale, unit.second_bias)
    grad = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, leaves, grad) for y in (out, expected))
    for mine, theirs in zip((out, *found), (expected, *wanted), strict=True):
        if number == 1:
            assert_close(mine, theirs, precision if mine.shape == x.shape else torch.float32)
        else:  # rounding decides what is positive, here and there; noise of 0.5 that is left out makes 0.29
            assert (mine - theirs).double().norm() < 0.15 * theirs.double().norm()


def factors(seed: Tensor, shape: tuple[int, int, int, int], noise: float) -> Tensor:
    """1 + noise · U(-1, 1) by the hash of the kernels, in torch; for images in channels_last."""
    n, channels, height, width = shape
    word = 2**32 - 1
    h = torch.arange(n * channels * height * width // 2, device=seed.device) ^ seed[0].long()
    h = (h ^ (h >> 16)) * 0x7FEB352D + seed[1].long() & word
    h = (h ^ (h >> 15)) * 0x846CA68B & word
    h = h ^ (h >> 16)
    drawn = torch.stack([h & 0xFFFF, h >> 16], 1).flatten() * 2.0**-15 - 1
    return (1 + noise * drawn).view(n, height, width, channels).permute(0, 3, 1, 2)


def check_norm(
    kernels: Any,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    plus: bool,
    relu: bool,
    groups: int = 0,
    device: str = "cpu",
) -> None:
    """BatchNorm, or GroupNorm with so many groups."""
    channels = shape[1]
    x = (2 * torch.randn(shape, device=device) + 3).to(dtype).contiguous(memory_format=torch.channels_last)
    added = torch.randn(shape, device=device).to(dtype) if plus else None  # not in channels_last
    weight, bias = torch.rand(channels, device=device) + 0.5, torch.randn(channels, device=device)
    tensors = [t.requires_grad_() for t in (x, weight, bias, added) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    running = [torch.randn(channels, device=device), torch.rand(channels, device=device)]
    exact_running = [t.double() for t in running]
    batches = torch.tensor(4, device=device)
    assert kernels.fits(x, added, groups)
    if groups:
        out = kernels.group_norm(x, groups, weight, bias, 1e-5, added, relu)
        expected = F.group_norm(exact[0], groups, exact[1], exact[2], 1e-5)
        variance = exact[0].detach().unflatten(1, (groups, -1)).var((2, 3, 4), correction=0)
    else:
        out = kernels.batch_norm(x, weight, bias, *running, batches, 0.1, 1e-5, added, relu)
        expected = F.batch_norm(exact[0], *exact_running, exact[1], exact[2], True, 0.1, 1e-5)
        variance = exact[0].detach().var((0, 2, 3), correction=0)
        assert int(batches) == 5
    expected = expected + exact[3] if plus else expected
    steepest = float((variance + 1e-5).rsqrt().max())
    magnitude = float(x.detach().abs().max())
    grad = torch.randn_like(out)
    if relu:  # no gradient where rounding decides what is positive
        grad *= expected.detach().abs() > 8 * torch.finfo(dtype).eps * steepest * magnitude
        expected = expected.relu()
    out.backward(grad)
    expected.backward(grad.double())
    assert_close(out, expected, dtype, steepest * magnitude)
    for mine, theirs in zip(running, exact_running, strict=True):
        assert_close(mine, theirs, torch.float32, magnitude**2)
    for mine, theirs in zip(tensors, exact, strict=True):
        assert mine.grad is not None
        assert_close(mine.grad, theirs.grad, mine.dtype if mine.dim() == 4 else torch.float16, 4 * steepest)


def check_pool(kernels: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Few different values, so that the largest of a window is often there twice."""
    x = (torch.randn(shape, device=device) * 2).round().to(dtype).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    exact = x.detach().float().requires_grad_()
    assert kernels.fits(x)
    out = kernels.relu_max_pool(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    expected = F.max_pool2d(exact.relu(), 3, 2, 1)
    assert torch.equal(out.float(), expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.float())
    assert x.grad is not None
    assert exact.grad is not None
    assert_close(x.grad, exact.grad, dtype)
