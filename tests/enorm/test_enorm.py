"""ENorm in training: coordinates, optimizer state, biases, copies, hooks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import equinorm
from equinorm.criteria.norm import Objective, layouts
from equinorm.enorm.reference import balance_layers_
from support.architectures import Architecture, example_input, mixed_plans
from support.chains import chain, linears
from support.grids import examples
from support.nets import relative_error

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AMSGrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
}


def batch(seed: int = 0, n: int = 16, width: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=draw).double(), torch.randint(classes, (n,), generator=draw)


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    x, y = batch(seed)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    start: int = 0,
    by_hand: equinorm.ENorm | None = None,
) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        if by_hand is not None:
            by_hand.before_step()
        optimizer.step()
        if by_hand is not None:
            by_hand.step()


def with_a_layer_without_bias() -> nn.Sequential:
    layers = [nn.Linear(5, 6), nn.Linear(6, 7, bias=False), nn.Linear(7, 3)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()


# -- one step ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    p=st.sampled_from([1.0, 2.0]),
    c=st.sampled_from([1.0, 1.2]),
    cycles=st.integers(1, 2),
)
def test_training_equals_algorithm_2(widths: list[int], p: float, c: float, cycles: int) -> None:
    """SGD with momentum and plain biases, three steps, against the reference in plain lines."""
    torch.manual_seed(len(widths))
    model = chain(5, *widths, 3)
    twin = copy.deepcopy(model)
    pair = [(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)) for net in (model, twin)]
    enorm = equinorm.ENorm(model, pair[0][1], batch()[0], p=p, c=c, cycles=cycles, bias="plain")
    for step in range(3):
        for net, optimizer in pair:
            train(net, optimizer, 1, step)
        enorm.step()
        balance_layers_(linears(twin), pair[1][1], p=p, c=c, cycles=cycles)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        buffers = [o.state[q]["momentum_buffer"] for (_, o), q in zip(pair, (mine, theirs), strict=True)]
        torch.testing.assert_close(*buffers, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_function_gradients_and_state_move_together(name: str) -> None:
    model = chain(5, 8, 8, 3)
    make, options = OPTIMIZERS[name]
    optimizer = make(model.parameters(), **options)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.2, bias="plain")
    train(model, optimizer, 3)
    weights = {k: q.detach().clone() for k, q in model.named_parameters()}
    states = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    loss, x = backward(model), batch()[0]
    gradients = {k: q.grad.clone() for k, q in model.named_parameters()}
    output = model(x)
    enorm.step()
    assert relative_error(model(x), output) < 1e-12
    factors = {k: q.detach() / weights[k] for k, q in model.named_parameters()}
    assert any((f - 1).abs().max() > 1e-2 for f in factors.values())
    for k, q in model.named_parameters():  # accumulated gradients are those of the new coordinates
        torch.testing.assert_close(q.grad, gradients[k] / factors[k])
    optimizer.zero_grad()
    torch.testing.assert_close(backward(model), loss)
    for k, q in model.named_parameters():
        torch.testing.assert_close(q.grad, gradients[k] / factors[k], rtol=1e-8, atol=1e-12)
    powers = {"momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "square_avg": -2, "sum": -2}
    for i, (k, q) in enumerate(model.named_parameters()):
        for key, old in states.get(i, {}).items():
            if key in powers and not (name == "RMSprop" and key == "momentum_buffer"):
                torch.testing.assert_close(optimizer.state[q][key], old * factors[k] ** powers[key], rtol=1e-8, atol=0)


def test_sgd_without_enorm_is_left_alone_by_every() -> None:
    model = chain(5, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], every=3)
    moved = []
    for step in range(6):
        train(model, optimizer, 1, step)
        before = model[0].weight.detach().clone()
        enorm.step()
        moved.append(not torch.equal(before, model[0].weight))
    assert moved == [False, False, True, False, False, True]


def test_many_cycles_reach_the_optimum() -> None:
    model = chain(5, 8, 8, 3)
    enorm = equinorm.ENorm(model, torch.optim.SGD(model.parameters(), lr=0.1), batch()[0], cycles=100)
    enorm.step()
    assert enorm.imbalance() < 1e-8


# -- hooks -------------------------------------------------------------------------------------------------------------


def pair_of(name: str, **options: Any) -> list[tuple[nn.Module, torch.optim.Optimizer, equinorm.ENorm]]:
    """Twice the same net with an optimizer and an ENorm."""
    make, settings = OPTIMIZERS[name]
    nets = [chain(5, 8, 8, 3)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [make(net.parameters(), **settings) for net in nets]
    return [(m, o, equinorm.ENorm(m, o, batch()[0], **options)) for m, o in zip(nets, optimizers, strict=True)]


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def hooks_of(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_attach_steps_by_itself_until_removed_and_before_that_nothing_is_installed(name: str) -> None:
    (by_hand, optimizer, hand), (by_hook, hooked, enorm) = pair_of(name, c=1.5)
    assert hooks_of(hooked) == 0
    handle = enorm.attach()
    assert hooks_of(hooked) == 2
    with pytest.raises(RuntimeError, match="attached already"):
        enorm.attach()
    with pytest.raises(RuntimeError, match="by itself"):
        enorm.before_step()
    train(by_hand, optimizer, 3, by_hand=hand)
    train(by_hook, hooked, 3)
    assert_same(by_hand, by_hook)
    handle.remove()
    assert handle.removed
    assert hooks_of(hooked) == 0
    train(by_hook, hooked, 1)
    assert enorm.calls == 3
    with enorm.attach():
        train(by_hook, hooked, 1)
        assert enorm.handle is not None
    assert (enorm.calls, enorm.handle, hooks_of(hooked)) == (4, None, 0)


def test_a_step_by_hand_puts_gradients_back() -> None:
    _, (model, optimizer, enorm) = pair_of("momentum", c=1.5, gradients=False)
    train(model, optimizer, 2, by_hand=enorm)
    backward(model)
    gradients = [q.grad.clone() for q in model.parameters()]
    enorm.before_step()
    assert not all(torch.equal(a, q.grad) for a, q in zip(gradients, model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="called twice"):
        enorm.before_step()
    optimizer.step()
    enorm.step()
    assert all(torch.equal(a, q.grad) for a, q in zip(gradients, model.parameters(), strict=True))


def test_a_loop_that_forgets_safe_biases_is_told_once() -> None:
    _, (model, optimizer, enorm) = pair_of("momentum", c=1.5)
    enorm.step()
    enorm.step()  # nobody changed the biases between
    train(model, optimizer, 1)
    with pytest.warns(UserWarning, match=r'attach\(\) this ENorm, .*before_step\(\).* or ask for bias="plain"'):
        enorm.step()
    train(model, optimizer, 1)
    enorm.step()


@pytest.mark.parametrize("options", [{"c": 1.0}, {"c": 1.5, "bias": "plain"}, {"c": 1.5, "bias": "skip"}])
def test_a_loop_without_safe_biases_needs_no_more_than_step(options: dict[str, Any]) -> None:
    model = with_a_layer_without_bias()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], **options)
    for step in range(3):
        train(model, optimizer, 1, step)
        enorm.step()


def test_it_says_what_it_is() -> None:
    _, (model, _, enorm) = pair_of("momentum", c=1.2)
    assert repr(enorm) == "ENorm(16 scales of Sequential, p=2, c=1.2, bias='safe', backend='foreach', not attached)"
    with enorm.attach() as handle:
        assert repr(enorm).endswith("backend='foreach', attached to SGD)")
        assert repr(handle) == "<ENorm attached to SGD>"
    implicit = equinorm.ImplicitENorm(model, batch()[0], c=1.2)
    assert repr(implicit) == "ImplicitENorm(16 scales of Sequential, decay=0.001, p=2, c=1.2)"
    inside = equinorm.ENormSGD(model, batch()[0], lr=0.1)
    assert repr(inside).startswith("ENormSGD (")
    assert repr(inside).endswith(
        "with ENorm(16 scales of Sequential, p=2, c=1, bias='safe', backend='foreach', attached to ENormSGD)"
    )
    assert repr(equinorm.PathSGD(model, batch()[0], lr=0.1)).endswith("for the paths of Sequential")


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_a_closure_sees_the_same_biases(optimizer: str) -> None:
    make, options = OPTIMIZERS[optimizer]
    nets = [chain(5, 8, 8, 3)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [make(m.parameters(), **options) for m in nets]
    for m, o in zip(nets, optimizers, strict=True):
        equinorm.ENorm(m, o, batch()[0], c=1.5, cycles=3).attach()

    def closure() -> Tensor:
        optimizers[1].zero_grad()
        return backward(nets[1], step)

    for step in range(4):
        train(nets[0], optimizers[0], 1, step)
        optimizers[1].step(closure)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_a_step_skipped_by_grad_scaler_changes_nothing_but_coordinates(name: str, fused: bool) -> None:
    make, options = OPTIMIZERS[name]
    model = chain(5, 8, 8, 3).float()
    optimizer = make(model.parameters(), **options, fused=fused)
    enorm = equinorm.ENorm(model, optimizer, batch()[0].float(), c=1.5, cycles=3)
    enorm.attach()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(poison: bool) -> None:
        optimizer.zero_grad()
        x, y = batch(1)
        scaler.scale(F.cross_entropy(model(x.float()), y)).backward()
        if poison:
            model[2].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step(poison=False)
    x = batch()[0].float()
    before = model(x).detach()
    step(poison=True)
    assert relative_error(model(x), before) < 1e-5
    assert all(torch.isfinite(q).all() for q in model.parameters())


# -- biases ------------------------------------------------------------------------------------------------------------


def test_a_safe_bias_is_a_weight_from_a_unit_scaled_like_the_inputs() -> None:
    """The same net with its biases written as weights of an extra unit that is always on, scaled like the others."""
    model = chain(4, 4, 4, 4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, torch.randn(2, 4).double(), c=1.3, cycles=5)
    layers = linears(model)
    x, y = torch.randn(16, 4).double(), torch.randint(2, (16,))
    handle = enorm.attach()
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    t = [torch.ones(4).double(), *enorm.log_t.exp().view(3, 4)]
    before = [m.bias.detach().clone() for m in layers]
    momentum = [optimizer.state[m.bias]["momentum_buffer"].clone() for m in layers]
    F.cross_entropy(model(x), y).backward()
    gradient = [m.bias.grad.clone() for m in layers]
    enorm.before_step()
    optimizer.step()
    enorm.biases.after_step()
    for m, b, v, g, scales in zip(layers, before, momentum, gradient, t, strict=True):
        mean = scales.log().mean().exp()
        torch.testing.assert_close(m.bias.detach(), b - 0.1 * (0.9 * v + mean**2 * g))
        torch.testing.assert_close(m.bias.grad, g)  # the user's gradient is as it was


def test_adam_steps_of_safe_biases_are_shortened_but_not_their_decay() -> None:
    model = chain(4, 4, 4, 2)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, twin)]
    enorm = equinorm.ENorm(model, optimizers[0], torch.randn(2, 4).double(), c=1.5)
    enorm.log_t.copy_(torch.tensor([-1.0] * 4 + [-2.0] * 4))
    enorm.load_state_dict(enorm.state_dict())
    x, y = torch.randn(16, 4).double(), torch.randint(2, (16,))
    old = [m.bias.detach().clone() for m in linears(model)]
    for m, o in zip((model, twin), optimizers, strict=True):
        F.cross_entropy(m(x), y).backward()
        if m is model:
            enorm.before_step()
        o.step()
    enorm.biases.after_step()
    for mine, plain, b, t in zip(linears(model), linears(twin), old, (1.0, math.exp(-1), math.exp(-2)), strict=True):
        decayed = b * (1 - 0.01 * 0.1)
        torch.testing.assert_close(mine.bias.detach(), decayed + t * (plain.bias.detach() - decayed))
        torch.testing.assert_close(mine.weight, plain.weight)


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


def deep_net(hidden: int, width: int = 64) -> nn.Sequential:
    """repro2019's protocol: He initialization, biases at zero."""
    net = chain(64, *[width] * (hidden + 1), 10).float()
    for m in linears(net):
        nn.init.kaiming_normal_(m.weight)
        nn.init.zeros_(m.bias)
    return net


