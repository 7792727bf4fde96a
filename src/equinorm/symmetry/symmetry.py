"""The positive rescalings that leave a model's function unchanged, as found by `trace`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..models.flat import refuse_flat_model
from ..models.saving import guard_saving_
from ..models.sharding import ALONE, Part, Processes, local, part_of, processes_of, reshard
from ..models.undo import tensors_kept
from ..models.unwrapping import unwrap
from .capture import Captured, capture
from .explain import Explainer, Explanation, where
from .holding import holding
from .interpreter import Interpreter
from .invariances import MODES, Carried, Norms
from .mappings import Mapping as Diagonal
from .mappings import mappings, prove
from .scales import FROZEN
from .traceless import uncollected
from .verify import (
    LARGEST,
    LARGEST_WORK,
    ROUNDS,
    Verification,
    Verifier,
    culprits,
    log_factors,
    relative_change,
    tolerance,
    work_of,
)


@dataclass(frozen=True, eq=False)
class Term:
    """Indices of the scale variables in one part of a parameter's factor, and their exponents.

    Both tensors have the parameter's number of axes, with length one where nothing depends on the axis. The index
    `num_scales` stands for a frozen scale.
    """

    index: Tensor
    exponent: Tensor

    def log_scale(self, padded: Tensor) -> Tensor:
        """The logarithm of this part of the factor; `padded` holds the log-scales and a final 0."""
        return padded[self.index] * self.exponent.to(padded)

    def to(self, device: torch.device) -> Term:
        return Term(self.index.to(device), self.exponent.to(device))

    def within(self, part: Part) -> Term:
        """On a part of the parameter's elements."""
        return Term(part.of(self.index), part.of(self.exponent))


