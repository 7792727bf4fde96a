"""Mappings: what is found, that it holds when it is applied as other tools do, and why the rest has no such form."""

from __future__ import annotations

import copy
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.tools.mappings import families, recipe, table
from support.zoo import DECODER, TRANSFORMERS

X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A norm, two projections whose product goes through a third: the shape of a gated MLP with a skip."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 8, bias=bias)
        self.down = nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class Fused(Block):
    """The same with gate and up in one layer, whose last outputs are the up projection's."""

    def __init__(self, last: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(6, 16, bias=bias, dtype=torch.float64), last

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        if not self.last:
            gate, up = up, gate
        return x + self.down(torch.sigmoid(gate) * up)


@torch.no_grad()
def plain_change(model: nn.Module, x: Any, smooth: str, balance: tuple[str, ...]) -> float:
    """Random scales divide the last outputs of one layer and multiply the inputs of others."""
    twin = copy.deepcopy(model)
    layer: Any = twin.get_submodule(smooth)
    readers: list[Any] = [twin.get_submodule(name) for name in balance]
    scales = torch.rand(readers[0].weight.shape[1], dtype=torch.float64) + 0.5
    for reader in readers:
        for column in range(len(scales)):
            reader.weight[:, column] *= scales[column]
    for channel in range(1, len(scales) + 1):
        layer.weight[-channel] /= scales[-channel]
        if layer.bias is not None:
            layer.bias[-channel] /= scales[-channel]
    return float((twin(x) - model(x)).abs().max())


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Block, [("norm", ("gate", "up")), ("up", ("down",))]),
        (Fused, [("norm", ("both",)), ("both", ("down",))]),
        (
            lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double(),
            [("0", ("2",)), ("2", ("4",))],
        ),
    ],
)
def test_what_is_found_holds(net: Callable[[], nn.Module], expected: list[tuple[str, tuple[str, ...]]]) -> None:
    model = net()
    symmetry = equinorm.trace(model, X)
    found = symmetry.mappings()
    assert [entry for mapping in found for entry in mapping.entries] == expected
    assert sum(mapping.scales for mapping in found) == symmetry.num_scales
    for mapping in found:
        assert symmetry.prove(mapping, X) < 1e-12
        for smooth, balance in mapping.entries:
            assert plain_change(model, X, smooth, balance) < 1e-12


def test_what_does_not_hold_moves_the_outputs() -> None:
    """The check can fail: without one of the layers to balance, outputs move."""
    assert plain_change(Block(), X, "norm", ("gate",)) > 1e-3
    assert plain_change(Fused(last=False), X, "both", ("down",)) > 1e-3


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (lambda: Fused(last=False), "not the last outputs of both"),
        (lambda: Fused(bias=True), "which has a bias for all"),
    ],
)
def test_what_has_no_form_says_why(net: Callable[[], nn.Module], why: str) -> None:
    symmetry = equinorm.trace(net(), X)
    mapping = next(mapping for mapping in symmetry.mappings() if mapping.smooth == ("both",))
    assert mapping.entries == ()
    assert why in mapping.why_not
    assert why in str(mapping)
    assert symmetry.prove(mapping, X) < 1e-12


def test_attention_with_shared_heads() -> None:
    """Four heads read two heads of values: the inputs of the output projection share their scales."""
    entry = TRANSFORMERS["llama"]
    model = entry.build().eval()
    symmetry = equinorm.trace(model, entry.example())
    found = {mapping.smooth[0].rpartition("layers.0.")[2]: mapping for mapping in symmetry.mappings()}
    assert found["input_layernorm"].entries[0][1] == tuple(
        f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v")
    )
    assert (found["self_attn.v_proj"].scales, found["self_attn.v_proj"].channels) == (16, 32)
    assert "share 16 scales" in found["self_attn.v_proj"].why_not
    assert "moves by its outputs" in found["self_attn.q_proj"].why_not
    assert all(symmetry.prove(mapping, entry.example()) < 1e-12 for mapping in found.values())


