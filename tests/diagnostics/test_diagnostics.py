"""The instruments: on cases with a known answer, against plain references, and without a trace left on the model."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm import diagnostics as d
from equinorm.enorm.reference import balance_chain_, paper_views
from equinorm.nn import EquiNormConv2d

# -- models and helpers ------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """½ θᵀHθ - bᵀθ; its output is the loss."""

    def __init__(self, H: Tensor, b: Tensor | None = None, start: Tensor | None = None) -> None:
        super().__init__()
        self.H, self.b = H, torch.zeros(len(H), dtype=H.dtype) if b is None else b
        self.theta = nn.Parameter(torch.ones(len(H), dtype=H.dtype) if start is None else start)

    def forward(self) -> Tensor:
        return 0.5 * self.theta @ self.H @ self.theta - self.b @ self.theta


def the_output(output: Tensor, _: Any) -> Tensor:
    return output


NOTHING: Any = ((), None)  # the batch of a model without inputs


def symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=draw, dtype=torch.float64))
    return q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T


class Busy(nn.Module):
    """Whatever an instrument could disturb: running statistics, dropout, an in-place ReLU, functional activations."""

    def __init__(self, equinorm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.middle = EquiNormConv2d(8, 8, 3, padding=1) if equinorm else nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = F.relu(self.middle(x)) + x
        return self.head(self.drop(x.mean((2, 3))))


def images(n: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, 6, 6, generator=draw), torch.randint(4, (n,), generator=draw)


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def data(inputs: int, classes: int, n: int = 32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(n, inputs, generator=draw, dtype=torch.float64), torch.randint(classes, (n,), generator=draw)


INSTRUMENTS: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "gradient_landscape": lambda m, loss, b: d.gradient_landscape(m, loss, b, [0.1, 0.2]),
    "gradient_predictiveness": lambda m, loss, b: d.gradient_predictiveness(m, loss, b, [0.1]),
    "effective_smoothness": lambda m, loss, b: d.effective_smoothness(m, loss, b, [0.1]),
    "gradient_scan": lambda m, loss, b: d.gradient_scan(m, loss, b, [0.1, 0.2]),
    "top_eigenvalue": lambda m, loss, b: d.top_eigenvalue(m, loss, b, iterations=3),
    "sharpness": lambda m, loss, b: d.sharpness(m, loss, b, steps=2),
    "gradient_norms": d.gradient_norms,
    "gradient_alignment": d.gradient_alignment,
    "forward_norms": lambda m, _, b: d.forward_norms(m, b[0]),
    "channel_means": lambda m, _, b: d.channel_means(m, b[0]),
    "dead_units": lambda m, _, b: d.dead_units(m, b[0]),
    "statistics_noise": lambda m, _, b: d.statistics_noise(m, b[0], batches=4),
    "layer_energy": lambda m, *_: d.layer_energy(m),
    "column_energy": lambda m, *_: d.column_energy(m),
    "energy_by_cycle": lambda m, _, b: d.energy_by_cycle(m, b[0], 2),
    "imbalance_by_layer": lambda m, _, b: d.imbalance_by_layer(m, b[0]),
    "kernel_means": lambda m, *_: d.kernel_means(m),
    "filter_norms": lambda m, *_: d.filter_norms(m),
    "effective_learning_rate": lambda m, *_: d.effective_learning_rate(m, 0.1),
    "deflated_share": lambda m, *_: d.deflated_share(m),
    "relative_steps": lambda m, *_: d.relative_steps(m, 0.1),
    "before_and_after_balancing": lambda m, _, b: d.before_and_after_balancing(d.layer_energy, m, b[0])[1],
}

BALANCING = ("energy_by_cycle", "imbalance_by_layer", "before_and_after_balancing")  # need a scale that is free


def state(model: nn.Module) -> Any:
    """All that an instrument must leave as it is."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return {
        "tensors": {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks,
        "random": torch.get_rng_state(),
        "grad_mode": torch.is_grad_enabled(),
    }


def assert_same_state(before: Any, after: Any) -> None:
    for name, (identity, value) in before["tensors"].items():
        assert after["tensors"][name][0] == identity, name
        assert torch.equal(after["tensors"][name][1], value), name
    for name, grad in before["grads"].items():
        found = after["grads"][name]
        assert (grad is None) == (found is None), name
        assert grad is None or torch.equal(grad, found), name
    for key in ("requires_grad", "training", "hooks", "grad_mode"):
        assert before[key] == after[key], key
    assert torch.equal(before["random"], after["random"])


