"""The rescalings that leave some parameters as they are: a subgroup of those that leave the function as it is.

An element of a held parameter follows exp(out - in), so out = in there: two variables become one, or stay at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .scales import FROZEN, Scales

if TYPE_CHECKING:
    from .symmetry import ScaledParameter, Term

__all__ = ["holding"]


def holding(
    parameters: Sequence[ScaledParameter], birth: Tensor, held: Collection[str]
) -> tuple[list[ScaledParameter], Tensor]:
    """The parameters and births of the variables that are left where the parameters of these names do not move.

    >>> parameters, birth = holding(symmetry.parameters, symmetry.birth, {"0.weight"})
    """
    n = len(birth)
    scales = Scales()
    label = torch.cat([scales.fresh(n, 0), torch.tensor([FROZEN])])
    for w in parameters:
        if w.name in held:
            _hold(scales, label, w)
    roots, weights = scales.find(label)
    roots = torch.where(scales.is_frozen(label), FROZEN, roots)

    def by_root(term: Term | None) -> Term | None:
        if term is None:
            return None
        return replace(term, index=roots[term.index], exponent=term.exponent * weights[term.index])

    moved = [replace(w, out=by_root(w.out), into=by_root(w.into), fan_in=by_root(w.fan_in)) for w in parameters]
    acting = torch.cat([torch.zeros(0, dtype=torch.int64), *(_acting(w) for w in moved if w.name not in held)]).unique()
    number = torch.full((scales.size,), len(acting))
    number[acting] = torch.arange(len(acting))

    def numbered(term: Term | None) -> Term | None:
        if term is None:
            return None
        index = number[term.index]
        return replace(term, index=index) if bool((index < len(acting)).any()) else None

    left = [
        replace(
            w,
            out=None if w.name in held else numbered(w.out),
            into=None if w.name in held else numbered(w.into),
            fan_in=numbered(w.fan_in),
        )
        for w in moved
    ]
    return left, birth[acting - label[0]] if n else birth


def _hold(scales: Scales, label: Tensor, w: ScaledParameter) -> None:
    """Demand that out = in on every element of a parameter."""
    if w.out is None or w.into is None:
        for term in (w.out, w.into):
            if term is not None:
                scales.freeze(label[term.index].reshape(-1), why=0)
        return
    # on axes that only one of the two has every element meets every other: what equals the first there equals all
    first_out, first_into = _narrowed(w.out, beside=w.into), _narrowed(w.into, beside=w.out)
    for out, into in ((w.out, first_into), (first_out, w.into)):
        one, two, k_one, k_two = torch.broadcast_tensors(
            label[out.index], label[into.index], out.exponent, into.exponent
        )
        free = ~scales.is_frozen(one) & ~scales.is_frozen(two)
        ratio = torch.where(free, k_two / k_one, 1.0)
        for exponent in ratio.unique().tolist():
            some = ratio == exponent
            scales.merge(one[some], two[some], why=0, exponent=exponent)


def _narrowed(term: Term, beside: Term) -> Term:
    """The first element of a term along every axis that another one does not have."""
    index, exponent = term.index, term.exponent.expand_as(term.index)
    for axis, (mine, other) in enumerate(zip(index.shape, beside.index.shape, strict=True)):
        if mine > 1 and other == 1:
            index, exponent = index.narrow(axis, 0, 1), exponent.narrow(axis, 0, 1)
    return replace(term, index=index, exponent=exponent)


def _acting(w: ScaledParameter) -> Tensor:
    """Roots that change a parameter; out and in of one element may be the same scale, which then cancels."""
    sides = [t for t in (w.out, w.into) if t is not None]
    found = [t.index[t.index > FROZEN].unique() for t in sides]
    if len(sides) < 2:
        return torch.cat([torch.zeros(0, dtype=torch.int64), *found])
    common = found[0][torch.isin(found[0], found[1])]
    alone = [side[~torch.isin(side, common)] for side in found]
    if len(common):
        out, into = sides
        one, two, k_one, k_two = torch.broadcast_tensors(out.index, into.index, out.exponent, into.exponent)
        differ = (one != two) | ((k_one - k_two).abs() > 1e-9)
        common = common[torch.isin(common, torch.cat([one[differ], two[differ]]))]
    return torch.cat([common, *alone])
