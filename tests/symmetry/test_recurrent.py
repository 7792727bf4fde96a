"""Recurrent layers: as free as the same layers written out step by step, and moving their scales changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm.symmetry.capture import capture
from support.grids import examples
from support.nets import assert_function_kept, double_and_trace

INPUT, UNITS, PROJECTED, STEPS, BATCH = 4, 5, 3, 3, 2


class Recurrent(nn.Module):
    """A layer before a recurrent one and a layer after it; `written_out` computes the same without torch's own op."""

    def __init__(self, core: nn.RNNBase, start: str, read: str, written_out: bool = False) -> None:
        super().__init__()
        self.stem, self.core = nn.Linear(3, INPUT), core
        directions = 2 if core.bidirectional else 1
        size = core.proj_size or core.hidden_size
        self.head = nn.Linear(size * (directions if read == "sequence" else 1), 2)
        self.read, self.written_out = read, written_out
        cells, sizes = core.num_layers * directions, [size, core.hidden_size][: 1 + (core.mode == "LSTM")]
        self.start = nn.ModuleList()
        if start == "learned":
            self.start = nn.ParameterList(torch.randn(cells, 1, n) for n in sizes)
        elif start == "computed":
            self.start.extend(nn.Sequential(nn.Linear(3, cells * n), nn.Unflatten(1, (cells, n))) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1 if self.core.batch_first else 0)
        start: Any = tuple(
            s(mean).transpose(0, 1).contiguous() if isinstance(s, nn.Module) else s.repeat(1, len(mean), 1)
            for s in self.start
        )
        start = start or None
        x = self.stem(x).relu()
        if self.written_out:
            sequence, last = self.unrolled(x, start)
        else:
            lstm = self.core.mode == "LSTM"
            sequence, states = self.core(x, start if lstm or start is None else start[0])
            last = states[0] if lstm else states
        return self.head(sequence if self.read == "sequence" else last[-1])

    def unrolled(self, x: Tensor, start: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
        steps = list(x.unbind(1 if self.core.batch_first else 0))
        last, number = [], 0
        for layer in range(self.core.num_layers):
            ways = []
            for suffix in ["", "_reverse"] if self.core.bidirectional else [""]:
                names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
                w, u, b, d, r = (getattr(self.core, f"{name}_l{layer}{suffix}", None) for name in names)
                h = c = torch.zeros((), dtype=x.dtype)
                h = h.expand(len(steps[0]), u.shape[1]) if start is None else start[0][number]
                if self.core.mode == "LSTM":
                    c = torch.zeros_like(h[:, :1]) if start is None else start[1][number]
                made = []
                for step in reversed(steps) if suffix else steps:
                    h, c = self.step(F.linear(step, w, b), F.linear(h, u, d), h, c)
                    h = h if r is None else F.linear(h, r)
                    made.append(h)
                last.append(h)
                ways.append(made[::-1] if suffix else made)
                number += 1
            steps = [torch.cat(pair, -1) for pair in zip(*ways, strict=True)]
        return torch.stack(steps, 1 if self.core.batch_first else 0), torch.stack(last)

    def step(self, before: Tensor, after: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.core.mode == "LSTM":
            i, f, g, o = (before + after).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        if self.core.mode == "GRU":
            (r, z, n), (hr, hz, hn) = before.chunk(3, -1), after.chunk(3, -1)
            update = (z + hz).sigmoid()
            return (1 - update) * (n + (r + hr).sigmoid() * hn).tanh() + update * h, c
        return (before + after).relu() if self.core.mode == "RNN_RELU" else (before + after).tanh(), c


KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected": lambda *args, **more: nn.LSTM(*args, proj_size=PROJECTED, **more),
    "gru": nn.GRU,
    "relu": lambda *args, **more: nn.RNN(*args, nonlinearity="relu", **more),
    "tanh": nn.RNN,
}


def states_have_their_shape() -> bool:
    """Whether torch records the shape of an LSTM's states as it is; 2.6, 2.7 and 2.8 have an axis too many."""
    captured = capture(Recurrent(nn.LSTM(INPUT, UNITS), "zero", "sequence"), torch.zeros(STEPS, BATCH, 3))
    (node,) = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.lstm.input)
    return bool(node.meta["val"][1].ndim == 3)


NEEDS_SHAPE = pytest.mark.skipif(not states_have_their_shape(), reason="torch mistakes the shape of an LSTM's states")
EVERY_KIND = [pytest.param(kind, marks=[NEEDS_SHAPE] if kind == "projected" else []) for kind in KINDS]


def free_units(kind: str, layers: int, directions: int) -> int:
    """By hand: what goes in, and the states of ReLU networks and projections."""
    return INPUT + layers * directions * {"relu": UNITS, "projected": PROJECTED}.get(kind, 0)