def train_on_digits(hidden: int, bias: str, lr: float, epochs: int) -> float:
    """Training accuracy, or 0 if the loss was not finite at some step."""
    torch.manual_seed(0)
    x, y = digits()
    x, y = x[:1024], y[:1024]
    net = deep_net(hidden)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs)
    equinorm.ENorm(net, optimizer, x[:2], c=1.2, bias=bias).attach()
    for _ in range(epochs):
        for i in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[i]), y[i])
            if not torch.isfinite(loss):
                return 0.0
            loss.backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize(
    ("hidden", "lr", "epochs"), [(15, 0.03, 12), pytest.param(19, 0.01, 15, marks=pytest.mark.slow)]
)
def test_deep_nets_with_safe_biases_train(hidden: int, lr: float, epochs: int) -> None:
    assert train_on_digits(hidden, "safe", lr, epochs) > 0.8


@pytest.mark.parametrize(("hidden", "lr"), [(15, 0.03), (19, 0.01)])
def test_plain_biases_blow_up(hidden: int, lr: float) -> None:
    """Why: the effective learning rate of a plain bias is lr / t². If this starts to pass, "safe" is not needed."""
    assert train_on_digits(hidden, "plain", lr, 3) < 0.2


def test_skip_moves_no_bias() -> None:
    model = with_a_layer_without_bias()
    enorm = equinorm.ENorm(model, torch.optim.SGD(model.parameters(), lr=0.1), batch()[0], bias="skip", cycles=20)
    before = copy.deepcopy(model.state_dict())
    x = batch()[0]
    output = model(x)
    enorm.step()
    for key, value in model.state_dict().items():
        if key.endswith("bias"):
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert not torch.equal(model[4].weight, before["4.weight"])
    assert relative_error(model(x), output) < 1e-12


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


