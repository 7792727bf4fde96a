"""Quantization: the round trip against plain loops, the weighed error against its definition, and never a worse net."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm.balance import counting
from equinorm.criteria import Quantization
from equinorm.criteria.quantization import (
    SHARPEST,
    ExpectedError,
    OutputProblem,
    RoundingProblem,
    Sensitivity,
    noise_like,
    rounded,
    sensitivities,
)

FORMATS: tuple[str | int, ...] = ("tensor", "channel", 1, 3, 5, 64)
X = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def plain_round_trip(weight: Tensor, bits: int, per: str | int, full_range: bool = False) -> Tensor:
    """`rounded`, one element at a time."""
    rows = [list(range(weight.numel()))]
    if per != "tensor":
        length = weight[0].numel()
        rows = [list(range(i * length, (i + 1) * length)) for i in range(len(weight))]
    if isinstance(per, int):
        rows = [row[i : i + per] for row in rows for i in range(0, len(row), per)]
    back = weight.detach().reshape(-1).tolist()
    for row in rows:
        largest = max(abs(back[e]) for e in row)
        if full_range:
            step = 2 * largest / (2**bits - 1)
            integers = range(-(2 ** (bits - 1)), 2 ** (bits - 1))
            for e in row:  # the nearest integer; of two that are as near, the one further from 0
                near = sorted(integers, key=lambda i: (round(abs(back[e] / step - i), 9), -abs(i))) if step else [0]
                back[e] = near[0] * step
            continue
        step = largest / (2 ** (bits - 1) - 1)
        for e in row:
            back[e] = round(back[e] / step) * step if step else 0.0
    return torch.tensor(back, dtype=weight.dtype).reshape(weight.shape)


def plain_cost(sensitivity: Sensitivity, error: Tensor) -> float:
    """The quadratic form of each row, written as a matrix."""
    total = 0.0
    for row, u, h in zip(error, sensitivity.direction, sensitivity.square, strict=True):
        row, u, h = row.reshape(-1), u.reshape(-1), h.reshape(-1)
        total += float(row @ (torch.diag(h - u.square()) + torch.outer(u, u)) @ row)
    return total


def plain_error(
    net: nn.Module, start: nn.Module, h: dict[str, Sensitivity], bits: int, per: str | int, full_range: bool = False
) -> float:
    """The weighed error of a rescaled net by its definition, in the coordinates of the net at the start."""
    error = size = 0.0
    for name, w in net.named_parameters():
        if w.ndim > 1:
            was, now = start.get_parameter(name).detach(), w.detach()
            error += plain_cost(h[name], (plain_round_trip(now, bits, per, full_range) - now) * was / now)
            size += plain_cost(h[name], was)
    return error / size


class Residual(nn.Module):
    """A stem, a branch with a depthwise convolution, a skip, a head; widths that no group size divides."""

    def __init__(self, width: int = 5, seed: int = 0, spread: float = 1.5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.expand, self.project = nn.Conv2d(width, 7, 1), nn.Conv2d(7, width, 1)
        self.depthwise = nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.head = nn.Linear(width, 4)
        for layer in (self.stem, self.expand, self.depthwise, self.project):
            with torch.no_grad():  # channels of very different sizes, as folded norms leave them
                layer.weight.mul_((spread * torch.randn(len(layer.weight))).exp().view(-1, 1, 1, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.project(self.depthwise(self.expand(x).relu()).relu())
        return self.head(x.mean((2, 3)))


def problem_of(model: nn.Module, criterion: Quantization, x: Any = X) -> RoundingProblem:
    symmetry = equinorm.trace(model, x)
    return criterion.problem(symmetry, counting(symmetry, None), x)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(FORMATS),
    st.integers(2, 8),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_round_trip_is_what_plain_loops_make(
    shape: list[int], per: str | int, bits: int, full_range: bool, seed: int
) -> None:
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weight[weight.abs() < 0.2] = 0.0
    if len(shape) == 1 and per != "tensor":
        per = "tensor"
    expected = plain_round_trip(weight, bits, per, full_range)
    torch.testing.assert_close(rounded(weight, bits, per, full_range), expected, rtol=1e-12, atol=0)
    assert len(expected.unique()) <= len(plain_groups(weight, per)) * (2**bits - (not full_range))


@pytest.mark.parametrize("per", FORMATS)
def test_the_round_trip_keeps_what_it_can_hold(per: str | int) -> None:
    weight = torch.tensor([[7.0, -3.0, 0.0, 1.0, -7.0], [0.0] * 5])
    kept = rounded(weight, 4, per)
    torch.testing.assert_close(kept, weight)
    assert bool(torch.isfinite(rounded(torch.zeros(3, 4), 2, per)).all())


def test_sensitivities_are_the_squared_derivatives() -> None:
    model = Residual(seed=3)
    exact = {name: torch.zeros_like(w) for name, w in model.named_parameters()}
    for one in X[:2].split(1):
        for output in model(one)[0]:
            grads = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            for square, g in zip(exact.values(), grads, strict=True):
                square += g.square()
    found = sensitivities(model, X[:2].split(1), probes=1000)
    for name, square in exact.items():
        error = (found[name].square / 1000 - square).norm() / square.norm()
        assert float(error) < 0.1, name


def test_the_direction_is_the_principal_axis_where_there_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    axis = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    zero = torch.zeros(4, 3, 2, dtype=torch.float64)
    found, samples = Sensitivity(zero, zero), []
    for _ in range(50):
        sizes = torch.randn(4, 1, generator=generator, dtype=torch.float64)
        samples.append(sizes * axis + 0.1 * torch.randn(4, 6, generator=generator, dtype=torch.float64))
        found = found.updated(samples[-1].reshape(4, 3, 2))
    stacked = torch.stack(samples, 1)
    torch.testing.assert_close(found.square.reshape(4, 6), stacked.square().sum(1))
    for row in range(4):
        _, sizes, axes = torch.linalg.svd(stacked[row])
        assert float((found.direction[row].reshape(-1) @ axes[0]).abs()) > 0.97 * float(sizes[0])
    assert bool((found.direction.square() <= found.square).all())


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("per", ["tensor", "channel", 3])
def test_the_value_is_its_definition_at_any_scales(per: str | int, full_range: bool) -> None:
    model, criterion = Residual(), Quantization(bits=4, per=per, full_range=full_range, probes=2)
    problem = problem_of(model, criterion)
    s = 0.5 * torch.randn(problem.symmetry.num_scales, dtype=torch.float64)
    value, start = problem.value(s), copy.deepcopy(model)
    assert {w.name for w in problem.weights} == {name for name, w in model.named_parameters() if w.ndim > 1}
    problem.symmetry.rescale_(s)
    h = sensitivities(start, noise_like(X, 8), probes=2)
    assert value == pytest.approx(plain_error(model, start, h, 4, per, full_range), rel=1e-9)


@pytest.mark.parametrize("per", ["tensor", "channel", 3])
def test_the_slope_is_that_of_the_measured_error(per: str | int) -> None:
    problem = problem_of(Residual(), Quantization(bits=5, per=per, probes=1))
    s = (0.3 * torch.randn(problem.symmetry.num_scales, dtype=torch.float64)).requires_grad_()
    (slope,) = torch.autograd.grad(sum(problem.errors(s)), s)  # type: ignore[arg-type]
    direction = torch.randn_like(slope)
    here = s.detach()
    # integers change only here and there: a tiny step crosses none of them
    ahead, behind = (problem.value(here + step * direction) for step in (1e-7, -1e-7))
    assert (ahead - behind) / 2e-7 == pytest.approx(float(slope @ direction), rel=1e-4)


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_what_a_small_move_changes_is_what_is_measured(per: str, full_range: bool) -> None:
    problem = problem_of(Residual(), Quantization(5, per, full_range=full_range, probes=1))
    s = 0.3 * torch.randn(problem.symmetry.num_scales, dtype=torch.float64)
    seen = set()
    for number, weight in itertools.product(range(problem.symmetry.num_scales), problem.weights):
        noise = torch.zeros_like(s)
        noise[number] = 0.02
        for w, term, whole in problem._moves(weight, noise > 0):
            change, sets_step = problem._change(w, s, s + noise, whole)
            mine = term.index.expand_as(change) == number
            if not bool(sets_step[term.index.expand_as(sets_step) == number].any()):
                measured = problem.error(w, s + noise) - problem.error(w, s)
                assert float(change[mine].sum()) / problem.size == pytest.approx(float(measured), rel=1e-6, abs=1e-12)
                seen.add((w.name, whole))
    assert len(seen) >= (7 if per == "tensor" else 1)


def plain_groups(values: Tensor, per: str | int) -> list[Tensor]:
    """What shares a step."""
    if per == "tensor":
        return [values.reshape(-1)]
    rows = [row.reshape(-1) for row in values]
    return rows if per == "channel" else [part for row in rows for part in row.split(int(per))]


def plain_expected_error(problem: RoundingProblem, s: Tensor, p: float) -> Tensor:
    """Σ over steps of Δ² / 12 · Σ h / λ², with a norm of order p for the maximum; differentiable."""
    total, padded = s.new_zeros(()), torch.cat([s, s.new_zeros(1)])
    for w in problem.weights:
        factor = w.factor(padded).expand(w.shape)
        sizes = plain_groups(problem.tensors[w.name] * factor, problem.criterion.per)
        costs = plain_groups(problem.h[w.name].square / factor.square(), problem.criterion.per)
        for size, cost in zip(sizes, costs, strict=True):
            bits = problem.criterion.bits
            step = size.norm(p) / (2 ** (bits - 1) - (0.5 if problem.criterion.full_range else 1))
            total = total + step.square() / 12 * cost.sum()
    return total


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from(FORMATS), st.sampled_from([2.0, 16.0]), st.booleans())
def test_the_expected_error_is_its_definition_and_convex(seed: int, per: str | int, p: float, full: bool) -> None:
    problem = problem_of(Residual(seed=seed % 7), Quantization(5, per, full_range=full, probes=1))
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, problem.symmetry.num_scales, dtype=torch.float64, generator=generator) / 3
    terms = [ExpectedError(problem._weight(w), problem.h[w.name].square, w, problem.criterion) for w in problem.weights]
    for term in terms:
        term.enter(a, p)
    found = float(sum(term.value(b - a) for term in terms))
    assert found == pytest.approx(float(plain_expected_error(problem, b, p)), rel=1e-9)
    at_a, at_b, between = (plain_expected_error(problem, s, p).log() for s in (a, b, (a + b) / 2))
    assert float(between) <= float(at_a + at_b) / 2 + 1e-12


@pytest.mark.parametrize("per", ["tensor", "channel", 3])
def test_the_descent_comes_near_the_least_expected_error(per: str | int) -> None:
    """SciPy's optimum of the plain definition, on the log-scales."""
    optimize = pytest.importorskip("scipy.optimize")
    problem = problem_of(Residual(), Quantization(5, per, probes=1, steps=300))
    n = problem.symmetry.num_scales

    def value_and_slope(values: Any) -> tuple[float, Any]:
        s = torch.from_numpy(values).requires_grad_()
        value = plain_expected_error(problem, s, SHARPEST).log()
        (slope,) = torch.autograd.grad(value, s)
        return float(value.detach()), slope.numpy()

    start = torch.zeros(n, dtype=torch.float64).numpy()
    least = optimize.minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": 3000}).fun
    found, at_start = (value_and_slope(x)[0] for x in (problem._descended(None).log_scales.numpy(), start))
    assert at_start > least + 0.05
    assert least - 1e-6 <= found < least + 0.2 * (at_start - least)


