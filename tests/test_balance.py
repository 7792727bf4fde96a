"""`balance_`: the optimum, its proof, and what happens when there is none."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm import criteria
from equinorm.balance import counting
from equinorm.criteria.norm import Objective, imbalance, layouts
from equinorm.enorm.reference import balance_layers_, objective, paper_views
from equinorm.solver import Cycle, hold_unbalanced, minimise
from support.architectures import Architecture, Step, example_input, homogeneous_plans
from support.chains import chain, linears
from support.grids import examples
from support.nets import Net, double_and_trace, relative_error


def shake(symmetry: equinorm.Symmetry, seed: int, size: float = 1.0) -> None:
    """Move to another point of the same orbit."""
    draw = torch.Generator().manual_seed(seed)
    symmetry.rescale_(size * torch.randn(symmetry.num_scales, generator=draw, dtype=torch.float64))


def problem(symmetry: equinorm.Symmetry, p: float = 2.0, c: float = 1.0) -> Objective:
    found = layouts(symmetry, p, c, lambda w: w.multiplicative)
    made = Objective(symmetry.num_scales, p, found, torch.float64, torch.device("cpu"))
    made.load(symmetry.tensor)
    return made


# -- special nets ------------------------------------------------------------------------------------------------------


def residual() -> tuple[nn.Module, Tensor]:
    """x + conv(x): every stream channel meets every other, and itself, in one weight."""
    parts = {"stem": nn.Conv2d(3, 6, 3), "conv": nn.Conv2d(6, 6, 3, padding=1), "head": nn.Conv2d(6, 2, 1)}
    net = Net(lambda m, x: m.head((h := m.stem(x).relu()) + m.conv(h)), **parts)
    return net.double(), torch.randn(2, 3, 8, 8).double()


def used_twice() -> tuple[nn.Module, Tensor]:
    parts = {"stem": nn.Linear(5, 6), "middle": nn.Linear(6, 6), "head": nn.Linear(6, 2)}
    net = Net(lambda m, x: m.head(m.middle(m.middle(m.stem(x).relu()).relu()).relu()), **parts)
    return net.double(), torch.randn(3, 5).double()


def squared() -> tuple[nn.Module, Tensor]:
    """ReLU²: the next layer sees the square of the scale."""
    parts = {"a": nn.Linear(5, 7), "b": nn.Linear(7, 6), "c": nn.Linear(6, 2)}
    return Net(lambda m, x: m.c(m.b(m.a(x).relu().square()).relu() ** 2), **parts).double(), torch.randn(3, 5).double()


def mixed_powers() -> tuple[nn.Module, Tensor]:
    """One scale to the first and to the second power on the same side."""
    parts = {"a": nn.Linear(5, 7), "b": nn.Linear(7, 2), "c": nn.Linear(7, 2)}
    return Net(lambda m, x: m.b(h := m.a(x).relu()) + m.c(h * h), **parts).double(), torch.randn(3, 5).double()


def with_batchnorm() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, groups=2),
        nn.Flatten(),
        nn.Linear(600, 4),
    )
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 2.0)
    return net.double().eval(), torch.randn(2, 3, 14, 14).double()


def attention() -> tuple[nn.Module, Tensor]:
    """Keys carry the reciprocal of the queries' scales, so both signs meet on one side of a weight."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="relu")
    return nn.Sequential(nn.Linear(5, 16), layer, nn.Linear(16, 3)).double().eval(), torch.randn(2, 7, 5).double()


SPECIAL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    f.__name__: f for f in (residual, used_twice, squared, mixed_powers, with_batchnorm, attention)
}


# -- the optimum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("p", "c"), [(2.0, 1.0), (1.0, 1.0), (3.5, 1.0), (0.5, 1.0), (2.0, 1.3)])
def test_reaches_the_optimum_and_keeps_the_function(name: str, p: float, c: float) -> None:
    model, x = SPECIAL[name]()
    before = model(x)
    report = equinorm.balance_(model, x, p=p, c=c)
    assert report.converged
    assert report.imbalance <= 1e-8
    assert report.held == 0
    assert relative_error(model(x), before) < 1e-12
    if c == 1:
        assert report.norm_after < report.norm_before
    # the certificate is true of the weights themselves
    symmetry = equinorm.trace(model, x)
    made = problem(symmetry, p, c)
    point = made.at(torch.zeros(symmetry.num_scales, dtype=torch.float64))
    assert float(imbalance(point, made.free)) < 1e-7
    # and no small rescaling makes the objective smaller
    for seed in range(3):
        step = 1e-3 * torch.randn(symmetry.num_scales, generator=torch.Generator().manual_seed(seed)).double()
        assert made.at(step).value > point.value


