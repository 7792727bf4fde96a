"""Mean-only batch norm, filter response norm and batch renormalization.

Each against a slow reference that follows the paper's equation channel by channel.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equinorm.normprop import NormalizationPropagation
from equinorm.norms.layers import (
    BATCH_RENORM_DEFAULTS,
    TLU,
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
    FilterResponseNorm,
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
)

MEAN_ONLY = {2: MeanOnlyBatchNorm1d, 3: MeanOnlyBatchNorm1d, 4: MeanOnlyBatchNorm2d, 5: MeanOnlyBatchNorm3d}
RENORM = {2: BatchRenorm1d, 3: BatchRenorm1d, 4: BatchRenorm2d, 5: BatchRenorm3d}


@st.composite
def activations(draw: st.DrawFn, min_axes: int = 2) -> Tensor:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    space = draw(st.lists(st.integers(1, 4), min_size=min_axes - 2, max_size=3))
    shape = (draw(st.integers(2, 5)), draw(st.integers(1, 4)), *space)
    return torch.randn(shape, dtype=torch.float64) * 2 + 1


def channels(x: Tensor) -> list[Tensor]:
    return list(x.unbind(1))


# Mean-only batch norm


@given(activations(), st.sampled_from([0.1, 0.7, None]), st.booleans())
def test_mean_only_batch_norm_is_its_equation(x: Tensor, momentum: float | None, bias: bool) -> None:
    norm = MEAN_ONLY[x.ndim](x.shape[1], momentum, bias).double()
    if bias:
        with torch.no_grad():
            norm.bias.normal_()
    running = [0.0] * x.shape[1]
    for step in range(1, 4):
        batch = x * step
        y = norm(batch)
        for c, (got, given_) in enumerate(zip(channels(y), channels(batch), strict=True)):
            mean = sum(v.item() for v in given_.flatten()) / given_.numel()
            offset = norm.bias[c].item() if bias else 0.0
            torch.testing.assert_close(got, given_ - mean + offset, rtol=1e-10, atol=1e-10)
            newest = 1 / step if momentum is None else momentum
            running[c] = (1 - newest) * running[c] + newest * mean
    torch.testing.assert_close(norm.running_mean, torch.tensor(running, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    norm.eval()
    before = norm.running_mean.clone()
    for c, (got, given_) in enumerate(zip(channels(norm(x)), channels(x), strict=True)):
        offset = norm.bias[c].item() if bias else 0.0
        torch.testing.assert_close(got, given_ - running[c] + offset, rtol=1e-10, atol=1e-10)
    assert torch.equal(norm.running_mean, before)


# Filter response norm


@given(activations(), st.booleans())
def test_filter_response_norm_is_its_equation(x: Tensor, learnable_eps: bool) -> None:
    norm = FilterResponseNorm(x.shape[1], eps=1e-3, learnable_eps=learnable_eps).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    y = norm(x).detach()
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            one = x[n, c]
            nu2 = sum(v.item() ** 2 for v in one.flatten()) / one.numel()
            eps = 1e-3 + (abs(norm.eps_l[c].item()) if learnable_eps else 0.0)
            expected = norm.weight[c].item() * one / math.sqrt(nu2 + eps) + norm.bias[c].item()
            torch.testing.assert_close(y[n, c], expected, rtol=1e-10, atol=1e-10)


def test_filter_response_norm_starts_as_the_paper_says() -> None:
    norm, tlu = FilterResponseNorm(3, learnable_eps=True), TLU(3)
    assert norm.eps == 1e-6
    torch.testing.assert_close(norm.eps_l, nn.Parameter(torch.full((3,), 1e-4)))
    assert not norm.bias.any()
    assert not tlu.threshold.any()
    torch.testing.assert_close(norm.weight, nn.Parameter(torch.ones(3)))


@given(activations())
def test_tlu_is_its_equation(x: Tensor) -> None:
    tlu = TLU(x.shape[1]).double()
    with torch.no_grad():
        tlu.threshold.normal_()
    for c, (got, given_) in enumerate(zip(channels(tlu(x)), channels(x), strict=True)):
        tau = tlu.threshold[c].item()
        expected = torch.tensor([max(v.item(), tau) for v in given_.flatten()], dtype=torch.float64)
        torch.testing.assert_close(got.flatten(), expected, rtol=0, atol=0)


# Batch renormalization


def renorm_limits(step: int, r: tuple[int, int], d: tuple[int, int], r_max: float, d_max: float) -> tuple[float, float]:
    def risen(first: int, last: int) -> float:
        if step < first:
            return 0.0
        return 1.0 if step >= last else (step - first) / (last - first)

    return 1 + (r_max - 1) * risen(*r), d_max * risen(*d)


@given(activations(), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_batch_renorm_is_its_algorithm(x: Tensor, first: int, length: int, affine: bool) -> None:
    eps, alpha, r_max, d_max, schedule = 1e-2, 0.3, 1.5, 0.4, (first, first + length)
    norm = RENORM[x.ndim](x.shape[1], eps, alpha, r_max, d_max, schedule, (0, 2), affine).double()
    if affine:
        with torch.no_grad():
            norm.weight.normal_()
            norm.bias.normal_()
    mu, sigma = [0.0] * x.shape[1], [1.0] * x.shape[1]
    for step in range(6):
        batch = torch.roll(x, step, 0) * (1 + step) + step
        y = norm(batch).detach()
        r_limit, d_limit = renorm_limits(step, schedule, (0, 2), r_max, d_max)
        for c, (got, given_) in enumerate(zip(channels(y), channels(batch), strict=True)):
            mu_b = sum(v.item() for v in given_.flatten()) / given_.numel()
            sigma_b = math.sqrt(eps + sum((v.item() - mu_b) ** 2 for v in given_.flatten()) / given_.numel())
            r = min(max(sigma_b / sigma[c], 1 / r_limit), r_limit)
            d = min(max((mu_b - mu[c]) / sigma[c], -d_limit), d_limit)
            expected = (given_ - mu_b) / sigma_b * r + d
            if affine:
                expected = norm.weight[c].item() * expected + norm.bias[c].item()
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
            mu[c] += alpha * (mu_b - mu[c])
            sigma[c] += alpha * (sigma_b - sigma[c])
    torch.testing.assert_close(norm.running_mean, torch.tensor(mu, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_std, torch.tensor(sigma, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    norm.eval()
    for c, (got, given_) in enumerate(zip(channels(norm(x).detach()), channels(x), strict=True)):
        expected = (given_ - mu[c]) / sigma[c]
        if affine:
            expected = norm.weight[c].item() * expected + norm.bias[c].item()
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_batch_renorm_schedule_of_the_paper() -> None:
    norm = BatchRenorm2d(2)
    for step in (0, 4_999, 5_000, 15_000, 25_000, 40_000, 90_000):
        norm.num_batches_tracked.fill_(step)
        r, d = renorm_limits(step, (5_000, 40_000), (5_000, 25_000), 3.0, 5.0)
        got = norm.limits()
        assert (got[0].item(), got[1].item()) == (pytest.approx(r), pytest.approx(d)), step


def test_wide_limits_make_training_and_evaluation_agree() -> None:
    """The point of the method: unclipped, r and d turn the batch's normalization into the running one."""
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    norm = BatchRenorm2d(3, r_max=1e6, d_max=1e6, r_schedule=(0, 0), d_schedule=(0, 0)).double()
    norm(x + 1)
    evaluated = copy.deepcopy(norm).eval()(x)
    torch.testing.assert_close(norm(x), evaluated, rtol=1e-10, atol=1e-10)