def test_what_was_measured_once_is_used_for_every_format() -> None:
    model = Residual(seed=2)
    known = sensitivities(model, noise_like(X, 4), probes=1)
    again, anew = (problem_of(model, Quantization(4, probes=1, sensitivities=h)) for h in (known, None))
    s = torch.zeros(again.symmetry.num_scales, dtype=torch.float64)
    assert again.value(s) == anew.value(s)


def test_drawing_again_lowers_the_error() -> None:
    problem = problem_of(Residual(seed=8), Quantization(5, "tensor"))
    still = torch.zeros(problem.symmetry.num_scales, dtype=torch.float64)
    assert problem.weighed(problem._drawn(still, None)) < 0.99 * problem.weighed(still)


@settings(deadline=None, max_examples=10)
@given(
    st.integers(0, 10**6),
    st.integers(2, 8),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 1.5]),
)
def test_never_worse_and_the_function_is_kept(
    seed: int, bits: int, per: str | int, full_range: bool, calibrated: bool, spread: float
) -> None:
    model = Residual(seed=seed, spread=spread)
    before, outputs = copy.deepcopy(model), model(X)
    inputs = list(X.split(3)) if calibrated else None
    criterion = Quantization(bits, per, inputs, full_range=full_range, probes=1, steps=12, draws=3)
    report = equinorm.balance_(model, X, criterion=criterion)
    assert report.value_after <= report.value_before
    assert float((model(X) - outputs).detach().abs().max() / outputs.detach().abs().max()) < 1e-12
    # measured once more on the two nets, by no code of the criterion
    if calibrated:
        size = outputs.detach().square().sum()
        for net, value in ((before, report.value_before), (model, report.value_after)):
            coarse = copy.deepcopy(net)
            with torch.no_grad():
                for w in coarse.parameters():
                    if w.ndim > 1:
                        w.copy_(plain_round_trip(w, bits, per, full_range))
                change = (coarse(X) - outputs).square().sum() / size
            assert float(change) == pytest.approx(value, rel=1e-5, abs=1e-14)
    else:
        h = sensitivities(before, noise_like(X, 4), probes=1)
        for net, value in ((before, report.value_before), (model, report.value_after)):
            assert plain_error(net, before, h, bits, per, full_range) == pytest.approx(value, rel=1e-9, abs=1e-14)