# -- no trace is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", INSTRUMENTS)
def test_an_instrument_leaves_the_model_as_it_was(name: str, training: bool) -> None:
    model, batch = Busy(equinorm=name not in BALANCING).train(training), images()
    model.stem.train(False)  # one module in another mode than the rest, on purpose
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    before = state(model)
    result = INSTRUMENTS[name](model, F.cross_entropy, batch)
    assert_same_state(before, state(model))
    json.dumps(result.to_dict())  # plain numbers


@pytest.mark.parametrize(
    "name", ["gradient_scan", "top_eigenvalue", "gradient_norms", "sharpness", "gradient_alignment"]
)
def test_an_error_in_the_loss_leaves_no_trace_either(name: str) -> None:
    model, batch = Busy(), images()
    before = state(model)
    calls = []

    def fails_later(output: Tensor, target: Tensor) -> Tensor:
        calls.append(torch.rand(1))
        if len(calls) > 1 or name != "gradient_scan":
            raise RuntimeError("no loss today")
        return F.cross_entropy(output, target)

    with pytest.raises(RuntimeError, match="no loss today"):
        INSTRUMENTS[name](model, fails_later, batch)
    assert_same_state(before, state(model))


@pytest.mark.parametrize("name", ["forward_norms", "dead_units", "channel_means", "statistics_noise"])
def test_an_error_in_the_model_leaves_no_trace_either(name: str) -> None:
    model, (x, y) = Busy(), images()
    before = state(model)
    with pytest.raises(RuntimeError):
        INSTRUMENTS[name](model, F.cross_entropy, (x[:, :2], y))
    assert_same_state(before, state(model))


