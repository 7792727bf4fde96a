"""ENorm: the least-norm network among all that compute the same function (stock2019)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from ..criteria.norm import Objective, Sum, imbalance, layouts, powers_of, times
from ..launch import ORDINARY
from ..solver import Cycle, Solution, hold_unbalanced, minimise
from ..symmetry import ScaledParameter, Symmetry, Term, trace
from ..symmetry.symmetry import out_of_range
from .optimizer_state import (
    carry_state_,
    check_optimizer,
    decoupled_decay,
    needs_functions,
    powered_state,
    state_rule,
    step_is_linear,
)

if TYPE_CHECKING:
    from .steps.foreach import ForeachCycle
    from .steps.triton import FusedCycle

# -- once: the exact optimum -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BalanceReport:
    """What `balance_` did, and the proof that it is the optimum."""

    norm_before: float  # Lp norm of the parameters that count
    norm_after: float
    imbalance: float  # largest |log(incoming / outgoing mass)| over the balanced scales: 0 exactly at the optimum
    iterations: int
    seconds: float  # without tracing
    converged: bool  # imbalance <= tol
    num_scales: int  # free scales of the model
    held: int  # of these, left where they were: dead units, non-finite weights, what would leave a dtype's range
    held_in: tuple[str, ...]  # parameters that hold them
    trace_seconds: float

    def __str__(self) -> str:
        if not self.num_scales:
            return "nothing to rescale: the model has no free scale (print equinorm.trace(...).explain() to see why)"
        verdict = "at the optimum" if self.converged else "NOT at the optimum"
        where = ", ".join(self.held_in[:3]) + (", ..." if len(self.held_in) > 3 else "")
        held = f"; {self.held:,} held where they were ({where})" if self.held else ""
        return (
            f"norm {self.norm_before:.6g} -> {self.norm_after:.6g}, {verdict} (imbalance {self.imbalance:.1e}) over "
            f"{self.num_scales - self.held:,} scales{held}; {self.iterations} iterations, {self.seconds:.2f} s"
        )


def balance_(
    model: nn.Module,
    example_inputs: Any = None,
    p: float = 2.0,
    c: float = 1.0,
    tol: float = 1e-8,
    *,
    parameters: Iterable[str] | Callable[[str], bool] | None = None,
    time_limit: float | None = None,
    keep: Iterable[str] = (),
    symmetry: Symmetry | None = None,
) -> BalanceReport:
    """Rescale a model in place to the least Lp norm among all networks that compute the same function.

    The problem is convex, so the optimum is unique (stock2019, theorem 1); the report's `imbalance` proves that it was
    reached. Dead units and whatever cannot be balanced stay where they are, and the report says so.

        report = equinorm.balance_(model, torch.randn(1, 3, 224, 224))

    Args:
        p: which norm, any p > 0.
        c: asymmetry (stock2019, section 3.7): c > 1 moves energy towards the output.
        tol: largest |log(incoming / outgoing mass)| accepted.
        parameters: names or patterns of the parameters that count in the norm; by default all that multiply (weights
            and gains, not biases).
        time_limit: seconds after which the best point so far is taken, and reported as not converged.
        keep: names or patterns of parameters that must not move.
        symmetry: from `equinorm.trace`, to save tracing again.
    """
    for name, number in (("p", p), ("c", c), ("tol", tol)):
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {number!r}")
    start = time.monotonic()
    symmetry = _symmetry(model, example_inputs, symmetry, keep=keep)
    traced = time.monotonic()
    counted = _counted(symmetry, parameters)
    for w in symmetry.moving:
        if symmetry.tensor(w.name).is_meta:
            raise ValueError(f"parameter {w.name!r} is on the meta device and has no values to balance")
    before = _norm(symmetry, counted, p)
    objective = Objective(symmetry.num_scales, p, layouts(symmetry, p, c, counted), torch.float64, torch.device("cpu"))
    objective.load(symmetry.tensor)
    solution = _within_range(symmetry, objective, tol, None if time_limit is None else traced + time_limit)
    if symmetry.num_scales:
        symmetry.rescale_(solution.log_scales)
    still = ~objective.free
    return BalanceReport(
        norm_before=before,
        norm_after=_norm(symmetry, counted, p),
        imbalance=solution.imbalance,
        iterations=solution.iterations,
        seconds=time.monotonic() - traced,
        converged=solution.converged,
        num_scales=symmetry.num_scales,
        held=int(still.sum()),
        held_in=tuple(w.name for w in symmetry.moving if w.multiplicative and _touches(w, still)),
        trace_seconds=traced - start,
    )


def _symmetry(model: nn.Module, example_inputs: Any, symmetry: Symmetry | None, **options: Any) -> Symmetry:
    if symmetry is not None:
        if options.pop("keep", ()) or any(value != "preserve" for value in options.values()):
            raise TypeError("keep and batchnorm are choices of equinorm.trace: pass them there, not with symmetry=")
        return symmetry.bind(model)
    if example_inputs is None:
        raise TypeError("pass example_inputs, or symmetry=equinorm.trace(model, example_inputs)")
    return trace(model, example_inputs, **options)


def _counted(
    symmetry: Symmetry, parameters: Iterable[str] | Callable[[str], bool] | None
) -> Callable[[ScaledParameter], bool]:
    """Which parameters count in the norm."""
    if parameters is None:
        return lambda w: w.multiplicative
    if callable(parameters):
        chosen = parameters
        return lambda w: chosen(w.name)
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        if not any(fnmatchcase(w.name, pattern) for w in symmetry.parameters):
            raise ValueError(f"parameters={pattern!r} matches no parameter that the model uses")
    return lambda w: any(fnmatchcase(w.name, pattern) for pattern in patterns)


def _norm(symmetry: Symmetry, counted: Callable[[ScaledParameter], bool], p: float) -> float:
    """The Lp norm of the parameters that count, in float64."""
    total = 0.0
    for w in symmetry.parameters:
        if counted(w) and (tensor := symmetry.tensor(w.name).detach()).numel():
            total += float(torch.linalg.vector_norm(tensor, p, dtype=torch.float64)) ** p
    return float(total ** (1.0 / p))


def _within_range(symmetry: Symmetry, objective: Objective, tol: float, deadline: float | None) -> Solution:
    """The optimum. Variables that would push a parameter out of its dtype's range are fixed, the rest solved again."""
    while True:
        hold_unbalanced(objective)
        solution = minimise(objective, symmetry.birth, tol, deadline)
        beyond = _beyond_range(symmetry.moving, symmetry.tensor, solution.log_scales) & objective.free
        if not bool(beyond.any()):
            return solution
        objective.fixed[:-1] |= beyond


