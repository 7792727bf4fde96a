"""ENorm: the least-norm network among all that compute the same function (stock2019)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from .objective import Objective, imbalance, layouts
from .optimizers import carry_state_, check_optimizer, decoupled_decay, step_is_linear
from .solver import Cycle, Solution, hold_unbalanced, minimise
from .symmetry import ScaledParameter, Symmetry, trace
from .symmetry.symmetry import out_of_range

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
        beyond = _beyond_range(symmetry, solution.log_scales) & objective.free
        if not bool(beyond.any()):
            return solution
        objective.fixed[:-1] |= beyond


def _beyond_range(symmetry: Symmetry, log_scales: Tensor) -> Tensor:
    """Variables whose scale makes a parameter overflow or vanish."""
    beyond = torch.zeros(symmetry.num_scales + 1, dtype=torch.bool, device=log_scales.device)
    padded = torch.cat([log_scales, log_scales.new_zeros(1)])
    for w in symmetry.moving:
        tensor = symmetry.tensor(w.name)
        bad = out_of_range(tensor, w.factor(padded).to(padded.device))
        for term in (w.out, w.into):
            if term is not None:
                index, where = torch.broadcast_tensors(term.index.to(bad.device), bad)
                beyond.index_put_((index[where],), torch.ones((), dtype=torch.bool, device=beyond.device))
    return beyond[:-1]


def _touches(w: ScaledParameter, variables: Tensor) -> bool:
    chosen = torch.cat([variables.cpu(), torch.zeros(1, dtype=torch.bool)])
    return any(bool(chosen[term.index].any()) for term in (w.out, w.into) if term is not None)


# -- in training: one cycle after every step ---------------------------------------------------------------------------


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
    ) -> None:
        if bias not in ("safe", "plain", "skip"):
            raise ValueError(f"bias must be 'safe', 'plain' or 'skip', got {bias!r}")
        for name, number in (("p", p), ("c", c), ("cycles", cycles), ("every", every)):
            if not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive, got {number!r}")
        symmetry = _symmetry(model, example_inputs, symmetry, keep=keep, batchnorm=batchnorm)
        if not symmetry.num_scales:
            raise ValueError(f"nothing to rescale.\n{symmetry.explain().summary}")
        self.symmetry, self.optimizer = symmetry, optimizer
        self.p, self.c, self.cycles, self.every, self.bias = float(p), float(c), int(cycles), int(every), bias
        self.companions = [symmetry.bind(_inner(other)) for other in companions]
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
        check_optimizer(self.optimizer, tensors.values())
        self._objective.load(tensors.__getitem__)
        s = torch.zeros_like(self.log_t, dtype=self._objective.dtype)
        for _ in range(self.cycles):
            s = self._cycle.run(s)
        s = self._representable(s, tensors)
        self._move(s, tensors)

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        log_t = state["log_t"]
        if log_t.shape != self.log_t.shape:
            raise ValueError(
                f"this state is for {len(log_t)} scales, the model has {len(self.log_t)}: "
                "load it into an ENorm made for the same architecture and options"
            )
        self.log_t.copy_(log_t)
        self._set_gains(self._bias_gains())
        self.calls = int(state["calls"])

    @torch.no_grad()
    def imbalance(self) -> float:
        """The largest |log(incoming / outgoing mass)| at the present weights."""
        self._objective.load(self._tensors().__getitem__)
        point = self._objective.at(torch.zeros_like(self.log_t, dtype=self._objective.dtype))
        return float(imbalance(point, self._objective.free & (point.up > 0) & (point.down > 0)))

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
        dtype, device = (torch.float64 if wide else torch.float32), first.device
        n = self.symmetry.num_scales
        self._objective = Objective(n, self.p, layouts(self.symmetry, self.p, self.c, self._counted), dtype, device)
        if self.bias == "skip":
            for w in moving:
                for term in (w.out, w.into):
                    if term is not None and not w.multiplicative:
                        self._objective.fixed[term.index.reshape(-1).to(device)] = True
        self._cycle = Cycle(self._objective, self.symmetry.birth)
        # a bias that writes to a frozen scale (the last layer's) does not move, but its layer's inputs do
        owned = [w for w in self.symmetry.parameters if self.bias == "safe" and w.fan_in is not None]
        self._terms = {w.name: w.to(device) for w in dict.fromkeys([*moving, *owned])}
        exact = dtype if device.type == "mps" else torch.float64
        self.log_t = torch.zeros(n, dtype=exact, device=device) if log_t is None else log_t.to(device, exact, copy=True)
        self._gains = self._bias_gains()

    def _tensors(self) -> dict[str, Tensor]:
        return {name: self.symmetry.tensor(name) for name in self._terms}

    # -- moving to new coordinates -------------------------------------------------------------------------------------

    def _representable(self, s: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Half precision has little range: a scale that would leave it stays where it is."""
        if all(q.dtype != torch.float16 for q in tensors.values()):
            return s
        return torch.where(_beyond_range(self.symmetry, s), 0.0, s)

    def _move(self, s: Tensor, tensors: dict[str, Tensor]) -> None:
        """Multiply weights, gradients, optimizer state and companions by the factors of log-scales s."""
        padded = torch.cat([s, s.new_zeros(1)])
        self.log_t += s
        gains = self._bias_gains()
        for name, w in self._terms.items():
            tensor, factor = tensors[name], w.factor(padded)
            tensor.mul_(factor)
            if tensor.grad is not None:
                tensor.grad.div_(factor)
            gain = (gains[name] / self._gains[name]).square() if name in gains and self._linear else None
            carry_state_(self.optimizer, tensor, factor, gain)
            for other in self.companions:
                twin = other.tensor(name)
                twin.mul_(factor.to(twin.device))
        self._set_gains(gains)

    # -- safe biases ---------------------------------------------------------------------------------------------------

    @property
    def _linear(self) -> bool:
        return step_is_linear(self.optimizer)

    def _bias_gains(self) -> dict[str, Tensor]:
        """t of each safe bias: the geometric mean of the scales of its layer's inputs, since the start of training."""
        if self.bias != "safe":
            return {}
        padded = torch.cat([self.log_t, self.log_t.new_zeros(1)])
        return {w.name: w.fan_in.log_scale(padded).mean(-1).exp() for w in self._terms.values() if w.fan_in is not None}

    def _set_gains(self, gains: dict[str, Tensor]) -> None:
        for name, gain in gains.items():
            self._gains[name].copy_(gain)  # in place, so that a captured graph reads the new ones

    def _hook_biases(self) -> None:
        if not self._gains:
            return
        saved: dict[str, Tensor] = {}

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._linear:
                saved.update({name: self.symmetry.tensor(name).detach().clone() for name in self._gains})
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
        for name, t in self._gains.items():
            gradient = self.symmetry.tensor(name).grad
            if gradient is not None:
                saved[name] = gradient.clone()
                gradient.mul_(t.square())

    @torch.no_grad()
    def _restore_bias_gradients(self, saved: dict[str, Tensor]) -> None:
        for name, gradient in saved.items():
            present = self.symmetry.tensor(name).grad
            if present is not None:
                present.copy_(gradient)
        saved.clear()

    @torch.no_grad()
    def _shorten_bias_steps(self, saved: dict[str, Tensor]) -> None:
        """Normalized steps: multiply the step that was made by t; decoupled weight decay is not part of it."""
        skipped = getattr(self.optimizer, "found_inf", None)  # a fused optimizer under GradScaler may have done nothing
        decay = {id(q): decoupled_decay(self.optimizer, g) for g in self.optimizer.param_groups for q in g["params"]}
        for name, t in self._gains.items():
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


