"""Recipes after the authors' own programs: each fact of a program is in the run, and one step is the one it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from equinorm.lab import nets as models
from equinorm.lab.experiments import repro2019, ruff2020, stock2019
from equinorm.lab.experiments.artifacts import find
from equinorm.lab.training.inputs import inputs_of
from equinorm.lab.training.parts import Parts, build
from equinorm.lab.training.runs import Run
from equinorm.models.parametrized import originals
from equinorm.msr import InputNoise, scaled_kernels


def parts_of(run: Run) -> Parts:
    return build(run, inputs_of(run, Path("data"), torch.device("cpu")))


def toy(name: str, row: str) -> Run:
    return find(name).part([row]).toy().cells[-1].runs[0]  # of the deepest net, where there are several


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


# -- stock2019 ---------------------------------------------------------------------------------------------------------


def after_a_step(run: Run) -> nn.Module:
    made = parts_of(run)
    torch.manual_seed(0)
    for p in made.model.parameters():
        p.grad = torch.randn_like(p)
    made.optimizer.step()
    return made.model


def weights_after(run: Run) -> dict[str, torch.Tensor]:
    return dict(after_a_step(run).state_dict())


def test_the_released_cycle_leaves_the_last_layer_out() -> None:
    """And so does naming the classifier in `keep=`; the paper's cycle, in plain lines, is that of `ENorm`."""
    plain, released, kept, paper = (
        toy("stock2019/figure4-released", row)
        for row in ("Baseline", "ENorm-1.2", stock2019.KEPT, "ENorm-1.2, the paper's cycle")
    )
    assert {run.model.options["init"] for run in (plain, released, kept, paper)} == {"he"}
    (cell,) = find("stock2019/figure4-released").part(["ENorm-1.2"], ["19"]).cells
    assert (cell.runs[0].data.train, len(cell.runs)) == (40_960, 3)
    last = f"{stock2019.LAST_LAYER}.weight"
    plain = replace(plain, optim=paper.optim)
    after = {
        name: weights_after(replace(run, optim=paper.optim))
        for name, run in {"plain": plain, "released": released, "kept": kept, "paper": paper}.items()
    }
    for name in ("released", "kept"):
        torch.testing.assert_close(after[name][last], after["plain"][last])
    assert not torch.allclose(after["paper"][last], after["plain"][last])
    in_lines = weights_after(replace(paper, method=replace(paper.method, name="enorm_chain", options={"c": 1.2})))
    torch.testing.assert_close(in_lines, after["paper"])


def test_biases_that_are_left_alone() -> None:
    left, plain = (toy("stock2019/biases", row) for row in (stock2019.LEFT, repro2019.PLAIN))
    one, other = weights_after(left), weights_after(plain)
    for name in one:
        assert torch.allclose(one[name], other[name]) == (name.endswith("weight") or name.startswith("head")), name


def test_the_released_head_averages_a_corner() -> None:
    net = models.build("cifar_nv", classes=10, in_shape=(3, 28, 28), norm="none", width=4, end="released").eval()
    maps: list[torch.Tensor] = []
    net.head.classifier.register_forward_hook(lambda *args: maps.append(args[2]))
    logits = net(torch.randn(2, 3, 28, 28))
    assert maps[0].shape == (2, 10, 9, 9)
    torch.testing.assert_close(logits, nn.functional.avg_pool2d(maps[0].relu(), 5)[:, :, 0, 0])
    assert isinstance(parts_of(toy("stock2019/cifar-nv-released", "ENorm-1.1")).model, nn.Module)


def test_the_notebooks_learning_rates() -> None:
    """repro2019: ENorm + BN from 15 layers on, 0.05 that falls by 0.1 / 60 an epoch."""
    (cell,) = find("repro2019/notebook").part([repro2019.NOTEBOOK], ["17"]).cells
    run = cell.runs[0]
    rates = [run.optim.schedule.at(epoch, run.epochs, run.optim.lr, 0.0)[0] for epoch in range(61)]
    assert rates[0] == 0.05
    assert rates[30] == pytest.approx(0)
    assert rates[31] == pytest.approx(-0.1 / 60)
    assert run.model.options["init"] == "he_uniform"


# -- defazio2018 -------------------------------------------------------------------------------------------------------


def test_the_grid_with_normalized_inputs() -> None:
    cells = find("defazio2018/normalized").cells
    assert len(cells) == 8
    assert {(run.data.inputs, run.data.mixup) for cell in cells for run in cell.runs} == {("standard", 2.0)}
    bare = [cell.runs[0] for cell in cells if "no final norm" in cell.row]
    for run in bare:
        assert (run.loss, run.optim.nesterov, run.model.options["last_activation"]) == ("binary", True, False)
    known = {run.key for run in find("defazio2018/variants-mixup").runs()}
    assert sum(run.key in known for cell in cells for run in cell.runs) >= 5  # what was measured is not run again
