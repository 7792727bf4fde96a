"""Weights that suffer least from being rounded to a few bits.

A weight w' = λ w that is rounded to integers times Δ comes back as w' + e; in the network as it was this is an error
δ = e / λ of w. To first order the outputs then change by Σ g δ, g being their derivatives. Errors of different channels
are as good as independent, but those of one channel add up where its inputs have a mean, as they have behind a ReLU. So
of every channel (a row, the first axis) the moments of g are kept as a diagonal and one direction u, and rounding costs

    Σ over rows of  Σ_e (h_e - u_e²) δ_e² + (Σ_e u_e δ_e)²,        h = Σ g²,   u uᵀ the largest part of Σ g gᵀ,

    e = Δ round(λ w / Δ) - λ w,        Δ = max |λ w| / (2^(bits - 1) - 1),

where the maximum is over the tensor, the channel or the group that shares a step. (With the full range of integers it
is 2^(bits - 1) - 1/2 steps, and what lies further out than the largest integer becomes that.) Between two roundings the
slope says little, so what is descended first is the error that is to be expected, Σ Δ² / 12 · Σ h / λ²; it is convex.
Then single scales are moved a little at random, because which way weights are rounded is a lottery that can be drawn
again.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..models.inputs import as_arguments, call
from ..solver import Solution
from ..symmetry import ScaledParameter, Symmetry, Term
from .criterion import Counts, Criterion, Problem
from .norm import Norm

__all__ = ["Quantization", "rounded", "sensitivities"]

STARTS = (2.0, 8.0)
"""The least norms from which the descent may start."""
RATE = 0.05
"""The largest step of a log-scale in the descent."""
AGAIN = 10
"""Steps of the descent after which powers are computed anew."""
SHARPEST = 64.0
"""The largest order of a norm that stands for a maximum in the descent; it begins with the square root of it."""


class Quantization(Criterion):
    """Least error of the weights' round trip through integers, weighed by what it does to the outputs.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Quantization(bits=8, per="tensor"))

    What counts are weights with at least two axes; biases and gains are not rounded. Steps are symmetric about 0, and
    the largest weight that shares a step is the largest integer. The value is measured, with weights that are really
    rounded, and never above where it started: without `inputs` it is the weighed error relative to the weighed size of
    the weights, with them the squared change of the outputs relative to the outputs.

    Args:
        bits: of a signed integer, 2 to 16.
        per: what shares a step: "tensor", "channel" (the first axis) or so many consecutive weights of a channel.
        full_range: the most negative integer is used too, and the largest weight is half a step beyond the largest
            integer (torchao, PT2E); else integers are as many below 0 as above (brevitas).
        inputs: calibration inputs, or a list of batches. Without any, random inputs like the example say how much each
            weight matters: normal noise in the place of real numbers, everything else as in the example.
        probes: random combinations of the outputs whose derivatives are taken for each batch.
        steps: of the descent.
        draws: how often every scale is then moved at random.
        sensitivities: what `equinorm.criteria.quantization.sensitivities` gave for this model, so that they need not be
            measured again for another format.
    """

    tol = 0.05
    unit = "error"

    def __init__(
        self,
        bits: int = 8,
        per: str | int = "tensor",
        inputs: Any = None,
        *,
        full_range: bool = False,
        probes: int = 4,
        steps: int = 100,
        draws: int = 50,
        sensitivities: Mapping[str, Sensitivity] | None = None,
    ) -> None:
        if not isinstance(bits, int) or not 2 <= bits <= 16:
            raise ValueError(f"bits must be an integer from 2 to 16, got {bits!r}")
        _check_per(per)
        for name, number, least in (("probes", probes, 1), ("steps", steps, 0), ("draws", draws, 0)):
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
        if isinstance(inputs, list) and not inputs:
            raise ValueError("inputs is empty: give at least one batch")
        self.bits, self.per, self.full_range, self.inputs = bits, per, bool(full_range), inputs
        self.probes, self.steps, self.draws, self.sensitivities = probes, steps, draws, sensitivities

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> RoundingProblem:
        if self.inputs is None and example_inputs is None:
            raise TypeError("Quantization runs the model: pass example_inputs too, or Quantization(inputs=...)")
        if symmetry.processes.count > 1:
            raise TypeError("Quantization needs whole weights: balance the model before it is sharded")
        if self.inputs is None:
            return RoundingProblem(symmetry, counted, self, noise_like(example_inputs, 4 * self.probes))
        batches = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return OutputProblem(symmetry, counted, self, batches)


# -- the round trip ----------------------------------------------------------------------------------------------------


def _check_per(per: object) -> None:
    if per in ("tensor", "channel") or (isinstance(per, int) and not isinstance(per, bool) and per > 0):
        return
    raise ValueError(f'per must be "tensor", "channel" or a group size, got {per!r}')


def rounded(weight: Tensor, bits: int, per: str | int = "tensor", full_range: bool = False) -> Tensor:
    """A weight after its round trip through symmetric signed integers, the largest element being the largest integer.

    With `full_range` the integers are -2^(bits - 1) to 2^(bits - 1) - 1 and the largest element is half a step outside.
    The derivative is that of integers · step, with the integers held.

    >>> rounded(conv.weight, bits=8, per="channel")
    """
    step = _steps(weight, bits, per, full_range)
    return _integers(weight.detach(), step.detach(), bits, full_range) * step


def _largest(bits: int, full_range: bool) -> float:
    """What the largest weight is, in steps."""
    return 2 ** (bits - 1) - (0.5 if full_range else 1)


def _integers(weight: Tensor, step: Tensor, bits: int, full_range: bool) -> Tensor:
    float_info = torch.finfo(weight.dtype)
    found = weight / step.clamp_min(float_info.tiny)
    if not full_range:
        return found.round()
    # the largest weight lies in the middle of two integers, whatever its last digit says: away from 0
    return (found * (1 + 8 * float_info.eps)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _steps(weight: Tensor, bits: int, per: str | int, full_range: bool = False) -> Tensor:
    """The step of each element."""
    groups = _groups(weight, per)
    step = groups.abs().amax(-1, keepdim=True) / _largest(bits, full_range)
    return _ungrouped(step.expand_as(groups), weight.shape)


def _within(per: str | int) -> str | int:
    """What shares a step inside of a channel."""
    return "channel" if per == "tensor" else per


def _groups(weight: Tensor, per: str | int, filled: float = 0.0) -> Tensor:
    """Elements that share a step along the last axis; a channel's last group may be short and is filled."""
    if per == "tensor" or weight.ndim < 2:
        return weight.reshape(1, -1)
    channels = weight.reshape(weight.shape[0], -1)
    if isinstance(per, int):
        channels = nn.functional.pad(channels, (0, -channels.shape[1] % per), value=filled)
        return channels.reshape(len(channels), -1, per)
    return channels


