"""The kernels of the weight norm family against their plain twin, in Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import equinorm
import equinorm.weightnorm.parametrizations
from equinorm.models.filters import centre_filters, filter_norm
from equinorm.weightnorm import (
    centred_weight_norm_,
    normalized_filters,
    scaled_weight_norm_,
    weight_standardization_,
)
from support.filters import SHAPES, assert_close, dtypes, laid_out
from support.triton_interpreter import interpreted

fused = interpreted("equinorm.weightnorm.kernels")
small = interpreted("equinorm.weightnorm.kernels")
small.BLOCK = 4  # so small that every loop runs several times
FORMS = [{}, {"scale": 1.7}, {"centred": True}, {"centred": True, "eps": 1e-5}, {"centred": True, "eps": 0.3}]
quick = settings(max_examples=20, phases=(Phase.explicit, Phase.generate))  # the interpreter is slow


@quick
@example(fused, FORMS[3], True, (4, 1, [1, 1, 1]), False, torch.float32, torch.float16, 25896570)
@given(
    st.sampled_from([fused, small]),
    st.sampled_from(FORMS),
    st.booleans(),
    SHAPES,
    st.booleans(),
    dtypes,
    dtypes,
    st.integers(0, 2**31),
)
def test_filters_and_their_gradients(
    kernels: Any, form: dict[str, Any], gain: bool, shape: Any, last: bool, dtype: Any, rounded: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    filters, channels, window = shape
    v = laid_out(torch.randn(filters, channels + 2, *window) + 0.5, last).to(dtype).requires_grad_()
    g = torch.randn(filters, *(1,) * (v.dim() - 1)).to(dtype).requires_grad_() if gain else None
    w = kernels.normalized(v, g, kernels.Form(**form), rounded)
    assert w.dtype == rounded
    assert w.stride() == v.stride()
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (v, g)]
    expected = normalized_filters(*exact, **form)
    assert_close(w.detach(), expected.detach(), rounded)

    tensors, twins = [[t for t in several if t is not None] for several in ((v, g), exact)]
    whole = filter_norm(exact[0].detach())
    length = filter_norm(centre_filters(exact[0].detach())) if form.get("centred") else whole
    # gradients grow as 1 / length, and centring rounds in proportion to what was taken off
    unit = 1 + float((whole / length).max() / length.min())
    for direction in (torch.randn_like(w), torch.randn(w.shape[::-1]).to(rounded).permute(*range(w.dim())[::-1])):
        actual = torch.autograd.grad(w, tensors, direction, retain_graph=True)
        wanted = torch.autograd.grad(expected, twins, direction.double(), retain_graph=True)
        for gradient, by_twin, parameter in zip(actual, wanted, tensors, strict=True):
            assert gradient.dtype == dtype
            assert gradient.stride() == parameter.stride()
            assert_close(gradient / unit, by_twin / unit, dtype)


def test_a_filter_of_equal_weights_is_standardized_to_zeros_and_gets_a_gradient() -> None:
    v = torch.ones(2, 3, 3, 3, requires_grad=True)
    w = fused.normalized(v, None, fused.Form(centred=True, eps=0.5), torch.float32)
    assert not w.any()
    (actual,) = torch.autograd.grad(w, v, torch.arange(54.0).view_as(v))
    (expected,) = torch.autograd.grad(
        normalized_filters(v, None, centred=True, eps=0.5), v, torch.arange(54.0).view_as(v)
    )
    assert_close(actual, expected)
    assert actual.any()


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    v, g = torch.randn(3, 2, 3, 3), torch.randn(3, 1, 1, 1)
    results = []
    for function in (
        lambda v, g: fused.normalized(v, g, fused.Form(**form), torch.float32),
        lambda v, g: normalized_filters(v, g, **form),
    ):
        leaves = [t.clone().requires_grad_() for t in (v, g)]
        first = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "apply", [equinorm.weight_norm_, centred_weight_norm_, scaled_weight_norm_, weight_standardization_]
)
def test_layers_use_the_kernels_where_filters_lie_one_after_the_other(monkeypatch: Any, apply: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3), nn.Flatten(), nn.Linear(196, 5))
    apply(net)
    twin, x = copy.deepcopy(net), torch.randn(2, 3, 7, 7)
    expected = twin(x)
    monkeypatch.setattr(equinorm.weightnorm.parametrizations, "kernels", lambda *_: small)
    assert ["Normalized" in str(net[i].weight.grad_fn) for i in (0, 2, 4)] == [True, False, True]
    actual = net(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    actual.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5 * float(q.grad.abs().max()))
