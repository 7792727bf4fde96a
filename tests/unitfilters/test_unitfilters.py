"""Filters stay on the sphere, whatever optimizer moves them; and nets train with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import equinorm
from equinorm.unitfilters import Muon, UnitFilters, data_init_, parameter_groups, project_, unit_filters_
from equinorm.unitfilters.reference import projected_by_loop


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.SiLU(),
        nn.Linear(16, 10),
    )


def unit_net(**options: Any) -> nn.Sequential:
    model = net()
    unit_filters_(model, **options)
    return model


def filters_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("original")]


def rest_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.endswith("original")]


def lengths(weights: list[nn.Parameter]) -> Tensor:
    return torch.cat([weight.detach().double().flatten(1).norm(dim=1) for weight in weights])


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (8,), generator=generator)
    loss: Tensor = cross_entropy(model(x), labels)
    loss.backward()
    return loss


def sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(parameter_groups(model, 5e-4), lr=0.1, momentum=0.9, nesterov=True)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(parameter_groups(model, 0.01), lr=0.01)]


def muon_and_sgd(model: nn.Module) -> list[Optimizer]:
    return [Muon(filters_of(model), lr=0.1), torch.optim.SGD(rest_of(model), lr=0.01, momentum=0.85, nesterov=True)]


def both_muons(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in filters_of(model) if p.ndim == 2]
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return [
        Muon([p for p in filters_of(model) if p.ndim > 2], lr=0.1),
        torch.optim.Muon(matrices, lr=0.1, weight_decay=0.0),
        torch.optim.SGD(rest_of(model), lr=0.01),
    ]


OPTIMIZERS = [sgd, adamw, muon_and_sgd, both_muons]


def train(model: nn.Module, optimizers: list[Optimizer], steps: int = 4, seed: int = 0) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, seed + step)
        for optimizer in optimizers:
            optimizer.step()


# -- length ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tangent": True}], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_filters_have_length_one_after_every_step(make: Any, options: dict[str, Any]) -> None:
    model = unit_net(learned=True)
    optimizers = make(model)
    held = UnitFilters(model, optimizers, **options)
    before = [p.detach().clone() for p in filters_of(model)]
    with held.attach():
        for step in range(3):
            train(model, optimizers, 1, step)
            assert (lengths(filters_of(model)) - 1).abs().max() < 1e-6
    assert held.steps == 3
    assert all((p - q).abs().max() > 1e-3 for p, q in zip(filters_of(model), before, strict=True))
    train(model, optimizers, 1)
    assert (lengths(filters_of(model)) - 1).abs().max() > 1e-6, "after remove() nothing is projected"
    assert held.steps == 3


@given(st.integers(0, 50), st.sampled_from([False, True, "window"]), st.floats(1e-3, 10.0))
def test_a_step_is_the_plain_step_and_a_projection(seed: int, zero_mean: Any, lr: float) -> None:
    model = unit_net(zero_mean=zero_mean)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr), torch.optim.SGD(twin.parameters(), lr=lr)]
    UnitFilters(model, optimizers[0]).attach()
    train(model, optimizers[:1], 1, seed)
    train(twin, optimizers[1:], 1, seed)
    for p, q in zip(filters_of(model), filters_of(twin), strict=True):
        expected = projected_by_loop(q, bool(zero_mean), "window" if zero_mean == "window" else "filter")
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-5)
    for p, q in zip(rest_of(model), rest_of(twin), strict=True):
        assert torch.equal(p, q)


def test_nothing_happens_before_attach_nor_in_it() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = UnitFilters(model, optimizer, layers=["0", "2"])
    handle = held.attach()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(RuntimeError, match="already attached"):
        held.attach()
    handle.remove()
    held.project_()
    assert (lengths([model[0].weight, model[2].weight]) - 1).abs().max() < 1e-6
    assert torch.equal(model[5].weight, before["5.weight"])


def test_plain_weights_by_name_and_by_themselves() -> None:
    for select in ({"layers": ["[02]"]}, {"parameters": None}):
        model = net()
        plain = [model[0].weight, model[2].weight]
        optimizers = [Muon(plain, lr=0.1), torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)]
        chosen = {name: plain if value is None else value for name, value in select.items()}
        held = UnitFilters(model, optimizers, zero_mean="window", **chosen)
        held.attach()
        train(model, optimizers)
        assert (lengths(plain) - 1).abs().max() < 1e-6
        assert max(p.mean((2, 3)).abs().max() for p in plain) < 1e-6
        assert "16 filters of 2 weights, zero_mean='window'" in repr(held)


def test_the_last_optimizer_that_has_a_filter_counts() -> None:
    model = unit_net()
    weights = filters_of(model)
    first, second = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    UnitFilters(model, [first, second]).attach()
    backward(model)
    first.step()
    assert (lengths(weights) - 1).abs().max() > 1e-4
    second.step()
    assert (lengths(weights) - 1).abs().max() < 1e-6


def test_before_the_step_leaves_the_step_its_length() -> None:
    model = unit_net()
    optimizers = sgd(model)
    held = UnitFilters(model, optimizers, project="before_step")
    held.attach()
    for weight in filters_of(model):
        weight.data *= 3.0
    backward(model)
    gradients = [p.grad.clone() for p in filters_of(model)]
    unit = [project_(p.detach().clone()) for p in filters_of(model)]
    optimizers[0].step()
    for p, w, g in zip(filters_of(model), unit, gradients, strict=True):
        torch.testing.assert_close(p.detach(), w - 0.1 * 1.9 * g)
    assert held.steps == 1


# -- every kind of step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
def test_with_a_closure_gradients_are_made_tangent_in_it(by_name: bool) -> None:
    results = []
    for closure in (False, True):
        model = unit_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        UnitFilters(model, optimizer, tangent=True).attach()
        for step in range(3):
            optimizer.zero_grad()
            if not closure:
                backward(model, step)
                optimizer.step()
            elif by_name:
                optimizer.step(closure=lambda model=model, step=step: backward(model, step))
            else:
                optimizer.step(lambda model=model, step=step: backward(model, step))
        for v in filters_of(model):
            buffer = optimizer.state[v]["momentum_buffer"]
            assert buffer.abs().max() > 0
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_tangent_momentum_has_no_part_along_the_filter_at_first() -> None:
    for tangent in (False, True):
        model = unit_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        UnitFilters(model, optimizer, tangent=tangent).attach()
        train(model, [optimizer], 2)
        along = [(optimizer.state[v]["momentum_buffer"] * v).flatten(1).sum(1).abs().max() for v in filters_of(model)]
        assert (max(along) < 1e-5) == tangent


def test_skipped_and_accumulated_steps() -> None:
    model = unit_net()
    optimizer = sgd(model)[0]
    held = UnitFilters(model, optimizer)
    held.attach()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad in (False, True):
        optimizer.zero_grad()
        for seed in range(2):
            backward(model, seed)
        if bad:
            model[0].bias.grad[0] = torch.inf
        for p in model.parameters():
            p.grad *= scaler.get_scale()
        scaler.scale(torch.zeros(()))
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.state_dict()["0.bias"], before["0.bias"]) == bad
        assert (lengths(filters_of(model)) - 1).abs().max() < 1e-6
    assert held.steps == 1


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, muon_and_sgd])
def test_resumed_it_goes_on_bit_by_bit(make: Any) -> None:
    model = unit_net(learned=True)
    optimizers = make(model)
    held = UnitFilters(model, optimizers, tangent=True)
    held.attach()
    train(model, optimizers, 3)
    saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers], held.state_dict()))
    twin, twins, copied = copy.deepcopy((model, optimizers, held))
    train(model, optimizers, 3, seed=3)

    resumed = unit_net(learned=True)
    others = make(resumed)
    again = UnitFilters(resumed, others)
    resumed.load_state_dict(saved[0])
    for optimizer, state in zip(others, saved[1], strict=True):
        optimizer.load_state_dict(state)
    again.load_state_dict(saved[2])
    again.attach()
    train(resumed, others, 3, seed=3)
    train(twin, twins, 3, seed=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
        assert torch.equal(value, twin.state_dict()[name])
    assert held.steps == again.steps == copied.steps == 6
    assert copied.model is twin
    with pytest.raises(ValueError, match="zero_mean=True"):
        held.load_state_dict({**held.state_dict(), "zero_mean": True})


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_name_the_weight_and_the_remedy() -> None:
    model = unit_net()
    first = model[0].parametrizations["weight"].original  # type: ignore[index, union-attr]
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer does not have 0\.parametrizations\.weight\.original"):
        UnitFilters(model, torch.optim.SGD([p for p in model.parameters() if p is not first], lr=0.1))
    with pytest.raises(ValueError, match=r"decays 0\.parametrizations\.weight\.original.*parameter_groups"):
        UnitFilters(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="call unit_filters_"):
        UnitFilters(net(), everything)
    with pytest.raises(TypeError, match="got dict"):
        UnitFilters(model, [{}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match='"after_step" or'):
        UnitFilters(model, everything, project="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches no linear or convolutional layer"):
        UnitFilters(model, everything, layers="stem")
    with pytest.raises(ValueError, match=r"0\.bias of shape \(8,\) has no filters"):
        UnitFilters(model, everything, parameters=[model[0].bias])
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="another method"):
        UnitFilters(normed, torch.optim.SGD(normed.parameters()), layers="0")
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4))
    with pytest.raises(ValueError, match="filters of one weight"):
        UnitFilters(depthwise, torch.optim.SGD(depthwise.parameters()), layers="0", zero_mean=True)


def test_what_is_frozen_may_be_in_no_optimizer() -> None:
    model = unit_net()
    frozen, *others = filters_of(model)
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    optimizer = torch.optim.SGD(others, lr=0.1)
    UnitFilters(model, optimizer).attach()
    train(model, [optimizer])
    assert torch.equal(frozen, before)
    for p in others:
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="all weights with unit filters are frozen"):
        UnitFilters(model, torch.optim.SGD([model[0].bias], lr=0.1))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, muon_and_sgd])
def test_digits_are_learned_in_one_epoch(make: Any) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    y = torch.tensor(digits.target)
    model = unit_net()
    data_init_(model, x[:256])
    optimizers = make(model)
    UnitFilters(model, optimizers).attach()
    for batch in torch.randperm(1500, generator=torch.Generator().manual_seed(0)).split(32):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        for optimizer in optimizers:
            optimizer.step()
    plain, _ = equinorm.fold(model)
    with torch.no_grad():
        accuracy = (plain(x[1500:]).argmax(1) == y[1500:]).float().mean()
    assert accuracy > 0.7, f"{accuracy:.3f}"


@pytest.mark.gpu
@pytest.mark.parametrize("zero_mean", [False, "window"])
def test_a_captured_step_is_a_step(zero_mean: Any) -> None:
    model = unit_net(zero_mean=zero_mean).cuda()
    twin = copy.deepcopy(model)
    both = [muon_and_sgd(each) for each in (model, twin)]
    held = [UnitFilters(each, optimizers, tangent=True) for each, optimizers in zip((model, twin), both, strict=True)]
    for one in held:
        one.attach()
    x, y = torch.randn(8, 1, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step(each: nn.Module, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        cross_entropy(each(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, both[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, both[0])
    graph.replay()
    for _ in range(4):
        step(twin, both[1])
    assert (lengths(filters_of(model)).cpu() - 1).abs().max() < 1e-6
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-2)
