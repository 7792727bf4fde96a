"""Mixtures of experts by grouped products: one family of scales per expert, and none where rows are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from support.nets import assert_function_kept, randomize_constants, w, x2

pytest.importorskip("transformers.integrations.moe")
EXPERTS, HIDDEN = 3, 4
X = x2(12, 5).double()


class Experts(nn.Module):
    """Tokens sorted by expert, two products, and back; `between` stands between the products."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = lambda m, y: F.relu(y)) -> None:
        super().__init__()
        self.between = between
        self.router, self.stem = nn.Linear(5, EXPERTS), nn.Linear(5, 6)
        self.up, self.down = w(EXPERTS, 6, HIDDEN), w(EXPERTS, HIDDEN, 2)
        self.rows = nn.Parameter(torch.randn(12, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort()
        offsets = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(self.stem(x)[order], self.up, offsets)
        y = product(self.between(self, y), self.down, offsets)
        return y[order.argsort()]


def traced(between: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Experts(between).double()
    randomize_constants(model)
    return model, equinorm.trace(model, X, verify=False)  # the rules alone


# Free in any case are the six units of the stem, and the one scale of all that the router compares.
FREE = {
    "relu": (lambda m, y: F.relu(y), EXPERTS * HIDDEN),
    "gated": (lambda m, y: F.silu(y.chunk(2, -1)[0]).repeat(1, 2) * y, 0),
    "halves": (lambda m, y: torch.cat([F.relu(y[:, :2]), F.relu(y[:, 2:])], -1), HIDDEN),
    "frozen_gate": (lambda m, y: y * torch.sigmoid(m.stem(X))[:, :HIDDEN], EXPERTS * HIDDEN),
}


@pytest.mark.parametrize("name", FREE)
def test_each_expert_has_scales_of_its_own(name: str) -> None:
    between, expected = FREE[name]
    model, sym = traced(between)
    assert sym.num_scales >= expected + (0 if name == "frozen_gate" else 6), sym.explain()
    if name == "relu":
        assert sym.num_scales == expected + 6 + 1
    for seed in range(2):
        assert_function_kept(model, X, sym, seed)


BARRIERS = {
    "some rows": lambda m, y: torch.cat([F.relu(y[:5]), y[5:]]),
    "some rows by step": lambda m, y: y[::2].repeat(2, 1),
    "rows turned round": lambda m, y: y.flip(0),
    "rows of a parameter": lambda m, y: F.relu(y + m.rows),
    "neighbours": lambda m, y: y + y.roll(1, 0),
    "mixed over rows": lambda m, y: y - y.mean(0, keepdim=True),
    "a triangle of rows": lambda m, y: y + y.cumsum(0),
    "another axis in front": lambda m, y: (y[None] * torch.ones(1, 1, 1, dtype=y.dtype)).squeeze(0).flip(0),
    "without gradient": lambda m, y: _undisturbed(y),
}


def _undisturbed(y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.relu(y).flip(0)


@pytest.mark.parametrize("name", BARRIERS)
def test_rows_are_not_told_apart(name: str) -> None:
    """Which rows belong to which expert depends on the inputs, so what treats rows unlike must not see a guess."""
    model, sym = traced(BARRIERS[name])
    for seed in range(2):
        assert_function_kept(model, X, sym, seed)
        assert_function_kept(model, X.flip(0).abs(), sym, seed)


def test_fewer_rows_than_experts_have_one_family() -> None:
    torch.manual_seed(0)
    model = Experts().double()
    sym = equinorm.trace(model, X[:2], verify=False)
    assert sym.num_scales == 6 + HIDDEN + 1
    assert_function_kept(model, X, sym)


def test_mixtral_as_exported_by_default() -> None:
    """Per layer norms 2 x 32, queries and keys 8, values 16, 4 sets of 48 up units; the last norm 32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False)).eval()
    example = {"input_ids": torch.arange(12).view(2, 6)}
    sym = equinorm.trace(model, example)
    assert sym.num_scales == 2 * (2 * 32 + 8 + 16 + 4 * 48) + 32
    assert not sym.explain().unknown_ops
    before = model(**example).logits
    powers = torch.randint(-2, 3, (sym.num_scales,), generator=torch.Generator().manual_seed(0))
    sym.rescale_(powers * torch.log(torch.tensor(2.0, dtype=torch.float64)))
    torch.testing.assert_close(model(**example).logits, before)


class InFloat32(nn.Module):
    """Computes in float32 inside, as some language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gain, self.b = nn.Linear(5, 6), nn.Parameter(torch.rand(6) + 0.5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).float()
        return self.b((y.relu() * self.gain.float()).type_as(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_freedom_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    model, x = InFloat32().to(dtype), X.to(dtype)
    sym = equinorm.trace(model, x)
    assert sym.num_scales == 6 + 6
    assert not sym.verification.frozen
    before = model(x)
    powers = torch.randint(-3, 4, (12,), generator=torch.Generator().manual_seed(0))
    sym.rescale_(powers * torch.log(torch.tensor(2.0, dtype=torch.float64)))
    torch.testing.assert_close(model(x), before, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_cast_to_less_than_the_weights_have_stays_a_barrier() -> None:
    class InHalf(InFloat32):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu().half().to(x.dtype))

    for dtype in (torch.float64, torch.float32):
        assert equinorm.trace(InHalf().to(dtype), X.to(dtype)).num_scales == 0
