"""timm: its parameter groups, its averaged weights, and the example."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import nn

import equinorm
from support.short_training import Short, adamw, assert_resumes

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_training.py"
IMAGE = (3, 32, 32)


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_vit", num_classes=3, img_size=32)
    return model


@pytest.mark.shows("timm", "no_weight_decay(model) in param_groups_weight_decay", "timm")
def test_no_weight_decay() -> None:
    model = vit()
    equinorm.weight_norm_(model, keep=["head"])
    names = equinorm.no_weight_decay(model)
    assert {"pos_embed", "cls_token", "patch_embed.proj.parametrizations.weight.original0", "norm.bias"} <= names
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    undecayed = {id(p) for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert undecayed == {id(p) for name, p in model.named_parameters() if name in names}
    by_axes = param_groups_weight_decay(model, 0.05)
    assert sum(len(group["params"]) for group in by_axes if group["weight_decay"] == 0.0) < len(names)  # which is why


@pytest.mark.shows("timm", "a vision transformer with weight norm and ENorm, resumed bitwise", "timm")
def test_a_transformer_resumes(tmp_path: Path) -> None:
    def made() -> Short:
        model = vit()
        groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=equinorm.no_weight_decay(model))
        optimizer = create_optimizer_v2(groups, opt="adamw", lr=1e-3)
        enorm = equinorm.ENorm(model, optimizer, torch.zeros(2, *IMAGE), c=1.1)
        enorm.attach()
        return Short(model, optimizer, [enorm], shape=IMAGE)

    assert_resumes(made, tmp_path)


@pytest.mark.shows("timm", "ModelEmaV3 as a companion of ENorm", "timm")
def test_averaged_weights_keep_their_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    ema, x = ModelEmaV3(model, decay=0.5), torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        for p in ema.module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    enorm = equinorm.ENorm(model, adamw(model), torch.zeros(2, 6, dtype=torch.float64), companions=[ema])
    before, weight = ema.module(x), ema.module[0].weight.clone()
    enorm.step()
    torch.testing.assert_close(ema.module(x), before, rtol=1e-12, atol=1e-12)
    assert not ema.module[0].weight.equal(weight)


@pytest.mark.shows("timm", "examples/timm_training.py: trained, stopped, resumed, folded", "timm")
def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](epochs=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 4
    assert float(lines[-1].split()[2].rstrip(",")) > 0.3  # ten classes