def _beyond_range(terms: Iterable[ScaledParameter], tensors: Callable[[str], Tensor], log_scales: Tensor) -> Tensor:
    """Variables whose scale makes a parameter overflow or vanish. No value is looked at by the host."""
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
    chosen = torch.cat([variables.cpu(), torch.zeros(1, dtype=torch.bool)])
    return any(bool(chosen[term.index].any()) for term in (w.out, w.into) if term is not None)


# -- in training: one cycle after every step ---------------------------------------------------------------------------

_BIASES = ("safe", "plain", "skip")
_BACKENDS = ("auto", "plain", "foreach", "triton")


class ENorm:
    """Keep a network balanced while it trains: one ENorm cycle after each optimizer step (stock2019, algorithm 2).

        enorm = equinorm.ENorm(model, optimizer, example_inputs, c=1.2)
        ...
        optimizer.step()
        enorm.step()             # or once, before training: handle = enorm.attach()

    The function does not change; weights, accumulated gradients, the optimizer's state and companions all move to the
    new coordinates together, in place.

    Args:
        model, optimizer: the optimizer must hold the parameters of the model that move.
        example_inputs: as in `equinorm.trace`.
        p, c: norm and asymmetry. c > 1 moves energy towards the output; 1.2 is stock2019's choice for deep FC nets.
        cycles: ENorm cycles each time.
        every: act on every n-th call of `step`.
        bias: "safe" (default) keeps the effective learning rate of biases bounded when c ≠ 1, see below; "plain" only
            rescales them, as stock2019 does; "skip" leaves every scale alone that would move a bias.
        batchnorm: "preserve" carries scales by BatchNorm's gain and offset; "ignore" treats BatchNorm as absent, as
            stock2019 and repro2019 did for ENorm + BN: that changes the function.
        parameters, keep: as in `equinorm.balance_`.
        companions: other copies of the model that must keep computing what they compute (EMA, SWA).
        symmetry: from `equinorm.trace`, to save tracing again.
        gradients: whether `.grad` moves along, which takes a pass of its own. False is right where gradients are set to
            zero (or None) before the next backward pass adds to them.
        backend: "triton", a few fused kernels on a GPU; "foreach", few torch operations; "plain", many, layer by layer.
            All compute the same. By default ("auto") the first that can be used: the attribute `backend` says which it
            is, and `why_not` why not an earlier one.

    Safe biases. In balanced coordinates with c > 1 the scale t of a layer deep inside falls to about c^(-q²/8). A
    stored bias b' = b·t has the gradient g/t, so its effective learning rate is lr/t²: 10⁹ for 19 layers, which is why
    repro2019 saw NaN beyond 9. A bias is a weight from a constant unit; scaling that unit like the layer's other inputs
    multiplies its gradient by t² of the layer's *input*. Where the step is linear in the gradient (SGD) that is what
    happens; where it is normalized (Adam and its kin) the bias's step is multiplied by t instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Any = None,
        *,
        p: float = 2.0,
        c: float = 1.0,
        cycles: int = 1,
        every: int = 1,
        bias: str = "safe",
        batchnorm: str = "preserve",
        parameters: Iterable[str] | Callable[[str], bool] | None = None,
        keep: Iterable[str] = (),
        companions: Iterable[nn.Module] = (),
        symmetry: Symmetry | None = None,
        gradients: bool = True,
        backend: str = "auto",
    ) -> None:
        for name, choice, known in (("bias", bias, _BIASES), ("backend", backend, _BACKENDS)):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")
        for name, number in (("p", p), ("c", c), ("cycles", cycles), ("every", every)):
            if not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive, got {number!r}")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"expected the optimizer that trains the model, got {type(optimizer).__name__}; without training there "
                "is equinorm.balance_(model, example_inputs)"
            )
        symmetry = _symmetry(model, example_inputs, symmetry, keep=keep, batchnorm=batchnorm)
        if not symmetry.num_scales:
            raise ValueError(f"nothing to rescale.\n{symmetry.explain().summary}")
        self.symmetry, self.optimizer = symmetry, optimizer
        self.p, self.c, self.cycles, self.every, self.bias = float(p), float(c), int(cycles), int(every), bias
        self.companions = [symmetry.bind(_inner(other)) for other in companions]
        self.gradients, self._wanted = gradients, backend
        self._counted = _counted(symmetry, parameters)
        self._handles: list[RemovableHandle] = []
        self._attached: _Handle | None = None
        self.calls = 0
        self._check_optimizer()
        self._prepare()
        self._hook_biases()

    # -- what a user calls ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Balance after an optimizer step: `cycles` ENorm cycles, on every `every`-th call."""
        self.calls += 1
        if self.calls % self.every:
            return
        tensors = self._tensors()
        if self._fused is not None and self._seen and self._seen == self._look(tensors):
            self._repeat(self._fused, tensors)
            return
        check_optimizer(self.optimizer, tensors.values())
        if self._fused is not None and not self._fused.fits(tensors.values()):
            self._prepare(self.log_t)  # the model was moved, or laid out anew in memory
        if self._fused is None:
            self._step_plain(tensors)
        else:
            self._step_fused(self._fused, tensors)

    def attach(self) -> RemovableHandle:
        """Call `step` by itself after every step of the optimizer, until the returned handle's `remove()`."""
        if self._attached is not None:
            raise RuntimeError("this ENorm is attached already: remove() its handle first")
        self._attached = _Handle(self, self.optimizer.register_step_post_hook(lambda *_: self.step()))
        return self._attached

    def remove(self) -> None:
        """Take every hook off the optimizer. Biases are no longer treated specially after this."""
        if self._attached is not None:
            self._attached.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def bind(self, model: nn.Module, optimizer: Optimizer) -> ENorm:
        """The same ENorm, with its state, on copies of the model and its optimizer."""
        twin = copy.copy(self)
        twin.symmetry, twin.optimizer = self.symmetry.bind(model), optimizer
        twin.log_t, twin._handles, twin._attached = self.log_t.clone(), [], None
        twin._check_optimizer()
        twin._prepare(self.log_t)
        twin._hook_biases()
        return twin

    def state_dict(self) -> dict[str, Any]:
        """The scales accumulated since the start of training, and the number of calls."""
        return {"log_t": self.log_t.detach().cpu().clone(), "calls": self.calls}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise, with nothing changed, unless `load_state_dict` can load this."""
        log_t = state["log_t"]
        if log_t.shape != self.log_t.shape:
            raise ValueError(
                f"this state is for {len(log_t)} scales, the model has {len(self.log_t)}: "
                "load it into an ENorm made for the same architecture and options"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self.log_t.copy_(state["log_t"])
        self._gains.measure_(self.log_t)
        self.calls = int(state["calls"])

    @torch.no_grad()
    def imbalance(self) -> float:
        """The largest |log(incoming / outgoing mass)| at the present weights."""
        objective, _ = self._plain()
        objective.load(self._tensors().__getitem__)
        point = objective.at(torch.zeros_like(self.log_t, dtype=objective.dtype))
        return float(imbalance(point, objective.free & (point.up > 0) & (point.down > 0)))

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that holds other parameters than the model's, or state we cannot carry."""
        held = {id(q) for group in self.optimizer.param_groups for q in group["params"]}
        tensors = {w.name: self.symmetry.tensor(w.name) for w in self.symmetry.moving}
        missing = [name for name, q in tensors.items() if q.requires_grad and id(q) not in held]
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(
                f"the optimizer does not hold {some}: make it from this model's parameters (after moving, copying or "
                "loading the model), or exclude them with keep=..."
            )
        for name, q in tensors.items():
            if q.is_meta:
                raise ValueError(f"parameter {name!r} is on the meta device: give the model real weights first")
        check_optimizer(self.optimizer, tensors.values())

    def _prepare(self, log_t: Tensor | None = None) -> None:
        moving = self.symmetry.moving
        first = self.symmetry.tensor(moving[0].name)
        wide = self.p > 4 or any(self.symmetry.tensor(w.name).dtype == torch.float64 for w in moving)
        self._dtype, self._device = (torch.float64 if wide else torch.float32), first.device
        n = self.symmetry.num_scales
        self._fixed = torch.zeros(n + 1, dtype=torch.bool)
        self._fixed[n] = True
        if self.bias == "skip":
            for term in (term for w in moving if not w.multiplicative for term in (w.out, w.into) if term is not None):
                self._fixed[term.index.reshape(-1)] = True
        # a bias that writes to a frozen scale (the last layer's) does not move, but its layer's inputs do
        owned = [w for w in self.symmetry.parameters if self.bias == "safe" and w.fan_in is not None]
        self._terms = {w.name: w for w in dict.fromkeys([*moving, *owned])}
        self._paths = {name: name.split(".") for name in self._terms}
        self._placed: dict[str, ScaledParameter] = {}
        self._plain_parts: tuple[Objective, Cycle] | None = None
        exact = self._dtype if self._device.type == "mps" else torch.float64
        since = torch.zeros(n) if log_t is None else log_t
        self.log_t = since.to(self._device, exact, copy=True)
        self._gains = Gains([w for w in self._terms.values() if w in owned], self.log_t)  # in the order of the terms
        self.why_not: dict[str, str] = {}
        self._seen: list[Any] = []
        self._fused = self._fuse()
        if self._fused is None:
            self._plain()  # now, so that the first step may be captured

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: _at(self.symmetry.model, path) for name, path in self._paths.items()}
        return {name: self.symmetry.tensor(name) if q is None else q for name, q in found.items()}

    def _place(self, name: str) -> ScaledParameter:
        """A parameter's terms on its device."""
        if name not in self._placed:
            self._placed[name] = self._terms[name].to(self._device)
        return self._placed[name]

    # -- a step in torch operations ------------------------------------------------------------------------------------

    def _plain(self) -> tuple[Objective, Cycle]:
        """The objective and its cycle, made when they are first needed."""
        if self._plain_parts is None:
            chosen = layouts(self.symmetry, self.p, self.c, self._counted)
            objective = Objective(self.symmetry.num_scales, self.p, chosen, self._dtype, self._device)
            objective.fixed |= self._fixed.to(self._device)
            for name in self._terms:
                self._place(name)
            self._plain_parts = objective, Cycle(objective, self.symmetry.birth)
        return self._plain_parts

    def _step_plain(self, tensors: dict[str, Tensor]) -> None:
        objective, cycle = self._plain()
        objective.load(tensors.__getitem__)
        s = torch.zeros_like(self.log_t, dtype=objective.dtype)
        for _ in range(self.cycles):
            s = cycle.run(s)
        s = self._representable(s, tensors)
        padded = torch.cat([s, s.new_zeros(1)])
        self.log_t += s
        self._gains.measure_(self.log_t)
        for name, tensor in tensors.items():
            factor = self._place(name).factor(padded)
            tensor.mul_(factor)
            if self.gradients and tensor.grad is not None:
                tensor.grad.div_(factor)
            carry_state_(self.optimizer, tensor, factor, self._gain_change(name))
            for other in self.companions:
                twin = other.tensor(name)
                twin.mul_(factor.to(twin.device))

    def _representable(self, s: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Half precision has little range: a scale that would leave it stays where it is."""
        if all(q.dtype != torch.float16 for q in tensors.values()):
            return s
        terms = [self._place(w.name) for w in self.symmetry.moving]
        return torch.where(_beyond_range(terms, tensors.__getitem__, s), 0.0, s)

    # -- the same in fused kernels -------------------------------------------------------------------------------------

    def _fuse(self) -> FusedCycle | ForeachCycle | None:
        """The fused step of the first backend that can be used; None for the plain one."""
        from .steps.plan import InexpressibleError

        tensors = list(self._tensors().values())
        fused = ("triton", "foreach") if self._device.type == "cuda" else ("foreach",)
        for backend in (*fused, "plain") if self._wanted == "auto" else (self._wanted,):
            self.backend = backend
            if backend == "plain":
                return None
            reason = _why_not(backend, tensors)
            try:
                if not reason:
                    return self._fused_by(backend, tensors)
            except InexpressibleError as inexpressible:
                reason = str(inexpressible)
            self.why_not[backend] = reason
        raise ValueError(f"backend={self._wanted!r} is not possible here: {self.why_not[self._wanted]}")

    def _fused_by(self, backend: str, tensors: list[Tensor]) -> FusedCycle | ForeachCycle:
        from .steps.plan import anatomy

        net = anatomy(
            list(self._terms.values()), tensors, self.symmetry.num_scales, self.symmetry.birth, self._counted,
            self.p, self.c, fixed=self._fixed, gains=self.bias == "safe",
        )  # fmt: skip
        shared = net, tensors, self.p, self._dtype, self.log_t, self._gains, self.cycles
        if backend == "triton":
            from .steps.triton import FusedCycle

            return FusedCycle(*shared)
        from .steps.foreach import ForeachCycle

        return ForeachCycle(*shared)

    def _look(self, tensors: dict[str, Tensor]) -> list[Any]:
        """All that a step depends on besides values: whatever moves, where it lies and how; empty if that is unsure."""
        state = self.optimizer.state
        found: list[Any] = [state_rule(self.optimizer)]
        for name, q in tensors.items():
            held = state.get(q, {})
            moved = [q, *held.values(), *((q.grad,) if self.gradients else ())]
            moved += [other.tensor(name) for other in self.companions]
            found += held
            for x in moved:
                if type(x) not in ORDINARY:
                    found.append(type(x))
                    if isinstance(x, Tensor):
                        return []
                else:
                    found += (x.data_ptr(), x.dtype, x.shape, x.stride())
        return found

    def _repeat(self, fused: FusedCycle | ForeachCycle, tensors: dict[str, Tensor]) -> None:
        """The step before once more, on the same tensors."""
        fused.sweep(self.cycles)
        fused.move()
        torch.autograd.graph.increment_version([*tensors.values()])

    def _step_fused(self, fused: FusedCycle | ForeachCycle, tensors: dict[str, Tensor]) -> None:
        from .steps.plan import Slot

        self._seen = []
        weights = list(tensors.values())
        state = powered_state(self.optimizer, weights)
        slots = {key: Slot(fused.fitting(held), power, self._linear) for key, (power, held) in state.items()}
        twins = [Slot(fused.fitting(other.tensor(name) for name in tensors), 1.0) for other in self.companions]
        gradients = [Slot(fused.fitting(q.grad for q in weights), -1.0)] if self.gradients else []
        fused.bind([Slot(weights, 1.0), *slots.values(), *twins, *gradients])
        s = fused.sweep(self.cycles)[:-1]
        if (representable := self._representable(s, tensors)) is not s:
            s.copy_(representable)
        fused.move()
        torch.autograd.graph.increment_version(weights)
        # what the kernels do not reach (odd layouts, other devices, state that takes a function) follows after them
        complete = True
        for i, (name, tensor) in enumerate(tensors.items()):
            carried = {key for key, slot in slots.items() if slot.tensors[i] is not None}
            missing = any(held[i] is not None for key, (_, held) in state.items() if key not in carried)
            gradient = tensor.grad if gradients and gradients[0].tensors[i] is None else None
            others = [other.tensor(name) for other, slot in zip(self.companions, twins, strict=True)
                      if slot.tensors[i] is None]  # fmt: skip
            state_left = missing or needs_functions(self.optimizer, tensor)
            if not (state_left or others or gradient is not None):
                continue
            complete = False
            factor = self._place(name).factor(fused.s)
            if gradient is not None:
                gradient.div_(factor)
            if state_left:
                carry_state_(self.optimizer, tensor, factor, self._gain_change(name), skip=carried)
            for twin in others:
                twin.mul_(factor.to(twin.device))
        if complete and representable is s and fused.repeats:
            self._seen = self._look(tensors)

    # -- safe biases ---------------------------------------------------------------------------------------------------

    @property
    def _linear(self) -> bool:
        return step_is_linear(self.optimizer)

    def _gain_change(self, name: str) -> Tensor | None:
        """By how much the gradient of a safe bias changed because of its gain, where that is multiplied by t²."""
        return self._gains.change_of[name].exp() if self._linear and name in self._gains.change_of else None

    def _hook_biases(self) -> None:
        if not self._gains:
            return
        saved: dict[str, Tensor] = {}

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._linear:
                saved.update({name: self.symmetry.tensor(name).detach().clone() for name in self._gains.t_of})
                return None
            closure = _closure(args, kwargs)
            if closure is None:
                self._scale_bias_gradients(saved)
                return None

            def scaled_closure() -> Any:  # the gradients come from the closure, so they are scaled after it
                self._restore_bias_gradients(saved)
                loss = closure()
                self._scale_bias_gradients(saved)
                return loss

            return (args[0], scaled_closure), {}

        def after(*_: Any) -> None:
            if self._linear:
                self._restore_bias_gradients(saved)
            else:
                self._shorten_bias_steps(saved)
            saved.clear()

        self._handles = [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]

    @torch.no_grad()
    def _scale_bias_gradients(self, saved: dict[str, Tensor]) -> None:
        """Linear steps: the optimizer sees t²·g. Weight decay is added by the optimizer later, so it is not scaled."""
        present = {name: q.grad for name in self._gains.t_of if (q := self.symmetry.tensor(name)).grad is not None}
        if not present:
            return
        gradients = list(present.values())
        saved.update(zip(present, torch._foreach_mul(gradients, 1.0), strict=True))  # copies, in one launch
        squares = self._gains.squares(torch.promote_types(gradients[0].dtype, torch.float32))
        torch._foreach_mul_(gradients, [squares[name] for name in present])

    @torch.no_grad()
    def _restore_bias_gradients(self, saved: dict[str, Tensor]) -> None:
        pairs = [(q.grad, old) for name, old in saved.items() if (q := self.symmetry.tensor(name)).grad is not None]
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [old for _, old in pairs])
        saved.clear()

    @torch.no_grad()
    def _shorten_bias_steps(self, saved: dict[str, Tensor]) -> None:
        """Normalized steps: multiply the step that was made by t; decoupled weight decay is not part of it."""
        skipped = getattr(self.optimizer, "found_inf", None)  # a fused optimizer under GradScaler may have done nothing
        decay = {id(q): decoupled_decay(self.optimizer, g) for g in self.optimizer.param_groups for q in g["params"]}
        for name, t in self._gains.t_of.items():
            tensor, old = self.symmetry.tensor(name), saved[name]
            if tensor.grad is None:
                continue
            decayed = old * (1 - decay[id(tensor)])
            shortened = decayed + t.to(tensor) * (tensor - decayed)
            tensor.copy_(shortened if skipped is None else torch.where(skipped.bool(), old, shortened))

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ENorm:
        """A copy on copies of model and optimizer. (Optimizers drop their hooks when copied; they are put back.)"""
        model = copy.deepcopy(self.symmetry.model, memo)
        optimizer = copy.deepcopy(self.optimizer, memo)
        twin = self.bind(model, optimizer)
        twin.companions = [other.bind(copy.deepcopy(other.model, memo)) for other in self.companions]
        memo[id(self)] = twin
        if self._attached is not None:
            twin.attach()
        return twin


class Gains:
    """t of each safe bias: the geometric mean of the scales of its layer's inputs, since the start of training.

    One number per bias, or one per channel where the inputs depend on it (grouped convolutions); all in one tensor `t`.
    """

    def __init__(self, owned: Sequence[ScaledParameter], log_t: Tensor) -> None:
        fan_ins = {w.name: w.fan_in for w in owned if w.fan_in is not None}
        device = log_t.device
        counts = {name: term.index[..., 0].numel() for name, term in fan_ins.items()}
        lengths = [term.index.shape[-1] for name, term in fan_ins.items() for _ in range(counts[name])]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        empty = torch.zeros(0, dtype=torch.int64)
        index = torch.cat([empty, *(term.index.reshape(-1) for term in fan_ins.values())])
        share = torch.cat([empty.double(), *(term.exponent.expand_as(term.index).reshape(-1) / term.index.shape[-1]
                                             for term in fan_ins.values())])  # fmt: skip
        self._index, self._share = index.to(device), share.to(log_t)
        self._mean = Sum(segment, len(lengths), device)
        self.t, self.change = torch.ones_like(log_t[:1]).repeat(len(lengths)), log_t.new_zeros(len(lengths))
        self.t_of, self.change_of = (dict(self._parts(x, fan_ins, counts)) for x in (self.t, self.change))
        numbers = torch.arange(len(lengths))
        self._shapes = {w.name: w.shape for w in owned}
        places = [p.expand(self._shapes[name]).reshape(-1) for name, p in self._parts(numbers, fan_ins, counts)]
        self._places = torch.cat([empty, *places]).to(device)
        if len(self):
            self.measure_(log_t)

    @staticmethod
    def _parts(whole: Tensor, fan_ins: Mapping[str, Term], counts: Mapping[str, int]) -> Iterable[tuple[str, Tensor]]:
        for (name, term), part in zip(fan_ins.items(), whole.split([*counts.values()]), strict=True):
            yield name, part.view(term.index.shape[:-1])

    def __len__(self) -> int:
        return len(self.t)

    def measure_(self, log_t: Tensor) -> None:
        """Read t off the scales; `change` is what log t² changes by. In place: captured graphs read the new ones."""
        if not len(self):
            return
        new = self._mean(torch.cat([log_t, log_t.new_zeros(1)])[self._index] * self._share)
        self.change.copy_(2 * (new - self.t.log()))
        self.t.copy_(new.exp())

    def squares(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """t² for every element of each safe bias."""
        parts = self.t.square()[self._places].to(dtype).split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


class _Handle(RemovableHandle):
    """Removes the hook and lets the ENorm be attached again."""

    def __init__(self, enorm: ENorm, handle: RemovableHandle) -> None:
        self._enorm, self._handle = enorm, handle

    def remove(self) -> None:
        self._handle.remove()
        self._enorm._attached = None


def _at(model: nn.Module, path: Sequence[str]) -> Tensor | None:
    """A parameter, found in a tenth of the time that `get_parameter` takes; None if that has to look."""
    module: nn.Module | None = model
    for part in path[:-1]:
        module = module._modules.get(part) if module is not None else None
    return None if module is None else module._parameters.get(path[-1])


def _why_not(backend: str, tensors: Sequence[Tensor]) -> str:
    """Why a backend cannot be used on these parameters; empty if it can."""
    from .steps.plan import Followers

    device = tensors[0].device
    for q in tensors:
        if q.device != device:
            return f"parameters are on {device} and on {q.device}"
        if type(q) not in (Tensor, nn.Parameter) or q.layout != torch.strided:
            return f"a parameter is a {type(q).__name__} of layout {q.layout}"
        if q.dtype not in Followers.dtypes:
            return f"a parameter has dtype {q.dtype}"
    if backend == "foreach":
        return "" if device.type in ("cpu", "cuda") else f"it has not been tried on {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from .steps.triton import can_launch

    return "" if can_launch(device) else f"its kernels do not run on {device.type}"


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure of `optimizer.step(closure)`, if there is one; hooks get the optimizer as the first argument."""
    found: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return found


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, AveragedModel) else model