def _ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    if groups.ndim == 3:
        return groups.reshape(shape[0], -1)[:, : shape[1:].numel()].reshape(shape)
    return groups.reshape(shape)


# -- what an error does to the outputs ---------------------------------------------------------------------------------


class Sensitivity(NamedTuple):
    """What errors of one parameter do to the outputs, up to a factor that all parameters share."""

    square: Tensor  # h: of each element by itself
    direction: Tensor  # u: along which errors of one row (the first axis) add up

    def cost(self, error: Tensor) -> Tensor:
        """Of an error, for each row."""
        square, direction = (x.to(error.dtype) for x in self)
        alone = ((square - direction.square()) * error.square()).reshape(len(error), -1).sum(1)
        return alone + (direction * error).reshape(len(error), -1).sum(1).square()

    def updated(self, gradient: Tensor) -> Sensitivity:
        """With one more sample. Of what is known and the sample, the direction takes the larger principal axis."""
        rows = gradient.reshape(len(gradient), -1) if gradient.ndim else gradient.reshape(1, 1)
        known = self.direction.reshape(rows.shape)
        angle = 0.5 * torch.atan2(2 * (known * rows).sum(1), known.square().sum(1) - rows.square().sum(1))
        direction = angle.cos()[:, None] * known + angle.sin()[:, None] * rows
        return Sensitivity(self.square + gradient.square(), direction.reshape(gradient.shape))