def test_training_goes_on_as_if_nothing_had_been_measured() -> None:
    def train(measure: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, (x, y) = Busy(), images()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            if measure:
                d.gradient_scan(model, F.cross_entropy, (x, y), [0.1])
                d.dead_units(model, x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model.state_dict()

    plain, measured = train(False), train(True)
    assert all(torch.equal(plain[name], measured[name]) for name in plain)


def test_every_evaluation_sees_the_same_dropout() -> None:
    """A landscape that mixed different masks would show their noise instead of the loss."""
    model, batch = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double(), data(6, 3)
    tiny = d.gradient_landscape(model, F.cross_entropy, batch, [1e-9, 2e-9])
    assert torch.allclose(tiny.losses, tiny.loss, atol=1e-7)


# -- landscape ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.05, 10.0), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 2.0), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_scan_of_a_quadratic(eigenvalues: list[float], steps: list[float], seed: int) -> None:
    """L(θ - ηg) and its gradient are known exactly: (I - ηH)g."""
    H = symmetric(eigenvalues, seed)
    model = Quadratic(H, start=torch.randn(len(H), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    scan = d.gradient_scan(model, the_output, NOTHING, steps)
    theta = model.theta.detach()
    g = H @ theta
    for i, step in enumerate(steps):
        there = theta - step * g
        assert torch.allclose(scan.losses[i], 0.5 * there @ H @ there)
        assert torch.allclose(scan.changes[i], step * (H @ g).norm())
    assert torch.allclose(scan.gradient_norm, g.norm())
    beta = scan.smoothness.beta
    assert torch.allclose(beta, (H @ g).norm() / g.norm(), rtol=1e-6)
    assert float(beta) <= max(eigenvalues) * (1 + 1e-9)  # a local Lipschitz constant of the gradient
    assert torch.equal(scan.landscape.losses, d.gradient_landscape(model, the_output, NOTHING, steps).losses)


def test_an_eigenvector_shows_its_eigenvalue() -> None:
    model = Quadratic(symmetric([4.0, 1.0]), start=torch.linalg.eigh(symmetric([4.0, 1.0]))[1][:, -1])
    found = d.gradient_predictiveness(model, the_output, NOTHING, [0.1, 0.5])
    assert torch.allclose(found.cosines, torch.tensor([1.0, -1.0], dtype=torch.float64))  # beyond 1/λ it turns round
    assert torch.allclose(d.effective_smoothness(model, the_output, NOTHING, [0.1]).beta, torch.tensor(4.0).double())


def test_scan_against_a_plain_loop() -> None:
    model, batch, steps = mlp(5, 8, 3), data(5, 3), [0.1, 0.7]
    scan = d.gradient_scan(model, F.cross_entropy, batch, steps)

    def gradient(m: nn.Module) -> tuple[float, Tensor]:
        m.zero_grad()
        loss = F.cross_entropy(m(batch[0]), batch[1])
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.reshape(-1) for p in m.parameters() if p.grad is not None])

    here, g = gradient(model)
    for i, step in enumerate(steps):
        moved = copy.deepcopy(model)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(moved.parameters()) - step * g, moved.parameters())
        there, turned = gradient(moved)
        assert float(scan.losses[i]) == pytest.approx(there)
        assert float(scan.changes[i]) == pytest.approx(float((turned - g).norm()))
        assert float(scan.cosines[i]) == pytest.approx(float(turned @ g / (turned.norm() * g.norm())))
    assert float(scan.loss) == pytest.approx(here)


def test_along_an_orbit_the_function_stays_and_the_landscape_changes() -> None:
    """What rescaling must not change, what it must, and what balancing makes equal again."""
    model, batch, steps = mlp(6, 12, 9, 4), data(6, 4), [0.05, 0.2]
    symmetry = equinorm.trace(model, batch[0])
    other = copy.deepcopy(model)
    symmetry.bind(other).rescale_(torch.randn(symmetry.num_scales))
    with torch.no_grad():
        assert torch.allclose(model(batch[0]), other(batch[0]), rtol=1e-10)
    here, there = (d.gradient_scan(m, F.cross_entropy, batch, steps) for m in (model, other))
    assert torch.allclose(here.loss, there.loss)
    assert not torch.allclose(here.losses, there.losses, rtol=1e-3)
    assert not torch.allclose(here.gradient_norm, there.gradient_norm, rtol=1e-3)

    def measure(m: nn.Module) -> d.GradientScan:
        return d.gradient_scan(m, F.cross_entropy, batch, steps)

    pairs = [d.before_and_after_balancing(measure, m, batch[0], tol=1e-12) for m in (model, other)]
    assert torch.equal(pairs[0][0].losses, here.losses)  # "before" is the model itself
    for name in ("losses", "gradient_norm", "changes"):  # one orbit has one balanced network
        assert torch.allclose(getattr(pairs[0][1], name), getattr(pairs[1][1], name), rtol=1e-6), name


def test_what_cannot_be_scanned_is_refused() -> None:
    model, batch = mlp(3, 2), data(3, 2)
    with pytest.raises(ValueError, match="step sizes other than 0"):
        d.gradient_landscape(model, F.cross_entropy, batch, [0.0])
    with pytest.raises(ValueError, match="single number"):
        d.gradient_scan(model, lambda out, y: out, batch, [0.1])
    with pytest.raises(TypeError, match="a pair"):
        d.gradient_scan(model, F.cross_entropy, batch[0], [0.1])
    with pytest.raises(ValueError, match="requires a gradient"):
        d.gradient_scan(model.requires_grad_(False), F.cross_entropy, batch, [0.1])


# -- curvature ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=6), st.integers(0, 1000))
def test_top_eigenvalue_of_a_quadratic(eigenvalues: list[float], seed: int) -> None:
    """Also where the eigenvalue of largest magnitude is negative."""
    model = Quadratic(symmetric(eigenvalues, seed))
    found = d.top_eigenvalue(model, the_output, NOTHING, iterations=20_000, tolerance=1e-4)
    scale = max(map(abs, eigenvalues))
    assert float(found.value) == pytest.approx(max(eigenvalues), abs=1e-3 * scale + 1e-9)


def test_top_eigenvalue_against_the_whole_hessian() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data(4, 3)
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach() for p in model.parameters()]

    def loss(*parameters: Tensor) -> Tensor:
        out = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (batch[0],))
        return F.cross_entropy(out, batch[1])

    blocks = torch.autograd.functional.hessian(loss, tuple(values))
    hessian = torch.cat(
        [torch.cat([b.reshape(v.numel(), -1) for b in row], 1) for v, row in zip(values, blocks, strict=True)]
    )
    found = d.top_eigenvalue(model, F.cross_entropy, batch, iterations=2000, tolerance=1e-6)
    assert found.converged
    assert float(found.value) == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-5)