# -- scales as learned parameters --------------------------------------------------------------------------------------


class ImplicitENorm(nn.Module):
    """Rescaling coefficients as parameters, trained with the weights (stock2019, appendix C).

    The loss gets a penalty λ · Σ_k c^(p·depth) ‖D_{k-1}⁻¹ W_k D_k‖_p^p instead of weight decay. The data term does not
    depend on the coefficients, so only the penalty moves them.

        implicit = equinorm.ImplicitENorm(model, example_inputs, decay=1e-3)
        optimizer = SGD([*model.parameters(), *implicit.parameters()], lr=0.1)      # no weight decay
        loss = criterion(model(x), y) + implicit()
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        decay: float = 1e-3,
        *,
        p: float = 2.0,
        c: float = 1.0,
        parameters: Iterable[str] | Callable[[str], bool] | None = None,
        keep: Iterable[str] = (),
        symmetry: Symmetry | None = None,
    ) -> None:
        super().__init__()
        found = _symmetry(model, example_inputs, symmetry, keep=keep)
        if not found.num_scales:
            raise ValueError(f"nothing to rescale.\n{found.explain().summary}")
        self._symmetry = [found]  # in a list, so that the model does not become a submodule
        self.decay, self.p, self.c = decay, p, c
        counted = _counted(found, parameters)
        self._layouts = layouts(found, p, c, counted)
        self._fixed = [(w.name, c ** (p * w.depth)) for w in found.parameters if counted(w) and not w.moves]
        first = found.tensor(found.moving[0].name)
        self.scales = nn.Parameter(torch.ones(found.num_scales, dtype=first.dtype, device=first.device))
        self._made: Objective | None = None

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry[0]

    def forward(self) -> Tensor:
        """The penalty, differentiable in weights and coefficients."""
        objective, tensor = self._objective(), self.symmetry.tensor
        with torch.autocast(self.scales.device.type, enabled=False):
            factors = (self.p * objective.gather(self.scales.to(objective.dtype).abs().log())).exp()
            parts = [
                rows * times(layout.reduce(tensor(layout.name), self.p, objective.dtype), columns)
                for layout, (rows, columns) in zip(self._layouts, objective.split(factors), strict=True)
            ]
            parts += [weight * powers_of(tensor(name), self.p, objective.dtype).sum() for name, weight in self._fixed]
            return self.decay * torch.cat([part.reshape(-1) for part in parts]).sum()

    def _objective(self) -> Objective:
        """The norm as a function of the coefficients, with its tables where these are now."""
        device, dtype = self.scales.device, torch.promote_types(self.scales.dtype, torch.float32)
        if self._made is None or (self._made.device, self._made.dtype) != (device, dtype):
            self._made = Objective(self.symmetry.num_scales, self.p, self._layouts, dtype, device)
        return self._made

    @torch.no_grad()
    def fold_(self) -> None:
        """Put the learned coefficients into the weights, which keeps the function, and set them back to 1."""
        self.symmetry.rescale_(self.scales.detach().double().abs().log())
        self.scales.fill_(1.0)


__all__ = ["BalanceReport", "ENorm", "ImplicitENorm", "balance_"]
