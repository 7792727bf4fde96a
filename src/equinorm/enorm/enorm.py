"""ENorm in training: one cycle after every optimizer step (stock2019, algorithm 2)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..balance import counting, symmetry_of
from ..criteria import Criterion, Norm
from ..launch import ORDINARY
from ..models.frozen import Frozen, check_frozen, held_by, untrained
from ..models.handle import Handle
from ..models.sharding import reshard
from ..models.undo import interrupts_deferred
from ..models.unwrapping import unwrap_optimizers
from ..symmetry import ScaledParameter, Symmetry
from .biases import SafeBiases
from .optimizer_state import check_optimizer, state_rule
from .steps.backends import BACKENDS, prepare
from .steps.plain import PlainStep
from .steps.protocol import Problem, Step, TrainingState
from .steps.sharded import ShardedStep

__all__ = ["ENorm"]

BIASES = ("safe", "plain", "skip")
WRITES_IN_A_ROW = 3
"""Steps in a row before which others wrote to a weight: a checkpoint that is loaded or an average that is tried is no
habit of the program."""
_ATTACHED: WeakSet[ENorm] = WeakSet()
"""All that act at present."""


class ENorm:
    """Keep a network balanced while it trains: one ENorm cycle after each optimizer step (stock2019, algorithm 2).

        enorm = equinorm.ENorm(model, optimizer, example_inputs, c=1.2)
        handle = enorm.attach()         # acts in every optimizer.step() until handle.remove()

    A loop by hand calls `enorm.before_step()`, `optimizer.step()` and `enorm.step()`. Before `attach` nothing is
    installed anywhere.

    The function does not change; weights, accumulated gradients, the optimizer's state and companions all move to the
    new coordinates together, in place.

    Args:
        model, optimizer: the optimizer must hold the parameters of the model that move. Several, `[muon, adamw]`, act
            as one: a cycle comes when all have stepped. Either may be wrapped (compile, DDP, accelerate, Opacus, PEFT).
        example_inputs: as in `equinorm.trace`.
        p, c: norm and asymmetry. c > 1 moves energy towards the output; 1.2 is stock2019's choice for deep FC nets.
        cycles: ENorm cycles each time.
        every: act on every n-th call of `step`.
        criterion: `criteria.Norm(p, c)` in place of p and c; no other criterion has cycles.
        bias: "safe" (default) keeps the effective learning rate of biases bounded when c ≠ 1, see below; "plain" only
            rescales them, as stock2019 does; "skip" leaves every scale alone that would move a bias.
        batchnorm: "preserve" carries scales by BatchNorm's gain and offset; "ignore" treats BatchNorm as absent, as
            stock2019 and repro2019 did for ENorm + BN: that changes the function.
        parameters, keep: as in `equinorm.balance_`.
        frozen: "keep" (default): what does not train stays as it is, that is parameters with `requires_grad=False` and
            those that the optimizer does not hold; scales that would move them are left alone (`kept` names them).
            "move": they move with the others, which keeps the function too, but not a checkpoint of the rest alone.
        companions: other copies of the model that must keep computing what they compute (AveragedModel, timm's
            ModelEmaV3, Lightning's EMAWeightAveraging).
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
        optimizer: Optimizer | Sequence[Optimizer],
        example_inputs: Any = None,
        *,
        p: float = 2.0,
        c: float = 1.0,
        cycles: int = 1,
        every: int = 1,
        criterion: Criterion | None = None,
        bias: str = "safe",
        batchnorm: str = "preserve",
        parameters: Iterable[str] | Callable[[str], bool] | None = None,
        keep: Iterable[str] = (),
        frozen: Frozen = "keep",
        companions: Iterable[nn.Module] = (),
        symmetry: Symmetry | None = None,
        gradients: bool = True,
        backend: str = "auto",
    ) -> None:
        p, c = _norm_of(criterion, p, c)
        for name, choice, known in (("bias", bias, BIASES), ("backend", backend, BACKENDS)):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")
        for name, number in (("p", p), ("c", c), ("cycles", cycles), ("every", every)):
            if not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive, got {number!r}")
        check_frozen(frozen)
        optimizers = unwrap_optimizers(optimizer)
        for each in optimizers:
            state_rule(each)
        symmetry = symmetry_of(model, example_inputs, symmetry, keep=keep, batchnorm=batchnorm)
        self.frozen = frozen
        self.kept = untrained(symmetry, optimizers) if frozen == "keep" else ()
        movable = symmetry.num_scales
        symmetry = symmetry.holding(self.kept)
        if movable and not symmetry.num_scales:
            names = ", ".join(self.kept[:3]) + (", ..." if len(self.kept) > 3 else "")
            raise ValueError(
                f"nothing to rescale: every scale of {type(symmetry.model).__name__} is held by parameters that do not "
                f"train ({names}): they have requires_grad=False, or the optimizer does not hold them. Make it from "
                "this model's parameters (after moving, copying or loading the model), or ask for frozen='move'"
            )
        if not symmetry.num_scales:
            raise ValueError(f"nothing to rescale.\n{symmetry.explain().summary}")
        self.symmetry, self.optimizers = symmetry, optimizers
        self.p, self.c, self.cycles, self.every, self.bias = float(p), float(c), int(cycles), int(every), bias
        self.companions = [symmetry.bind(other) for other in companions]
        self.gradients, self._requested = gradients, backend
        self._counts = counting(symmetry, parameters)
        self._handle: Handle | None = None
        self.prepared: Step
        self.why_not: dict[str, str]
        self._plain: PlainStep | None = None
        self._stepped: set[int] = set()  # the numbers of the optimizers that have stepped since the last cycle
        self._has_state = False  # of its own, loaded
        self._versions: dict[str, int] = {}  # of the weights after the last step, as torch counts what is written
        self._writes_in_a_row, self._warned_of_writers = 0, False
        self.calls = 0
        # a bias that writes to a frozen scale (the last layer's) does not move, but its layer's inputs do
        safe = [w for w in symmetry.parameters if bias == "safe" and w.fan_in is not None]
        self._terms = {w.name: w for w in dict.fromkeys([*symmetry.moving, *safe])}
        self._paths = {name: name.split(".") for name in self._terms}
        self._safe = [w.name for w in self._terms.values() if w in safe]  # in this order their gains are numbered
        self.biases = self._safe_biases()
        self._check_optimizer()
        self._prepare()

    def __repr__(self) -> str:
        attached = f"attached to {self._optimizer_names()}" if self.biases.attended else "not attached"
        return (
            f"ENorm({self.symmetry.num_scales:,} scales of {type(self.symmetry.model).__name__}, p={self.p:g}, "
            f"c={self.c:g}, bias={self.bias!r}, backend={self.backend!r}, {attached})"
        )

    # -- what a user calls ---------------------------------------------------------------------------------------------

    def attach(self) -> Handle:
        """Act by itself in every step of the optimizer, closures and `GradScaler` included, until `handle.remove()`.

        >>> with enorm.attach():
        ...     train()
        """
        if self._handle is not None:
            raise RuntimeError("this ENorm is attached already: remove() its handle first")
        self._refuse_a_second()
        hooks = []
        for number, optimizer in enumerate(self.optimizers):
            # not compiled along with a compiled optimizer.step(): what moves depends on where tensors lie
            hooks.append(optimizer.register_step_post_hook(torch.compiler.disable(partial(self._after_hook, number))))
            hooks.append(optimizer.register_step_pre_hook(torch.compiler.disable(partial(self._before_hook, number))))
        self.biases.attended = True
        _ATTACHED.add(self)
        self._handle = Handle(f"ENorm attached to {self._optimizer_names()}", hooks, then=self._detach)
        return self._handle

    @property
    def handle(self) -> Handle | None:
        """What `attach` returned; None when it is not attached. A copy of an attached ENorm has one of its own."""
        return self._handle

    def before_step(self) -> None:
        """In a loop by hand, right before `optimizer.step()`: have safe biases make the step that is meant for them.

        `step` finishes what this begins, so call it right after the optimizer's step, before a scheduler's and before
        gradients are set to zero. Where gradients come into being in a closure, or `GradScaler` unscales them or skips
        the step, this comes too early: `attach` there.
        """
        if self.biases.attended:
            raise RuntimeError("this ENorm acts in optimizer.step() by itself: do not call before_step()")
        self._refuse_a_second()
        if self.biases.pending:
            raise RuntimeError(
                "before_step() was called twice: call step() after every optimizer.step() (ENorm(..., every=n) acts on "
                "every n-th call only)"
            )
        if len(self.biases):
            self._warn_without_state(stacklevel=3)
            self._reshard()
            with interrupts_deferred():
                self.biases.before_step()

    @torch.no_grad()
    def step(self) -> None:
        """Balance after an optimizer step: `cycles` ENorm cycles, on every `every`-th call.

        All or nothing: what may fail comes before the first write, and Ctrl-C is heard when the step is complete.
        """
        if not self.biases.pending and self.c != 1.0:
            self.biases.warn_if_unsafe(stacklevel=3)  # of whoever calls this, through no_grad
        with interrupts_deferred():
            try:
                if self.biases.pending:
                    self.biases.after_step()
            finally:  # what is raised in one part is heard when the others are done
                self.calls += 1
                try:
                    if self.calls % self.every == 0:
                        self._balance()
                finally:
                    self.biases.watch()

    def bind(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> ENorm:
        """The same ENorm, with its state, on copies of the model and its optimizer; not attached."""
        twin = copy.copy(self)
        twin.symmetry, twin.optimizers = self.symmetry.bind(model), unwrap_optimizers(optimizer)
        twin._stepped = set()
        twin.biases = twin._safe_biases()
        twin._handle = None
        twin._check_optimizer()
        twin._prepare(self.log_t)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """The scales accumulated since the start of training, and the number of calls."""
        return {"log_t": self.log_t.detach().cpu().clone(), "calls": self.calls}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise, with nothing changed, unless `load_state_dict` can load this."""
        missing = [repr(key) for key in ("log_t", "calls") if key not in state]
        if missing:
            keys = ", ".join(map(repr, state)) or "no keys at all"
            raise ValueError(
                f"this state has no {' and no '.join(missing)}: load what ENorm.state_dict() returned, got {keys}"
            )
        log_t = state["log_t"]
        if log_t.shape != self.log_t.shape:
            raise ValueError(
                f"this state is for {len(log_t)} scales, the model has {len(self.log_t)}: "
                "load it into an ENorm made for the same architecture and options"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self._has_state = True
        self.log_t.copy_(state["log_t"])
        self.biases.gains.measure_(self.log_t)
        self.biases.watch()
        self.calls = int(state["calls"])

    @torch.no_grad()
    def imbalance(self) -> float:
        """The largest |log(incoming / outgoing mass)| at the present weights."""
        if self._plain is None:  # made when it is needed, which may be never
            self._plain = PlainStep(self.prepared.problem, self.log_t, self.biases.gains)
        return self._plain.imbalance(self._training_state())

    @property
    def optimizer(self) -> Any:
        """The optimizer that it acts on, without wrappers; of several, a list."""
        return self.optimizers[0] if len(self.optimizers) == 1 else list(self.optimizers)

    @property
    def backend(self) -> str:
        """What takes the steps."""
        return self.prepared.name

    def weights(self) -> dict[str, Tensor]:
        """The parameters that move, and safe biases, by name."""
        weights = {name: _at(self.symmetry.model, path) for name, path in self._paths.items()}
        return {name: self.symmetry.tensor(name) if q is None else q for name, q in weights.items()}

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _safe_biases(self) -> SafeBiases:
        here = {w.name: w for w in self.symmetry.local().parameters}
        return SafeBiases(self.symmetry, self.optimizers, [here[name] for name in self._safe])

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that holds other parameters than the model's, or state we cannot carry."""
        held = held_by(self.optimizers)
        tensors = {w.name: self.symmetry.tensor(w.name) for w in self.symmetry.moving}
        missing = [name for name, q in tensors.items() if q.requires_grad and id(q) not in held]
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(
                f"the optimizer does not hold {some}: make it from this model's parameters (after moving, copying or "
                'loading the model), or leave them as they are with frozen="keep"'
            )
        for name, q in tensors.items():
            if q.is_meta:
                raise ValueError(f"parameter {name!r} is on the meta device: give the model real weights first")
        for optimizer in self.optimizers:
            check_optimizer(optimizer, tensors.values())

    def _refuse_a_second(self) -> None:
        """Two of them would move the same weights twice, and each count half of it."""
        own, names = {id(each) for each in self.optimizers}, {id(q): name for name, q in self.weights().items()}
        inside = [held for each in self.optimizers if isinstance(held := getattr(each, "enorm", None), ENorm)]
        for other in (*_ATTACHED, *inside):
            if other is self or not (own & {id(each) for each in other.optimizers}):
                continue
            both = [names[id(q)] for q in other.weights().values() if id(q) in names]
            if both:
                raise RuntimeError(
                    f"{self._optimizer_names()} has an ENorm already, which moves {both[0]!r} too: {other!r}. Use that "
                    "one, or remove() the handle that its attach() returned"
                )

    def _optimizer_names(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def _prepare(self, log_t: Tensor | None = None) -> None:
        """Prepare a step for the parameters where they are now, with the scales since the start of training."""
        moving = self.symmetry.moving
        device = self.symmetry.tensor(moving[0].name).device
        wide = self.p > 4 or any(self.symmetry.tensor(w.name).dtype == torch.float64 for w in moving)
        dtype = torch.float64 if wide else torch.float32
        n = self.symmetry.num_scales
        exact = dtype if device.type == "mps" else torch.float64
        since = torch.zeros(n) if log_t is None else log_t
        self.log_t = since.to(device, exact, copy=True)
        self.biases.measure(self.log_t)
        problem = Problem(
            symmetry=self.symmetry,
            terms=self._terms,
            counts=self._counts,
            p=self.p,
            c=self.c,
            cycles=self.cycles,
            fixed=self._fixed(moving),
            safe=self.bias == "safe",
            dtype=dtype,
        )
        self._seen: list[Any] = []
        self.prepared, self.why_not = prepare(self._requested, problem, self.log_t, self.biases.gains)
        self._plain = self.prepared if isinstance(self.prepared, PlainStep) else None

    def _fixed(self, moving: Sequence[ScaledParameter]) -> Tensor:
        """Scale variables that stay where they are."""
        n = self.symmetry.num_scales
        fixed = torch.zeros(n + 1, dtype=torch.bool)
        self._frozen_now = self._frozen_since()
        for w in moving:
            if w.name in self._frozen_now or (self.bias == "skip" and not w.multiplicative):
                for term in (w.out, w.into):
                    if term is not None:
                        fixed[term.index.reshape(-1)] = True
        fixed[n] = True
        return fixed

    def _frozen_since(self) -> set[str]:
        """Parameters that trained when this was made and do not now."""
        if self.frozen == "move":
            return set()
        return {name for name, q in self.weights().items() if not q.requires_grad}

    def _detach(self) -> None:
        self._handle = None
        _ATTACHED.discard(self)
        self.biases.attended = False
        self.biases.forget()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _balance(self) -> None:
        state = self._training_state()
        if self._frozen_now != self._frozen_since():
            self._prepare(self.log_t)
            state = self._training_state()
        if self._seen and self._seen == self._look(state):
            self.prepared.repeat(state)
            return
        for optimizer in self.optimizers:
            check_optimizer(optimizer, state.weights.values())
        if not self.prepared.fits(state.weights.values()):
            self._prepare(self.log_t)  # the model was moved, or laid out anew in memory
            state = self._training_state()
        self._seen = []
        if self.prepared.step(state):
            self._seen = self._look(state)

    def _before_hook(self, number: int, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._warn_without_state(stacklevel=5)  # of whoever calls optimizer.step(), through torch's two frames
        self._warn_of_other_writers(stacklevel=5)
        if not len(self.biases):
            return None
        self._reshard()
        with interrupts_deferred():
            return self.biases.before_hook(number, args, kwargs)

    def _after_hook(self, number: int, *_: Any) -> None:
        """A cycle when all optimizers have stepped, or one a second time: the others may rest, or skip a step."""
        with interrupts_deferred():
            self.biases.after_step(number)
        again = number in self._stepped
        self._stepped.add(number)
        if len(self._stepped) == len(self.optimizers):
            self._stepped = set()
        elif again:
            self._stepped = {number}
        else:
            return
        self.step()
        self._versions = {name: q._version for name, q in self.weights().items() if not q.is_inference()}

    def _warn_of_other_writers(self, stacklevel: int) -> None:
        """Warn, once, of a weight that the program writes to between steps, time after time."""
        if not self._versions or self._warned_of_writers:
            return
        written = [name for name, q in self.weights().items() if q._version != self._versions.get(name, q._version)]
        self._versions = {}
        self._writes_in_a_row = self._writes_in_a_row + 1 if written else 0
        if self._writes_in_a_row == WRITES_IN_A_ROW:
            self._warned_of_writers = True
            warnings.warn(
                f"{written[0]} is written to between steps: if it is tied to another weight by copying, or held to a "
                "size, its scales are not free, although forward does not show it: leave it out with "
                f"keep=[{written[0]!r}] (docs: ENorm, Weights that are used outside forward)",
                stacklevel=stacklevel,
            )

    def _warn_without_state(self, stacklevel: int) -> None:
        """Warn, before the first step, where the optimizer has made steps and nothing is known of the scales then."""
        if not len(self.biases) or self.calls or self._has_state or self.biases.pending:
            return
        self._has_state = True
        tensors = [self.symmetry.tensor(name) for name in self._terms]
        if any(_has_stepped(optimizer.state.get(q)) for optimizer in self.optimizers for q in tensors):
            warnings.warn(
                f"{self._optimizer_names()} has made steps already and this ENorm begins anew: if training is resumed, "
                "load its state too, enorm.load_state_dict(...), or biases go on with other learning rates; if it "
                "begins here, say so by enorm.load_state_dict(enorm.state_dict())",
                stacklevel=stacklevel,
            )

    def _reshard(self) -> None:
        """A forward pass without a backward leaves whole weights in the place of shards: those would move in vain."""
        if self.backend == ShardedStep.name:
            reshard(self.symmetry.model)
            for other in self.companions:
                reshard(other.model)

    def _training_state(self) -> TrainingState:
        self._reshard()
        return TrainingState(self.weights(), self.optimizers, self.companions, self.gradients, self.biases)

    def _look(self, state: TrainingState) -> list[Any]:
        """All that a step depends on besides values: whatever moves, where it lies and how; empty if that is unsure."""
        seen: list[Any] = [state_rule(optimizer) for optimizer in self.optimizers]
        for name, q in state.weights.items():
            moved = [q, *((q.grad,) if self.gradients else ())]
            for optimizer in self.optimizers:
                held = optimizer.state.get(q, {})
                moved += held.values()
                seen += held
            moved += [other.tensor(name) for other in self.companions]
            for x in moved:
                if type(x) not in ORDINARY:
                    seen.append(type(x))
                    if isinstance(x, Tensor):
                        return []
                else:
                    seen += (x.data_ptr(), x.dtype, x.shape, x.stride())
        return seen

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ENorm:
        """A copy on copies of model and optimizer. (Optimizers drop their hooks when copied; they are put back.)"""
        model = copy.deepcopy(self.symmetry.model, memo)
        twin = self.bind(model, [copy.deepcopy(optimizer, memo) for optimizer in self.optimizers])
        twin.companions = [other.bind(copy.deepcopy(other.model, memo)) for other in self.companions]
        memo[id(self)] = twin
        if self._handle is not None:
            twin.attach()
        return twin


def _at(model: nn.Module, path: Sequence[str]) -> Tensor | None:
    """A parameter, found in a tenth of the time that `get_parameter` takes; None if that has to look."""
    module: nn.Module | None = model
    for part in path[:-1]:
        module = module._modules.get(part) if module is not None else None
    return None if module is None else module._parameters.get(path[-1])


def _has_stepped(state: Mapping[str, Any] | None) -> bool:
    """Whether an optimizer has made steps with a parameter, whose state it may have before the first (Adagrad)."""
    return bool(state) and float(state.get("step", 1)) > 0  # type: ignore[union-attr]


def _norm_of(criterion: Criterion | None, p: float, c: float) -> tuple[float, float]:
    """p and c, which a criterion may give in their place."""
    if criterion is None:
        return p, c
    if not isinstance(criterion, Norm):
        name = type(criterion).__name__
        raise TypeError(
            f"ENorm's cycle is the exact step of a norm, and there is none for {name}: pass criterion=Norm(p, c), or "
            f"call equinorm.balance_(model, x, criterion={name}(...)) once, before training or after it"
        )
    if (p, c) != (2.0, 1.0):
        raise TypeError("p and c belong to the norm: pass criterion=Norm(p, c), or p and c, not both")
    return criterion.p, criterion.c