def test_a_flat_loss_has_no_curvature() -> None:
    found = d.top_eigenvalue(Quadratic(torch.zeros(3, 3), torch.ones(3)), the_output, NOTHING)
    assert float(found.value) == 0.0
    assert found.converged


@settings(max_examples=15)
@given(st.floats(0.1, 5.0), st.floats(0.05, 1.0))
def test_sharpness_of_a_bowl(curvature: float, radius: float) -> None:
    """½λ‖θ‖² at a point of length 1: highest straight outwards, ½λ(1 + r)²."""
    model = Quadratic(curvature * torch.eye(3, dtype=torch.float64), start=torch.tensor([0.6, 0.8, 0.0]).double())
    found = d.sharpness(model, the_output, NOTHING, radius=radius)
    assert float(found.rise) == pytest.approx(0.5 * curvature * ((1 + radius) ** 2 - 1), rel=1e-6)
    assert found.radius == pytest.approx(radius)


def test_sharpness_differs_along_the_orbit_and_balancing_lowers_it() -> None:
    model, batch = mlp(6, 12, 9, 4), data(6, 4)
    with torch.no_grad():
        model[0].weight.mul_(30)
        model[0].bias.mul_(30)
        model[2].weight.div_(30)

    def curvature(m: nn.Module) -> float:
        return float(d.top_eigenvalue(m, F.cross_entropy, batch).value)

    before, after = d.before_and_after_balancing(curvature, model, batch[0])
    assert before > 10 * after


# -- propagation -------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.floats(0.3, 3.0), st.integers(1, 6), st.integers(2, 7))
def test_propagation_through_scaled_rotations(gain: float, depth: int, width: int) -> None:
    """Every layer is gain times an orthogonal matrix: activations grow as gain^l, gradients as gain^(L - l)."""
    layers = [nn.Linear(width, width, bias=False).double() for _ in range(depth)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
    model, x = nn.Sequential(*layers), torch.randn(4, width, dtype=torch.float64)
    forward = d.forward_norms(model, x)
    expected = torch.tensor([gain**k for k in range(1, depth + 1)], dtype=torch.float64)
    assert torch.allclose(forward.ratio, expected)
    assert torch.allclose(forward.rms, forward.norm[0] * 0 + forward.rms)
    down = torch.randn(4, width, dtype=torch.float64)
    backward = d.gradient_norms(model, lambda out, t: (out * t).sum(), (x, down))
    reference = torch.tensor([gain ** (depth - k) for k in range(1, depth + 1)], dtype=torch.float64) * down.norm()
    assert torch.allclose(backward.norm, reference)
    assert forward.names == backward.names == [str(i) for i in range(depth)]


def test_gradients_against_retained_ones() -> None:
    model, (x, y) = Busy().double(), images()
    x = x.double()
    model.eval()
    found = d.gradient_norms(model, F.cross_entropy, (x, y))
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            out.retain_grad()
            kept[name] = out
            return out.clone()  # the in-place ReLU must not overwrite what is compared

        return hook

    for name in found.names:
        model.get_submodule(name).register_forward_hook(keep(name))
    F.cross_entropy(model(x), y).backward()
    for name, size in zip(found.names, found.norm, strict=True):
        grad = kept[name].grad
        assert grad is not None
        assert torch.allclose(size, grad.norm()), name
    weight = model.stem.weight
    assert weight.grad is not None
    assert float(found.parameter_norm[0]) == pytest.approx(float(weight.grad.norm()))
    assert float(found.relative[0]) == pytest.approx(float(weight.grad.norm() / weight.detach().norm()))


def test_the_output_before_an_inplace_relu_is_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(inplace=True)).double()
    with torch.no_grad():
        model[0].weight.copy_(-torch.eye(3))
    x = torch.ones(2, 3, dtype=torch.float64)
    assert float(d.forward_norms(model, x).rms[0]) == pytest.approx(1.0)


