"""Recipes after the authors' own programs: each fact of a program is in the run, and one step is the one it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from equinorm.lab import nets as models
from equinorm.lab.experiments import ruff2020
from equinorm.lab.experiments.artifacts import find
from equinorm.lab.training.inputs import inputs_of
from equinorm.lab.training.parts import Parts, build
from equinorm.lab.training.runs import Run
from equinorm.models.parametrized import originals
from equinorm.msr import InputNoise, scaled_kernels


def parts_of(run: Run) -> Parts:
    return build(run, inputs_of(run, Path("data"), torch.device("cpu")))


def toy(name: str, row: str) -> Run:
    (cell,) = find(name).part([row]).toy().cells
    return cell.runs[0]


# -- ruff2020 ----------------------------------------------------------------------------------------------------------


def test_ruff2020_as_its_program_has_it() -> None:
    made = parts_of(toy("ruff2020/program", ruff2020.PROGRAM_MSR))
    model = made.model
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    first, classifier = convolutions[0], model.get_submodule("head.classifier")
    assert [conv.bias is not None for conv in convolutions] == [True] + [False] * (len(convolutions) - 1)
    assert classifier.bias is not None
    assert len(dict(scaled_kernels(model))) == len(convolutions) - 1  # no e^g and no LUMA in the first layer
    torch.testing.assert_close(first.weight.flatten(1).norm(dim=1), torch.ones(len(first.weight)))
    torch.testing.assert_close(first.weight.mean((2, 3)), torch.zeros(first.weight.shape[:2]), atol=1e-6, rtol=0)
    noises = [module for module in model.modules() if isinstance(module, InputNoise)]
    assert {(noise.a, noise.per) for noise in noises} == {(0.1, "channel")}
    skips = [module for module in model.modules() if hasattr(module, "before")]
    assert skips
    assert all(skip.before == 0 < skip.after for skip in skips)
    rates = {id(p): group["lr"] for group in made.optimizer.param_groups for p in group["params"]}
    scaled = [originals(layer) for _, layer in scaled_kernels(model)]
    assert {rates[id(layer[0].g)] for layer in scaled} == {0.4}
    assert all(rates[id(layer.original)] == pytest.approx(0.4 * 1.9) for layer in scaled)  # (1 + z) g
    assert rates[id(first.bias)] == rates[id(classifier.bias)] == rates[id(classifier.weight)] == 0.1
    assert all(group["weight_decay"] == 0 for group in made.optimizer.param_groups)


def test_one_step_of_ruff2020s_program() -> None:
    """V ← V - lr ((1 + z) g - z mean g) with LUMA in g; the classifier's rows are drawn to length 1."""
    run = toy("ruff2020/program", ruff2020.PROGRAM_MSR)
    made, z, luma = parts_of(run), ruff2020.PROGRAM_Z, ruff2020.LUMA
    classifier = made.model.get_parameter("head.classifier.weight")
    (V, *_) = [originals(layer).original for _, layer in scaled_kernels(made.model)]
    with torch.no_grad():
        V.mul_(1.5)
    before = V.detach().clone(), classifier.detach().clone()
    torch.manual_seed(0)
    for p in made.model.parameters():
        p.grad = torch.randn_like(p)
    assert V.grad is not None
    assert classifier.grad is not None
    norm, length = V.detach().flatten(1).norm(dim=1).view(-1, 1, 1, 1), classifier.detach().norm(dim=1, keepdim=True)
    g = V.grad + 2 * luma * (norm - 1) / norm * V.detach()
    step = 0.4 * ((1 + z) * g - z * g.mean((2, 3), keepdim=True))
    pulled = classifier.grad + 2 * luma * (length - 1) / length * classifier.detach()
    made.optimizer.step()
    torch.testing.assert_close(V.detach(), before[0] - step)
    torch.testing.assert_close(classifier.detach(), before[1] - 0.1 * pulled)


def fields_of(run: Run) -> dict[tuple[str, str], object]:
    """Every field of a run, those of options too."""
    parts = {name: part for name, part in run.to_dict().items() if isinstance(part, dict)}
    flat = {(name, key): value for name, part in parts.items() for key, value in part.items() if key != "options"}
    options = {(name, key): v for name, part in parts.items() for key, v in part.get("options", {}).items()}
    return flat | options


def test_every_difference_from_the_program_is_one() -> None:
    """A row of `program-differences` changes its one thing, and nothing else."""
    runs = {cell.row: cell.runs[0] for cell in find("ruff2020/program-differences").cells}
    for base, changes in (
        (ruff2020.PROGRAM_MSR, ruff2020.BACK_TO_OURS),
        (ruff2020.PROGRAM_BN, ruff2020.BACK_TO_OURS_BN),
    ):
        before = fields_of(runs[base])
        for name in changes:
            after = fields_of(runs[name])
            differing = {key for key in before | after if before.get(key) != after.get(key)}
            assert 1 <= len(differing) <= 2, (name, differing)


def test_a_model_says_which_options_it_has() -> None:
    with pytest.raises(ValueError, match="first_bias, first_zero_mean"):
        models.build("resnet110", classes=10, in_shape=(3, 8, 8), first=True)
    with pytest.raises(ValueError, match="A behind"):
        models.build("resnet_cifar", classes=10, in_shape=(3, 8, 8), depth=8, skips="a")
    assert replace(ruff2020.program(), seed=1).key != ruff2020.program().key