def test_batch_renorm_refuses_impossible_limits() -> None:
    with pytest.raises(ValueError, match="r_max"):
        BatchRenorm2d(3, r_max=0.5)
    with pytest.raises(ValueError, match="schedule"):
        BatchRenorm2d(3, d_schedule=(10, 5))


def test_the_defaults_of_batch_renorm_stand_in_one_place() -> None:
    assert dict(BATCH_RENORM_DEFAULTS) == {
        "eps": 1e-3,
        "momentum": 0.01,
        "r_max": 3.0,
        "d_max": 5.0,
        "r_schedule": (5_000, 40_000),
        "d_schedule": (5_000, 25_000),
    }
    told, silent = BatchRenorm2d(3, **BATCH_RENORM_DEFAULTS), BatchRenorm2d(3)
    assert all(getattr(told, name) == getattr(silent, name) for name in BATCH_RENORM_DEFAULTS)


# What all have in common

ALL: dict[str, Callable[[], nn.Module]] = {
    "mean-only": lambda: MeanOnlyBatchNorm2d(4),
    "mean-only, plain average": lambda: MeanOnlyBatchNorm2d(4, momentum=None),
    "frn": lambda: nn.Sequential(FilterResponseNorm(4, learnable_eps=True), TLU(4)),
    "renorm": lambda: BatchRenorm2d(4, r_schedule=(1, 4), d_schedule=(0, 2)),
    "propagation": lambda: NormalizationPropagation(nn.Conv2d(4, 4, 3, padding=1)),
}
EACH = pytest.mark.parametrize("build", ALL.values(), ids=ALL)