@dataclass(frozen=True, eq=False)
class ScaledParameter:
    """How one parameter follows the scale variables: w -> w · exp(out - in), and what it is in the network."""

    name: str
    shape: torch.Size
    out: Term | None
    into: Term | None
    multiplicative: bool  # weights and gains count in the norm, biases and offsets do not
    depth: int  # linear layers between it and the output, on the longest path
    fan_in: Term | None = None  # for a bias: the inputs of the layer that owns it, along a last axis of their own
    shift: float = 0.0  # the factor multiplies w + shift: 1 for a gain that is stored minus 1
    share: float = 1.0  # by what a sum over its elements is multiplied: below 1 where other processes hold copies

    def moved(self, tensor: Tensor, factor: Tensor) -> Tensor:
        """A tensor after the move, in its dtype."""
        if not self.shift:
            return tensor * factor.to(tensor)
        return ((tensor.double() + self.shift) * factor.to(tensor.device) - self.shift).to(tensor.dtype)

    def factor(self, padded: Tensor) -> Tensor:
        """The factor on each element, in a shape that broadcasts to the parameter's; `padded` as for a `Term`."""
        first, *others = self.factors(self.logs(padded))
        return first * others[0] if others else first

    @staticmethod
    def factors(logs: list[Tensor]) -> list[Tensor]:
        """One or two tensors whose product is the factor, from its logarithms."""
        first, *others = logs
        if not others:
            return [first.exp()]
        (second,) = others
        if first.device.type == "cpu" and min(first.numel(), second.numel()) > 1:
            # exponentials of rows and of columns are fewer, but each may be out of range where their product is not
            (low, high), (least, most) = ((float(x) for x in part.detach().aminmax()) for part in (first, second))
            centre = (low + high - least - most) / 4
            if max(high - low, most - least, abs(low + high + least + most)) <= 300:
                return [(first - centre).exp(), (second + centre).exp()]
        return [(first + second).exp()]

    def multiply_(self, tensor: Tensor, padded: Tensor) -> None:
        """Multiply a tensor by the factor, in place, where it is; `padded` is on the host."""
        # a factor may leave the range of half precision where what it makes of a weight does not
        exact = torch.promote_types(tensor.dtype, torch.float32)
        parts = self.factors([part.to(tensor.device) for part in self.logs(padded)])
        for piece, first, *others in in_pieces(tensor, *parts):
            factor = first * others[0] if others else first
            if self.shift:
                piece.copy_(self.moved(piece, factor))
            else:
                piece.mul_(factor.to(exact))

    def surely_fits(self, tensor: Tensor, padded: Tensor) -> Tensor:
        """True if no element leaves the range of its dtype when it is multiplied; no value is looked at by the host.

        Where it is False, `out_of_range` knows more.
        """
        if not tensor.numel():
            return torch.ones((), dtype=torch.bool, device=tensor.device)
        limit = torch.finfo(tensor.dtype)
        edges = [part.aminmax() for part in self.logs(padded)]
        low, high = (float(torch.stack(x).sum().exp()) for x in zip(*edges, strict=True))
        fits = []
        for (piece,) in in_pieces(tensor.detach()):
            size = piece.abs()
            least = size.amin()
            if not (least.device.type == "cpu" and bool(least >= limit.tiny)):  # what is tiny, or 0, may vanish
                least = torch.where(size >= limit.tiny, size, limit.max).amin()
            fits.append((size.amax().double() * high < limit.max) & (least.double() * low > 2 * limit.tiny))
        return torch.stack(fits).all()

    def logs(self, padded: Tensor) -> list[Tensor]:
        """Logarithms of the parts of the factor, which broadcast together to its shape."""
        parts = [] if self.out is None else [self.out.log_scale(padded)]
        parts += [] if self.into is None else [-self.into.log_scale(padded)]
        return parts or [padded.new_zeros([1] * len(self.shape))]

    def to(self, device: torch.device) -> ScaledParameter:
        out, into, fan_in = (None if t is None else t.to(device) for t in (self.out, self.into, self.fan_in))
        return replace(self, out=out, into=into, fan_in=fan_in)

    def within(self, part: Part, share: float = 1.0) -> ScaledParameter:
        """On the part of its elements that this process holds."""
        out, into, fan_in = (None if t is None else t.within(part) for t in (self.out, self.into, self.fan_in))
        return replace(self, shape=part.shape, out=out, into=into, fan_in=fan_in, share=share)

    @property
    def moves(self) -> bool:
        return self.out is not None or self.into is not None