@pytest.mark.parametrize("kind", EVERY_KIND)
@settings(max_examples=examples(3, of=6), phases=(Phase.explicit, Phase.generate))  # an export takes a while
@given(
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    start=st.sampled_from(["zero", "learned", "computed"]),
    read=st.sampled_from(["sequence", "last"]),
)
def test_as_free_as_written_out(
    kind: str, layers: int, bidirectional: bool, bias: bool, batch_first: bool, start: str, read: str
) -> None:
    torch.manual_seed(0)
    core = KINDS[kind](INPUT, UNITS, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    model = Recurrent(core, start, read)
    x = torch.randn((BATCH, STEPS, 3) if batch_first else (STEPS, BATCH, 3))
    twin, x, sym = double_and_trace(model, x)
    plain = Recurrent(core, start, read, written_out=True).double()
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(plain(x), twin(x))
    assert not sym.explain().unknown_ops
    assert sym.num_scales == equinorm.trace(plain, x).num_scales
    if read == "sequence" or not bidirectional:  # else one direction of the last layer is not read
        assert sym.num_scales == free_units(kind, layers, 1 + bidirectional)
    assert_function_kept(twin, x, sym)


@NEEDS_SHAPE
def test_what_freezes_is_named() -> None:
    model = Recurrent(nn.LSTM(INPUT, UNITS, proj_size=PROJECTED), start="zero", read="sequence")
    rows = equinorm.trace(model, torch.randn(STEPS, BATCH, 3)).explain().rows
    reasons = {
        (row.parameter, row.axis): row.because for row in rows if row.parameter.startswith("core") and row.because
    }
    assert len(reasons) == 5  # the gates' weights and biases, and what the projection reads
    assert all(reason.startswith("lstm in core") for reason in reasons.values()), reasons


class Steps(nn.Module):
    """Cells in a loop."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(3, INPUT), cell, nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in self.stem(x).relu().unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (nn.LSTMCell(INPUT, UNITS), INPUT),
        (nn.GRUCell(INPUT, UNITS), INPUT),
        (nn.RNNCell(INPUT, UNITS), INPUT),
        (nn.RNNCell(INPUT, UNITS, nonlinearity="relu"), INPUT + UNITS),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_cells(cell: nn.Module, expected: int) -> None:
    twin, x, sym = double_and_trace(Steps(cell), torch.randn(BATCH, STEPS, 3))
    assert sym.num_scales == expected, sym.explain()
    assert not sym.explain().unknown_ops
    assert_function_kept(twin, x, sym)


def test_balance_moves_states_but_not_their_self_loops() -> None:
    torch.manual_seed(0)
    core = nn.RNN(INPUT, UNITS, nonlinearity="relu", batch_first=True)
    model, x = Recurrent(core, start="zero", read="last").double(), torch.randn(8, STEPS, 3).double()
    with torch.no_grad():
        core.weight_ih_l0.mul_(10 ** torch.linspace(-2, 2, UNITS)[:, None])
    before, weight = model(x).detach(), core.weight_hh_l0.detach().clone()
    report = equinorm.balance_(model, x)
    torch.testing.assert_close(model(x).detach(), before)
    torch.testing.assert_close(core.weight_hh_l0.detach().diagonal(), weight.diagonal())
    assert not torch.allclose(core.weight_hh_l0, weight)
    assert report.norm_after < 0.2 * report.norm_before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_enorm_in_training_keeps_the_function(kind: str, device: str) -> None:
    torch.manual_seed(0)
    model = Recurrent(KINDS[kind](INPUT, UNITS, 2), "learned", "sequence").to(device, torch.float64)
    x = torch.randn(STEPS, BATCH, 3, dtype=torch.float64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    enorm = equinorm.ENorm(model, optimizer, x, c=1.2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        enorm.before_step()
        optimizer.step()
        before, weight = model(x).detach(), model.stem.weight.detach().clone()
        enorm.step()
        torch.testing.assert_close(model(x).detach(), before)
        assert not torch.equal(model.stem.weight, weight)


def test_weights_in_one_storage() -> None:
    """cuDNN keeps all weights of a recurrent layer side by side in one."""
    core = nn.RNN(INPUT, UNITS, 2, nonlinearity="relu")
    weights = list(core.parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view_as(weight)
    model, x = Recurrent(core, "zero", "sequence"), torch.randn(STEPS, BATCH, 3)
    before = model(x).detach()
    sym = equinorm.trace(model, x)
    assert sym.num_scales == free_units("relu", 2, 1)
    sym.rescale_(torch.linspace(-1, 1, sym.num_scales))
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-4, atol=1e-5)
    assert weights[0].untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr()