@pytest.mark.parametrize("name", SPECIAL)
def test_every_point_of_an_orbit_leads_to_the_same_weights(name: str) -> None:
    model, x = SPECIAL[name]()
    symmetry = equinorm.trace(model, x)
    results = []
    for seed in (1, 2):
        shake(symmetry, seed)
        equinorm.balance_(model, symmetry=symmetry, tol=1e-11)
        results.append({k: v.detach().clone() for k, v in model.named_parameters()})
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", SPECIAL)
def test_cycles_never_raise_the_norm_and_converge_to_the_optimum(name: str) -> None:
    model, x = SPECIAL[name]()
    symmetry = equinorm.trace(model, x)
    shake(symmetry, 3)
    made = problem(symmetry)
    cycle, s = Cycle(made, symmetry.birth), torch.zeros(symmetry.num_scales, dtype=torch.float64)
    values = [float(made.at(s).value)]
    for _ in range(300):
        s = cycle.run(s)
        values.append(float(made.at(s).value))
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(values))
    hold_unbalanced(made)
    best = minimise(made, symmetry.birth, 1e-11)
    assert values[-1] == pytest.approx(float(best.point.value), rel=1e-6)


@settings(max_examples=examples(15, of=40))
@given(homogeneous_plans, st.integers(0, 5))
def test_generated_nets(plan: list[Step], seed: int) -> None:
    model, x, symmetry = double_and_trace(Architecture(plan), example_input())
    assume(symmetry.num_scales)
    before = model(x)
    report = equinorm.balance_(model, symmetry=symmetry, tol=1e-10)
    assert report.converged
    assert report.norm_after <= report.norm_before * (1 + 1e-12)
    assert relative_error(model(x), before) < 1e-11
    first = {k: v.detach().clone() for k, v in model.named_parameters()}
    if report.held:
        return  # what is held depends on where it was
    shake(symmetry, seed, 0.3)
    equinorm.balance_(model, symmetry=symmetry, tol=1e-10)
    counted = {w.name for w in symmetry.moving if w.multiplicative}
    for key, value in model.named_parameters():
        if key in counted:
            torch.testing.assert_close(value.detach(), first[key], rtol=1e-6, atol=1e-8)


# -- against algorithm 1 in plain lines --------------------------------------------------------------------------------


@settings(max_examples=examples(15, of=40))
@given(
    widths=st.lists(st.integers(1, 6), min_size=3, max_size=6),
    p=st.sampled_from([1.0, 2.0, 3.0]),
    c=st.sampled_from([0.8, 1.0, 1.2]),
    cycles=st.integers(1, 3),
)
def test_a_cycle_is_algorithm_1(widths: list[int], p: float, c: float, cycles: int) -> None:
    torch.manual_seed(sum(widths))
    model = chain(*widths)
    twin = copy.deepcopy(model)
    symmetry = equinorm.trace(model, torch.randn(2, widths[0]).double())
    made = problem(symmetry, p, c)
    s = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    cycle = Cycle(made, symmetry.birth)
    for _ in range(cycles):
        s = cycle.run(s)
    symmetry.rescale_(s)
    balance_layers_(linears(twin), p=p, c=c, cycles=cycles)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_weighted_objective_is_that_of_the_paper() -> None:
    model = chain(4, 6, 5, 3)
    symmetry = equinorm.trace(model, torch.randn(2, 4).double())
    made = problem(symmetry, p=2.0, c=1.2)
    value = made.at(torch.zeros(symmetry.num_scales, dtype=torch.float64)).value
    theirs = objective(paper_views([m.weight.detach() for m in linears(model)]), p=2.0, c=1.2)
    assert float(value) == pytest.approx(float(theirs), rel=1e-12)


# -- no optimum, or not everywhere -------------------------------------------------------------------------------------


def test_dead_units_stay_and_the_rest_is_balanced() -> None:
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    with torch.no_grad():
        model[0].weight[1] = 0  # no input: only its bias speaks
        model[2].weight[:, 2] = 0  # nobody listens
        model[2].weight[3] = 0
    before, dead = model(x), copy.deepcopy(model.state_dict())
    report = equinorm.balance_(model, x)
    assert report.converged
    assert report.held == 3
    assert set(report.held_in) == {"0.weight", "2.weight", "4.weight"}
    assert relative_error(model(x), before) < 1e-12
    torch.testing.assert_close(model[0].bias[1], dead["0.bias"][1])


