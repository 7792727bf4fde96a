"""Programs whose shapes or numbers depend on values, tensors without elements, and what torch.export refuses.

What it can capture is traced, with a barrier where need be; what it cannot is a `TraceError` that names the line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from support.nets import Net, assert_function_kept

Program = Callable[[Any, Tensor], Any]
CAPTURED: dict[str, tuple[Program, int]] = {}
REFUSED: dict[str, Program] = {}


def captured(scales: int) -> Callable[[Program], Program]:
    """A program that is traced, and the scales that are free in it: 8 where the hidden units of `a` are."""

    def add(run: Program) -> Program:
        CAPTURED[run.__name__] = run, scales
        return run

    return add


def refused(run: Program) -> Program:
    REFUSED[run.__name__] = run
    return run


def layers(run: Program) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Net(
        run,
        a=nn.Linear(6, 8),
        g=nn.Linear(6, 8),
        c=nn.Linear(8, 3),
        one=nn.Parameter(torch.randn(1)),
        row=nn.Parameter(torch.randn(1, 8)),
        thin=nn.Parameter(torch.randn(3, 1)),
        sparse=torch.eye(4, dtype=torch.float64).to_sparse(),
    )
    model.plain = torch.ones(8, dtype=torch.float64)  # type: ignore[assignment]
    model.held = {"k": torch.ones(8, dtype=torch.float64)}  # type: ignore[assignment]
    return model.double(), torch.randn(4, 6, dtype=torch.float64)


# -- how many elements there are depends on values ---------------------------------------------------------------------


@captured(8)
def a_mask_of_the_input(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()[x[:, 0] > 0])


@captured(0)
def a_mask_of_hidden_units(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.c(h[h.sum(1) > 1.0])


@captured(8)
def rows_that_nonzero_finds(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()[torch.nonzero(x[:, 0] > 0).squeeze(1)])


@captured(8)
def rows_that_where_finds(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu().index_select(0, torch.where(x[:, 0] > 0)[0]))


@captured(1)
def columns_that_nonzero_finds(m: Any, x: Tensor) -> Any:
    """The chosen columns are a different set each time, so all have one scale."""
    h = m.a(x).relu()
    h = h[:, torch.nonzero(x[0].repeat(2)[:8] > 0).squeeze(1)]
    return m.g(x).sigmoid().sum() * h.sum(1) / m.a(x).relu().sum(1)


@captured(0)
def scrambled_rows(m: Any, x: Tensor) -> Any:
    """A size that is not known mixes rows and columns."""
    h = m.a(x).relu()[x[:, 0] > 0]
    return m.c(h.reshape(8, -1).t()), h.reshape(-1)[:1]


@captured(8)
def unique_of_the_input(m: Any, x: Tensor) -> Any:
    found, where = torch.unique((x[:, 0] > 0).long(), return_inverse=True)
    return m.c(m.a(x).relu()) + where[:, None], found


@captured(0)
def unique_of_hidden_units(m: Any, x: Tensor) -> Any:
    return torch.unique(m.a(x).relu())


@captured(0)
def repeated_by_a_tensor(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu().repeat_interleave((x[:, 0] > 0).long() + 1, 0))


@captured(0)
def selected_by_a_mask(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.c(h), torch.masked_select(h, h > 0.5).sum()


@captured(0)
def written_where_a_mask_is(m: Any, x: Tensor) -> Any:
    h, rows = m.a(x).relu().clone(), x[:, 0] > 0
    h[rows] = m.g(x[rows]).relu()
    return m.c(h)


@captured(8)
def added_where_a_mask_is(m: Any, x: Tensor) -> Any:
    rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
    return m.c(m.a(x).relu().index_add(0, rows, m.g(x[rows]).relu()))


@captured(8)
def experts_chosen_by_the_input(m: Any, x: Tensor) -> Any:
    out, best = torch.zeros(4, 3, dtype=x.dtype), x[:, :2].argmax(1)
    h = m.a(x).relu()
    for expert in range(2):
        rows = torch.where(best == expert)[0]
        out.index_add_(0, rows, m.c(h[rows]))
    return out


@captured(0)
def a_part_of_a_table_of_unknown_length(m: Any, x: Tensor) -> Any:
    """The rows of a weight up to a number that depends on the input: all of them may be read."""
    n = (x[:, 0] > 0).sum().item()
    torch._check(n >= 1)
    torch._check(n <= 4)
    return m.c(m.a.weight[:n].sum(0)[:1].expand(8)), m.a(x).relu() @ m.a.weight


# -- numbers that depend on values -------------------------------------------------------------------------------------


@captured(8)
def divided_by_an_item_of_the_input(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu() / x.abs().max().item())


@captured(0)
def divided_by_an_item_of_hidden_units(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.c(h / h.max().item())


@captured(0)
def an_item_is_an_exponent(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu() ** x.abs().max().item())


@captured(0)
def an_item_is_added(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu() + x.max().item())


@captured(0)
def filled_with_an_item(m: Any, x: Tensor) -> Any:
    """It may be anything but zero, so it cannot be taken for a structural zero."""
    return m.c(m.a(x).relu() + torch.full((4, 8), x.max().item(), dtype=x.dtype))


@captured(8)
def a_list_of_numbers_of_the_input(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()) * (x[:, 0] > 0).long().tolist()[0]


# -- tensors kept as plain attributes ----------------------------------------------------------------------------------


@captured(0)
def a_plain_tensor_is_written(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    m.plain.mul_(0.9).add_(h.detach().mean(0))
    return m.c(h + m.plain)


@captured(0)
def a_part_of_a_plain_tensor_is_written(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    m.plain[:4] = h.detach()[0, :4]
    return m.c(h + m.plain)


@captured(8)
def a_tensor_in_a_dict_is_written(m: Any, x: Tensor) -> Any:
    m.held["k"].mul_(0.9)
    return m.c(m.a(x).relu() * m.held["k"])


@captured(8)
def a_plain_tensor_is_replaced(m: Any, x: Tensor) -> Any:
    m.plain = m.plain * 0.9
    return m.c(m.a(x).relu() * m.plain)


# -- no axes, axes of length one, other layouts, no elements -----------------------------------------------------------


@captured(8)
def scattered_into_a_number(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()) * m.g(x).sum().scatter(0, torch.tensor(0), 2.0)


@captured(0)
def scatter_added_to_a_number(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x)) * m.a(x).relu().sum().scatter_add(0, torch.tensor(0), m.g(x).sum())


@captured(8)
def the_product_of_a_number(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()) * m.g(x).sigmoid().sum().prod(0)


@captured(0)
def einsum_with_a_weight_of_length_one(m: Any, x: Tensor) -> Any:
    return torch.einsum("bi,oi->bo", m.a(x).relu(), m.thin)


@captured(0)
def einsum_with_a_gain_of_length_one(m: Any, x: Tensor) -> Any:
    return m.c(torch.einsum("bi,i->bi", m.a(x).relu(), m.one))


@captured(0)
def einsum_with_a_row_for_the_batch(m: Any, x: Tensor) -> Any:
    return m.c(torch.einsum("bi,bi->bi", m.a(x).relu(), m.row))


@captured(0)
def a_sparse_constant_made_in_forward(m: Any, x: Tensor) -> Any:
    return m.c(torch.sparse.mm(torch.eye(4, dtype=x.dtype).to_sparse(), m.a(x).relu()))


@captured(8)
def a_sparse_buffer(m: Any, x: Tensor) -> Any:
    return m.c(m.sparse @ m.a(x).relu())


@captured(8)
def parts_without_elements(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.c(torch.cat([h[:, :0], h], 1)), h[:, :0]


@pytest.mark.parametrize("name", CAPTURED)
def test_it_is_traced_and_the_function_is_kept(name: str) -> None:
    run, scales = CAPTURED[name]
    model, x = layers(run)
    symmetry = equinorm.trace(model, x)
    assert symmetry.num_scales >= scales
    assert symmetry.verification.frozen == (), "what the rules find is right without the net below them"
    assert_function_kept(model, x, symmetry)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (0, 6)),
        (nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3)), (0, 1, 6)),
        (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval(), (0, 6)),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval(), (0, 5, 6)),
        (nn.GRU(6, 3, batch_first=True), (0, 5, 6)),
        (nn.Sequential(nn.Embedding(6, 8), nn.ReLU(), nn.Linear(8, 3)), (0, 5)),
    ],
)
def test_nothing_is_free_that_a_batch_of_none_does_not_show(net: nn.Module, shape: tuple[int, ...]) -> None:
    x = (
        torch.zeros(shape, dtype=torch.int64)
        if isinstance(next(net.children(), None), nn.Embedding)
        else torch.ones(shape)
    )
    assert equinorm.trace(net, x).num_scales == 0


def test_a_rule_that_fails_is_a_barrier_and_is_reported() -> None:
    """A case that the author of a rule has not thought of costs freedom, and somebody hears of it."""
    model = Net(
        lambda m, x: torch.einsum("bi,bi->bi", m.a(x), m.row), a=nn.Linear(6, 8), row=nn.Parameter(torch.ones(1, 8))
    )
    summary = equinorm.trace(model, torch.randn(4, 6)).explain(summary=True).summary
    assert "the rule of aten.einsum.default failed, please report it" in summary


# -- what cannot be captured -------------------------------------------------------------------------------------------


@refused
def a_branch(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.c(h * 2 if h.sum() > 0 else h)  # here


@refused
def a_loop(m: Any, x: Tensor) -> Any:
    h = m.a(x).relu()
    for _ in range(int((x[:, 0] > 0).sum())):  # here
        h = h + 1
    return m.c(h)


@refused
def a_float(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()) * float(x.max())  # here


@refused
def an_array(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()) * torch.from_numpy(x.detach().numpy().mean(1, keepdims=True))  # here


@refused
def data_of_a_tensor(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu().data)  # here


@refused
def an_error_of_the_user(m: Any, x: Tensor) -> Any:
    return m.c(m.a(x).relu()[:, :5])  # here


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_names_its_line(name: str) -> None:
    run = REFUSED[name]
    model, x = layers(run)
    code = run.__code__
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n in range(code.co_firstlineno, len(text)) if text[n - 1].endswith("# here"))
    with pytest.raises(equinorm.TraceError, match=rf"symmetry/test_values_dependent\.py:{line}: "):
        equinorm.trace(model, x)


def test_what_vmap_leaves_in_the_graph_is_refused() -> None:
    """Its tensors show one example and stand for many: looking where they lie ended with NotImplementedError."""
    model, x = layers(lambda m, x: m.c(torch.func.vmap(lambda row: row * (row > 0.5).sum())(m.a(x).relu())))
    with pytest.raises(equinorm.TraceError, match=r"torch\.func .* Write what it maps over as a batch"):
        equinorm.trace(model, x)
