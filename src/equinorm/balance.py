"""Balancing once: the network of least Lp norm among all that compute the same function (stock2019).

`balance_` takes a symmetry (`symmetry/`), writes the norm as a function of its scales (`criteria/norm.py`), finds the
exact optimum (`solver.py`) and multiplies the weights by it. What counts in the norm, and which scales would leave the
range of a dtype, is decided here for training (`enorm/`) too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from html import escape
from itertools import accumulate
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from .criteria.criterion import Counts, Criterion, Problem
from .criteria.norm import Norm
from .models.flat import refuse_shards
from .models.frozen import Frozen, check_frozen, trains, untrained
from .solver import Solution
from .symmetry import ScaledParameter, Symmetry, trace
from .symmetry.symmetry import in_pieces, not_surely_fitting, out_of_range
from .symmetry.verify import outputs_of, relative_change

__all__ = ["BalanceReport", "Optimum", "balance_", "beyond_range", "counting", "optimum", "symmetry_of"]


@dataclass(frozen=True)
class BalanceReport:
    """What `balance_` did, and the proof that it is the optimum."""

    norm_before: float  # Lp norm of the parameters that count
    norm_after: float
    imbalance: float  # largest |log(incoming / outgoing mass)| over the balanced scales: 0 exactly at the optimum
    iterations: int
    seconds: float  # without tracing
    converged: bool  # imbalance <= tol, and something was balanced
    num_scales: int  # free scales of the model
    held: int  # of these, left where they were: dead units, non-finite weights, what would leave a dtype's range
    held_in: tuple[str, ...]  # parameters that hold them
    trace_seconds: float
    output_change: float | None = None  # by how much outputs moved, relatively; None where that was not measured
    frozen: Frozen = "move"  # whether parameters without gradients were kept or moved
    kept: tuple[str, ...] = ()  # parameters without gradients that stayed as they are
    criterion: Criterion = field(default_factory=Norm)
    value_before: float = 0.0  # of the criterion
    value_after: float = 0.0
    notes: tuple[str, ...] = ()  # what the criterion has to say: what does not fit into half precision, say

    def __repr__(self) -> str:
        return f"<BalanceReport: {self}>"

    def __str__(self) -> str:
        if not self.num_scales:
            why = "print equinorm.trace(...).explain() to see why"
            return f"nothing to rescale: the model has no free scale ({why}){self._kept()}"
        verdict = "at the optimum" if self.converged else "NOT at the optimum"
        where = ", ".join(self.held_in[:3]) + (", ..." if len(self.held_in) > 3 else "")
        if self.held == self.num_scales:
            return (
                f"nothing was balanced: all {self.held:,} scales are held where they were ({where}), because what they "
                f"multiply is zero, feeds nothing or is not finite; the norm is {self.norm_after:.6g}"
            )
        held = f"; {self.held:,} held where they were ({where})" if self.held else ""
        return (
            f"{self._value()}, {verdict} (imbalance {self.imbalance:.1e}) over "
            f"{self.num_scales - self.held:,} scales{held}; {self.iterations} iterations, {self.seconds:.2f} s"
            f"{self._outputs()}{self._kept()}{''.join(f'; {note}' for note in self.notes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "criterion": repr(self.criterion)}

    def _value(self) -> str:
        if isinstance(self.criterion, Norm):
            return f"norm {self.norm_before:.6g} -> {self.norm_after:.6g}"
        return f"{self.criterion}: {self.criterion.unit} {self.value_before:.6g} -> {self.value_after:.6g}"

    def _outputs(self) -> str:
        return "" if self.output_change is None else f"; outputs moved by {self.output_change:.1e}"

    def _kept(self) -> str:
        if not self.kept:
            return ""
        some = ", ".join(self.kept[:3]) + (", ..." if len(self.kept) > 3 else "")
        return f'; {len(self.kept)} frozen parameters stayed ({some}; frozen="move" moves them)'

    def _repr_html_(self) -> str:
        """The same as a small table, for notebooks."""
        by_norm = isinstance(self.criterion, Norm)
        unit = "norm" if by_norm else self.criterion.unit
        before, after = (self.norm_before, self.norm_after) if by_norm else (self.value_before, self.value_after)
        rows = {
            **({} if by_norm else {"criterion": repr(self.criterion)}),
            f"{unit} before": f"{before:.6g}",
            f"{unit} after": f"{after:.6g}",
            "imbalance": f"{self.imbalance:.1e}, {'at' if self.converged else 'NOT at'} the optimum",
            "scales": f"{self.num_scales:,}",
            "held": f"{self.held:,}" + (f" (in {', '.join(self.held_in)})" if self.held else ""),
            "iterations": f"{self.iterations}, {self.seconds:.2f} s",
            "change of the outputs": self._outputs().removeprefix("; outputs moved by ") or "not measured",
            **({"frozen parameters": f"stayed: {', '.join(self.kept)}"} if self.kept else {}),
            **({"notes": "; ".join(self.notes)} if self.notes else {}),
        }
        cells = (f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>" if self.num_scales else f"<p>{escape(str(self))}</p>"


def balance_(
    model: nn.Module,
    example_inputs: Any = None,
    p: float = 2.0,
    c: float = 1.0,
    tol: float | None = None,
    *,
    criterion: Criterion | None = None,
    parameters: Iterable[str] | Callable[[str], bool] | None = None,
    time_limit: float | None = None,
    keep: Iterable[str] = (),
    symmetry: Symmetry | None = None,
    verify: bool | None = None,
    frozen: Frozen | None = None,
) -> BalanceReport:
    """Rescale a model in place to the least Lp norm among all networks that compute the same function.

    Or to the best by another criterion (`equinorm.criteria`). The problem is convex, so the optimum is unique
    (stock2019, theorem 1); the report's `imbalance` proves that it was reached. Dead units and whatever cannot be
    balanced stay where they are, and the report says so. Where nothing can move, a warning says why.

        report = equinorm.balance_(model, torch.randn(1, 3, 224, 224))

    Args:
        p: which norm, any p > 0.
        c: asymmetry (stock2019, section 3.7): c > 1 moves energy towards the output.
        tol: largest `|log(incoming / outgoing mass)|` accepted; by default 1e-8 for a norm, and what a criterion says.
        criterion: what to be best at, one of `equinorm.criteria`, in place of the norm of p and c.
        parameters: names or patterns of the parameters that count in the norm, or of modules, which stand for all that
            is in them; by default all that multiply (weights and gains, not biases).
        time_limit: seconds after which the best point so far is taken, and reported as not converged.
        keep: names or patterns of parameters that must not move, or of modules, which stand for all that is in them.
        symmetry: from `equinorm.trace`, to save tracing again.
        verify: as in `equinorm.trace`; where it was done, the report also says by how much the outputs moved.
        frozen: "keep" leaves parameters with `requires_grad=False` as they are, "move" moves them too. By default they
            are kept where others require gradients (a base under an adapter), and move where none does (a net for
            inference). The report says which it was and what stayed.
    """
    if frozen is not None:
        check_frozen(frozen)
    if criterion is None:
        criterion = Norm(p, c)
    elif not isinstance(criterion, Criterion):
        raise TypeError(f"criterion must be one of equinorm.criteria, or a subclass of Criterion, got {criterion!r}")
    elif (p, c) != (2.0, 1.0):
        raise TypeError("p and c belong to the norm: pass criterion=equinorm.criteria.Norm(p, c), or leave them out")
    if not criterion.on_shards:
        who = f"the criterion {type(criterion).__name__}"
        refuse_shards(model, who, "balance for it before the model is sharded, or take Norm")
    tol = criterion.tol if tol is None else tol
    if not 0 < tol < float("inf"):
        raise ValueError(f"tol must be a positive number, got {tol!r}")
    start = time.monotonic()
    symmetry = symmetry_of(
        model,
        example_inputs,
        symmetry,
        keep=keep,
        verify=verify,
        invariances=symmetry is None and criterion.invariances,
    )
    frozen = frozen or ("keep" if trains(symmetry.model) else "move")
    kept = untrained(symmetry) if frozen == "keep" else ()
    symmetry = symmetry.holding(kept)
    looks = example_inputs is not None and (verify or symmetry.verification.done)
    outputs = outputs_of(symmetry.model, example_inputs) if looks else None
    traced = time.monotonic()
    if not symmetry.num_scales:
        warnings.warn(f"nothing to rescale in {_first_reason(symmetry)}", stacklevel=2)
    counted = counting(symmetry, parameters)
    for w in symmetry.moving:
        if symmetry.tensor(w.name).is_meta:
            raise ValueError(f"parameter {w.name!r} is on the meta device and has no values to balance")
    here = symmetry.local()
    p = criterion.p if isinstance(criterion, Norm) else 2.0
    before = _norm(here, counted, p)
    problem = criterion.problem(here, counted, example_inputs)
    value_before = problem.value(torch.zeros(symmetry.num_scales, dtype=torch.float64))
    solution = optimum(here, problem, tol, None if time_limit is None else traced + time_limit)
    if symmetry.num_scales:
        symmetry.rescale_within_range_(solution.log_scales)
    seconds = time.monotonic() - traced
    after = None if outputs is None else outputs_of(symmetry.model, example_inputs)
    return BalanceReport(
        norm_before=before,
        norm_after=_norm(here, counted, p),
        imbalance=solution.imbalance,
        iterations=solution.iterations,
        seconds=seconds,
        converged=solution.converged and not (symmetry.num_scales and bool(solution.still.all())),
        num_scales=symmetry.num_scales,
        held=int(solution.still.sum()),
        held_in=solution.held_in,
        trace_seconds=traced - start,
        output_change=None if outputs is None or after is None else relative_change(after, outputs),
        frozen=frozen,
        kept=kept,
        criterion=criterion,
        value_before=value_before,
        value_after=problem.value(solution.log_scales),
        notes=problem.notes(solution.log_scales),
    )


@dataclass(frozen=True, eq=False)
class Optimum:
    """Where a criterion is best, and what was left where it is."""

    log_scales: Tensor
    imbalance: float
    iterations: int
    converged: bool
    still: Tensor  # scales that do not move: dead units, non-finite weights, what would leave a dtype's range
    held_in: tuple[str, ...]  # parameters that hold them
    passes: int  # of the solver over the weights


def optimum(symmetry: Symmetry, problem: Problem, tol: float, deadline: float | None = None) -> Optimum:
    """The log-scales where a criterion is best, of the values that `symmetry.values` gives; nothing is written.

    >>> found = optimum(here, criteria.Norm().problem(here, counting(here, None)), tol=1e-8)
    """
    if not problem.moves_absorbed:
        problem.fixed[:-1] |= symmetry.absorbed.to(problem.fixed.device)
    solution = _within_range(symmetry, problem, tol, deadline)
    still = problem.fixed[:-1].cpu()
    return Optimum(
        solution.log_scales,
        solution.imbalance,
        solution.iterations,
        solution.converged,
        still,
        tuple(w.name for w in symmetry.moving if w.multiplicative and _touches(w, still)),
        problem.passes,
    )


def symmetry_of(model: nn.Module, example_inputs: Any, symmetry: Symmetry | None, **options: Any) -> Symmetry:
    """The symmetry that was given, on this model; or a new one, traced with these options.

    >>> symmetry = symmetry_of(model, example_inputs, None, keep="head")
    """
    if symmetry is not None:
        if options.pop("keep", ()) or any(value not in ("preserve", None, False) for value in options.values()):
            raise TypeError(
                "keep, batchnorm and verify are choices of equinorm.trace: pass them there, not with symmetry="
            )
        return symmetry.bind(model)
    if example_inputs is None:
        raise TypeError("pass example_inputs, or symmetry=equinorm.trace(model, example_inputs)")
    return trace(model, example_inputs, **options)


def counting(symmetry: Symmetry, parameters: Iterable[str] | Callable[[str], bool] | None) -> Counts:
    """Which parameters count in the norm, of names or patterns of parameters and modules.

    >>> counts = counting(symmetry, ["features", "*.weight"])
    """
    if parameters is None:
        return lambda w: w.multiplicative
    if callable(parameters):
        by_name = parameters
        return lambda w: by_name(w.name)
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        if not any(_matches(w.name, pattern) for w in symmetry.parameters):
            raise ValueError(f"parameters={pattern!r} matches no parameter that the model uses")
    return lambda w: any(_matches(w.name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or that of a module around it."""
    return any(fnmatchcase(part, pattern) for part in accumulate(name.split("."), "{}.{}".format))


