"""The fused ENorm step against its plain twin, in Triton's interpreter."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_enorm_gpu import Groups, Residual, chain, perturbed
from torch import Tensor, nn

import equinorm
from equinorm.enorm.steps import structure
from equinorm.enorm.steps.fused import ParameterLayouts
from equinorm.enorm.steps.protocol import Problem
from equinorm.enorm.steps.structure import (
    InexpressibleError,
    MatrixView,
    Tiles,
    matrix_views,
    net_structure,
)
from equinorm.enorm.steps.tables import step_tables
from equinorm.lab import nets as models
from equinorm.symmetry import ScaledParameter, Term
from support.architectures import Architecture, example_input, homogeneous_plans
from support.grids import diagonal, examples
from support.triton_interpreter import interpreted

# sizes so small that every loop runs several times
SMALL = Tiles(
    rows=2,
    columns=4,
    filters=2,
    channels=2,
    kernel=4,
    share=16,
    shares=8,
    alone=16,
    variables=2,
    line=16,
    area=32,
    chunk=32,
    flat=64,
    narrow=8,
    wide=24,
)
# the interpreter is slow, and shrinking an example runs it many times
quick = settings(max_examples=examples(4, of=7), phases=(Phase.explicit, Phase.generate))


@pytest.fixture(scope="module")
def kernels() -> Any:
    return interpreted("equinorm.enorm.steps.triton")


@pytest.fixture(autouse=True)
def _interpreted(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="triton"` finds the interpreted kernels."""
    monkeypatch.setitem(sys.modules, "equinorm.enorm.steps.triton", kernels)


# -- one step, both ways -----------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda q: torch.optim.SGD(q, lr=0.01),
    "momentum": lambda q: torch.optim.SGD(q, lr=0.01, momentum=0.9),
    "AMSGrad": lambda q: torch.optim.Adam(q, lr=0.01, amsgrad=True),
    "ASGD": lambda q: torch.optim.ASGD(q, lr=0.01),
    "Adafactor": lambda q: torch.optim.Adafactor(q, lr=0.01),
}


def one_step(
    model: nn.Module,
    symmetry: equinorm.Symmetry,
    backend: str,
    optimizer: str = "momentum",
    companion: bool = False,
    steps: int = 1,
    **options: Any,
) -> tuple[dict[str, Tensor], equinorm.ENorm]:
    """All that a step from a made-up point in training moves."""
    model = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(1)
    other = [copy.deepcopy(model)] if companion else []
    chosen = OPTIMIZERS[optimizer](model.parameters())
    enorm = equinorm.ENorm(model, chosen, symmetry=symmetry, backend=backend, companions=other, **options)
    enorm.load_state_dict({"log_t": 0.3 * torch.randn(symmetry.num_scales, generator=draw), "calls": 0})
    for _ in range(steps):
        for scale in (0.01, 1.0):
            for q in model.parameters():
                q.grad = torch.empty_like(q).copy_(scale * torch.randn(q.shape, generator=draw))
            if scale < 1:
                enorm.before_step()
                chosen.step()
                enorm.biases.after_step()
        enorm.step()
    moved = {"log_t": enorm.log_t, "t": enorm.biases.gains.t}
    for name, q in model.named_parameters():
        assert q.grad is not None
        moved |= {name: q.detach(), f"{name}.grad": q.grad}
        moved |= {f"{name}.{k}": v for k, v in chosen.state[q].items() if isinstance(v, Tensor) and v.ndim}
    for twin in other:
        moved |= {f"companion.{name}": q.detach() for name, q in twin.named_parameters()}
    return moved, enorm


FUSED = ("foreach", "triton")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_same_step(
    model: nn.Module, example: Tensor, p: float = 2.0, backends: tuple[str, ...] = FUSED, **options: Any
) -> equinorm.ENorm:
    symmetry = equinorm.trace(model, example)
    plain, enorm = one_step(model, symmetry, "plain", p=p, **options)
    assert float(plain["log_t"].abs().max()) > 1e-3
    tolerance = max(TOLERANCE[q.dtype] for q in model.parameters())
    for backend in backends:
        fused, enorm = one_step(model, symmetry, backend, p=p, **options)
        assert enorm.backend == backend
        for name, expected in plain.items():
            scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
            error = (fused[name].double() - expected.double()).abs().div(scale)
            assert bool((error < tolerance).all()), (
                f"{backend}: {name} is off by {error.max():.1e} of its largest value"
            )
    return enorm


IMAGE = torch.zeros(2, 3, 3, 3)


