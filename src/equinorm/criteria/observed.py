"""How large the tensors inside a model become, and which scale each of them follows.

Every tensor that an op makes is looked at, in float64, on a copy of the model. Which scale it follows is measured: the
scales are moved by known random amounts, twice, and what an element was multiplied by says which it was. Casts to other
floating dtypes are left out meanwhile, so that factors are known to many digits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..models.exact import Exact
from ..models.inputs import call
from ..symmetry import Symmetry
from .exponentials import NEVER

__all__ = ["Observed", "observe"]

EXPONENTS = (1.0, 2.0, -1.0, 0.5, -2.0, 3.0, 4.0)
READERS = ("convolution", "addmm", "mm", "bmm", "baddbmm", "linear", "scaled_dot_product")
FILL = 1e30
"""Numbers beyond are no activations but what masks are filled with."""
MANY = 1 << 22
"""Scales that differ along more elements than this are not told apart."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What was seen of activations: largest absolute values as logarithms, by the scale that they follow."""

    variables: Tensor  # one row for each scale and exponent that was met
    exponents: Tensor
    log_largest: Tensor
    log_typical: Tensor  # of the root mean square of the tensor in which it is smallest
    where: tuple[str, ...]  # the module in which it was largest
    read: Tensor  # whether a linear op reads them, and log_read how large these are
    log_read: Tensor
    frozen: tuple[tuple[str, float], ...]  # where tensors were made that follow no scale, and how large they are


@torch.no_grad()
def observe(symmetry: Symmetry, inputs: Any, *, stored_only: bool = False) -> Observed:
    """Run the model on inputs, or on each of a list of them, and measure what is inside.

    With `stored_only`, tensors that stay in float32 when the model is in half precision (inside its norms, say) do not
    count.

    >>> seen = observe(symmetry, [batch for batch, _ in loader])
    """
    batches = list(inputs) if isinstance(inputs, list) else [inputs]
    if not batches:
        raise ValueError("inputs is empty: give at least one batch")
    doubled = [pytree.tree_map(_cast(torch.float64), batch) for batch in batches]
    twin = copy.deepcopy(symmetry.model).double()
    seen = _patterns(symmetry.bind(twin), twin, doubled[0])
    skipped = _wide(symmetry.model, batches[0], seen.ops) if stored_only else set()
    tally = _Tally(symmetry.num_scales, seen.patterns, skipped)
    twin = copy.deepcopy(symmetry.model).double()
    for batch in doubled:
        tally.made.clear()
        with _Watch(twin, tally.remember):
            _run(twin, batch)
    return tally.result()