def batchnorm_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def test_batchnorm_is_preserved_by_default_and_ignored_on_request() -> None:
    x = batch()[0]
    for mode in ("preserve", "ignore"):
        model = batchnorm_net().eval()
        nn.init.uniform_(model[1].running_mean, -1.0, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        enorm = equinorm.ENorm(model, optimizer, x, c=1.2, cycles=5, batchnorm=mode)
        output, gain = model(x), model[1].weight.detach().clone()
        enorm.step()
        kept = relative_error(model(x), output) < 1e-12
        assert kept == (mode == "preserve")
        assert torch.equal(model[1].weight, gain) == (mode == "ignore")


def test_ignoring_batchnorm_scales_the_layers_as_if_it_were_absent() -> None:
    torch.manual_seed(0)
    with_bn = batchnorm_net()
    without = nn.Sequential(*(copy.deepcopy(m) for m in with_bn if not isinstance(m, nn.BatchNorm1d)))
    for net, options in ((with_bn, {"batchnorm": "ignore"}), (without, {})):
        equinorm.ENorm(net, torch.optim.SGD(net.parameters(), lr=0.1), batch()[0], c=1.2, **options).step()
    for a, b in zip(linears(with_bn), linears(without), strict=True):
        torch.testing.assert_close(a.weight, b.weight)


# -- copies and state --------------------------------------------------------------------------------------------------


def test_companions_keep_computing_what_they_compute() -> None:
    model = chain(5, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    frozen_copy = copy.deepcopy(model)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.2, companions=[average, frozen_copy])
    enorm.attach()
    for step in range(3):
        train(model, optimizer, 1, step)
        average.update_parameters(model)
    x = batch()[0]
    before = [average(x), frozen_copy(x)]
    train(model, optimizer, 1)
    for old, net in zip(before, (average, frozen_copy), strict=True):
        assert relative_error(net(x), old) < 1e-12


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_resuming_from_state_dicts_is_exact(name: str) -> None:
    make, options = OPTIMIZERS[name]

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, equinorm.ENorm]:
        torch.manual_seed(0)
        model = chain(5, 8, 8, 3)
        optimizer = make(model.parameters(), **options)
        enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.5, every=2)
        enorm.attach()
        return model, optimizer, enorm

    whole = fresh()
    train(*whole[:2], 7)
    first = fresh()
    train(*first[:2], 3)
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = fresh()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    train(*second[:2], 4, start=3)
    for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_deepcopy_goes_on_by_itself() -> None:
    model = chain(5, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.5)
    enorm.attach()
    train(model, optimizer, 2)
    twin_model, twin_optimizer, twin = copy.deepcopy((model, optimizer, enorm))
    assert twin.symmetry.model is twin_model
    assert twin.optimizer is twin_optimizer
    assert (hooks_of(optimizer), hooks_of(twin_optimizer)) == (2, 2)
    train(model, optimizer, 2, start=2)
    train(twin_model, twin_optimizer, 2, start=2)
    for a, b in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert a is not b
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_copies_of_model_and_optimizer_alone_are_bound() -> None:
    model = chain(5, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.5)
    train(model, optimizer, 2, by_hand=enorm)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    bound = enorm.bind(other, other_optimizer)
    assert hooks_of(other_optimizer) == 0
    train(model, optimizer, 2, by_hand=enorm)
    bound.attach()
    train(other, other_optimizer, 2)
    assert_same(model, other)
    with pytest.raises(ValueError, match="does not hold"):
        enorm.bind(copy.deepcopy(model), other_optimizer)


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(TypeError, match=r"expected the optimizer that trains the model, got NoneType; .*balance_"):
        equinorm.ENorm(chain(5, 8, 3), None, batch()[0])  # type: ignore[arg-type]