def sensitivities(model: nn.Module, batches: Iterable[Any], probes: int = 4) -> dict[str, Sensitivity]:
    """What errors of each parameter do to the outputs, in float32 or what is wider.

    The squares are estimated without bias from random signs, E (∂ Σ ± output / ∂ w)² being Σ (∂ output / ∂ w)². Small
    batches say more: each has signs of its own.

    >>> h = sensitivities(model, x.split(4))["conv1.weight"].square
    """
    twin = copy.deepcopy(model).eval().requires_grad_(True)
    names = {name: w for name, w in twin.named_parameters() if w.is_floating_point()}
    zeros = {n: torch.zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32)) for n, w in names.items()}
    found = {name: Sensitivity(zero, zero) for name, zero in zeros.items()}
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        with torch.enable_grad():
            outputs = [x for x in _real(call(twin, batch)) if x.requires_grad]
        if not outputs:
            raise ValueError("no output of the model depends on its weights in a differentiable way")
        for left in reversed(range(probes)):
            signs = [torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for x in outputs]
            grads = torch.autograd.grad(outputs, list(names.values()), signs, retain_graph=left > 0, allow_unused=True)
            for name, g in zip(names, grads, strict=True):
                if g is not None:
                    g = g.detach().cpu().to(found[name].square.dtype).nan_to_num(0.0, 0.0, 0.0)
                    found[name] = found[name].updated(g)
    return found


def noise_like(inputs: Any, number: int) -> list[Any]:
    """Inputs of the same shapes with normal noise in the place of real numbers; with everything else as it is."""
    generator = torch.Generator().manual_seed(0)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim < 2:
            return leaf
        if not bool(torch.isfinite(leaf).all()):  # a mask of zeros and -inf
            return leaf
        return torch.randn(leaf.shape, generator=generator).to(leaf)

    return [pytree.tree_map(drawn, inputs) for _ in range(number)]


def _real(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]