@quick
@given(
    plan=homogeneous_plans,
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    c=st.sampled_from([1.0, 1.2]),
    cycles=st.integers(1, 2),
    last=st.booleans(),
    small=st.booleans(),
    optimizer=st.sampled_from(["SGD", "momentum", "AMSGrad"]),
)
def test_random_architectures(
    plan: list[Any], p: float, c: float, cycles: int, last: bool, small: bool, optimizer: str
) -> None:
    model = perturbed(Architecture(plan), torch.float64)
    if last:
        model = model.to(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(structure, "DEFAULT", SMALL)
        assert_same_step(model, example_input().double(), p=p, c=c, cycles=cycles, optimizer=optimizer)


@quick
@given(
    widths=st.lists(st.integers(1, 21), min_size=3, max_size=6),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    small=st.booleans(),
)
def test_chains_of_any_width(widths: list[int], p: float, dtype: torch.dtype, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(structure, "DEFAULT", SMALL)
        model = perturbed(chain(*widths), dtype)
        assert_same_step(model, torch.zeros(2, widths[0], dtype=dtype), p=p, c=1.2)


@pytest.mark.parametrize(
    ("make", "dtype", "last"), diagonal([Residual, Groups], [torch.float32, torch.bfloat16], [True, False])
)
def test_convolutions(make: type[nn.Module], dtype: torch.dtype, last: bool) -> None:
    model = perturbed(make(), dtype)
    if last:
        model = model.to(memory_format=torch.channels_last)
    assert_same_step(model, IMAGE.to(dtype), c=1.2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_gradients_and_companions_move_along(optimizer: str) -> None:
    enorm = assert_same_step(
        perturbed(chain(4, 6, 5, 3)), torch.zeros(1, 4), optimizer=optimizer, companion=True, steps=2, c=1.2
    )
    assert_same_step(perturbed(chain(4, 6, 5, 3)), torch.zeros(1, 4), optimizer=optimizer, gradients=False, c=1.2)
    assert enorm.calls == 2


@pytest.mark.parametrize("bias", ["plain", "skip"])
def test_other_ways_with_biases(bias: str) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 3))
    assert_same_step(perturbed(model), torch.zeros(1, 5), bias=bias, c=1.2)


def test_large_p_is_summed_in_double_precision() -> None:
    assert_same_step(perturbed(chain(4, 6, 5, 3)), torch.zeros(1, 4), p=7.5)


def test_weights_of_several_dtypes() -> None:
    model = perturbed(chain(4, 6, 5, 3), torch.bfloat16)
    model[2].float()
    symmetry = equinorm.trace(perturbed(chain(4, 6, 5, 3)), torch.zeros(1, 4))
    plain, *others = (one_step(model, symmetry, backend)[0] for backend in ("plain", *FUSED))
    for fused in others:
        for name, expected in plain.items():
            torch.testing.assert_close(fused[name], expected, rtol=1e-2, atol=1e-6)


def test_only_some_parameters_count() -> None:
    assert_same_step(perturbed(chain(4, 6, 5, 3)), torch.zeros(1, 4), parameters=["0.weight", "2.weight"])


def test_a_dead_unit_and_a_weight_that_is_not_finite_hold_their_scales() -> None:
    model = perturbed(chain(4, 6, 5, 3))
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[2].weight[1, 2] = torch.nan
        model[4].weight[0, 3] = torch.inf
    symmetry = equinorm.trace(model, torch.zeros(1, 4))
    with torch.no_grad():
        plain, *others = (one_step(model, symmetry, b, bias="plain")[0]["log_t"] for b in ("plain", *FUSED))
    for fused in others:
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
        assert torch.isfinite(fused).all()


def test_scales_that_leave_the_range_of_half_precision_stay() -> None:
    model = chain(5, 8, 8, 3).half()
    with torch.no_grad():
        model[0].weight[0].mul_(1e-4)
        model[2].weight[:, 0].fill_(3e4)
        model[0].bias[0] = 6e4
    symmetry = equinorm.trace(model, torch.zeros(1, 5).half())
    plain, *others = (one_step(model, symmetry, backend, "SGD")[0]["log_t"] for backend in ("plain", *FUSED))
    for fused in others:
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


# -- tensors that come and go ------------------------------------------------------------------------------------------


def test_state_that_appears_later_and_memory_that_changes_are_found() -> None:
    """Momentum exists after the first step; gradients may be others each time; a model may be laid out anew."""
    model = perturbed(Residual())
    symmetry = equinorm.trace(model, IMAGE)
    pair = []
    for backend in ("plain", *FUSED):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        pair.append((net, optimizer, equinorm.ENorm(net, optimizer, symmetry=symmetry, backend=backend, c=1.2)))
    for i in range(4):
        for net, optimizer, enorm in pair:
            draw = torch.Generator().manual_seed(i)
            if i == 2:
                net.to(memory_format=torch.channels_last)  # momentum stays contiguous
            if i:
                for q in net.parameters():
                    q.grad = 0.1 * torch.randn(q.shape, generator=draw)
                enorm.before_step()
                optimizer.step()
            if i == 3:
                optimizer.zero_grad()
            enorm.step()
    (one, left, _), *others = pair
    for two, right, fused in others:
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            buffers = [o.state[q]["momentum_buffer"] for o, q in ((left, a), (right, b))]
            torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)
        assert fused.backend in FUSED