def test_layers_are_found_however_they_are_made() -> None:
    """Parametrized weights are one layer, layers that run twice are two lines, dict inputs are arguments."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(self.inner(self.table(ids)))

    model = Twice()
    equinorm.weight_norm_(model, layers=["inner"])
    found = d.forward_norms(model, {"ids": torch.tensor([[0, 1], [2, 3]])})
    assert found.names == ["table", "inner", "inner#2"]
    assert math.isnan(float(found.input_norm))


# -- energy ------------------------------------------------------------------------------------------------------------


def test_energies_against_plain_sums() -> None:
    model = Busy()
    energy, columns = d.layer_energy(model, p=3.0), d.column_energy(model, p=3.0)
    assert energy.names == ["stem.weight", "middle.weight", "head.weight"]
    for name, value in zip(energy.names, energy.energy, strict=True):
        weight = model.get_parameter(name).detach()
        assert float(value) == pytest.approx(sum(abs(w) ** 3 for w in weight.flatten().tolist()), rel=1e-5)
        plain = [sum(abs(w) ** 3 for w in row.flatten().tolist()) ** (1 / 3) for row in weight]
        assert columns.columns[name].tolist() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("c", [1.0, 1.2])
def test_cycles_are_those_of_the_paper(c: float) -> None:
    """Against algorithm 1 in plain lines; with c = 1 the norm never rises (stock2019, theorem 1)."""
    model = mlp(5, 7, 6, 4, bias=False)
    found = d.energy_by_cycle(model, torch.randn(1, 5, dtype=torch.float64), cycles=4, c=c)
    weights = [layer.weight.detach().clone() for layer in model if isinstance(layer, nn.Linear)]
    for cycle in range(5):
        expected = [float(w.square().sum()) for w in weights]
        assert found.energy[cycle].tolist() == pytest.approx(expected)
        assert float(found.norm[cycle]) == pytest.approx(math.sqrt(sum(expected)))
        balance_chain_(paper_views(weights), c=c)
    if c == 1.0:
        assert bool((found.norm.diff() <= 1e-12).all())
        assert float(found.imbalance[-1]) < float(found.imbalance[0])


def test_the_norm_by_cycle_counts_the_gains_of_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    found = d.energy_by_cycle(model, torch.randn(1, 3, 8, 8), cycles=3)
    assert bool((found.norm.diff() <= 1e-6).all())


@settings(max_examples=15)
@given(st.floats(0.05, 20.0))
def test_imbalance_of_two_layers(factor: float) -> None:
    """One hidden layer: per unit |log(Σ in² / Σ out²)|."""
    torch.manual_seed(0)
    model = mlp(4, 5, 3, bias=False)
    with torch.no_grad():
        model[0].weight.mul_(factor)
    found = d.imbalance_by_layer(model, torch.randn(1, 4, dtype=torch.float64))
    incoming, outgoing = model[0].weight.detach().square().sum(1), model[2].weight.detach().square().sum(0)
    gaps = (incoming / outgoing).log().abs()
    assert found.names == ["0.weight"]
    assert float(found.largest) == pytest.approx(float(gaps.max()))
    assert float(found.mean) == pytest.approx(float(gaps.mean()))


def test_balancing_ends_all_imbalance_and_changes_no_output() -> None:
    model, (x, _) = Busy(equinorm=False).eval(), images()
    with torch.no_grad():
        outputs = model(x)
        before = d.imbalance_by_layer(model, x)
        equinorm.balance_(model, x, tol=1e-10)
        assert torch.allclose(model(x), outputs, atol=1e-5)
    assert float(before.overall) > 0.1
    assert float(d.imbalance_by_layer(model, x).overall) < 1e-5


def test_a_model_without_free_scales_has_no_imbalance() -> None:
    found = d.imbalance_by_layer(nn.Linear(3, 2), torch.randn(1, 3))
    assert found.names == []
    assert float(found.overall) == 0.0


# -- shift -------------------------------------------------------------------------------------------------------------


def test_channel_means_of_a_constant_and_of_noise() -> None:
    """A bias on a zero weight is all mean; zero-mean noise through a unit weight has almost none."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2).view(2, 2, 1, 1))
        model[0].bias.zero_()
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([1.0, -2.0, 3.0]))
    x = torch.randn(64, 2, 8, 8, dtype=torch.float64)
    found = d.channel_means(model, x)
    assert torch.allclose(found.means["0"], x.mean((0, 2, 3)))
    assert torch.allclose(found.deviations["0"], x.std((0, 2, 3), correction=0))
    assert found.means["1"].tolist() == [1.0, -2.0, 3.0]
    assert float(found.share["1"]) == 1.0
    assert float(found.share["0"]) < 0.01