class Symmetry:
    """All positive rescalings of a model's parameters that leave its outputs unchanged.

    Made by `equinorm.trace`. Holds a reference to the model, whose parameters `rescale_` changes in place.

        sym = equinorm.trace(model, example_inputs)
        print(sym.explain())
        sym.rescale_(0.1 * torch.randn(sym.num_scales))
    """

    def __init__(self, model: nn.Module, captured: Captured, interpreter: Interpreter) -> None:
        self.model = model
        self.parameters, self.carried, self.birth = _compile(interpreter)
        self.num_scales: int = len(self.birth)
        self.processes = ALONE
        self.verification = Verification(done=False, why_not="it was not asked for")
        self.held: tuple[str, ...] = ()  # parameters that `holding` keeps as they are
        self._explainer = Explainer(type(model).__name__, captured, interpreter, self.num_scales)

    def __repr__(self) -> str:
        return f"<Symmetry of {self.explain().summary.splitlines()[0]}>"

    def explain(self, summary: bool = False) -> Explanation:
        """Every parameter: which axes are free, which are frozen, and why. Print it, or read its `rows`.

        `summary=True` leaves out the rows, which large models have thousands of.
        """
        explanation = self._explainer()
        if self.verification.frozen:
            explanation = replace(explanation, summary=f"{explanation.summary}\n{self.verification}")
        if self.carried:
            follow = f"what norms absorb: {len(self.carried)} numbers and statistics of theirs follow"
            explanation = replace(explanation, summary=f"{explanation.summary}\n{follow}")
        if self.held:
            some = ", ".join(self.held[:3]) + (f" and {len(self.held) - 3} more" if len(self.held) > 3 else "")
            left = f"{self.num_scales:,} free scale{'' if self.num_scales == 1 else 's'} left"
            explanation = replace(explanation, summary=f"{explanation.summary}\n{left} while {some} stay as they are")
        return explanation[:0] if summary else explanation

    def bind(self, model: nn.Module) -> Symmetry:
        """The same symmetry on another copy of the model: an average of its weights, a deepcopy, a sharded one."""
        model = unwrap(model)
        refuse_flat_model(model)
        reshard(model)
        for parameter in self.moving:
            other = _parameter(model, parameter.name)
            if other.shape != parameter.shape:
                raise ValueError(
                    f"{parameter.name} has shape {tuple(other.shape)} there and {tuple(parameter.shape)} here"
                )
        for carried in self.carried:
            carried.value(model)
        twin = object.__new__(Symmetry)
        twin.__dict__.update(self.__dict__, model=model)
        return twin

    def holding(self, names: Iterable[str]) -> Symmetry:
        """The rescalings among these that leave the parameters of these names, and numbers of norms, as they are.

        >>> symmetry.holding(name for name, p in model.named_parameters() if not p.requires_grad)
        """
        held = set(names) & {*(w.name for w in self.moving), *(c.name for c in self.carried)}
        return self._restricted(held) if held else self

    def tying(self, groups: Iterable[Iterable[str]]) -> Symmetry:
        """The rescalings among these under which the numbers of norms in each group change by one factor.

        >>> symmetry.tying([[carried.name for carried in symmetry.carried]])  # they have one entry in a config
        """
        terms = {carried.name: carried.term for carried in self.carried}
        ties: list[ScaledParameter] = []
        for group in groups:
            tied = [terms[name] for name in group if name in terms]
            for other in tied[1:]:
                ties.append(ScaledParameter(f"tie {len(ties)}", torch.Size([]), tied[0], other, False, 0))
        return self._restricted(set(), ties) if ties else self

    def _restricted(self, held: set[str], ties: Sequence[ScaledParameter] = ()) -> Symmetry:
        """Without what moves held parameters and numbers; out = in for ties."""
        twin = object.__new__(Symmetry)
        twin.__dict__.update(self.__dict__, held=(*self.held, *sorted(held)))
        followers = [ScaledParameter(c.name, torch.Size([]), c.term, None, False, 0) for c in self.carried]
        every = [*self.parameters, *followers, *ties]
        left, twin.birth = holding(every, self.birth, held | {tie.name for tie in ties})
        twin.parameters, followers = left[: len(self.parameters)], left[len(self.parameters) :]
        both = zip(self.carried, followers, strict=False)
        twin.carried = [replace(carried, term=w.out) for carried, w in both if w.out is not None]
        twin.num_scales = len(twin.birth)
        return twin

    def local(self) -> Symmetry:
        """The same on the parts of parameters that this process holds; itself where they are not sharded.

        `processes` are those that hold parts. Sums over elements are theirs together.
        """
        if self.processes is not ALONE:
            return self
        tensors = {p.name: self.tensor(p.name) for p in self.parameters}
        processes = processes_of(tensors.values())
        if processes is ALONE:
            return self
        parts = {name: part_of(tensor, name) for name, tensor in tensors.items()}
        parameters = [p.within(parts[p.name], parts[p.name].share(processes)) for p in self.parameters]
        twin = object.__new__(Symmetry)
        twin.__dict__.update(self.__dict__, parameters=parameters, processes=processes)
        return twin

    def mappings(self) -> list[Diagonal]:
        """Where a diagonal can move between layers: SmoothQuant's and AWQ's mappings, in the order of the network.

        >>> print(*equinorm.trace(model, x).mappings(), sep="\\n")
        """
        return mappings(self)

    def prove(self, mapping: Diagonal, example_inputs: Any) -> float:
        """By how much the outputs change, in float64, when the scales of a mapping are moved at random on a copy."""
        return prove(self, mapping, example_inputs)

    @property
    def moving(self) -> list[ScaledParameter]:
        """The parameters with at least one free scale."""
        return [p for p in self.parameters if p.moves]

    @property
    def absorbed(self) -> Tensor:
        """Which scales a norm absorbs (or a gain that is stored minus 1 carries): no norm of weights has a minimum
        there, so what looks for one holds them."""
        held = torch.zeros(self.num_scales + 1, dtype=torch.bool)
        shifted = [term for w in self.parameters if w.shift for term in (w.out, w.into) if term is not None]
        for term in (*(carried.term for carried in self.carried), *shifted):
            held[term.index.reshape(-1)] = True
        return held[:-1]

    def tensor(self, name: str) -> Tensor:
        """A parameter of the bound model."""
        return _parameter(self.model, name)

    def values(self, name: str) -> Tensor:
        """The elements of a parameter that this process holds."""
        return local(self.tensor(name))

    @torch.no_grad()
    def rescale_(self, log_scales: Tensor) -> None:
        """Multiply every scale variable by exp(log_scales), in place: all, or nothing if anything is raised.

        Args:
            log_scales: `num_scales` real numbers, any element of the symmetry group.
        """
        here, padded = self.local(), self.padded(log_scales)
        _check_range(here.moving, [here.values(w.name) for w in here.moving], padded, here.processes)
        self.rescale_within_range_(log_scales)

    @torch.no_grad()
    def rescale_within_range_(self, log_scales: Tensor) -> None:
        """The same for log-scales of which it is known that no parameter leaves the range of its dtype."""
        here, padded = self.local(), self.padded(log_scales)
        tensors = [here.values(w.name) for w in here.moving]
        numbers = [(carried, carried.moved(self.model, padded)) for carried in self.carried]
        buffers = [carried.value(self.model) for carried in self.carried]
        if not all(isinstance(buffer, Tensor) for buffer in buffers):
            guard_saving_(self.model)  # numbers such as ε are in no state dict
        with tensors_kept([*tensors, *(b for b in buffers if isinstance(b, Tensor))]), self._numbers_kept():
            for w, tensor in zip(here.moving, tensors, strict=True):
                w.multiply_(tensor, padded)
            for (carried, value), buffer in zip(numbers, buffers, strict=True):
                if isinstance(buffer, Tensor):
                    buffer.copy_(value)  # type: ignore[arg-type]
                else:
                    setattr(self.model.get_submodule(carried.module), carried.attribute, value)

    def others(self, log_scales: Tensor) -> dict[str, Tensor | float]:
        """What the numbers, statistics and shifted gains become that a factor alone does not move, by name."""
        padded = self.padded(log_scales)
        found: dict[str, Tensor | float] = {c.name: c.moved(self.model, padded) for c in self.carried}
        for w in self.moving:
            if w.shift:
                found[w.name] = w.moved(self.tensor(w.name).detach(), w.factor(padded))
        return found

    @contextmanager
    def _numbers_kept(self) -> Iterator[None]:
        """Numbers on modules are what they were if the block raises."""
        owners = [(self.model.get_submodule(c.module), c.attribute) for c in self.carried]
        before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute in owners]
        try:
            yield
        except BaseException:
            for owner, attribute, value in before:
                if not isinstance(value, Tensor):
                    setattr(owner, attribute, value)
            raise

    def factors(self, log_scales: Tensor) -> dict[str, Tensor]:
        """The positive factor on each parameter, broadcastable to its shape, in float64."""
        padded = self.padded(log_scales)
        return {p.name: p.factor(padded) for p in self.moving}

    def padded(self, log_scales: Tensor) -> Tensor:
        """Log-scales as a `Term` asks for them: in float64, and a 0 behind them for what is frozen."""
        log_scales = torch.as_tensor(log_scales, dtype=torch.float64, device="cpu")
        if log_scales.shape != (self.num_scales,):
            raise ValueError(f"log_scales must have shape ({self.num_scales},), got {tuple(log_scales.shape)}")
        if not bool(torch.isfinite(log_scales).all()):
            raise ValueError("log_scales must be finite")
        return torch.cat([log_scales, log_scales.new_zeros(1)])


