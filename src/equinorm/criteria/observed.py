"""How large the tensors inside a model become, and which scale each of them follows.

Every tensor that an op makes is looked at, in float64, on a copy of the model. Which scale it follows is measured: the
scales are moved by known random amounts, twice, and what an element was multiplied by says which it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.inputs import as_arguments, call
from ..symmetry import Symmetry
from .exponentials import NEVER

__all__ = ["Observed", "observe"]

EXPONENTS = (1.0, 2.0, -1.0, 0.5, -2.0, 3.0, 4.0)
READERS = ("convolution", "addmm", "mm", "bmm", "baddbmm", "linear", "scaled_dot_product")


@dataclass(frozen=True, eq=False)
class Observed:
    """What was seen of activations: largest absolute values as logarithms, by the scale that they follow."""

    variables: Tensor  # one row for each scale and exponent that was met
    exponents: Tensor
    log_largest: Tensor
    log_typical: Tensor  # of the root mean square of the tensor in which it is smallest
    read: Tensor  # whether a linear op reads them, and log_read how large these are
    log_read: Tensor
    frozen: tuple[tuple[str, float], ...]  # where tensors were made that follow no scale, and how large they are


@torch.no_grad()
def observe(symmetry: Symmetry, inputs: Any) -> Observed:
    """Run the model on inputs, or on each of a list of them, and measure what is inside.

    >>> seen = observe(symmetry, [batch for batch, _ in loader])
    """
    batches = list(inputs) if isinstance(inputs, list) else [inputs]
    if not batches:
        raise ValueError("inputs is empty: give at least one batch")
    batches = [pytree.tree_map(_doubled, batch) for batch in batches]
    twin = copy.deepcopy(symmetry.model).double()
    patterns = _patterns(symmetry.bind(twin), twin, batches[0])
    twin = copy.deepcopy(symmetry.model).double()
    n = symmetry.num_scales
    size = (n + 1) * len(EXPONENTS)
    largest, read, typical = (torch.full((size,), x, dtype=torch.float64) for x in (NEVER, NEVER, float("inf")))
    frozen: dict[str, float] = {}

    def look(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        if number >= len(patterns):
            return
        place = patterns[number]
        if place is None or place.ndim != out.ndim:
            return
        axes = [a for a in range(out.ndim) if place.shape[a] == 1]
        if any(place.shape[a] not in (1, out.shape[a]) for a in range(out.ndim)):
            return
        tops = out.abs().amax(axes, keepdim=True) if axes else out.abs()
        means = out.square().mean(axes, keepdim=True).sqrt() if axes else out.abs()
        index = place.reshape(-1)
        largest.scatter_reduce_(0, index, tops.log().reshape(-1), "amax")
        some = (means > 0).reshape(-1)
        typical.scatter_reduce_(0, index[some], means.log().reshape(-1)[some], "amin")
        if bool((place // len(EXPONENTS) == n).any()):
            top = float(tops[place // len(EXPONENTS) == n].amax())
            frozen[where] = max(frozen.get(where, 0.0), top)

    readers: dict[int, list[int]] = {}

    def remember(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        look(number, where, op, inputs, out)
        made[id(out)] = (number, out)
        if any(op.startswith(name) for name in READERS):
            for source in inputs:
                entry = made.get(id(source))
                if entry is not None and entry[0] < len(patterns) and patterns[entry[0]] is not None:
                    place = patterns[entry[0]]
                    assert place is not None
                    axes = [a for a in range(source.ndim) if place.shape[a] == 1]
                    if place.ndim != source.ndim:
                        continue
                    tops = source.abs().amax(axes, keepdim=True) if axes else source.abs()
                    if tops.shape == place.shape:
                        read.scatter_reduce_(0, place.reshape(-1), tops.log().reshape(-1), "amax")

    for batch in batches:
        made: dict[int, tuple[int, Tensor]] = {}
        with _Watch(twin, remember):
            call(twin, batch)
    del readers
    met = (largest > NEVER).nonzero().view(-1)
    met = met[met // len(EXPONENTS) < n]
    return Observed(
        variables=met // len(EXPONENTS),
        exponents=torch.tensor(EXPONENTS, dtype=torch.float64)[met % len(EXPONENTS)],
        log_largest=largest[met],
        log_typical=typical[met],
        read=read[met] > NEVER,
        log_read=read[met],
        frozen=tuple(sorted(frozen.items(), key=lambda item: -item[1])),
    )


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _Watch(TorchDispatchMode):
    """Calls back for every tensor of real numbers that an op makes, with the module it is made in."""

    def __init__(self, model: nn.Module, back: Callable[[int, str, str, list[Tensor], Tensor], None]) -> None:
        super().__init__()
        self.model, self.back, self.number, self.path = model, back, 0, [""]
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda m, a, name=name: self.path.append(name)),
                module.register_forward_hook(lambda m, a, out: self.path.pop() and None),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        op = str(func).removeprefix("aten.").split(".")[0]
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64 and leaf.numel():
                with _outside():
                    self.back(self.number, self.path[-1] or op, op, inputs, leaf)
                self.number += 1
        return result


@contextmanager
def _outside() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _patterns(symmetry: Symmetry, twin: nn.Module, batch: Any) -> list[Tensor | None]:
    """For each tensor that is made, which scale and exponent every element follows: variable · exponents + exponent."""
    one = _single(batch)
    n = symmetry.num_scales
    generator = torch.Generator().manual_seed(0)
    before: list[Tensor] = []

    def keep(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        before.append(out.clone())

    with _Watch(twin, keep):
        call(twin, one)
    moved = torch.zeros(n, dtype=torch.float64)
    ratios: list[list[Tensor | None]] = []
    draws = []
    for _ in range(2):
        drawn = torch.rand(n, generator=generator, dtype=torch.float64) - 0.5
        symmetry.rescale_(drawn - moved)
        moved = drawn
        draws.append(drawn)
        found: list[Tensor | None] = []

        def compare(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor, into: Any = found) -> None:
            known = number < len(before) and before[number].shape == out.shape
            into.append(_collapsed((out / before[number]).abs().log()) if known else None)

        with _Watch(twin, compare):
            call(twin, one)
        ratios.append(found)
    return [_looked_up(a, b, draws) for a, b in zip(*ratios, strict=False)]


def _single(batch: Any) -> Any:
    args, kwargs = as_arguments(batch)
    return dict(kwargs) if kwargs else tuple(args)


def _collapsed(ratio: Tensor) -> Tensor | None:
    """The logarithms of factors without the axes along which they are the same; what is unknown is nan."""
    ratio = ratio.masked_fill(~torch.isfinite(ratio), float("nan"))
    for axis in range(ratio.ndim):
        low = ratio.nan_to_num(float("inf")).amin(axis, keepdim=True)
        high = ratio.nan_to_num(float("-inf")).amax(axis, keepdim=True)
        if bool(((high - low) < 1e-6).all()):  # also where nothing is known
            ratio = torch.where(high >= low, low, float("nan"))
    return ratio if ratio.numel() <= 1 << 22 else None


def _looked_up(a: Tensor | None, b: Tensor | None, draws: list[Tensor]) -> Tensor | None:
    if a is None or b is None:
        return None
    if a.shape != b.shape:
        return None
    many = len(EXPONENTS)
    powers = torch.tensor(EXPONENTS, dtype=torch.float64)
    n = len(draws[0])
    table = (draws[0][:, None] * powers).reshape(-1)
    order = table.argsort()
    place = torch.full(a.shape, n * many)
    first, second = a.reshape(-1), b.reshape(-1)
    flat = place.view(-1)
    at = torch.searchsorted(table[order], first.nan_to_num(0.0) - 1e-7)
    for step in range(4):  # the few candidates that are as near
        here = (at + step).clamp_max(max(len(order) - 1, 0))
        if not n:
            break
        candidate = order[here]
        fits = (table[candidate] - first).abs() < 1e-7
        other = draws[1][candidate // many] * powers[candidate % many]
        fits &= (other - second).abs() < 1e-7
        flat[fits] = candidate[fits]
    return place