def test_a_set_of_units_that_only_feed_each_other_is_held() -> None:
    """Each unit has mass on both sides, yet together they can shrink for ever: no optimum along them."""
    parts = {"stem": nn.Linear(4, 4), "loop": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 2)}
    net = Net(lambda m, x: m.head((h := m.stem(x).relu()) + m.loop(h)), **parts).double()
    with torch.no_grad():
        net.stem.weight[:2] = 0  # units 0 and 1 see no input ...
        net.loop.weight[:2, 2:] = 0  # ... nor what the others make,
        net.loop.weight[:2, :2].fill_(0.5)  # only each other
    x = torch.randn(3, 4).double()
    before = net(x)
    report = equinorm.balance_(net, x)
    assert report.converged
    assert report.held == 2
    assert relative_error(net(x), before) < 1e-12


def test_nonfinite_weights_are_left_alone() -> None:
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    with torch.no_grad():
        model[2].weight[2, 3] = math.nan
        model[2].weight[4, 1] = math.inf
    before = model[0].weight.detach().clone()
    report = equinorm.balance_(model, x)
    assert report.converged
    assert report.held == 4
    torch.testing.assert_close(model[0].weight[3], before[3])
    assert not torch.equal(model[0].weight[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_in_range(dtype: torch.dtype) -> None:
    model, x = chain(5, 6, 6, 2).to(dtype), torch.randn(3, 5).to(dtype)
    with torch.no_grad():
        model[0].weight[0].mul_(1e-4)
        model[2].weight[:, 0].fill_(3e4)
        model[0].bias[0] = 6e4  # would overflow in float16 if unit 0 grew
    report = equinorm.balance_(model, x)
    assert all(torch.isfinite(q).all() for q in model.parameters())
    assert report.held == (1 if dtype == torch.float16 else 0)


def test_a_flat_direction_is_not_moved() -> None:
    """Counting conv in x + conv(x) alone balances its channels, but nothing says how large all of them are."""
    model, x = residual()
    symmetry = equinorm.trace(model, x)
    shake(symmetry, 5)
    before, output = model.stem.weight.detach().clone(), model(x)
    report = equinorm.balance_(model, symmetry=symmetry, parameters="conv.weight")
    assert report.converged
    assert report.held == 0
    assert relative_error(model(x), output) < 1e-12
    moved = (model.stem.weight.detach() / before).log().mean((1, 2, 3))
    assert float(moved.abs().max()) > 0.1
    assert float(moved.sum()) == pytest.approx(0.0, abs=1e-9)


def test_scales_that_the_counted_parameters_leave_open_are_held() -> None:
    """Counting one weight of a chain alone, its rows could shrink for ever."""
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    before = copy.deepcopy(model.state_dict())
    report = equinorm.balance_(model, x, parameters="2.weight")
    assert report.held == 12
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_which_parameters_count() -> None:
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    symmetry = equinorm.trace(model, x)
    shake(symmetry, 0)
    report = equinorm.balance_(model, symmetry=symmetry, parameters=["0.weight", "2.weight"])
    expected = sum(float(model[i].weight.detach().square().sum()) for i in (0, 2)) ** 0.5
    assert report.norm_after == pytest.approx(expected)
    assert equinorm.balance_(model, x, parameters=lambda name: name.endswith("weight")).converged
    with pytest.raises(ValueError, match="matches no parameter"):
        equinorm.balance_(model, x, parameters="nosuch*")


def test_kept_parameters_do_not_move() -> None:
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    before = model[2].weight.detach().clone()
    output = model(x)
    with pytest.warns(UserWarning, match=r"nothing to rescale in Sequential: 0\.weight"):
        report = equinorm.balance_(model, x, keep=["2.*"])
    torch.testing.assert_close(model[2].weight.detach(), before, rtol=0, atol=0)
    assert relative_error(model(x), output) < 1e-12
    # the kept layer mixes everything: its bias freezes what it writes, its weight what it reads
    assert report.num_scales == 0
    assert "nothing to rescale" in str(report)


def test_where_nothing_can_move_the_first_reason_is_said() -> None:
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 2)).double(), torch.randn(3, 5).double()
    before = copy.deepcopy(model.state_dict())
    because = equinorm.trace(model, x).explain().rows[0].because
    with pytest.warns(UserWarning, match="nothing to rescale") as caught:
        report = equinorm.balance_(model, x)
    said = str(caught[0].message)
    assert said.startswith("nothing to rescale in Sequential: 0.weight (0 out) ")
    assert because
    assert because in said
    assert caught[0].filename == __file__
    assert (report.num_scales, report.norm_after) == (0, report.norm_before)
    assert "nothing to rescale" in report._repr_html_()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("keep", ["head", ["head"], ["he*"]])
