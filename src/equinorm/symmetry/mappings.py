"""Where a diagonal can move between layers: what SmoothQuant and AWQ call mappings.

A mapping is a set of scales that act on the same layers: the outputs of some are divided (they are smoothed) by what
the inputs of others are multiplied with (they are balanced). Others keep them as regular expressions for every
architecture; here they are read off a symmetry, so they are right for any model, and can be proved by moving them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models.exact import Exact
from .verify import Verifier, log_factors, relative_change

if TYPE_CHECKING:
    from .symmetry import ScaledParameter, Symmetry, Term

__all__ = ["Mapping", "mappings", "prove"]

STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",), "up_proj": ("up_proj",)}
"""Experts in one parameter, and the linear layers that tools unfold it into."""


@dataclass(frozen=True)
class Mapping:
    """Layers between which a diagonal can move.

    Layers are named as modules, or as parameters where these are neither `weight` nor `bias`.
    """

    smooth: tuple[str, ...]  # their outputs are divided
    balance: tuple[str, ...]  # what multiplies these outputs: their inputs are multiplied
    scales: int  # how many numbers can be chosen
    channels: int  # how many inputs the balanced layers have: more than scales, where heads share them
    entries: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """In the form of other tools: one layer to smooth, linear layers to balance; several where experts are stacked."""
    why_not: str = ""  # why it has no such form
    plus: float = 0.0  # what is added to the smoothed gain before it multiplies: 1 in Gemma
    variables: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), repr=False, compare=False)

    def __str__(self) -> str:
        of = "" if self.scales == self.channels else f" for {self.channels:,} channels"
        why = f" ({self.why_not})" if self.why_not else ""
        return f"{', '.join(self.smooth)} -> {', '.join(self.balance)}: {self.scales:,} scales{of}{why}"


@dataclass(frozen=True)
class _Touch:
    """One side of a parameter on which scales act, all to the same power."""

    parameter: ScaledParameter
    inner: bool  # divides the inputs
    exponent: float

    @property
    def smooths(self) -> bool:
        return (self.exponent > 0) != self.inner

    @property
    def term(self) -> Term:
        term = self.parameter.into if self.inner else self.parameter.out
        assert term is not None
        return term

    @property
    def layer(self) -> str:
        path, _, leaf = self.parameter.name.rpartition(".")
        return path if path and leaf in ("weight", "bias") else self.parameter.name


def mappings(symmetry: Symmetry) -> list[Mapping]:
    """All mappings of a symmetry, in the order of the network.

    >>> for mapping in equinorm.trace(model, x).mappings():
    ...     print(mapping)
    """
    followers = torch.zeros(symmetry.num_scales + 1, dtype=torch.bool)
    for carried in symmetry.carried:
        followers[carried.term.index.reshape(-1)] = True
    found = []
    for variables, touches in _groups(symmetry):
        kinds = {touch.smooths for touch in touches if touch.parameter.multiplicative}
        if kinds == {True, False}:
            found.append(_made(variables, touches, bool(followers[variables].any())))
    return found


def _groups(symmetry: Symmetry) -> list[tuple[Tensor, list[_Touch]]]:
    """Variables that act on the same sides of the same parameters to the same powers, together with these."""
    label = torch.zeros(symmetry.num_scales, dtype=torch.int64)
    used, touched = 1, []
    for parameter in symmetry.moving:
        for inner, term in ((False, parameter.out), (True, parameter.into)):
            if term is None:
                continue
            index, exponent = (x.reshape(-1) for x in torch.broadcast_tensors(term.index, term.exponent))
            free = index < symmetry.num_scales
            for power in exponent[free].unique().tolist():
                here = index[free & (exponent == power)].unique()
                old, place = label[here].unique(return_inverse=True)
                label[here] = used + place
                used += len(old)
                touched.append((_Touch(parameter, inner, power), here))
    members: dict[int, list[_Touch]] = {}
    for touch, here in touched:
        for name in label[here].unique().tolist():
            members.setdefault(name, []).append(touch)
    groups = [((label == name).nonzero().view(-1), touches) for name, touches in members.items()]
    return sorted(groups, key=lambda group: int(group[0][0]))


def _made(variables: Tensor, touches: Sequence[_Touch], followed: bool) -> Mapping:
    smooth = _once(touch.layer for touch in touches if touch.smooths)
    balance = _once(touch.layer for touch in touches if not touch.smooths)
    readers = [touch for touch in touches if not touch.smooths and touch.parameter.multiplicative]
    rows = _rows(readers[0])
    channels = len(variables) if rows is None else int(torch.isin(rows, variables).sum())
    try:
        if followed:
            raise _IrregularError("ε of norms changes with it")
        entries, why_not = _entries(variables, touches, smooth), ""
    except _IrregularError as error:
        entries, why_not = (), str(error)
    plus = max((touch.parameter.shift for touch in touches if touch.smooths), default=0.0)
    return Mapping(smooth, balance, len(variables), channels, entries, why_not, plus, variables)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _IrregularError(Exception):
    """Why a mapping is more than one smoothed layer and balanced linear layers with a scale for every channel."""


def _entries(
    variables: Tensor, touches: Sequence[_Touch], smooth: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The mapping in other tools' form, or an error that says why it has none."""
    if len(smooth) != 1:
        raise _IrregularError(f"{len(smooth)} layers would have to be smoothed together")
    for touch in touches:
        if touch.inner == touch.smooths:
            kind = "inputs" if touch.inner else "outputs"
            raise _IrregularError(f"{touch.layer} moves by its {kind}")
        if abs(touch.exponent) != 1:
            raise _IrregularError(f"{touch.layer} moves by a power of {touch.exponent:g}")
    columns: Tensor | None = None
    for touch in (touch for touch in touches if not touch.smooths):
        if touch.parameter.multiplicative:
            columns = _agreed(columns, _columns(touch, variables), touch.layer)
    assert columns is not None
    for touch in (touch for touch in touches if touch.smooths):
        _check_rows(touch, variables, columns, touches)
    experts = len(columns)
    if experts == 1 and all(len(touch.parameter.shape) < 3 for touch in touches):
        return ((smooth[0], _once(touch.layer for touch in touches if not touch.smooths)),)
    writer = next(touch for touch in touches if touch.smooths and touch.parameter.multiplicative)
    readers = [touch for touch in touches if not touch.smooths and touch.parameter.multiplicative]
    if experts == 1:  # one layer for all experts
        balanced = (name for touch in readers for name in _unfolded(touch, None))
        return ((smooth[0], _once(balanced)),)
    return tuple(
        (_unfolded(writer, e)[-1], _once(name for touch in readers for name in _unfolded(touch, e)))
        for e in range(experts)
    )