class _Handle(RemovableHandle):
    """Removes the hook and lets the ENorm be attached again."""

    def __init__(self, enorm: ENorm, handle: RemovableHandle) -> None:
        self._enorm, self._handle = enorm, handle

    def remove(self) -> None:
        self._handle.remove()
        self._enorm._attached = None


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
        self._counted = _counted(found, parameters)
        first = found.tensor(found.moving[0].name)
        self.scales = nn.Parameter(torch.ones(found.num_scales, dtype=first.dtype, device=first.device))
        self._terms = [w.to(first.device) for w in found.parameters if self._counted(w)]

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry[0]

    def forward(self) -> Tensor:
        """The penalty, differentiable in weights and coefficients."""
        padded = torch.cat([self.scales.abs().log(), self.scales.new_zeros(1)])
        total = self.scales.new_zeros(())
        for w in self._terms:
            scaled = self.symmetry.tensor(w.name) * w.factor(padded)
            total = total + self.c ** (self.p * w.depth) * scaled.abs().pow(self.p).sum()
        return self.decay * total

    @torch.no_grad()
    def fold_(self) -> None:
        """Put the learned coefficients into the weights, which keeps the function, and set them back to 1."""
        self.symmetry.rescale_(self.scales.detach().double().abs().log())
        self.scales.fill_(1.0)


__all__ = ["BalanceReport", "ENorm", "ImplicitENorm", "balance_"]