def _check_range(
    moving: Sequence[ScaledParameter], tensors: Sequence[Tensor], padded: Tensor, processes: Processes
) -> None:
    """Refuse, before anything is changed, a tensor without data and a factor that leaves the range of its dtype."""
    for w, tensor in zip(moving, tensors, strict=True):
        if tensor.is_meta:
            raise ValueError(f"parameter {w.name!r} is on the meta device and has no values to rescale")
    doubtful = not_surely_fitting(moving, tensors, padded)
    flags = torch.zeros(len(moving), dtype=torch.bool)
    for i in doubtful:
        flags[i] = out_of_range(tensors[i], moving[i].factor(padded)).any()
    for flag, w, tensor in zip(processes.any(flags).tolist(), moving, tensors, strict=True):
        if flag:
            factor = w.factor(padded)
            by = f" by factors from {factor.min():.3g} to {factor.max():.3g}" if factor.numel() else ""
            raise OverflowError(
                f"rescaling {w.name!r}{by} leaves the range of {tensor.dtype}; use smaller log_scales or a wider dtype"
            )


def not_surely_fitting(moving: Sequence[ScaledParameter], tensors: Sequence[Tensor], padded: Tensor) -> list[int]:
    """The parameters that have to be looked at element by element: which of them a factor takes out of range.

    >>> doubtful = not_surely_fitting(symmetry.moving, weights, symmetry.padded(log_scales))
    """
    flags = [w.surely_fits(tensor, padded) for w, tensor in zip(moving, tensors, strict=True)]
    devices = {flag.device for flag in flags}
    known = torch.stack(flags).tolist() if len(devices) == 1 else [bool(flag) for flag in flags]
    return [i for i, fits in enumerate(known) if not fits]