@EACH
def test_gradcheck(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    norm = build().double()
    # r and d of batch renorm are constants to the gradient, so finite differences must see them constant too
    renorm = isinstance(norm, BatchRenorm2d)
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in norm.parameters() if p.requires_grad]
    buffers = {name: b.clone() for name, b in norm.named_buffers()}

    def function(x: Tensor, *values: Tensor) -> Tensor:
        for name, buffer in norm.named_buffers():
            buffer.copy_(buffers[name])
        names = [name for name, p in norm.named_parameters() if p.requires_grad]
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), x)

    if renorm:
        assert buffers["num_batches_tracked"] == 0  # r_max 1, and d_max 0: plain batch norm
    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters))


def test_renorm_does_not_differentiate_r_and_d() -> None:
    x = torch.randn(6, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    norm = BatchRenorm2d(2, r_max=1e3, d_max=1e3, r_schedule=(0, 0), d_schedule=(0, 0), affine=False).double()
    norm.running_mean.normal_()
    norm.running_std.fill_(0.7)
    mean, std = x.mean((0, 2, 3), keepdim=True), (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-3).sqrt()
    r = (std / 0.7).detach()
    d = ((mean - norm.running_mean.view(1, 2, 1, 1)) / 0.7).detach()
    v = torch.randn_like(x)
    expected = torch.autograd.grad((((x - mean) / std * r + d) * v).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((norm(x) * v).sum(), x), expected, rtol=1e-9, atol=1e-9)


@EACH
def test_state_dict_deepcopy_and_pickle(build: Callable[[], nn.Module]) -> None:
    norm, x = build(), torch.randn(5, 4, 6, 6)
    norm(x)
    other = build()
    other.load_state_dict(norm.state_dict())
    twin = copy.deepcopy(norm)
    copies = [other, twin]
    if not isinstance(norm, NormalizationPropagation):  # parametrized modules go through the state dict
        copies.append(pickle.loads(pickle.dumps(norm)))
    for same in copies:
        torch.testing.assert_close(same.eval()(x), norm.eval()(x), rtol=0, atol=0)


@EACH
def test_compiles_once_and_counts_on(build: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    norm = build()
    eager = copy.deepcopy(norm)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(norm, fullgraph=True, backend="eager")
        for _ in range(5):
            x = torch.randn(5, 4, 6, 6)
            torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(norm.state_dict(), eager.state_dict())


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_in_low_precision_out(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    norm = build()
    x = torch.randn(5, 4, 6, 6) + 8
    exact = copy.deepcopy(norm)(x)
    with torch.autocast("cpu", dtype=dtype):
        low = norm(x.to(dtype))
    assert low.dtype == dtype
    # the input alone is rounded by 8·eps
    assert (low.float() - exact).abs().max() < 24 * torch.finfo(dtype).eps * max(1, exact.abs().max().item())
    for name, buffer in norm.named_buffers():
        assert buffer.dtype in (torch.float32, torch.int64), name


@pytest.mark.parametrize("norm", [MeanOnlyBatchNorm2d(4), TLU(4), FilterResponseNorm(4), BatchRenorm3d(4)], ids=repr)
def test_shapes_are_checked(norm: nn.Module) -> None:
    with pytest.raises(ValueError, match="got an input of shape"):
        norm(torch.randn(2, 5, 3, 3))
    assert "4" in repr(norm)