def test_drift_of_a_moved_bias() -> None:
    model, x = nn.Linear(3, 4).double(), torch.randn(50, 3, dtype=torch.float64)
    before = d.channel_means(model, x)
    with torch.no_grad():
        model.bias.add_(torch.tensor([3.0, 0.0, 4.0, 0.0]))
    moved = d.drift(before, d.channel_means(model, x))
    assert float(moved.drift[0]) == pytest.approx(5.0 / float(before.deviations[""].norm()))


def test_kernel_means() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 2, 3))
    with torch.no_grad():
        model[0].weight.copy_(
            model[0].weight.mean((2, 3), keepdim=True).expand_as(model[0].weight)
        )  # nothing but means
    equinorm.mean_shift_rejection_(model)
    found = d.kernel_means(model)
    kernel = "1.parametrizations.weight.original"
    assert set(found.means) == {"0.weight", kernel, "3.weight"}  # the pointwise layer has no window
    assert float(found.share["0.weight"]) == pytest.approx(1.0)
    assert float(found.share[kernel]) < 1e-10  # channel-wise zero mean: rejects a shift
    assert found.means["3.weight"].shape == (2, 4)  # filters first, also where torch stores inputs first
    assert torch.allclose(found.means["3.weight"], model[3].weight.detach().mean((2, 3)).T)