def test_a_module_that_is_kept_does_not_move(keep: str | list[str]) -> None:
    parts = {"stem": chain(5, 6, 6), "head": chain(6, 6, 2)}
    model = Net(lambda m, x: m.head(m.stem(x).relu()), **parts).double()
    x = torch.randn(3, 5).double()
    before, output = copy.deepcopy(model.state_dict()), model(x)
    report = equinorm.balance_(model, x, keep=keep)
    assert report.num_scales == 6
    assert {k.split(".")[0] for k, v in model.state_dict().items() if not torch.equal(v, before[k])} == {"stem"}
    assert relative_error(model(x), output) < 1e-12
    with pytest.raises(ValueError, match=r"keep='haed' matches no module and no parameter of Net; did you mean head"):
        equinorm.balance_(model, x, keep="haed")


def test_a_module_that_counts_stands_for_its_parameters() -> None:
    parts = {"stem": chain(5, 6, 6), "head": chain(6, 6, 2)}
    model = Net(lambda m, x: m.head(m.stem(x).relu()), **parts).double()
    symmetry = equinorm.trace(model, torch.randn(3, 5).double())
    by_module = counting(symmetry, "stem")
    assert {w.name for w in symmetry.parameters if by_module(w)} == {
        f"stem.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")
    }
    by_pattern = counting(symmetry, ["*.0.weight", "head"])
    assert {w.name for w in symmetry.parameters if by_pattern(w)} == {
        "stem.0.weight",
        "head.0.weight",
        "head.0.bias",
        "head.2.weight",
        "head.2.bias",
    }


def test_a_report_is_a_table_in_a_notebook() -> None:
    model, x = chain(5, 6, 6, 2), torch.randn(3, 5).double()
    with torch.no_grad():
        model[0].weight[1] = 0
    report = equinorm.balance_(model, x)
    table = report._repr_html_()
    assert table.count("<tr>") == table.count("</tr>") == 7
    assert f"<th>norm after</th><td>{report.norm_after:.6g}</td>" in table
    assert "<td>1 (in 0.weight, 2.weight)</td>" in table


def test_a_report_names_its_criterion_and_shows_itself() -> None:
    report = equinorm.balance_(chain(5, 6, 2), torch.randn(3, 5).double(), criterion=criteria.Range())
    assert repr(report) == f"<BalanceReport: {report}>"
    assert "Range()" in repr(report)
    table = report._repr_html_()
    assert "<th>criterion</th><td>Range()</td>" in table
    assert f"<td>{report.value_after:.6g}</td>" in table
    assert "norm before" not in table


def test_a_time_limit_keeps_the_function_and_says_so() -> None:
    model, x = chain(5, 40, 40, 40, 2), torch.randn(3, 5).double()
    symmetry = equinorm.trace(model, x)
    shake(symmetry, 0, 2.0)
    before = model(x)
    report = equinorm.balance_(model, symmetry=symmetry, time_limit=0.0)
    assert not report.converged
    assert report.norm_after < report.norm_before
    assert "NOT at the optimum" in str(report)
    assert relative_error(model(x), before) < 1e-11


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    model, x = chain(5, 4, 3), torch.randn(3, 5).double()
    scripted = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="a TorchScript module cannot be traced"):
        equinorm.balance_(scripted, x)


def test_bad_arguments_change_nothing() -> None:
    model, x = chain(5, 6, 2), torch.randn(3, 5).double()
    before = copy.deepcopy(model.state_dict())
    for wrong in ({"p": 0}, {"p": -1}, {"c": 0}, {"tol": 0}, {"p": math.nan}, {"p": math.inf}):
        with pytest.raises(ValueError, match="must be a positive number"):
            equinorm.balance_(model, x, **wrong)
    with pytest.raises(TypeError, match="example_inputs"):
        equinorm.balance_(model)
    with pytest.raises(equinorm.TraceError, match="example inputs"):
        equinorm.balance_(model, torch.randn(3, 4).double())
    with pytest.raises(ValueError, match="meta device"):
        equinorm.balance_(copy.deepcopy(model).to("meta"), torch.empty(3, 5, device="meta", dtype=torch.float64))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
