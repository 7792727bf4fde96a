"""What trained models go into: ONNX, and quantization by PT2E and torchao."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equinorm
from support.short_training import IMAGE, Short, adamw, assert_resumes, dense, with_enorm, with_method

X = torch.randn(16, *IMAGE, generator=torch.Generator().manual_seed(4))


def trained(method: str, folder: Path) -> nn.Module:
    return assert_resumes(lambda: with_method(method), folder).model.eval()


def run_onnx(model: nn.Module, folder: Path) -> Tensor:
    import onnxruntime

    path = folder / "model.onnx"
    torch.onnx.export(model, (X,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0])


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("method", ["equinorm", "msr", "weightnorm"])
@pytest.mark.shows(
    "ONNX",
    "converted models, trained, resumed and exported, as they are and folded",
    "onnx",
    "onnxruntime",
    "onnxscript",
)
def test_onnx(method: str, folded: bool, tmp_path: Path) -> None:
    model = trained(method, tmp_path)
    if folded:
        model, _ = equinorm.fold(model, X)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(model, tmp_path), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["equinorm", "msr"])
@pytest.mark.shows("PT2E", "a trained model, folded, balanced and quantized to int8", "torchao")
def test_pt2e(method: str, tmp_path: Path) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    plain, _ = equinorm.fold(trained(method, tmp_path), X)
    with torch.no_grad():
        expected = plain.eval()(X)
        equinorm.balance_(plain, X)
        exported = torch.export.export(plain, (X,), strict=True).module()
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        prepared(X)
        quantized = convert_pt2e(prepared)
        found = quantized(X)
    assert "quantize_per" in str(quantized.graph)
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1


@pytest.mark.shows("torchao", "a model trained with ENorm, resumed, balanced, weights quantized to int8", "torchao")
def test_torchao_weight_only(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make() -> Short:
        model = dense(32)
        return with_enorm(model, adamw(model))

    model, x = assert_resumes(make, tmp_path).model.eval(), torch.randn(16, 6)
    with torch.no_grad():
        expected = model(x)
        balanced = copy.deepcopy(model)
        equinorm.balance_(balanced, x)
        quantize_(balanced, Int8WeightOnlyConfig())
        found = balanced(x)
        equinorm.balance_(balanced, x)  # quantized weights stay what they are
        assert balanced(x).equal(found)
        error = (found - expected).norm() / expected.norm()
    assert type(balanced[2].weight) is not nn.Parameter
    assert 0 < error < 0.05