def _unfolded(touch: _Touch, expert: int | None) -> tuple[str, ...]:
    """The linear layers in a parameter: itself, or those of one expert (of all) where experts are stacked in it."""
    if len(touch.parameter.shape) < 3:
        return (touch.layer,)
    path, _, leaf = touch.parameter.name.rpartition(".")
    if leaf not in STACKED:
        raise _IrregularError(f"{touch.parameter.name} holds several layers")
    experts = range(touch.parameter.shape[0]) if expert is None else (expert,)
    return tuple(f"{path}.{e}.{name}" for e in experts for name in STACKED[leaf])


def _rows(touch: _Touch) -> Tensor | None:
    """The variable of every channel on one side of a parameter, for every expert: experts × channels."""
    index, shape = touch.term.index, touch.parameter.shape
    axes = [axis for axis in range(index.ndim) if index.shape[axis] > 1]
    if len(shape) == 3 and len(axes) > 1 and axes[0] == 0:
        return index.reshape(shape[0], -1) if len(axes) == 2 else None
    return index.reshape(1, -1) if len(axes) == 1 else None


def _columns(touch: _Touch, variables: Tensor) -> Tensor:
    found = _rows(touch)
    if found is None:
        raise _IrregularError(f"one scale for all channels of {touch.layer}")
    if len(touch.parameter.shape) == 2 and touch.term.index.shape[1] == 1:
        raise _IrregularError(f"{touch.layer} keeps its weight transposed")
    if not bool(torch.isin(found, variables).all()):
        raise _IrregularError(f"only some inputs of {touch.layer} move")
    if found.numel() > len(variables):
        raise _IrregularError(f"{found.numel():,} inputs of {touch.layer} share {len(variables):,} scales")
    return found


def _agreed(columns: Tensor | None, found: Tensor, layer: str) -> Tensor:
    if columns is not None and not torch.equal(columns, found):
        raise _IrregularError(f"{layer} has its inputs in another order")
    return found


def _check_rows(touch: _Touch, variables: Tensor, columns: Tensor, touches: Sequence[_Touch]) -> None:
    """Other tools divide the last outputs of a layer, as many as there are scales."""
    found = _rows(touch)
    if found is None or len(found) != len(columns):
        raise _IrregularError(f"{touch.layer} has its outputs in another order")
    if len(touch.parameter.shape) == 3:  # unfolded into layers of their own
        if not torch.equal(found[torch.isin(found, variables)].view(len(found), -1), columns):
            raise _IrregularError(f"{touch.layer} has its outputs in another order")
        return
    last, others = found[:, -columns.shape[1] :], found[:, : -columns.shape[1]]
    if not torch.equal(last, columns) or bool(torch.isin(others, variables).any()):
        raise _IrregularError(f"they are not the last outputs of {touch.layer}")
    biases = [other for other in touches if not other.parameter.multiplicative and other.layer == touch.layer]
    if others.numel() and biases:
        raise _IrregularError(f"they are the last outputs of {touch.layer}, which has a bias for all")


@torch.no_grad()
def prove(symmetry: Symmetry, mapping: Mapping, example_inputs: Any) -> float:
    """By how much the outputs change when the scales of a mapping move at random, in float64 on a copy of the model.

    >>> change = equinorm.trace(model, x).prove(mapping, x)
    """
    twin = copy.deepcopy(symmetry.model).double()
    bound = symmetry.bind(twin)
    doubled = torch.utils._pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, example_inputs
    )
    log_scales = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    log_scales[mapping.variables] = log_factors(len(mapping.variables), small=False)
    with Exact():
        verifier = Verifier(twin, doubled, vary=True, kept={w.name for w in bound.moving if w.shift})
        before = verifier.run()
        if not all(bool(torch.isfinite(out).all()) for out in before):
            return math.nan
        return relative_change(verifier.run(bound.factors(log_scales), bound.others(log_scales)), before)