def test_half_precision_weights_stay_finite() -> None:
    model = chain(5, 8, 8, 3).half()
    with torch.no_grad():
        model[0].weight[0].mul_(1e-4)
        model[2].weight[:, 0].fill_(3e4)
        model[0].bias[0] = 6e4
    enorm = equinorm.ENorm(model, torch.optim.SGD(model.parameters(), lr=0.1), batch()[0].half())
    enorm.step()
    assert all(torch.isfinite(q).all() for q in model.parameters())


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_misuse_is_refused_before_anything_changes() -> None:
    model, x = chain(5, 8, 3), batch()[0]
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(chain(5, 8, 3).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every scale of Sequential is held by parameters that do not train"):
        equinorm.ENorm(model, other, x)
    with pytest.raises(ValueError, match=r"does not hold 0\.weight"):
        equinorm.ENorm(model, other, x, frozen="move")
    with pytest.raises(ValueError, match=r"nothing to rescale.*do not train \(2\.weight\)"):
        equinorm.ENorm(model, torch.optim.SGD(model[0].parameters(), lr=0.1), x)
    with pytest.raises(ValueError, match="frozen must be 'keep' or 'move'"):
        equinorm.ENorm(model, optimizer, x, frozen="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LBFGS"):
        equinorm.ENorm(model, torch.optim.LBFGS(model.parameters()), x)
    with pytest.raises(ValueError, match="nothing to rescale"):
        equinorm.ENorm(nn.Linear(5, 3).double(), torch.optim.SGD(model.parameters(), lr=0.1), x)
    for wrong in ({"bias": "no"}, {"batchnorm": "no"}, {"p": 0}, {"c": -1}, {"cycles": 0}, {"every": 0}):
        with pytest.raises(ValueError, match="must be"):
            equinorm.ENorm(model, optimizer, x, **wrong)
    enorm = equinorm.ENorm(model, optimizer, x)
    with pytest.raises(ValueError, match="for 3 scales"):
        enorm.load_state_dict({"log_t": torch.zeros(3), "calls": 0})
    with pytest.raises(ValueError, match=r"this state has no 'log_t' and no 'calls': load .*, got no keys at all"):
        enorm.load_state_dict({})
    with pytest.raises(ValueError, match=r"this state has no 'calls': .*, got 'log_t'"):
        enorm.load_state_dict({"log_t": torch.ones(8)})
    assert not enorm.log_t.any()
    optimizer.state[model[0].weight]["surprise"] = torch.zeros(8, 5)
    with pytest.raises(ValueError, match="surprise"):
        enorm.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("why", ["no gradient", "no optimizer"])
def test_what_does_not_train_stays_or_moves_as_asked(why: str) -> None:
    model = chain(5, 8, 8, 3)
    if why == "no gradient":
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
    out, first = model(batch()[0]), model[0].weight.clone()
    enorm = equinorm.ENorm(model, optimizer, batch()[0])
    assert enorm.kept == ("0.weight", "0.bias")
    assert enorm.symmetry.num_scales == 8
    enorm.step()
    assert torch.equal(model[0].weight, first)
    torch.testing.assert_close(model(batch()[0]), out)
    if why == "no gradient":
        moving = equinorm.ENorm(model, optimizer, batch()[0], frozen="move")
        assert moving.kept == ()
        moving.step()
        assert not torch.equal(model[0].weight, first)
        torch.testing.assert_close(model(batch()[0]), out)


def test_what_is_frozen_later_stays_from_then_on() -> None:
    """Gradual freezing: the scales that would move it are left alone, and free again with it."""
    model, x = chain(5, 8, 8, 3), batch()[0]
    enorm = equinorm.ENorm(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    model[0].requires_grad_(False)
    before, out = [q.clone() for q in model.parameters()], model(x)
    enorm.step()
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(model[0].bias, before[1])
    assert not torch.equal(model[4].weight, before[4])
    torch.testing.assert_close(model(x), out)
    model[0].requires_grad_(True)
    enorm.step()
    assert not torch.equal(model[0].weight, before[0])
    torch.testing.assert_close(model(x), out)


class LowRank(nn.Module):
    """An adapter as PEFT puts it around a layer: W x + b + B A x, of which only A and B train."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


def test_an_adapter_saved_alone_fits_the_untouched_base() -> None:
    """Weights of the base that move are in no adapter checkpoint."""
    base = chain(5, 8, 8, 3)
    model = copy.deepcopy(base)
    for i in (0, 2, 4):
        model[i] = LowRank(model[i]).double()
    trained = [q for q in model.parameters() if q.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    enorm = equinorm.ENorm(model, optimizer, batch()[0], c=1.2)
    assert enorm.symmetry.num_scales == 6  # the rank of each adapter
    with enorm.attach():
        train(model, optimizer, 5)
    saved = {name: q for name, q in model.state_dict().items() if ".base." not in name}
    fresh = copy.deepcopy(base)
    for i in (0, 2, 4):
        fresh[i] = LowRank(fresh[i]).double()
    fresh.load_state_dict(saved, strict=False)
    assert torch.equal(fresh(batch()[0]), model(batch()[0]))


# -- implicit ENorm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1.0, 1.2])
def test_implicit_scales_find_the_optimum_and_do_not_touch_the_loss(c: float) -> None:
    model, x = chain(5, 8, 8, 3), batch()[0]
    implicit = equinorm.ImplicitENorm(model, x, decay=1.0, c=c)
    explicit = copy.deepcopy(model)
    equinorm.balance_(explicit, x, c=c, tol=1e-12)
    output = model(x)
    weights = sum(
        q.detach().square().sum() * c ** (2 * d)
        for q, d in zip((m.weight for m in linears(model)), (2, 1, 0), strict=True)
    )
    torch.testing.assert_close(implicit().detach(), weights)
    optimizer = torch.optim.LBFGS(
        implicit.parameters(), max_iter=400, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=0
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = implicit()
        penalty.backward()
        return penalty

    optimizer.step(closure)
    implicit.fold_()
    assert relative_error(model(x), output) < 1e-12
    torch.testing.assert_close(implicit.scales.detach(), torch.ones(16).double())
    for a, b in zip(model.parameters(), explicit.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def plain_penalty(implicit: equinorm.ImplicitENorm, counted: Any = None) -> Tensor:
    """λ · Σ c^(p·depth) Σ |d_out w / d_in|^p, parameter by parameter (stock2019, appendix C)."""
    symmetry, padded = implicit.symmetry, torch.cat([implicit.scales.abs().log(), implicit.scales.new_zeros(1)])
    total = implicit.scales.new_zeros(())
    for w in symmetry.parameters:
        if w.multiplicative if counted is None else counted(w.name):
            scaled = symmetry.tensor(w.name) * w.factor(padded)
            total = total + implicit.c ** (implicit.p * w.depth) * scaled.abs().pow(implicit.p).sum()
    return implicit.decay * total


def assert_same_penalty(implicit: equinorm.ImplicitENorm, counted: Any = None, **tolerance: float) -> None:
    """Value, gradients, and the gradient of a gradient's norm."""
    symmetry = implicit.symmetry
    inputs = [implicit.scales, *(symmetry.tensor(w.name) for w in symmetry.parameters if w.multiplicative)]
    found = []
    for penalty in (implicit(), plain_penalty(implicit, counted)):
        first = torch.autograd.grad(penalty, inputs, create_graph=True, materialize_grads=True)
        steep = sum((g.square().sum() for g in first), torch.zeros(()))
        found.append([penalty, *first, *torch.autograd.grad(steep, inputs, materialize_grads=True)])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)


@settings(deadline=None, max_examples=examples(10, of=25))
@given(
    plan=mixed_plans,
    p=st.sampled_from([1.0, 2.0, 3.0]),
    c=st.sampled_from([1.0, 1.2]),
    last=st.booleans(),
    seed=st.integers(0, 5),
)
def test_implicit_penalty_is_what_it_says(plan: list[Any], p: float, c: float, last: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Architecture(plan).double()
    model = model.to(memory_format=torch.channels_last) if last else model
    symmetry = equinorm.trace(model, example_input().double())
    assume(symmetry.num_scales)
    implicit = equinorm.ImplicitENorm(model, symmetry=symmetry, p=p, c=c)
    with torch.no_grad():
        implicit.scales.copy_(torch.randn_like(implicit.scales).exp() * torch.randn_like(implicit.scales).sign())
    assert_same_penalty(implicit)


def test_implicit_penalty_of_chosen_parameters_wherever_its_scales_are() -> None:
    model, x = chain(5, 8, 8, 3), batch()[0]
    chosen = equinorm.ImplicitENorm(model, x, parameters=lambda name: name.startswith("2"), keep=["4.*"])
    assert_same_penalty(chosen, counted=lambda name: name.startswith("2"))
    model.float()
    implicit = equinorm.ImplicitENorm(model, x.float())
    assert implicit().dtype == torch.float32
    model.double()
    assert_same_penalty(implicit.double())
    expected = implicit()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(implicit(), expected)


@pytest.mark.parametrize("keep", ["2", ["2"], ["[2]"], ("2.weight", "2.bias")])
def test_a_module_is_kept_with_all_that_is_in_it(keep: Any) -> None:
    model, x = chain(5, 8, 8, 8, 3), batch()[0]
    before, output = copy.deepcopy(model.state_dict()), model(x)
    enorm = equinorm.ENorm(model, torch.optim.SGD(model.parameters(), lr=0.1), x, keep=keep, cycles=5)
    enorm.step()
    moved = {key.split(".")[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"4", "6"}
    assert relative_error(model(x), output) < 1e-12
    with pytest.raises(ValueError, match="keep='classifier' matches no module and no parameter of Sequential"):
        equinorm.trace(model, x, keep="classifier")


def test_implicit_penalty_reaches_weights_and_scales() -> None:
    model, x = chain(5, 8, 3), batch()[0]
    implicit = equinorm.ImplicitENorm(model, x, decay=1e-2)
    assert {name for name, _ in implicit.named_parameters()} == {"scales"}
    (backward(model) * 0 + implicit()).backward()
    assert implicit.scales.grad is not None
    assert model[2].weight.grad is not None
    assert float(model[2].weight.grad.abs().sum()) > 0
    with pytest.raises(ValueError, match="nothing to rescale"):
        equinorm.ImplicitENorm(nn.Linear(5, 3).double(), x)


def test_all_that_a_plain_step_reads_is_on_the_device() -> None:
    """Nothing may be copied from the host inside a capture, and masks must be where the matrices are."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(torch.relu(x + self.inner(torch.relu(x))))

    symmetry = equinorm.trace(Stream(), torch.zeros(1, 3))
    chosen = layouts(symmetry, 2.0, 1.0, lambda w: w.multiplicative)
    assert any(layout.cancels is not None for layout in chosen)
    objective = Objective(symmetry.num_scales, 2.0, chosen, torch.float32, torch.device("meta"))
    objective.load(lambda name: symmetry.tensor(name).to("meta"))
    found = [*vars(objective).values(), *vars(objective._sum).values()]
    tensors = [x for value in found for x in (value if isinstance(value, list) else [value]) if isinstance(x, Tensor)]
    assert len(tensors) > 8
    assert {x.device.type for x in tensors} == {"meta"}