def _first_reason(symmetry: Symmetry) -> str:
    """The model's class, and the first parameter that cannot move with its reason."""
    model = type(symmetry.model).__name__
    first = next((row for row in symmetry.explain().rows if row.because), None)
    if first is None:
        return f"{model}: it has no scale that a rescaling could move"
    return (
        f"{model}: {first.parameter} ({first.axis}) {first.because}; print(equinorm.trace(...).explain()) has all of it"
    )


def _norm(symmetry: Symmetry, counted: Counts, p: float) -> float:
    """The Lp norm of the parameters that count, in float64; it overflows only if it is larger than any number."""
    counts = [w for w in symmetry.parameters if counted(w) and w.share]
    tensors = [symmetry.values(w.name).detach() for w in counts]
    norms = [_plain_norm(tensor, p) for tensor in tensors]
    # one look at them all, where they are on one device
    found = torch.stack(norms).tolist() if len({x.device for x in norms}) == 1 else [float(x) for x in norms]
    logs = [
        p * _log_norm(tensor, norm, p) + log(w.share) for w, tensor, norm in zip(counts, tensors, found, strict=True)
    ]
    total = torch.tensor(logs or [float("-inf")], dtype=torch.float64).logsumexp(0)
    return float(symmetry.processes.log_sum(total).div(p).exp())