# -- learning rates and filters ----------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.floats(0.1, 10.0))
def test_a_scale_invariant_layer(factor: float) -> None:
    """BN(cWx) = BN(Wx): gradient orthogonal to the filter, 1/c as long, effective rate 1/c² (arpit2019, ruff2020)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-30), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    batch = data(6, 3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(factor)
    for m in (model, other):
        alignment = d.gradient_alignment(m, F.cross_entropy, batch)
        assert float(alignment.largest["0.weight"]) < 1e-9
        assert float(alignment.largest["3.weight"]) > 1e-3  # the classifier is not invariant
    here, there = (d.gradient_norms(m, F.cross_entropy, batch).parameter_norm[0] for m in (model, other))
    assert float(there) == pytest.approx(float(here) / factor, rel=1e-6)
    rates = [d.effective_learning_rate(m, 0.3).rates["0.weight"] for m in (model, other)]
    assert torch.allclose(rates[1], rates[0] / factor**2)


def test_the_effective_rate_says_how_fast_a_filter_turns() -> None:
    """The inverse square law: two lengths, learning rates in the ratio of their squares, the same turn."""
    batch = data(6, 3)
    directions = []
    for factor in (1.0, 5.0):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-30), nn.ReLU(), nn.Linear(8, 3)
        ).double()
        with torch.no_grad():
            model[0].weight.mul_(factor)
        optimizer = torch.optim.SGD([model[0].weight], lr=0.7 * factor**2)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        steps = d.relative_steps(model, optimizer).steps["0.weight"]
        before = F.normalize(model[0].weight.detach())
        optimizer.step()
        after = F.normalize(model[0].weight.detach())
        angle = (before * after).sum(1).clamp(-1, 1).arccos()
        assert torch.allclose(angle.tan(), steps, rtol=1e-6)  # a step at a right angle
        directions.append(after)
    assert torch.allclose(directions[0], directions[1])


def test_weight_norm_appears_by_its_direction() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 5, 3))
    lengths = d.filter_norms(model).norms
    assert torch.allclose(lengths["1.weight"], torch.linalg.vector_norm(model[1].weight.detach(), dim=(0, 2, 3)))
    equinorm.weight_norm_(model)
    names = set(d.filter_norms(model).norms)
    assert names == {f"{i}.parametrizations.weight.original1" for i in (0, 1)}  # v, not the gain g
    assert d.filter_norms(model).all.shape == (9,)


def test_deflated_share() -> None:
    model = nn.Linear(3, 10, bias=False)
    with torch.no_grad():
        model.weight.copy_(F.normalize(torch.randn(10, 3)))
    start = d.filter_norms(model)
    with torch.no_grad():
        model.weight[:3].mul_(0.05)
        model.weight[3:].mul_(0.5)
    assert float(d.deflated_share(model, 0.1, start).share) == pytest.approx(0.3)
    assert float(d.deflated_share(model, 0.6, start.norms).share) == pytest.approx(1.0)
    assert float(d.deflated_share(model, 0.2).share) == pytest.approx(0.3)  # against the layer's own median, 0.5
    assert float(d.deflated_share(model, 0.5, 0.2).by_layer["weight"]) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="no filters of 'weight'"):
        d.deflated_share(model, 0.1, {})


def test_rates_come_from_the_group_that_holds_a_parameter() -> None:
    model = mlp(3, 4, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].bias], "lr": 0.1}], lr=1.0
    )
    rates = d.effective_learning_rate(model, optimizer).rates
    assert list(rates) == ["0.weight"]
    assert torch.allclose(rates["0.weight"], 0.5 / model[0].weight.detach().square().sum(1))


# -- units -------------------------------------------------------------------------------------------------------------


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.linear = nn.Conv2d(2, 10, 1), nn.ReLU(), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x)).mean((2, 3))
        x = torch.sigmoid(self.linear(x))
        return F.relu6(x.add(3)).clamp(min=0)


def test_dead_and_saturated_units_are_counted() -> None:
    """Functional activations too: 3 of 10 channels dead, 2 of 8 sigmoids at a bound."""
    model = Activations()
    with torch.no_grad():
        model.conv.bias[:3] = -100
        model.conv.bias[3:] = 0
        model.linear.bias[:1] = 100
        model.linear.bias[1:2] = -100
        model.linear.bias[2:] = 0
    found = d.dead_units(model, torch.randn(20, 2, 5, 5))
    assert found.names[0] == "act relu"
    assert found.units[:2] == [10, 8]
    assert float(found.dead[0]) == pytest.approx(0.3)
    assert "sigmoid" in found.names[1]
    assert float(found.saturated[1]) == pytest.approx(0.25)
    assert float(found.dead[1]) == 0.0
    assert float(found.zeros[0]) > 0.3


@settings(max_examples=15)
@given(st.integers(0, 6), st.booleans())
def test_dead_units_of_a_layer(dead: int, channels_last: bool) -> None:
    """On any number of axes: a linear layer has its units last, a convolution second."""
    torch.manual_seed(1)
    layer: nn.Module = nn.Linear(4, 6) if channels_last else nn.Conv1d(4, 6, 1)
    with torch.no_grad():
        layer.bias.zero_()
        layer.bias[:dead] = -1e3
    x = torch.randn(30, 7, 4)
    found = d.dead_units(nn.Sequential(layer, nn.ReLU()), x if channels_last else x.mT)
    assert found.units == [6]
    assert float(found.total) == pytest.approx(dead / 6)


def test_smooth_activations_die_near_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-50.0, -50.0, 0.0, 0.0]))
    assert float(d.dead_units(model, torch.randn(64, 3)).dead[0]) == pytest.approx(0.5)


def test_a_model_without_activations_has_no_dead_units() -> None:
    found = d.dead_units(nn.Linear(3, 2), torch.randn(4, 3))
    assert found.names == []
    assert float(found.total) == 0.0


def test_frozen_scales() -> None:
    model = mlp(3, 5, 2)
    found = d.frozen_scales(equinorm.trace(model, torch.randn(1, 3, dtype=torch.float64)))
    assert (found.free, found.units, found.frozen) == (5, 7, 2)
    assert found.by_parameter == {"0.weight": 0.0, "2.weight": 1.0}
    assert found.share == pytest.approx(2 / 7)


@pytest.mark.parametrize("samples", [16, 256])
def test_noise_of_batch_statistics_is_one_over_root_n(samples: int) -> None:
    """Independent normal values: the mean of n varies by 1/√n, their variance by √(2/n)."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    nn.init.eye_(model[0].weight)
    found = d.statistics_noise(model, torch.randn(40 * samples, 64), batches=40)
    assert found.names == ["1"]
    assert float(found.mean[0]) == pytest.approx(samples**-0.5, rel=0.1)
    assert float(found.variance[0]) == pytest.approx((2 / samples) ** 0.5, rel=0.15)
    without = d.statistics_noise(model[:1], torch.randn(40 * samples, 64), batches=40)
    assert float(without.mean[0]) == pytest.approx(samples**-0.5, rel=0.1)


def test_noise_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match="the inputs have 6 samples"):
        d.statistics_noise(nn.Linear(2, 2), torch.randn(6, 2), batches=4)