def test_a_step_per_channel_makes_the_scales_of_outputs_irrelevant() -> None:
    problem = problem_of(Residual(), Quantization(bits=3, per="channel", probes=1))
    s = torch.randn(problem.symmetry.num_scales, dtype=torch.float64)
    still = torch.zeros_like(s)
    for w in problem.weights:
        if w.into is None or w.name == "depthwise.weight":  # whose one input has the channel's own scale
            torch.testing.assert_close(problem.restored(w, s), problem.restored(w, still), rtol=1e-12, atol=0)
    expand = next(w for w in problem.weights if w.name == "expand.weight")
    assert float((problem.restored(expand, s) - problem.restored(expand, still)).abs().max()) > 0.01


@pytest.mark.parametrize(("bits", "per"), list(itertools.product((4, 6), ("tensor", "channel", 3))))
def test_it_gains_where_channels_differ_in_size(bits: int, per: str | int) -> None:
    report = equinorm.balance_(Residual(seed=5), X, criterion=Quantization(bits, per))
    assert report.value_after < (0.5 if per == "tensor" else 0.999) * report.value_before


def test_calibration_lowers_the_error_of_outputs() -> None:
    model = Residual(seed=6)
    report = equinorm.balance_(model, X, criterion=Quantization(5, "tensor", list(X.split(2))))
    assert report.value_after < 0.5 * report.value_before
    assert "Quantization(bits=5, per='tensor'" in str(report)