def _plain_norm(tensor: Tensor, p: float) -> Tensor:
    """‖w‖p in float64, which may be out of range."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    pieces = (piece.reshape(-1).to(torch.float64) for (piece,) in in_pieces(tensor))
    parts = [piece.dot(piece).sqrt() if p == 2 else torch.linalg.vector_norm(piece, p) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), p)


def _log_norm(tensor: Tensor, norm: float, p: float) -> float:
    """Its logarithm, given the plain norm."""
    if not tensor.numel():
        return float("-inf")
    if 1e-100 < norm < 1e100:
        return log(norm)
    largest = tensor.abs().amax().double()
    if not 0 < float(largest) < float("inf"):
        return float(largest.log())
    return float(largest.log() + torch.linalg.vector_norm(tensor / largest, p, dtype=torch.float64).log())


def _within_range(symmetry: Symmetry, problem: Problem, tol: float, deadline: float | None) -> Solution:
    """The optimum. Variables that would push a parameter out of its dtype's range are fixed, the rest solved again."""
    while True:
        problem.hold()
        solution = problem.solve(tol, deadline)
        solution = solution._replace(log_scales=solution.log_scales.cpu())
        moving, padded = symmetry.moving, symmetry.padded(solution.log_scales)
        doubtful = not_surely_fitting(moving, [symmetry.values(w.name) for w in moving], padded)
        beyond = beyond_range([moving[i] for i in doubtful], symmetry.values, solution.log_scales)
        beyond = symmetry.processes.any(beyond) & ~problem.fixed[:-1].cpu()
        if not bool(beyond.any()):
            return solution
        problem.fixed[:-1] |= beyond.to(problem.fixed.device)


def beyond_range(terms: Iterable[ScaledParameter], tensors: Callable[[str], Tensor], log_scales: Tensor) -> Tensor:
    """Variables whose scale makes a parameter overflow or vanish. No value is looked at by the host.

    >>> stuck = beyond_range(symmetry.moving, symmetry.tensor, log_scales)
    """
    n = len(log_scales)
    beyond = torch.zeros(n + 1, dtype=torch.bool, device=log_scales.device)
    padded = torch.cat([log_scales, log_scales.new_zeros(1)])
    for w in terms:
        bad = out_of_range(tensors(w.name), w.factor(padded))
        for term in (w.out, w.into):
            if term is not None:
                beyond[torch.where(bad, term.index, n).reshape(-1)] = True
    return beyond[:-1]


def _touches(w: ScaledParameter, variables: Tensor) -> bool:
    padded = torch.cat([variables.cpu(), torch.zeros(1, dtype=torch.bool)])
    return any(bool(padded[term.index].any()) for term in (w.out, w.into) if term is not None)
