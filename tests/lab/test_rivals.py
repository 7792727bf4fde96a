"""What the recipes of today's rivals need of nets and optimizers: Fixup, thresholds, SGD on paths, Muon with SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equinorm.enorm.enorm import ENorm
from equinorm.lab import nets
from equinorm.lab.experiments import rivals
from equinorm.lab.nets.fixup import Scalar, Scale
from equinorm.lab.nets.fused import Residual
from equinorm.lab.training.inputs import inputs_of
from equinorm.lab.training.optimizers import BasisPathSGD, MuonAndSGD
from equinorm.lab.training.parts import build
from equinorm.lab.training.runs import Method, Run
from equinorm.norms import TLU
from equinorm.unitfilters import Muon


def resnet(**options: object) -> nets.Chain:
    torch.manual_seed(0)
    options = {"norm": "none", "init": "he_fan_out", "width": 8, "depth": 20, **options}
    return nets.build("resnet_cifar", classes=10, in_shape=(3, 8, 8), **options)  # type: ignore[arg-type]


# -- Fixup -------------------------------------------------------------------------------------------------------------


def test_fixup_starts_as_zhang_et_al_say() -> None:
    model = resnet(fixup=True)
    units = [module for module in model.modules() if isinstance(module, Residual)]
    names = ["before_conv1", "conv1", "before_relu1", "relu1", "before_conv2", "conv2", "scale", "after"]
    for unit in units:
        assert [name for name, _ in unit.branch.named_children()] == names
        first, last = (module for module in unit.branch.modules() if isinstance(module, nn.Conv2d))
        assert not last.weight.any()
        expected = math.sqrt(2 / (9 * first.out_channels)) * len(units) ** -0.5
        assert float(first.weight.detach().std()) == pytest.approx(expected, rel=0.15)
    assert sum(isinstance(module, Scale) for module in model.modules()) == len(units)
    assert sum(isinstance(module, Scalar) for module in model.modules()) == 4 * len(units) + 2
    assert not model(torch.randn(2, 3, 8, 8)).any()  # the classifier is zero


@pytest.mark.parametrize("wrong", [{"norm": "batchnorm"}, {"preact": True}, {"norm": "weightnorm"}])
def test_fixup_is_for_nets_without_norm(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Fixup is for blocks"):
        resnet(fixup=True, **wrong)


def test_thresholds_stand_in_the_place_of_relus() -> None:
    model = resnet(norm="msr+tlu")
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())
    assert sum(isinstance(module, TLU) for module in model.modules()) == 19
    with pytest.raises(ValueError, match="unknown norm"):
        resnet(norm="msr+magic")


def test_branches_with_skipinit_start_as_nothing() -> None:
    model = resnet(norm="centred_weightnorm", preact=True, skipinit=True)
    units = [module for module in model.modules() if isinstance(module, Residual)]
    assert not any(unit.branch(torch.randn(1, 8, 4, 4)).any() for unit in units[:3])


# -- SGD on the values of paths ----------------------------------------------------------------------------------------


def values_of(weights: Sequence[Tensor], skeletons: Sequence[Tensor]) -> list[Tensor]:
    """The values of basis paths, one for each weight that is not a constant skeleton weight: the definition."""
    w = weights[0][skeletons[0]]
    return [weights[0], *(weight * w for weight in weights[1:])]


def output(values: Sequence[Tensor], skeletons: Sequence[Tensor], x: Tensor) -> Tensor:
    """The net whose paths have these values."""
    w = values[0][skeletons[0]]
    weights = [values[0]]
    weights += [torch.where(s, 1.0, v / w) for v, s in zip(values[1:], skeletons[1:], strict=True)]
    for weight in weights[:-1]:
        x = (x @ weight.T).relu()
    return x @ weights[-1].T


@settings(max_examples=30)
@given(st.integers(0, 2**16), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_a_step_on_paths_is_sgd_in_their_values(seed: int, inputs: int, hidden: int, outputs: int, middle: int) -> None:
    torch.manual_seed(seed)
    sizes = [inputs, *[hidden] * (middle + 1), outputs]
    weights = [torch.randn(b, a, dtype=torch.float64).requires_grad_() for a, b in pairwise(sizes)]
    x = torch.randn(3, inputs, dtype=torch.float64)
    optimizer = BasisPathSGD(weights, lr=1e-4)
    masks = optimizer._skeleton
    assert [int(mask.sum()) for mask in masks] == [hidden] * len(masks)
    values = [v.detach().requires_grad_() for v in values_of(weights, masks)]
    loss = output(values, masks, x).square().sum()
    slopes = torch.autograd.grad(loss, values)
    expected = [v.detach() - 1e-4 * s for v, s in zip(values, slopes, strict=True)]
    y = x
    for weight in weights[:-1]:
        y = (y @ weight.T).relu()
    direct = (y @ weights[-1].T).square().sum()
    torch.testing.assert_close(direct, loss)
    direct.backward()
    optimizer.step()
    after = values_of([w.detach() for w in weights], masks)
    torch.testing.assert_close(after[0], expected[0], rtol=1e-9, atol=1e-12)
    for found, wanted, mask, weight in zip(after[1:], expected[1:], masks[1:], weights[1:], strict=True):
        torch.testing.assert_close(found[~mask], wanted[~mask], rtol=1e-9, atol=1e-12)
        assert bool((weight.detach()[mask] == 1).all())


def test_only_chains_of_equal_width_have_such_paths() -> None:
    with pytest.raises(ValueError, match="equally wide"):
        BasisPathSGD([torch.ones(4, 3), torch.ones(5, 4), torch.ones(2, 5)], lr=0.1)


# -- Muon with SGD -----------------------------------------------------------------------------------------------------


def test_muon_and_sgd_in_one_are_the_two() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
    two = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
    two.load_state_dict(one.state_dict())

    def parts(model: nn.Sequential) -> tuple[list[Tensor], list[Tensor]]:
        return [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]

    filters, others = parts(one)
    both = MuonAndSGD([{"params": filters}, {"params": others, "orthogonal": False, "lr": 0.01}], lr=0.1, momentum=0.9)
    filters, others = parts(two)
    apart = [
        Muon(filters, lr=0.1, momentum=0.9),
        torch.optim.SGD(others, lr=0.01, momentum=0.9, nesterov=True),
    ]
    for _ in range(4):
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        for model, optimizers in ((one, [both]), (two, apart)):
            model.zero_grad()
            model(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_enorm_knows_it() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    enorm = ENorm(model, MuonAndSGD([{"params": model.parameters(), "orthogonal": False}], lr=0.1), torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    with enorm.attach():
        enorm.optimizer.step()


# -- what is done once -------------------------------------------------------------------------------------------------


def built(run: Run) -> nets.Chain:
    return build(run, inputs_of(run, None, torch.device("cpu"))).model


@pytest.mark.parametrize("row", list(rivals.BALANCED))
def test_the_criterion_keeps_the_function_and_the_program_does_not(row: str) -> None:
    (cell,) = (cell for cell in rivals.PATHCOND_END.toy().cells if cell.row == row)
    run = cell.runs[0]
    start, balanced = built(replace(run, method=Method())), built(run)
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(start.eval()(x), balanced.eval()(x), rtol=1e-3, atol=1e-4)  # BatchNorm does nothing yet
    start.train()
    balanced.train()
    same = torch.allclose(start(x), balanced(x), rtol=1e-3, atol=1e-4)
    assert same == (row != rivals.PROGRAM)
    gains = [
        torch.equal(a.weight, b.weight)
        for a, b in zip(start.modules(), balanced.modules(), strict=True)
        if isinstance(a, nn.BatchNorm2d)
    ]
    assert all(gains) == (row in (rivals.PLAIN, rivals.PROGRAM, rivals.ENORM_ALWAYS))