class _Tally:
    """The largest values met so far, by scale and exponent."""

    def __init__(self, n: int, patterns: Sequence[Tensor | None], skipped: set[int]) -> None:
        self.n, self.patterns, self.skipped = n, patterns, skipped
        size = (n + 1) * len(EXPONENTS)
        self.largest, self.read = (torch.full((size,), NEVER, dtype=torch.float64) for _ in range(2))
        self.typical = torch.full((size,), float("inf"), dtype=torch.float64)
        self.place = torch.zeros(size, dtype=torch.int64)
        self.places: dict[str, int] = {}
        self.frozen: dict[str, float] = {}
        self.made: dict[int, tuple[int, Tensor]] = {}

    def remember(self, number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        self.made[id(out)] = number, out
        if number not in self.skipped:
            self._look(number, where, out)
        if any(op.startswith(name) for name in READERS):
            for source in inputs:
                entry = self.made.get(id(source))
                pattern = None if entry is None else self._pattern(entry[0], source)
                if pattern is not None:
                    tops = _largest(source, pattern).log().reshape(-1)
                    self.read.scatter_reduce_(0, pattern.reshape(-1), tops, "amax")

    def _pattern(self, number: int, tensor: Tensor) -> Tensor | None:
        """Which scale and exponent the elements of a tensor follow, if it is known."""
        pattern = self.patterns[number] if number < len(self.patterns) else None
        if pattern is None or pattern.ndim != tensor.ndim:
            return None
        fits = all(a in (1, b) for a, b in zip(pattern.shape, tensor.shape, strict=True))
        return pattern if fits else None

    def _look(self, number: int, where: str, out: Tensor) -> None:
        out = out.masked_fill(~(out.abs() <= FILL), 0.0)
        pattern = self._pattern(number, out)
        if pattern is None:
            self._freeze(where, float(out.abs().amax()))
            return
        index, tops = pattern.reshape(-1), _largest(out, pattern)
        logs, before = tops.log().reshape(-1), self.largest.clone()
        self.largest.scatter_reduce_(0, index, logs, "amax")
        leads = (logs == self.largest[index]) & (logs > before[index])
        self.place[index[leads]] = self.places.setdefault(where, len(self.places))
        axes = [a for a in range(out.ndim) if pattern.shape[a] == 1]
        means = out.square().mean(axes, keepdim=True).sqrt() if axes else out.abs()
        some = (means > 0).reshape(-1)
        self.typical.scatter_reduce_(0, index[some], means.log().reshape(-1)[some], "amin")
        still = pattern // len(EXPONENTS) == self.n
        if bool(still.any()):
            self._freeze(where, float(tops[still].amax()))

    def _freeze(self, where: str, top: float) -> None:
        self.frozen[where] = max(self.frozen.get(where, 0.0), top)

    def result(self) -> Observed:
        met = (self.largest > NEVER).nonzero().view(-1)
        met = met[met // len(EXPONENTS) < self.n]
        names = list(self.places)
        return Observed(
            variables=met // len(EXPONENTS),
            exponents=torch.tensor(EXPONENTS, dtype=torch.float64)[met % len(EXPONENTS)],
            log_largest=self.largest[met],
            log_typical=self.typical[met],
            where=tuple(names[i] for i in self.place[met].tolist()),
            read=self.read[met] > NEVER,
            log_read=self.read[met],
            frozen=tuple(sorted(self.frozen.items(), key=lambda item: -item[1])),
        )


def _largest(tensor: Tensor, pattern: Tensor) -> Tensor:
    """The largest absolute values among elements that follow the same scale, in the shape of a pattern."""
    axes = [a for a in range(tensor.ndim) if pattern.shape[a] == 1]
    return tensor.abs().amax(axes, keepdim=True) if axes else tensor.abs()


def _cast(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _Watch(Exact):
    """Calls back for every tensor of real numbers that an op makes of the inputs, with the module it is made in.

    With `exact`, whatever would be cast to a floating dtype becomes float64, and casts are no ops.
    """

    def __init__(
        self, model: nn.Module, back: Callable[[int, str, str, list[Tensor], Tensor], None], exact: bool = True
    ) -> None:
        super().__init__()
        self.model, self.back, self.exact, self.number, self.path = model, back, exact, 0, [""]
        self._handles: list[Any] = []
        # what does not depend on the inputs: parameters, views of them, masks
        self._static = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def __enter__(self) -> _Watch:
        for name, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda m, a, name=name: self.path.append(name)),
                module.register_forward_hook(lambda m, a, out: self.path.pop() and None, always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = super().__torch_dispatch__ if self.exact else _as_it_is
        result = run(func, types, args, kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if all(id(leaf) in self._static for leaf in inputs):
            self._static.update({id(leaf): leaf for leaf in made})
            return result
        for leaf in made:
            self._static.pop(id(leaf), None)  # it was written to
        op = str(func).removeprefix("aten.").split(".")[0]
        if op == "_to_copy" and self.exact:
            return result
        if "norm" in op or "attention" in op:
            made = made[:1]  # the rest is statistics, for the way back
        for leaf in made:
            if leaf.is_floating_point() and leaf.numel():
                with _outside():
                    self.back(self.number, self.path[-1] or op, op, inputs, leaf)
                self.number += op != "_to_copy"
        return result


def _as_it_is(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **(kwargs or {}))


@contextmanager
def _outside() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


# -- which tensors are stored in half precision ------------------------------------------------------------------------


def _wide(model: nn.Module, batch: Any, ops: Sequence[tuple[str, torch.Size]]) -> set[int]:
    """Of the ops of an exact run, those whose results stay in float32 when the model is in half precision.

    The model is run once in bfloat16, whose rules are those of float16 and which does not overflow. If it cannot be,
    all tensors count.
    """
    found: list[tuple[str, torch.Size]] = []
    wide: set[int] = set()
    made: dict[int, tuple[int, Tensor]] = {}

    def note(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        if op == "_to_copy":
            source = made.get(id(inputs[0]))
            if source is not None and out.dtype.itemsize == 2:
                wide.discard(source[0])  # it is stored after all
            elif source is not None:
                made[id(out)] = source[0], out
            return
        found.append((op, out.shape))
        made[id(out)] = number, out
        if out.dtype.itemsize > 2:
            wide.add(number)

    try:
        twin = copy.deepcopy(model).to(torch.bfloat16)
        with _Watch(twin, note, exact=False):
            _run(twin, pytree.tree_map(_cast(torch.bfloat16), batch))
    except Exception:  # it is the user's model that runs
        return set()
    if found == list(ops):
        return wide
    blocks = SequenceMatcher(None, found, list(ops), autojunk=False).get_matching_blocks()
    return {b.b + i for b in blocks for i in range(b.size) if b.a + i in wide}


# -- which scale a tensor follows --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Patterns:
    """For each tensor that is made, by which op, and which scale and exponent its elements follow.

    A pattern holds variable · number of exponents + place of the exponent.
    """

    ops: list[tuple[str, torch.Size]]
    patterns: list[Tensor | None]


def _patterns(symmetry: Symmetry, twin: nn.Module, batch: Any) -> _Patterns:
    n = symmetry.num_scales
    generator = torch.Generator().manual_seed(0)
    before: list[Tensor] = []
    ops: list[tuple[str, torch.Size]] = []

    def keep(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor) -> None:
        before.append(out.clone())
        ops.append((op, out.shape))

    with _Watch(twin, keep):
        _run(twin, batch)
    moved = torch.zeros(n, dtype=torch.float64)
    ratios: list[list[Tensor | None]] = []
    draws = []
    for _ in range(2):
        # a variance that grows stays positive
        drawn = torch.rand(n, generator=generator, dtype=torch.float64)
        symmetry.rescale_(drawn - moved)
        moved = drawn
        draws.append(drawn)
        found: list[Tensor | None] = []

        def compare(number: int, where: str, op: str, inputs: list[Tensor], out: Tensor, into: Any = found) -> None:
            known = number < len(before) and before[number].shape == out.shape
            into.append(_collapsed(out, before[number]) if known else None)

        with _Watch(twin, compare):
            _run(twin, batch)
        ratios.append(found)
    return _Patterns(ops, [_looked_up(a, b, draws) for a, b in zip(*ratios, strict=False)])


def _run(model: nn.Module, batch: Any) -> None:
    """Always with the same random numbers, for what drops some of its units."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        call(model, batch)


def _collapsed(after: Tensor, before: Tensor) -> Tensor | None:
    """The logarithms of factors without the axes along which they are the same; what is unknown is nan."""
    size = before.abs()
    size = size.masked_fill(~(size <= FILL), 0.0)
    lost = size <= 1e-8 * size.amax()  # what cancelled has no digits left
    ratio = (after / before).abs().log()
    ratio = ratio.masked_fill(lost | ~torch.isfinite(ratio), float("nan"))
    for axis in range(ratio.ndim):
        low = ratio.nan_to_num(float("inf")).amin(axis, keepdim=True)
        high = ratio.nan_to_num(float("-inf")).amax(axis, keepdim=True)
        if bool(((high - low) < 1e-6).all()):  # also where nothing is known
            ratio = torch.where(high >= low, low, float("nan"))
    return ratio if ratio.numel() <= MANY else None


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