def _is_late(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


# -- the problem -------------------------------------------------------------------------------------------------------


class ExpectedError:
    """What rounding one weight costs, if every rounding error is drawn evenly from half a step to either side:

        Σ over steps of Δ² / 12 · Σ_e h_e / λ_e²,        Δ ~ (Σ_e |λ_e w_e|^p)^(1/p) / (2^(bits - 1) - 1),

    sums over what shares a step. The maximum is a norm of order p, so that the function is smooth; it is convex in the
    log-scales. It is computed relative to a point that is entered, so that powers neither overflow nor vanish.
    """

    def __init__(self, weight: Tensor, square: Tensor, w: ScaledParameter, criterion: Quantization) -> None:
        self.rows, self.per, self.levels = len(weight), criterion.per, _largest(criterion.bits, criterion.full_range)
        self.w, self.shape = w, weight.shape
        self.log, self.square = weight.abs().log(), square.to(weight)
        terms = [(term, sign) for term, sign in ((w.out, 1), (w.into, -1)) if term is not None]
        self.by_row = [x for x in terms if x[0].index.numel() == x[0].index.shape[0] == self.rows]
        self.other = [x for x in terms if x not in self.by_row]

    def enter(self, s: Tensor, p: float) -> None:
        log_factor = self.w.factor(torch.cat([s, s.new_zeros(1)])).log().to(self.log)
        log = _groups(self.log + log_factor, self.per, -math.inf)
        self.top = log.amax(-1, keepdim=True).clamp_min(-1e30)
        self.p = p
        self.powers = (p * (log - self.top)).exp()
        self.costs = _groups(self.square * (-2 * log_factor).exp(), self.per)

    def value(self, moved: Tensor) -> Tensor:
        """At log-scales relative to the point that was entered."""
        padded = torch.cat([moved, moved.new_zeros(1)])
        row, other = moved.new_zeros(self.rows), moved.new_zeros(1)
        for term, sign in self.by_row:
            row = row + sign * term.log_scale(padded).reshape(-1)
        for term, sign in self.other:
            other = other + sign * term.log_scale(padded)
        log_max = self._total(self.powers, self.p, row, other).clamp_min(1e-38).log() / self.p + self.top.squeeze(-1)
        return ((2 * log_max).exp() * self._total(self.costs, -2.0, row, other)).sum() / (12 * self.levels**2)

    def _total(self, values: Tensor, power: float, row: Tensor, other: Tensor) -> Tensor:
        """The sums over what shares a step of values times the power of their factors."""
        rows, factor = (power * row).exp(), (power * other).exp()
        if factor.numel() > 1:
            alike = factor.ndim == len(self.shape) and factor.shape[0] == 1
            columns = _groups(factor.expand(1 if alike else self.rows, *self.shape[1:]), _within(self.per))
            values = values.reshape(self.rows, *columns.shape[1:])
            sums = torch.einsum("r...k,...k->r...", values, columns[0]) if alike else (values * columns).sum(-1)
        else:
            rows = rows * factor.reshape(())
            sums = values.reshape(self.rows, -1).sum(1) if self.per == "tensor" else values.sum(-1)
        if self.per == "tensor":
            return (rows * sums.reshape(self.rows)).sum().reshape(1)
        return sums * rows.reshape(-1, *[1] * (sums.ndim - 1))


class RoundingProblem(Problem):
    """The error of rounding all weights as a function of the log-scales, weighed by sensitivities."""

    def __init__(self, symmetry: Symmetry, counted: Counts, criterion: Quantization, batches: list[Any]) -> None:
        self.symmetry, self.counted, self.criterion = symmetry, counted, criterion
        self.fixed = torch.zeros(symmetry.num_scales + 1, dtype=torch.bool)
        self.fixed[-1] = True
        weights = [w for w in symmetry.parameters if counted(w) and len(w.shape) > 1 and not w.shift]
        self.tensors = {w.name: symmetry.values(w.name).detach().clone().cpu() for w in weights}
        self.weights = []
        for w in weights:
            if bool(torch.isfinite(self.tensors[w.name]).all()):
                self.weights.append(w)
            else:  # it has no step, so nothing that it follows moves
                self._fix(w)
        known = criterion.sensitivities
        self.h = sensitivities(symmetry.model, batches, criterion.probes) if known is None else known
        self.size = 1.0
        self.size = sum(float(self.h[w.name].cost(self._weight(w)).sum()) for w in self.weights) or 1.0

    def _fix(self, w: ScaledParameter) -> None:
        for term in (w.out, w.into):
            if term is not None:
                self.fixed[term.index.reshape(-1)] = True

    def _weight(self, w: ScaledParameter, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.tensors[w.name].to(dtype)

    def restored(self, w: ScaledParameter, s: Tensor) -> Tensor:
        """A weight after the move, the round trip and the way back, in the dtype of the log-scales."""
        factor = w.factor(torch.cat([s, s.new_zeros(1)]))
        bits, per, full_range = self.criterion.bits, self.criterion.per, self.criterion.full_range
        return rounded(self._weight(w, s.dtype) * factor, bits, per, full_range) / factor

    def error(self, w: ScaledParameter, s: Tensor) -> Tensor:
        """A weight's part of the error, relative to the cost of losing all weights."""
        return self.h[w.name].cost(self.restored(w, s) - self._weight(w, s.dtype)).sum() / self.size

    def errors(self, s: Tensor) -> Iterable[Tensor]:
        return (self.error(w, s) for w in self.weights)

    @torch.no_grad()
    def weighed(self, s: Tensor) -> float:
        return float(sum(self.errors(s.double())))

    def value(self, s: Tensor) -> float:
        return self.weighed(s)

    def solve(self, tol: float, deadline: float | None) -> Solution:
        """From the best of the start, two least norms and the least expected error, on at random."""
        found = self._descended(deadline)
        still = torch.zeros(self.symmetry.num_scales, dtype=torch.float64)
        starts = [still, *self._norms(deadline), found.log_scales]
        start = min(starts, key=self.weighed)
        best = min((still, start, self._drawn(start, deadline)), key=self.value)
        return found._replace(log_scales=best, converged=found.imbalance <= tol)

    def _norms(self, deadline: float | None) -> Iterable[Tensor]:
        """The optima of least norms, roughly."""
        for p in STARTS:
            norm = Norm(p).problem(self.symmetry, self.counted)
            norm.fixed |= self.fixed.to(norm.fixed.device)
            norm.hold()
            found = norm.solve(1e-2, deadline).log_scales.cpu()
            if bool(torch.isfinite(found).all()):
                yield found

    def _descended(self, deadline: float | None) -> Solution:
        """Down the slope of the expected error with Adam; and how much the last quarter of the steps brought."""
        free, steps = ~self.fixed[:-1], self.criterion.steps
        s = torch.zeros(self.symmetry.num_scales, dtype=torch.float64)
        if not bool(free.any()) or not steps:
            return Solution(s, None, 0.0, 0, True)
        terms = [
            ExpectedError(self._weight(w, torch.float32), self.h[w.name].square, w, self.criterion)
            for w in self.weights
        ]
        moved = torch.zeros(len(s), requires_grad=True)
        optimizer = torch.optim.Adam([moved], lr=RATE, betas=(0.9, 0.97))
        before, gain, done = math.inf, 1.0, 0
        quarter = max(steps // 4, 1)
        while done < steps and not _is_late(deadline):
            if done % AGAIN == 0:
                s, p = s + moved.detach(), SHARPEST ** ((1 + done / steps) / 2)
                with torch.no_grad():
                    moved.zero_()
                for term in terms:
                    term.enter(s, p)
            optimizer.param_groups[0]["lr"] = RATE * (1 - done / steps)
            slope, here = torch.zeros_like(moved), 0.0
            with torch.enable_grad():
                for term in terms:
                    part = term.value(moved)
                    if part.requires_grad:
                        slope += torch.autograd.grad(part, moved)[0]
                    here += float(part.detach())
            moved.grad = torch.where(free, slope / max(here, 1e-300), 0.0).nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            done += 1
            if done % quarter == 0:
                before, gain = here, max(0.0, 1 - here / before) if before else 0.0
        return Solution(s + moved.detach(), None, gain, done, False)

    # -- drawing again -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _drawn(self, s: Tensor, deadline: float | None) -> Tensor:
        """Every scale a little further, where that lowers the error. Scales that one layer opens are tried together."""
        births = self.symmetry.birth
        blocks = [
            (birth == births, [move for w in self.weights for move in self._moves(w, birth == births)])
            for birth in births[~self.fixed[:-1]].unique()
        ]
        generator = torch.Generator().manual_seed(0)
        spread = 2.0 ** (1 - self.criterion.bits)  # by which the largest weights change by about half a step
        for _ in range(self.criterion.draws):
            for block, moves in blocks:
                if _is_late(deadline):
                    return s
                noise = spread * torch.randn(len(s), generator=generator, dtype=s.dtype)
                s = self._better(s, torch.where(block & ~self.fixed[:-1], noise, 0.0), moves)
        return s

    def _moves(self, w: ScaledParameter, block: Tensor) -> list[tuple[ScaledParameter, Term, bool]]:
        """How a weight follows the scales of a block: the term, and whether it moves whole rows.

        Where rows have steps of their own, moving whole rows changes nothing.
        """
        padded = torch.cat([block, block.new_zeros(1)])
        found = []
        for term in (w.out, w.into):
            if term is not None and bool(padded[term.index].any()):
                whole = term.index.numel() == term.index.shape[0]
                if not whole or self.criterion.per == "tensor":
                    found.append((w, term, whole))
        return found

    def _better(self, s: Tensor, noise: Tensor, moves: list[tuple[ScaledParameter, Term, bool]]) -> Tensor:
        """s with those of the moves that lower the error together; s itself where they do not."""
        n = len(s)
        gains, refused = torch.zeros(n + 1, dtype=s.dtype), self.fixed.clone()
        for w, term, whole in moves:
            change, sets_step = self._change(w, s, s + noise, whole)
            gains.index_add_(0, term.index.expand_as(change).reshape(-1), change.reshape(-1))
            refused[term.index.expand_as(sets_step)[sets_step]] = True
        good = (gains < 0) & ~refused
        touched = {w.name: w for w, _, _ in moves}.values()
        before = sum(float(self.error(w, s)) for w in touched)
        for _ in range(2):
            trial = torch.where(good[:-1], s + noise, s)
            if sum(float(self.error(w, trial)) for w in touched) < before:
                return trial
            if not bool(good.any()):
                break
            good = good & (gains <= gains[good].median())  # what promises most, if all together is too much
        return s

    def _change(self, w: ScaledParameter, s: Tensor, moved: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """The change of the error by each row or element, steps held; and the elements that would change a step."""
        weight, (square, u) = self._weight(w), (x.double() for x in self.h[w.name])
        factors = [w.factor(torch.cat([x, x.new_zeros(1)])) for x in (s, moved)]
        bits, full_range = self.criterion.bits, self.criterion.full_range
        step = _steps(weight * factors[0], bits, self.criterion.per, full_range)
        old, new = (_integers(weight * x, step, bits, full_range) * step / x - weight for x in factors)
        limit = step * _largest(bits, full_range) * (1 - 1e-9)
        sets_step = ((weight * factors[0]).abs() >= limit) | ((weight * factors[1]).abs() >= limit)
        axes, along = list(range(1, weight.ndim)), u * (new - old)
        alone = (square - u.square()) * (new.square() - old.square())
        before = (u * old).sum(axes, keepdim=True)
        if whole:
            alone, along = alone.sum(axes, keepdim=True), along.sum(axes, keepdim=True)
        return alone + along * (2 * before + along), sets_step


class OutputProblem(RoundingProblem):
    """The same, and of all points met the one is taken where the outputs for the calibration inputs change least."""

    def __init__(self, symmetry: Symmetry, counted: Counts, criterion: Quantization, batches: list[Any]) -> None:
        super().__init__(symmetry, counted, criterion, batches)
        self.batches, self.known = batches, dict[bytes, float]()
        self.twin = copy.deepcopy(symmetry.model).eval().requires_grad_(False)
        with torch.no_grad():
            self.references = [_real(call(self.twin, batch)) for batch in batches]
        self.output_size = sum(float(x.double().square().sum()) for xs in self.references for x in xs) or 1.0

    @torch.no_grad()
    def value(self, s: Tensor) -> float:
        """The squared change of the outputs, relative to the outputs, with weights that are really rounded."""
        key = s.double().numpy().tobytes()
        if key not in self.known:
            self.known[key] = self._measured(s)
        return self.known[key]

    def _measured(self, s: Tensor) -> float:
        named = dict(self.twin.named_parameters())
        weights = {w.name: self.restored(w, s.double()).to(named[w.name]) for w in self.weights}
        change = 0.0
        for batch, references in zip(self.batches, self.references, strict=True):
            outputs = _real(functional_call(self.twin, weights, *as_arguments(batch)))
            change += sum(float((x - y).double().square().sum()) for x, y in zip(outputs, references, strict=True))
        return change / self.output_size