def in_pieces(tensor: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A tensor, and others that broadcast to it, row by row so that a piece stays in the processor's cache."""
    if tensor.device.type != "cpu" or tensor.numel() <= PIECE:
        yield tensor, *others
        return
    rows = max(1, PIECE // tensor[0].numel())
    for start in range(0, len(tensor), rows):
        yield (
            tensor[start : start + rows],
            *(x[start : start + rows] if x.ndim == tensor.ndim and len(x) > 1 else x for x in others),
        )


def out_of_range(tensor: Tensor, factor: Tensor) -> Tensor:
    """Where the largest value that a factor meets would overflow, or vanish; in the factor's shape."""
    if tensor.device.type == "cpu" and tensor.numel() > PIECE and factor.shape == tensor.shape:
        rows = max(1, PIECE // tensor[0].numel())  # a piece at a time, in the processor's cache
        pieces = zip(tensor.split(rows), factor.split(rows), strict=True)
        return torch.cat([_out_of_range(*piece) for piece in pieces])
    return _out_of_range(tensor, factor)


PIECE = 1 << 16


def _out_of_range(tensor: Tensor, factor: Tensor) -> Tensor:
    axes = [a for a in range(tensor.ndim) if a >= factor.ndim or factor.shape[a] == 1]
    largest = tensor.detach().abs() if tensor.numel() else factor.new_zeros(())
    if axes and tensor.numel():  # over no axes `amax` would take all
        largest = largest.amax(axes, keepdim=True)
    largest = largest.to(factor)
    limit = torch.finfo(tensor.dtype)
    after = largest * factor
    bad = ~(after <= limit.max) | ((after < limit.tiny) & (largest >= limit.tiny))
    return bad & torch.isfinite(largest)


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    keep: Iterable[str] = (),
    batchnorm: str = "preserve",
    verify: bool | None = None,
    invariances: bool | str = False,
) -> Symmetry:
    """Find every positive rescaling of a model's parameters that leaves its function unchanged.

    Args:
        model: any module `torch.export` can capture. It is not changed, nor are its mode, buffers or random state.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Shapes matter; values
            only to `verify`.
        keep: names or patterns (`"*.bias"`) of parameters that must not move, or of modules with all that is in them.
        batchnorm: "preserve" keeps the function; "ignore" treats BatchNorm as absent (stock2019's ENorm + BN), so that
            the rescalings found change the function of a net with BatchNorm.
        verify: whether to run the model once as it is and once with all scales moved, on copies, and to freeze what
            changes the outputs. By default where that costs less than the trace; `symmetry.verification` says.
        invariances: True: norms take the scale of what they read, one for a module, and their ε (and running
            statistics) change with the weights. "inference": BatchNorm in evaluation one per channel, carried by its
            running statistics, which later training would not find useful. No norm of weights has a minimum along
            these directions (`symmetry.absorbed`): `balance_` to the least norm leaves them where they are.
    """
    if batchnorm not in ("preserve", "ignore"):
        raise ValueError(f"batchnorm must be 'preserve' or 'ignore', got {batchnorm!r}")
    if invariances not in MODES:
        raise ValueError(f"invariances must be True, False or 'inference', got {invariances!r}")
    if invariances and batchnorm == "ignore":
        raise ValueError(
            "batchnorm='ignore' takes BatchNorm for absent, so there is nothing that invariances could find"
        )
    with uncollected():
        captured = capture(model, example_inputs, keep)
        with torch.no_grad(), _on_the_host():
            interpreter = Interpreter(captured, batchnorm, Norms(unwrap(model), invariances) if invariances else None)
            interpreter.run()
            symmetry = Symmetry(unwrap(model), captured, interpreter)
    if batchnorm == "preserve" and verify is not False:
        return _verified(symmetry, captured, interpreter, example_inputs, asked=verify is True)
    return symmetry


def _on_the_host() -> AbstractContextManager[Any]:
    """Labels are computed with, so they have values also where the model was made on the meta device."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _verified(
    symmetry: Symmetry, captured: Captured, interpreter: Interpreter, example_inputs: Any, asked: bool
) -> Symmetry:
    """The symmetry without the scales whose move changes what the model puts out."""
    model = symmetry.model
    large = sum(p.numel() for p in model.parameters()) > LARGEST or work_of(captured.module) > LARGEST_WORK
    if not asked and large:
        symmetry.verification = Verification(done=False, why_not="the model is large: ask for it with verify=True")
        return symmetry
    try:
        shifted = {w.name for w in symmetry.moving if w.shift}
        verifier = Verifier(model, example_inputs, vary=True, kept=shifted)
        before = verifier.run()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        symmetry.verification = Verification(done=False, why_not=f"the model cannot be run: {reason}")
        return symmetry
    small = any(p.dtype == torch.float16 for p in model.parameters())
    frozen: list[str] = []
    while True:
        log_scales = log_factors(symmetry.num_scales, small)
        if any(carried.shift for carried in symmetry.carried):
            log_scales = log_scales.abs()  # a variance that grows stays positive
        integral = all(
            bool((term.exponent == term.exponent.round()).all())
            for w in symmetry.moving
            for term in (w.out, w.into)
            if term is not None
        ) and not any(w.shift for w in symmetry.moving)
        limit = tolerance(before, exact=integral)

        def change(groups: list[int], s: Symmetry = symmetry, log_scales: Tensor = log_scales) -> float:
            moved = torch.where(torch.isin(s.birth, torch.tensor(groups)), log_scales, 0.0)
            try:
                return relative_change(verifier.run(s.factors(moved), s.others(moved)), before)
            except Exception:
                return math.inf  # an assertion about values, or a branch that only runs now

        groups = symmetry.birth.unique().tolist()
        total = change(groups) if groups else 0.0
        if total > limit and change([]) > limit:
            why_not = "the model puts out something else each time it is run on the same inputs"
            symmetry.verification = Verification(done=False, why_not=why_not)
            return symmetry
        if total <= limit:
            symmetry.verification = Verification(True, total, tuple(frozen))
            return symmetry
        guilty = groups
        if len(frozen) < ROUNDS:
            guilty = culprits(groups, lambda some, limit=limit, change=change: change(some) > limit)  # type: ignore[misc]
        frozen += [where(interpreter, interpreter.nodes[group]) for group in guilty]
        roots = acting_roots(interpreter)[torch.isin(symmetry.birth, torch.tensor(guilty))]
        for group in guilty:
            interpreter.scales.freeze(roots[interpreter.scales.birth(roots) == group], group)
        symmetry = Symmetry(model, captured, interpreter)


def _parameter(model: nn.Module, name: str) -> Tensor:
    try:
        return model.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no parameter {name!r}; trace this model anew") from error


# -- from labels to variables ------------------------------------------------------------------------------------------


def _compile(t: Interpreter) -> tuple[list[ScaledParameter], list[Carried], Tensor]:
    """Number the free scales that act on some parameter, in forward order, and express every form by them."""
    acting = acting_roots(t)
    number = torch.full((t.scales.size,), len(acting))
    number[acting] = torch.arange(len(acting))
    depth = _depths(t)

    def term(labels: Tensor | None) -> Term | None:
        if labels is None:
            return None
        roots, exponents = t.scales.find(labels)
        index = number[torch.where(labels > FROZEN, roots, FROZEN)]
        return Term(index, exponents) if bool((index < len(acting)).any()) else None

    found, carried = [], []
    make = {} if t.norms is None else t.norms.carried
    for name, form in t.forms.items():
        if not form.roles:
            continue
        out, into = term(form.plus), term(form.minus)
        if name in make:
            if out is not None:
                carried.append(make[name](out))
            continue
        owners = [role.fan_in for role in form.roles if role.fan_in is not None]
        factors = [role.node for role in form.roles if role.multiplies] or [role.node for role in form.roles]
        fan_in = None if form.multiplicative or not owners else term(owners[0])
        found.append(
            ScaledParameter(
                name, form.shape, out, into, form.multiplicative, max(depth[n] for n in factors), fan_in, form.shift
            )
        )
    return found, carried, t.scales.birth(acting)


def acting_roots(t: Interpreter) -> Tensor:
    """Roots of free scales that change at least one parameter; sorted, which is the order of the graph."""
    acting: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
    numbers = () if t.norms is None else t.norms.carried
    for form in (form for name, form in t.forms.items() if name not in numbers):
        sides = [_free_roots(t, term) for term in (form.plus, form.minus) if term is not None]
        if len(sides) < 2:
            acting += sides
            continue
        assert form.plus is not None
        assert form.minus is not None
        both = sides[0][torch.isin(sides[0], sides[1])]
        acting += [side[~torch.isin(side, both)] for side in sides]
        if len(both):  # out and in of one element may be the same scale, which then cancels
            (root_out, k_out), (root_in, k_in) = t.scales.find(form.plus), t.scales.find(form.minus)
            different = (root_out != root_in) | ((k_out - k_in).abs() > 1e-9)
            both_out, both_in, _ = torch.broadcast_tensors(root_out, root_in, different)
            moved = torch.cat([both_out[different], both_in[different]]).unique()
            acting.append(both[torch.isin(both, moved)])
    return torch.cat(acting).unique()


def _free_roots(t: Interpreter, labels: Tensor) -> Tensor:
    labels = labels[labels > FROZEN]
    return t.scales.find(labels[~t.scales.is_frozen(labels)])[0].unique()


def _depths(t: Interpreter) -> list[int]:
    """For each node, the number of linear layers after it on the longest path to the output."""
    layers = {role.node for form in t.forms.values() for role in form.roles if role.layer}
    depth = [0] * len(t.nodes)
    for node in reversed(range(len(t.nodes))):
        for source in t.depends[node]:
            depth[source] = max(depth[source], depth[node] + (node in layers))
    return depth