@pytest.mark.parametrize("backend", FUSED)
def test_copies_go_on_by_themselves(backend: str) -> None:
    model = perturbed(chain(4, 6, 5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(1, 4), backend=backend, c=1.2)
    enorm.attach()
    nets = [(model, optimizer, enorm), copy.deepcopy((model, optimizer, enorm))]
    for net, its_optimizer, _ in nets:
        for i in range(2):
            its_optimizer.zero_grad()
            net(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            its_optimizer.step()
    for a, b in zip(nets[0][0].parameters(), nets[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_step_on_the_same_tensors_does_not_look_at_them_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturbed(chain(4, 6, 5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, torch.zeros(1, 4), backend="triton", gradients=False)
    closely: list[int] = []
    slow = enorm.prepared.step
    monkeypatch.setattr(enorm.prepared, "step", lambda state: closely.append(enorm.calls) or slow(state))
    for i in range(7):
        for q in model.parameters():
            q.grad = torch.zeros_like(q)
        if i:
            optimizer.step()  # momentum appears with it, that of the new weight one step later
        if i == 4:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
            optimizer.param_groups[0]["params"] = list(model.parameters())
        enorm.step()
    assert closely == [1, 2, 5, 6]


# -- what cannot be fused ----------------------------------------------------------------------------------------------


def test_backends_are_chosen_and_said(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(4, 6, 3), torch.zeros(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    enorm = equinorm.ENorm(model, optimizer, x)
    assert (enorm.backend, enorm.why_not) == ("foreach", {})
    assert equinorm.ENorm(model, optimizer, x, backend="plain").backend == "plain"
    monkeypatch.setattr(kernels, "can_launch", lambda device: False)
    with pytest.raises(ValueError, match="not possible here: its kernels do not run on cpu"):
        equinorm.ENorm(model, optimizer, x, backend="triton")
    with pytest.raises(ValueError, match="backend must be one of"):
        equinorm.ENorm(model, optimizer, x, backend="cuda")
    monkeypatch.setattr("equinorm.enorm.steps.backends.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        equinorm.ENorm(model, optimizer, x, backend="triton")


def test_memory_with_gaps_is_left_to_torch() -> None:
    model, x = chain(4, 6, 3), torch.zeros(1, 4)
    model[0].weight = nn.Parameter(torch.randn(6, 8)[:, ::2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for backend in ("foreach", "triton"):
        with pytest.raises(ValueError, match=r"the memory of 0\.weight is not dense"):
            equinorm.ENorm(model, optimizer, x, backend=backend)
    enorm = equinorm.ENorm(model, optimizer, x)
    assert enorm.backend == "plain"
    assert "not dense" in enorm.why_not["foreach"]


# -- tables ------------------------------------------------------------------------------------------------------------


@st.composite
def scaled_parameters(draw: st.DrawFn) -> tuple[ScaledParameter, Tensor, int]:
    """A parameter of any shape and layout, with terms on any axes, and perhaps in groups along the first."""
    n, shape = 7, draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    if draw(st.booleans()) and shape:
        shape[0] *= draw(st.integers(1, 4))
    seed = draw(st.integers(0, 999))
    random = torch.Generator().manual_seed(seed)

    def term(axes: list[int], runs: int) -> Term:
        sizes = [k if a in axes else 1 for a, k in enumerate(shape)]
        index = torch.randint(n + 1, sizes, generator=random)
        if runs > 1 and 0 in axes:
            index = index[::runs].repeat_interleave(runs, 0)
        return Term(index, torch.ones(sizes, dtype=torch.float64))

    axes = st.lists(st.sampled_from(range(len(shape))), unique=True) if shape else st.just([])
    runs = draw(st.sampled_from([k for k in (1, 2, 3) if not shape or shape[0] % k == 0]))
    out = draw(st.none() | axes.map(lambda chosen: term(chosen, 1)))
    into = draw(st.none() | axes.map(lambda chosen: term(chosen, runs)))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.randn([shape[a] for a in order]).permute([order.index(a) for a in range(len(shape))])
    return ScaledParameter("w", torch.Size(shape), out, into, True, 0), tensor, n


def rebuilt(views: list[MatrixView], numel: int, s: Tensor) -> Tensor:
    """The log-factor of every element of memory, from the views; NaN where there is none."""
    memory = torch.full((numel,), torch.nan, dtype=torch.float64)
    for view in views:
        rows, columns = (
            (s[i] * k).sum(1)
            for i, k in ((view.row_index, view.row_exponent), (view.column_index, view.column_exponent))
        )
        memory[view.offset : view.offset + view.rows * view.columns] = (rows[:, None] + columns).reshape(-1)
    return memory


@settings(max_examples=150)
@given(scaled_parameters(), st.sampled_from([SMALL, structure.DEFAULT]))
def test_matrix_views_cover_memory_and_know_its_factors(
    given_one: tuple[ScaledParameter, Tensor, int], tiles: Tiles
) -> None:
    w, tensor, n = given_one
    s = torch.cat([torch.randn(n), torch.zeros(1)]).double()
    try:
        views = list(matrix_views(w, 0, tensor, n, tiles))
    except InexpressibleError:
        assert tensor.numel() > tiles.flat
        return
    order = sorted(range(tensor.ndim), key=lambda a: -tensor.stride(a))
    expected = w.factor(s).log().expand(w.shape).permute(order).reshape(-1)
    torch.testing.assert_close(rebuilt(views, tensor.numel(), s), expected)


def test_a_kernel_of_one_element_lies_the_same_way_in_either_format() -> None:
    parameter = torch.randn(6, 4, 1, 1)
    other = torch.randn(6, 1, 1, 4).permute(0, 3, 1, 2)
    assert parameter.stride() != other.stride()
    assert ParameterLayouts([parameter]).fitting([other]) == [other]
    assert ParameterLayouts([parameter]).fitting([parameter.transpose(0, 1).contiguous().transpose(0, 1)]) == [None]


def test_sums_that_several_lines_are_weighed_from_are_kept_as_they_are_read() -> None:
    """conv2's columns are read when conv1's scales are found: its matrix is stored by columns."""
    model, image = Residual(), IMAGE
    symmetry = equinorm.trace(model, image)
    terms = {w.name: w for w in symmetry.moving if w.name in ("a.weight", "b.weight")}
    tables = step_tables(net_structure(Problem(symmetry, terms, lambda w: True)))
    assert tables.matrices == 5 * 6  # a: 3 × 3; b is not repeated
    assert tables.nested


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_block_of_a_wide_bottleneck_net_has_a_possible_number_of_warps(layout: torch.memory_format) -> None:
    """Flat and tall lines together need not make a power of two."""
    model = models.build("resnet50", classes=1000, in_shape=(3, 224, 224), norm="none")
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    symmetry = equinorm.trace(model, torch.rand(1, 3, 32, 32))
    terms = {w.name: w for w in symmetry.moving}
    tables = step_tables(net_structure(Problem(symmetry, terms, lambda w: True)))
    assert {block.warps for block in (*tables.first, *tables.later)} <= {1, 2, 4, 8, 16}


def test_a_convolution_is_one_view_in_either_layout() -> None:
    """The columns of an input channel are taken together: nine neighbours, or nine that are a row of channels apart."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 70, 3), nn.ReLU(), nn.Conv2d(70, 2, 1))
    w = {w.name: w for w in equinorm.trace(model, torch.zeros(1, 3, 8, 8)).moving}["2.weight"]
    for layout, repeats in ((torch.contiguous_format, (1, 8, 9)), (torch.channels_last, (9, 8, 1))):
        tensor = model[2].weight.detach().to(memory_format=layout)
        (view,) = matrix_views(w, 0, tensor, 78, structure.DEFAULT)
        assert (view.rows, view.columns) == (70, 72)
        rank = torch.tensor([0] * 8 + [1] * 70 + [2])
        rows, columns = structure.lines_of(view, 0, 1.0, rank, 2)
        assert view.repeats == repeats
        assert (len(rows.variable), len(columns.variable)) == (70, 8)
        assert rows.weighted.all()
        assert not columns.weighted.any()