def test_gains_that_are_stored_minus_one() -> None:
    """Gemma's norms smooth what reads them, as 1 + w; a tied head has no mapping."""
    entry = TRANSFORMERS["gemma"]
    symmetry = equinorm.trace(entry.build().eval(), entry.example(), invariances=True)
    found = [mapping for mapping in symmetry.mappings() if mapping.smooth[0].endswith("layernorm")]
    assert len(found) == 4
    assert {mapping.plus for mapping in found} == {1.0}
    assert all(len(mapping.entries) == 1 and symmetry.prove(mapping, entry.example()) < 1e-12 for mapping in found)
    assert not any("lm_head" in mapping.balance for mapping in symmetry.mappings())


def test_families_and_recipe() -> None:
    """Layers become one pattern that matches them all, and nothing else."""
    entry = TRANSFORMERS["llama"]
    model = entry.build().eval()
    names = [name for name, _ in model.named_modules()]
    found = families(equinorm.trace(model, entry.example(), verify=False).mappings(), names)
    assert [family.count for family in found] == [2] * 5 + [1]
    smooth, balance = found[0].patterns
    assert smooth == r"re:model\.layers\.\d+\.input_layernorm$"
    matched = [name for name in names for each in balance if re.match(each.removeprefix("re:"), name)]
    assert sorted(matched) == sorted(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkv")
    some = families(equinorm.trace(model, entry.example(), keep="model.layers.1.input_layernorm").mappings(), names)
    assert some[0].patterns[0] == r"re:model\.layers\.(0)\.input_layernorm$"
    text = recipe(found)
    assert text.startswith("AWQModifier:\n  mappings:\n    - smooth_layer: ")
    assert text.count("smooth_layer") == sum(not family.why_not for family in found)
    assert "2 x 48 scales" in table(found)


def test_experts_are_unfolded() -> None:
    """Experts stacked in one parameter are layers of their own for other tools."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        **{**DECODER, "num_hidden_layers": 1, "num_key_value_heads": 4, "num_experts": 3, "num_experts_per_tok": 2},
        moe_intermediate_size=24,
        head_dim=8,
    )
    x = {"input_ids": torch.tensor([[3, 14, 15, 9, 26, 5]])}
    symmetry = equinorm.trace(transformers.Qwen3MoeForCausalLM(config).eval(), x)
    entries = [entry for mapping in symmetry.mappings() for entry in mapping.entries]
    mlp = "model.layers.0.mlp"
    for e in range(3):
        assert (f"{mlp}.experts.{e}.up_proj", (f"{mlp}.experts.{e}.down_proj",)) in entries
    readers = next(balance for smooth, balance in entries if smooth.endswith("post_attention_layernorm"))
    every = {f"{mlp}.experts.{e}.{name}_proj" for e in range(3) for name in ("gate", "up")}
    assert set(readers) == {f"{mlp}.gate", *every}
    assert all(symmetry.prove(mapping, x) < 1e-12 for mapping in symmetry.mappings())


def test_the_docs_say_what_the_log_says() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "mappings.json").read_text())["rows"]
    done = [row for row in rows if "why_not" not in row]
    in_registry = [row for row in done if row.get("registry_kept") or row.get("registry_refuted")]
    refuted = [row for row in done for _ in row.get("registry_refuted", {})]
    seconds = [row["trace_seconds"] for row in done]

    def total(key: str) -> int:
        return sum(row.get(key, 0) for row in done)

    expected = {
        "architectures measured": f"{len(done)}, of which {len(in_registry)} are in the registry",
        "left out": f"{len(rows) - len(done)}",
        "mappings found": f"{total('found'):,}",
        "in the form of other tools": f"{total('form'):,}",
        "largest change, moved in float64": f"{max(row['worst'] for row in done):.0e}",
        "largest change, applied as llm-compressor does": f"{max(row.get('applied_worst') or 0 for row in done):.0e}",
        "mappings of the registry that hold": (
            f"{total('registry_kept')}, of which {total('registry_also_ours')} were found alike"
        ),
        "mappings of the registry that do not": (
            f"{len(refuted)}, in {len({row['architecture'] for row in refuted})} architectures"
        ),
        "tracing, seconds of processor time": (
            f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        ),
    }
    text = (root / "docs" / "criteria.md").read_text().partition("(`results/mappings.txt`)")[2]
    found = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.partition("## ")[0], re.MULTILINE))
    assert {name: found.get(name) for name in expected} == expected