def test_the_values_of_the_example_do_not_matter_without_inputs() -> None:
    zeros, ones = (problem_of(Residual(), Quantization(4), torch.full_like(X, value)) for value in (0.0, 1.0))
    still = torch.zeros(zeros.symmetry.num_scales, dtype=torch.float64)
    assert zeros.value(still) == ones.value(still) > 0
    assert float(zeros.h["stem.weight"].square.min()) > 0


def test_noise_takes_the_place_of_real_numbers_only() -> None:
    mask = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    tokens, scale = torch.arange(4), torch.tensor(2.0)
    drawn, other = noise_like({"x": torch.zeros(2, 3), "mask": mask, "tokens": tokens, "scale": scale}, 2)
    assert bool((drawn["x"] != 0).all())
    assert not torch.equal(drawn["x"], other["x"])
    assert all(drawn[name] is value for name, value in (("mask", mask), ("tokens", tokens), ("scale", scale)))


def test_time_that_is_up_leaves_a_net_that_is_no_worse() -> None:
    model = Residual()
    report = equinorm.balance_(model, X, criterion=Quantization(4, inputs=X), time_limit=1e-9)
    assert report.value_after <= report.value_before


def test_weights_that_are_not_finite_hold_what_they_follow() -> None:
    model = Residual()
    with torch.no_grad():
        model.expand.weight[2, 1] = float("inf")
    before = copy.deepcopy(model.state_dict())
    report = equinorm.balance_(model, X, criterion=Quantization(4), verify=False)
    assert report.held >= 7
    assert torch.equal(model.expand.weight, before["expand.weight"])


def test_held_parameters_stay_and_others_move() -> None:
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    report = equinorm.balance_(model, X, criterion=Quantization(6), keep=["depthwise"])
    assert torch.equal(model.depthwise.weight, before["depthwise.weight"])
    assert report.value_after < report.value_before
    assert not torch.equal(model.stem.weight, before["stem.weight"])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Quantization(1), ValueError, "bits must be an integer from 2 to 16"),
        (lambda: Quantization(8.0), ValueError, "bits"),  # type: ignore[arg-type]
        (lambda: Quantization(8, "row"), ValueError, "per must be"),
        (lambda: Quantization(8, 0), ValueError, "per must be"),
        (lambda: Quantization(8, True), ValueError, "per must be"),
        (lambda: Quantization(8, inputs=[]), ValueError, "at least one batch"),
        (lambda: Quantization(8, probes=0), ValueError, "probes"),
        (lambda: Quantization(8, steps=-1), ValueError, "steps"),
    ],
)
def test_wrong_options_are_named(make: Callable[[], Quantization], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_without_any_inputs_it_says_what_to_pass() -> None:
    symmetry = equinorm.trace(Residual(), X)
    with pytest.raises(TypeError, match="pass example_inputs too"):
        equinorm.balance_(symmetry.model, criterion=Quantization(8), symmetry=symmetry)


def test_with_inputs_the_value_is_the_change_of_outputs() -> None:
    problem = problem_of(Residual(), Quantization(4, inputs=[X[:2], X[2:]]))
    assert isinstance(problem, OutputProblem)
    assert problem.references[0][0].shape == (2, 4)
