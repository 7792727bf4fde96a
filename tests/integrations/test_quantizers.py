"""Quantizers of other people, before which a net is balanced: their grid is the criterion's, and their error falls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm import criteria
from equinorm.criteria.quantization import rounded

GENERATOR = torch.Generator().manual_seed(3)
CALIBRATION, TEST = (torch.randn(64, 3, 12, 12, generator=GENERATOR) for _ in range(2))


def uneven() -> nn.Module:
    """A depthwise net whose channels are of very different sizes, as folded norms leave them."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    with torch.no_grad():
        for layer in (net[0], net[2], net[4], net[8]):
            layer.weight.mul_(torch.randn(len(layer.weight)).exp().view(-1, *[1] * (layer.weight.ndim - 1)))
    return net.eval()


def balanced(net: nn.Module, criterion: criteria.Criterion) -> nn.Module:
    net = copy.deepcopy(net)
    equinorm.balance_(net, CALIBRATION[:1], criterion=criterion)
    return net


@torch.no_grad()
def error(net: nn.Module, plain: nn.Module) -> float:
    return float((net(TEST) - plain(TEST)).norm() / plain(TEST).norm())


def inputs() -> list[Tensor]:
    return list(CALIBRATION.split(8))


@pytest.mark.shows("torchao", "balanced for the grid of weights in int4 and int8, then quantized", "torchao")
@pytest.mark.parametrize("bits", [4, 8])
def test_torchao(bits: int) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis

    net = uneven()
    better = balanced(net, criteria.Quantization(bits, "channel", inputs(), full_range=True))
    found = []
    for each in (net, better):
        quantized = copy.deepcopy(each)
        quantize_(quantized, IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerAxis(0)))
        weight = each[8].weight.detach()
        grid = rounded(weight, bits, "channel", full_range=True)
        largest = weight.abs() == weight.abs().amax(1, keepdim=True)
        elsewhere = (quantized[8].weight.dequantize() - grid).abs() > 1e-5 * weight.abs().max()
        assert float(elsewhere[~largest].float().mean()) < 0.002  # where the last digit decides between two integers
        found.append(error(quantized, net))
    assert found[1] < 0.9 * found[0]


@pytest.mark.shows("PT2E", "balanced between weights and activations, then both quantized to int8", "torchao")
def test_pt2e() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    def quantized(net: nn.Module) -> nn.Module:
        exported = torch.export.export(net, (CALIBRATION,), strict=True).module()
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        prepared(CALIBRATION)
        return convert_pt2e(prepared)

    net = uneven()
    better = balanced(net, criteria.Activations(inputs()))
    assert error(quantized(better), net) < 0.9 * error(quantized(net), net)


@pytest.mark.shows("brevitas", "balanced for the grid of weights in int5 and int8, then quantized", "brevitas")
@pytest.mark.parametrize("bits", [5, 8])
def test_brevitas(bits: int) -> None:
    from brevitas.nn import QuantConv2d, QuantLinear
    from brevitas.quant import Int8WeightPerTensorFloat

    def quantized(net: nn.Module) -> nn.Module:
        net = copy.deepcopy(net)
        options: dict[str, Any] = {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": bits}
        for name, layer in list(net.named_modules()):
            if isinstance(layer, nn.Conv2d):
                shape = layer.in_channels, layer.out_channels, layer.kernel_size
                new = QuantConv2d(*shape, groups=layer.groups, **options)
            elif isinstance(layer, nn.Linear):
                new = QuantLinear(layer.in_features, layer.out_features, bias=True, **options)
            else:
                continue
            new.load_state_dict(layer.state_dict(), strict=False)
            net.set_submodule(name, new)
        return net.eval()

    net = uneven()
    better = balanced(net, criteria.Quantization(bits, "tensor", inputs()))
    with torch.no_grad():
        for layer, plain in zip(quantized(better), better, strict=True):
            if isinstance(layer, QuantConv2d | QuantLinear):
                grid = rounded(plain.weight.detach(), bits, "tensor")
                torch.testing.assert_close(layer.quant_weight().value, grid, rtol=1e-5, atol=1e-6)
    assert error(quantized(better), net) < 0.5 * error(quantized(net), net)


@pytest.mark.shows("llm-compressor", "a Llama balanced for groups of 128 in int4, then quantized", "llmcompressor")
def test_llm_compressor(tmp_path: Path) -> None:
    """It wants an older transformers than the one that the others are tested with, so it is seldom there."""
    pytest.importorskip("llmcompressor")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes)).eval()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(4)
        for block in net.model.layers:  # some channels larger than others
            block.mlp.up_proj.weight.mul_(torch.randn(256, 1).exp())
            block.input_layernorm.weight.mul_(torch.randn(128).exp())
    ids = torch.randint(128, (16, 16), generator=GENERATOR)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))

    @torch.no_grad()
    def off(model: nn.Module) -> float:
        return float((model(ids[8:]).logits - net(ids[8:]).logits).norm() / net(ids[8:]).logits.norm())

    def quantized(model: Any, name: str) -> nn.Module:
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
        return oneshot(model=str(tmp_path / name), recipe=recipe)

    better = copy.deepcopy(net)
    batches = [(part,) for part in ids[:8].split(2)]
    criterion = criteria.Quantization(4, 128, batches, full_range=True)
    equinorm.balance_(better, (ids[:1],), criterion=criterion)
    assert off(better) < 1e-4
    assert off(quantized(better, "better")) < off(quantized(net, "plain"))
