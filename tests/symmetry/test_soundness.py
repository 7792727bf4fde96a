"""Programs written to break the engine: writes, casts, aliases and constants that a rule alone would not see.

A program is a function of the net and x; `a`, `g` and `c` are linear layers, 8 hidden units on a batch of 4. Whatever
is found free in it, moving it must not change the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from support.nets import assert_function_kept

Program = Callable[[Any, Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Layers(nn.Module):
    def __init__(self, run: Program) -> None:
        super().__init__()
        self.run = run
        self.a, self.g, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@torch.library.custom_op("soundness::halve_second", mutates_args=("y",))
def halve_second(x: Tensor, y: Tensor) -> None:
    y.mul_(0.5).add_(x.detach().mean())


@halve_second.register_fake
def _(x: Tensor, y: Tensor) -> None:
    return None


# -- a write into another dtype ----------------------------------------------------------------------------------------


@program
def written_into_integers(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=torch.int64)
    z[:, :4] = 3 * m.a(x).relu()[:, :4]
    return m.c(z.to(x.dtype))


@program
def written_into_booleans(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=torch.bool)
    z[:, :4] = m.a(x).relu()[:, :4] - 0.3
    return m.c(z.to(x.dtype))


@program
def copied_into_integers(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=torch.int32)
    z.copy_(5 * m.a(x).relu())
    return m.c(z.to(x.dtype))


@program
def filled_into_integers(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(8, dtype=torch.int64)
    with torch.no_grad():
        z.fill_(7 * m.a(x).relu().mean())
    return m.c(z.to(x.dtype).expand(4, 8))


@program
def summed_as_integers(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x).relu()
        return m.c(h * 0 + (4 * h).sum(0, dtype=torch.int64).to(x.dtype))


@program
def cast_to_half(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x).relu().half().to(x.dtype))


@program
def cast_to_bfloat(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x).relu().to(torch.bfloat16).to(x.dtype))


@program
def cast_to_float8(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x).relu().to(torch.float8_e4m3fn).to(x.dtype))


@program
def a_weight_cast_to_half(m: Any, x: Tensor) -> Tensor:
    return m.c(F.linear(x, m.a.weight.half().to(x.dtype)).relu())


@program
def written_into_half(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=torch.float16)
    z[:, 2:] = m.a(x).relu()[:, 2:]
    return m.c(z.to(x.dtype))


# -- constants and their dtypes ----------------------------------------------------------------------------------------


@program
def a_mask_of_ones(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    mask = torch.ones_like(h[0], dtype=torch.bool)
    h[:, mask] = m.g(x).sigmoid()
    return m.c(h)


@program
def unsigned_constants_wrap(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    k = torch.zeros_like(h, dtype=torch.uint8) - 1
    return m.c(h + (k > 0))


@program
def full_of_half(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    k = torch.full_like(h, 0.5, dtype=torch.int32)
    return m.c(torch.where(k == 0, h, m.g(x).sigmoid()))


# -- writes that no rule is asked about --------------------------------------------------------------------------------


@program
def added_to_a_list(m: Any, x: Tensor) -> Tensor:
    z = m.a(x).relu()
    torch._foreach_add_([z], 1.0)
    return m.c(z)


@program
def multiplied_in_a_list(m: Any, x: Tensor) -> Tensor:
    z, y = m.a(x).relu(), m.g(x).relu()
    torch._foreach_mul_([z, y], [y.clone(), z.clone()])
    return m.c(z + y)


@program
def changed_by_a_custom_op(m: Any, x: Tensor) -> Tensor:
    z = m.a(x).relu()
    halve_second(m.g(x).sigmoid(), z)
    return m.c(z)


@program
def a_view_changed_by_a_custom_op(m: Any, x: Tensor) -> Tensor:
    z = m.a(x).relu()
    halve_second(m.g(x).sigmoid(), z[:, 3:])
    return m.c(z)


@program
def written_out(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.a(x).relu()
        torch.add(torch.ones(4, 1, dtype=x.dtype), torch.ones(4, 1, dtype=x.dtype), out=z[:, :1])
        return m.c(z)


@program
def several_written_out(m: Any, x: Tensor) -> Tensor:
    z, i = torch.empty(4, dtype=x.dtype), torch.empty(4, dtype=torch.int64)
    with torch.no_grad():
        torch.max(m.a(x).relu(), 1, out=(z, i))
    return m.c(z[:, None] + m.g(x).sigmoid())


# -- aliases that schemas do not tell ----------------------------------------------------------------------------------


@program
def an_unsafe_chunk_is_filled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    p, _ = torch.unsafe_chunk(h, 2, 1)
    p.fill_(1.0)
    return m.c(h)


@program
def a_diagonal_of_einsum_is_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    s = h.T @ h
    torch.einsum("ii->i", s).copy_(torch.ones(8, dtype=x.dtype))
    return m.c(m.g(x).sigmoid() @ s)


@program
def a_mesh_is_written(m: Any, x: Tensor) -> Tensor:
    s = m.a(x).relu()
    torch.meshgrid(s[0], indexing="ij")[0].copy_(torch.ones(8, dtype=x.dtype))
    return m.c(s)


@program
def a_view_of_a_constant_is_made_positive(m: Any, x: Tensor) -> Tensor:
    k = -torch.ones(8, dtype=x.dtype)
    k.view(2, 4).abs_()
    return m.c(m.a(x).relu() + (k + 1))


@program
def a_view_of_a_constant_is_rectified(m: Any, x: Tensor) -> Tensor:
    k = -torch.ones(8, dtype=x.dtype)
    k[:4].relu_()
    return m.c(m.a(x).relu() + (k + 1))


@program
def a_view_of_a_constant_drops_out(m: Any, x: Tensor) -> Tensor:
    k = torch.ones(8, dtype=x.dtype)
    F.dropout(k[:], 0.5, True, inplace=True)
    return m.c(m.a(x).relu() + (k - 1))


@program
def a_transposed_view_is_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    h.t()[0].add_(1.0)
    return m.c(h)


@program
def an_older_view_is_read(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    view = h[:, :4]
    h.mul_(m.g(x).sigmoid())
    h.add_(1.0)
    return m.c(torch.cat([view, view], 1))


@program
def a_reshape_is_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    h.reshape(-1)[::3].fill_(2.0)
    return m.c(h)


@program
def expanded_constants_are_written(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(8, dtype=x.dtype)
    v = z.view(2, 4)
    v[0].add_(m.g(x).sigmoid().mean())
    return m.c(m.a(x).relu() + z)


@program
def a_dropout_that_is_off_shows_its_input(m: Any, x: Tensor) -> Tensor:
    """Found by a random program: `dropout` handed out its input itself, and torch's functionalisation took a copy."""
    with torch.no_grad():
        h = m.g(x).relu()
        same = F.dropout(h, 0.5, False)
        z = h + m.a(x).relu()
        h.flatten()[0].add_(same.sum())
        torch.cumsum(same, 0, out=z)
        return m.c(z)


@program
def what_a_dropout_that_is_off_hands_out_is_written(m: Any, x: Tensor) -> Tensor:
    """Found by a random program: with gradients the export shows the input and what is handed out apart."""
    h = m.g(x).relu()
    F.hardtanh(F.dropout(h, 0.5, False), inplace=True)
    return m.c(h) + m.c(m.a(x).relu())


@program
def type_as_shows_its_input(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    same = h.type_as(x)
    h.view(-1)[:3].add_(1.0)
    return m.c(same) + m.c(m.g(x).relu())


def traced(run: Program) -> Iterator[tuple[nn.Module, Tensor, equinorm.Symmetry]]:
    for seed in range(2):
        torch.manual_seed(seed)
        model, x = Layers(run).double(), torch.randn(4, 6, dtype=torch.float64)
        yield model, x, equinorm.trace(model, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_function_is_kept(name: str) -> None:
    for model, x, symmetry in traced(PROGRAMS[name]):
        torch.manual_seed(0)
        assert_function_kept(model, x, symmetry, copies=False)
