"""SGD and ENorm in one pass, in Triton's interpreter, against torch's SGD followed by the plain ENorm."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_enorm_gpu import Groups, Residual, chain, perturbed
from test_kernels_enorm import IMAGE, SMALL
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm import launch as dispatch
from equinorm.enorm.sgd import ENormSGD
from equinorm.enorm.steps import structure
from equinorm.enorm.steps.tables import stretch
from support.architectures import Architecture, example_input, homogeneous_plans
from support.grids import diagonal, examples
from support.triton_interpreter import interpreted

quick = settings(max_examples=examples(3, of=5), phases=(Phase.explicit, Phase.generate))
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 3e-3}


@pytest.fixture(scope="module")
def kernels() -> Any:
    return interpreted("equinorm.enorm.steps.triton")


@pytest.fixture(autouse=True)
def _interpreted(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="triton"` finds the interpreted kernels."""
    monkeypatch.setitem(sys.modules, "equinorm.enorm.steps.triton", kernels)


class Twins:
    """One model trained twice: by torch's SGD and the plain ENorm, and by ENormSGD."""

    def __init__(
        self,
        model: nn.Module,
        example: Tensor | equinorm.Symmetry,
        sgd: dict[str, Any],
        groups: list[dict[str, Any]] | None = None,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self.symmetry = equinorm.trace(model, example) if isinstance(example, Tensor) else example
        # in half precision torch rounds after every operation, and the kernels once: the twin does not round at all
        half = any(q.dtype.itemsize < 4 for q in model.parameters())
        self.models = copy.deepcopy(model).double() if half else copy.deepcopy(model), model
        self.draw = torch.Generator().manual_seed(seed)
        plain, fused = (self._groups(m, groups) for m in self.models)
        torchs = torch.optim.SGD(plain, **{"lr": 0.01} | sgd)
        options = {"gradients": False, "symmetry": self.symmetry} | options
        self.enorm = equinorm.ENorm(self.models[0], torchs, backend="plain", **options)
        ours = ENormSGD(self.models[1], params=fused, backend="triton", **{"lr": 0.01} | sgd, **options)
        self.optimizers = torchs, ours
        start = {"log_t": 0.3 * torch.randn(self.symmetry.num_scales, generator=self.draw).double(), "calls": 0}
        for enorm in (self.enorm, ours.enorm):
            enorm.load_state_dict(start)

    @property
    def ours(self) -> ENormSGD:
        return self.optimizers[1]

    @staticmethod
    def _groups(model: nn.Module, groups: list[dict[str, Any]] | None) -> Any:
        """Parameters dealt to groups in turn."""
        parameters = [q for q in model.parameters() if q.requires_grad]
        if not groups:
            return parameters
        return [{"params": parameters[i :: len(groups)], **group} for i, group in enumerate(groups)]

    def step(self, without: float = 0.0) -> None:
        """Both, on the same gradients; a share of the parameters has none."""
        for q, twin in zip(*(m.parameters() for m in self.models), strict=True):
            there = torch.rand((), generator=self.draw) >= without
            gradient = 0.3 * torch.randn(q.shape, generator=self.draw).to(twin.dtype)
            q.grad, twin.grad = (torch.empty_like(p).copy_(gradient) if there else None for p in (q, twin))
        self.enorm.before_step()
        self.optimizers[0].step()
        self.enorm.step()
        self.ours.step()

    def assert_same(self, tolerance: float) -> None:
        plain, fused = (dict(self._all(*pair)) for pair in zip(self.models, self.optimizers, strict=True))
        plain["log_t"], fused["log_t"] = self.enorm.log_t, self.ours.enorm.log_t
        assert plain.keys() == fused.keys()
        for name, expected in plain.items():
            scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
            error = (fused[name].double() - expected.double()).abs().div(scale)
            assert bool((error < tolerance).all()), f"{name} is off by {error.max():.1e} of its largest value"

    @staticmethod
    def _all(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for name, q in model.named_parameters():
            yield name, q.detach()
            if q.grad is not None:
                yield f"{name}.grad", q.grad
            for key, value in optimizer.state.get(q, {}).items():
                if value is not None:
                    yield f"{name}.{key}", value


# -- the same steps ----------------------------------------------------------------------------------------------------

averaging = st.sampled_from(
    [{"nesterov": True, "momentum": 0.9}, {"momentum": 0.5, "dampening": 0.25}, {"momentum": 0.9}]
)
sgds = st.builds(
    dict,
    lr=st.sampled_from([0.01, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
)
several = st.lists(
    st.sampled_from([{"lr": 0.03}, {"momentum": 0.0}, {"weight_decay": 0.3}, {"maximize": True}]), max_size=3
)


@quick
@given(
    plan=homogeneous_plans,
    sgd=sgds,
    averages=st.just({}) | averaging,
    groups=several,
    without=st.sampled_from([0.0, 0.0, 0.4]),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    cycles=st.integers(1, 2),
    last=st.booleans(),
    small=st.booleans(),
)
def test_random_architectures(
    plan: list[Any],
    sgd: dict[str, Any],
    averages: dict[str, Any],
    groups: list[dict[str, Any]],
    without: float,
    p: float,
    cycles: int,
    last: bool,
    small: bool,
) -> None:
    if averages.get("nesterov"):
        groups = [group for group in groups if "momentum" not in group]
    model = perturbed(Architecture(plan), torch.float64)
    if last:
        model = model.to(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(structure, "DEFAULT", SMALL)
        twins = Twins(model, example_input().double(), sgd | averages, groups, p=p, cycles=cycles, c=1.2)
        for _ in range(2 if "dampening" not in averages else 3):
            twins.step(without)
        if not without:
            assert twins.ours.why_not == ""
        twins.assert_same(TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    ("make", "dtype", "last"),
    diagonal([Residual, Groups], [torch.bfloat16, torch.float32, torch.float16], [False, True]),
)
def test_convolutions(make: type[nn.Module], dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    if last:
        model = model.to(memory_format=torch.channels_last)
    twins = Twins(model, IMAGE.to(dtype), {"momentum": 0.9, "weight_decay": 0.01}, c=1.2)
    for _ in range(2):
        twins.step()
    assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[dtype])


def test_weights_of_several_dtypes() -> None:
    model = chain(4, 6, 5, 3).bfloat16()
    model[2].float()
    symmetry = equinorm.trace(chain(4, 6, 5, 3), torch.zeros(1, 4))
    twins = Twins(model, symmetry, {"momentum": 0.9})
    for _ in range(2):
        twins.step()
    assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[torch.bfloat16])


class Odd(nn.Module):
    """Parameters outside of the symmetry: a table of positions that a sigmoid reads, an unused weight, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 300), nn.Linear(300, 3)
        self.position = nn.Parameter(torch.randn(7, 5))
        self.unused = nn.Parameter(torch.randn(3, 4, 2))
        self.number = nn.Parameter(torch.randn(()))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.number * (x + self.position[:1]))
        return self.frozen(F.relu(self.b(F.relu(self.a(x)))))


def test_parameters_outside_of_the_symmetry_are_stepped_on_and_frozen_ones_only_balanced() -> None:
    model = Odd()
    twins = Twins(model, torch.zeros(1, 5), {"momentum": 0.9, "weight_decay": 0.1}, c=1.2, frozen="move")
    frozen = model.frozen.weight.detach().clone()
    for _ in range(2):
        twins.step()
    assert twins.ours.why_not == ""
    assert not torch.equal(frozen, model.frozen.weight)
    twins.assert_same(TOLERANCE[torch.float32])


def test_a_rate_that_changes_and_gradients_that_move() -> None:
    twins = Twins(chain(4, 6, 5, 3), torch.zeros(1, 4), {"momentum": 0.9}, gradients=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in twins.optimizers]
    held = []
    for _ in range(4):
        twins.step()
        held += [q.grad for q in twins.models[1].parameters()]  # so that the next ones are elsewhere
        for scheduler in schedulers:
            scheduler.step()
        assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[torch.float32])


def test_a_rate_in_a_tensor_is_read_in_the_step() -> None:
    twins = Twins(chain(4, 6, 5, 3), torch.zeros(1, 4), {"momentum": 0.9, "lr": torch.tensor(0.1)})
    for rate in (0.1, 0.2):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"].fill_(rate)
        twins.step()
    assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[torch.float32])


def test_a_parameter_without_a_gradient_keeps_its_momentum_and_is_balanced() -> None:
    twins = Twins(chain(4, 6, 5, 3), torch.zeros(1, 4), {"momentum": 0.9, "weight_decay": 0.5})
    for without in (0.0, 0.5, 1.0):
        twins.step(without)
        assert twins.ours.why_not == ""
        twins.assert_same(TOLERANCE[torch.float32])


# -- what is not fused, and comes back ---------------------------------------------------------------------------------


def test_what_cannot_be_fused_is_said_and_done_by_torch() -> None:
    twins = Twins(Residual(), IMAGE, {"momentum": 0.9, "dampening": 0.1}, c=1.2)
    twins.step()
    assert "begin with this step" in twins.ours.why_not
    twins.step()
    assert twins.ours.why_not == ""
    for model in twins.models:
        model.to(memory_format=torch.channels_last)
    twins.step()
    assert "laid out anew" in twins.ours.why_not
    twins.step()
    assert "does not lie in memory" in twins.ours.why_not  # momentum stays contiguous
    twins.assert_same(TOLERANCE[torch.float32])


def test_every_other_step() -> None:
    twins = Twins(chain(4, 6, 5, 3), torch.zeros(1, 4), {"momentum": 0.9}, every=2)
    said = []
    for _ in range(4):
        twins.step()
        said.append(twins.ours.why_not)
    assert said == ["ENorm does not act in this step", ""] * 2
    twins.assert_same(TOLERANCE[torch.float32])


def test_a_group_that_is_added_later() -> None:
    model = chain(4, 6, 5, 3)
    twins = Twins(model, torch.zeros(1, 4), {"momentum": 0.9})
    twins.step()
    extra = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    for optimizer, m, q in zip(twins.optimizers, twins.models, extra, strict=True):
        m.register_parameter("extra", q)
        optimizer.add_param_group({"params": [q], "lr": 0.7})
    twins.step()
    assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[torch.float32])


def test_sparse_gradients_are_left_to_torch_and_a_group_may_be_empty() -> None:
    twins = Twins(Odd(), torch.zeros(1, 5), {"lr": 0.1}, frozen="move")
    for optimizer in twins.optimizers:
        optimizer.add_param_group({"params": [], "lr": 0.7})
    twins.step()
    assert twins.ours.why_not == ""
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        for q in model.parameters():
            q.grad = None
        model.position.grad = torch.ones(7, 5).to_sparse()
        optimizer.step()
    twins.enorm.step()
    assert "does not lie in memory" in twins.ours.why_not
    for model in twins.models:
        model.position.grad = None
    twins.assert_same(TOLERANCE[torch.float32])


def test_a_parameter_that_was_replaced_is_found() -> None:
    twins = Twins(chain(4, 6, 5, 3), torch.zeros(1, 4), {"momentum": 0.9})
    twins.step()
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer.param_groups[0]["params"] = list(model.parameters())
    for _ in range(2):
        twins.step()
    assert twins.ours.why_not == ""
    twins.assert_same(TOLERANCE[torch.float32])


# -- tables ------------------------------------------------------------------------------------------------------------


@given(start=st.integers(0, 50), length=st.integers(0, 700), entry=st.sampled_from([-1, 5]))
def test_stretches_cover_memory_once(start: int, length: int, entry: int) -> None:
    counted = torch.zeros(start + length + 9, dtype=torch.int64)
    for tile in stretch(3, start, length, SMALL, entry).tolist():
        parameter, first, height, width, pitch, inner, outer = tile[:7]
        assert (parameter, inner, outer, tile[8], tile[9], tile[11]) == (3, 1, 1, -1, -1, -1)
        assert tile[14] == (-1 if entry < 0 else entry + first - start)
        for row in range(height):
            counted[first + row * pitch : first + row * pitch + width] += 1
    expected = torch.zeros_like(counted)
    expected[start : start + length] = 1
    assert torch.equal(counted, expected)


def test_a_table_is_written_where_it_is_until_a_graph_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dispatch.DeviceTable(3, torch.float64, torch.device("cpu"))
    first = table.values
    assert not table.write((0.5, 0.0, -2.0))
    assert not table.write((0.0, 3.0, 1.0))
    assert first.tolist() == [0.0, 3.0, 1.0]
    table.keep()  # as in a capture
    assert not table.write((0.0, 3.0, 1.0))
    assert table.values is first
    assert table.write((1.0, 1.0, 1.0))
    assert first.tolist() == [0.0, 3.0, 1.0]
    monkeypatch.setattr(dispatch, "is_capturing", lambda device: True)
    assert table.write((2.0, 2.0, 2.0))  # the graph's own
    assert not table.known
    table.keep()
    monkeypatch.undo()
    assert table.write((2.0, 2.0, 2.0))
    assert table.known
