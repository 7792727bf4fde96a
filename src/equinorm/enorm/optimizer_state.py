"""How an optimizer's state follows a rescaling of the weights.

ENorm multiplies a parameter in place by a positive factor f. The network computes what it did, but its
gradients change: in the new coordinates every gradient is g / f (stock2019, equation 10). What an optimizer
remembers must jump along; stock2019 (section 5) found ENorm much less effective without. How each piece of
state jumps follows from one requirement: *state carried through a rescaling equals the state that would have
been gathered in the new coordinates from the start.*

=====================================  =====  ================================================================
what the state is                      power  why
=====================================  =====  ================================================================
average of gradients                     -1   linear in g
average, sum or maximum of squares       -2   quadratic in g
largest gradient (Adamax)                -1   |g|
average of weights (ASGD)                +1   linear in w
average of normalized steps               0   g / sqrt(avg g²) does not see f (RMSprop's momentum_buffer)
average of their squares                  0   Adadelta's acc_delta, grown from eps, which has no coordinates
step sizes, counters                      0   Rprop's step_size follows signs only
row and column means of squares           -   those of the rescaled squares: `carry_factored_squares_`
=====================================  =====  ================================================================

Two things are carried approximately. Constants (`eps`, Adagrad's `initial_accumulator_value`) have no
coordinates and are taken as negligible. Coupled weight decay that went into a buffer is carried as the
gradient it was added to, as in stock2019.

Optimizers of other libraries are in `other_optimizers`, by the names of their classes. One of your own takes one
line; Lion, for example, keeps one average of gradients::

    equinorm.register_state_rule(Lion, {"exp_avg": -1}, decoupled=True)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..models.flat import refuse_flat_optimizer
from .other_optimizers import KNOWN, REFUSED, KnownOptimizer, SecondCopy, carry_factored_squares_

__all__ = [
    "StateRule",
    "carry_state_",
    "check_optimizer",
    "decoupled_decay",
    "needs_functions",
    "powered_state",
    "register_state_rule",
    "state_rule",
    "step_is_linear",
]

Carry = Callable[[dict[str, Any], Tensor, Tensor], None]
"""`carry(state, w, g)` changes `state` in place where weights are multiplied by `w` and gradients by `g`."""

Rules = Mapping[str | tuple[str, ...], float | Carry]


@dataclass(frozen=True)
class StateRule:
    """What equinorm knows about one optimizer class; made by `register_state_rule`."""

    powers: Mapping[str, float]
    """State key -> power of the factor: negative ones count gradients, positive ones weights, 0 leaves it."""
    together: Mapping[tuple[str, ...], Carry]
    """State keys that can only be carried together -> the function that does it."""
    linear: bool
    """The step is linear in the gradient: SGD, with or without momentum."""
    decoupled: bool | Callable[[Any, Mapping[str, Any]], Any]
    """Weight decay multiplies the weight itself; a group's `decoupled_weight_decay`, if any, goes first. Or the share
    of the weight that decay takes, of (optimizer, group)."""
    second_copy: SecondCopy | None = None
    """A copy of the weights that takes the steps, and that the weights follow: schedule-free's."""

    def __contains__(self, key: str) -> bool:
        return key in self.powers or any(key in keys for keys in self.together)


_RULES: dict[type, StateRule] = {}


def register_state_rule(
    optimizer_class: type[Optimizer], rules: Rules, *, linear: bool = False, decoupled: bool = False
) -> None:
    """Tell equinorm how the state of `optimizer_class`, and of its subclasses, follows a rescaling.

    `rules` maps each state key to a power: where a parameter is multiplied by f, the state is multiplied by
    f**power: -1 for averages of gradients, -2 for averages of squares, 1 for averages of weights, 0 for what
    stays. Keys that cannot be carried one by one are given as a tuple, with a function `(state, w, g)` that
    changes the state in place where weights are multiplied by the tensor `w` and gradients by `g`; it must
    not read values on the host. Name every key: one without a rule is refused, never guessed. The entry of
    the nearest class counts, as a whole; registering a class again replaces its entry.

    `linear`: the step is linear in the gradient (SGD), neither normalized (Adam) nor a sign (Lion).
    `decoupled`: lr·weight_decay multiplies the weight itself (AdamW, Lion) and does not enter the gradient.

    >>> register_state_rule(Lion, {"exp_avg": -1}, decoupled=True)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
    if optimizer_class is Optimizer:
        raise TypeError("a rule for torch.optim.Optimizer itself would be a guess about all others; name a class")
    _RULES[optimizer_class] = _made(optimizer_class.__name__, KnownOptimizer(rules, linear, decoupled))


def _made(name: str, known: KnownOptimizer) -> StateRule:
    """A rule, with powers and functions apart."""
    powers: dict[str, float] = {}
    together: dict[tuple[str, ...], Carry] = {}
    for key, rule in known.rules.items():
        if callable(rule):
            together[(key,) if isinstance(key, str) else tuple(key)] = rule
        elif isinstance(key, str) and isinstance(rule, int | float):
            powers[key] = float(rule)
        else:
            raise TypeError(
                f"the rule for state {key!r} of {name} must be a power for one key, "
                f"or a function (state, w, g) for one key or a tuple of keys; got {rule!r}"
            )
    names = [*powers, *(key for keys in together for key in keys)]
    if len(names) != len(set(names)):
        raise ValueError(f"two rules for one state key of {name}: {sorted(names)}")
    return StateRule(powers, together, known.linear, known.decoupled, known.second_copy)


def state_rule(optimizer: Optimizer | type[Optimizer]) -> StateRule:
    """The rule of the nearest class in the method resolution order that has one; TypeError if none has."""
    optimizer_class = optimizer if isinstance(optimizer, type) else type(optimizer)
    for base in optimizer_class.__mro__:
        if base in _RULES:
            return _RULES[base]
        known = KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return _RULES.setdefault(base, _made(base.__name__, known))
        if base.__name__ in REFUSED:
            raise TypeError(f"{base.__name__} cannot follow a rescaling of the weights: {REFUSED[base.__name__]}")
    refuse_flat_optimizer(optimizer)
    name = optimizer_class.__name__
    if not issubclass(optimizer_class, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {name}; of a wrapper, pass what it wraps")
    for base, reason in _REFUSED.items():
        if issubclass(optimizer_class, base):
            raise TypeError(f"{name} cannot follow a rescaling of the weights: {reason}")
    keys = {} if isinstance(optimizer, type) else {key: None for held in optimizer.state.values() for key in held}
    kept = f" It keeps {', '.join(map(repr, keys))}." if keys else ""
    raise TypeError(
        f"equinorm has no rule for how the state of {name} follows a rescaling of weights.{kept} {_remedy(name)}"
    )


def check_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Raise, with nothing touched, unless all state that `optimizer` holds for `params` can be carried.

    TypeError: the class has no rule. ValueError: some parameter's state has a key without a rule, or a shape
    or dtype that its rule does not fit. Both say what to do. State appears with the first step, so check before every
    rescaling; it costs a few dictionary lookups per parameter and reads no tensor.
    """
    rule = state_rule(optimizer)
    for param in params:
        # .get: `state` is a defaultdict, and looking must not create entries
        state = optimizer.state.get(param)
        if state:
            _check_state(type(optimizer).__name__, rule, state, param)


def _check_state(name: str, rule: StateRule, state: Mapping[str, Any], param: Tensor) -> None:
    for key, value in state.items():
        if key not in rule:
            there = ", ".join(map(repr, state))
            raise ValueError(
                f"{name} keeps a state {key!r} for which equinorm has no rule (it keeps {there}). {_remedy(name, key)}"
            )
        if value is None or rule.powers.get(key, 0.0) == 0.0:
            continue
        if not isinstance(value, Tensor) or value.shape != param.shape:
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"state {key!r} of {name} must have the parameter's shape {tuple(param.shape)} to follow a "
                f"power of the factor, but is {actual}. Give equinorm.register_state_rule a function for it"
            )
        if not (value.is_floating_point() or value.is_complex()) or value.is_quantized:
            raise ValueError(
                f"state {key!r} of {name} has dtype {value.dtype}, which cannot be multiplied by a factor. Give "
                "equinorm.register_state_rule a function that reads it, multiplies and writes it again"
            )
    for keys in rule.together:
        held = [key for key in keys if state.get(key) is not None]
        if held and len(held) < len(keys):
            raise ValueError(f"{name} can only carry the states {keys} together, but holds {held} alone")


def _remedy(name: str, key: str = "exp_avg") -> str:
    return (
        f"Tell it with equinorm.register_state_rule({name}, {{{key!r}: power, ...}}), all keys named: -1 "
        f"for averages of gradients, -2 for averages of squares, 1 for averages of weights, 0 for what stays"
    )


def powered_state(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[str, tuple[float, list[Tensor | None]]]:
    """The state that follows a power of the factor: key -> the power, and what each of `params` has there.

    >>> powered_state(sgd, [w])    # {"momentum_buffer": (-1.0, [tensor])}
    """
    states = [optimizer.state.get(param, {}) for param in params]
    powered: dict[str, tuple[float, list[Tensor | None]]] = {}
    for key, power in state_rule(optimizer).powers.items():
        held = [state.get(key) for state in states]
        if power != 0.0 and any(value is not None for value in held):
            powered[key] = (power, held)
    return powered


def needs_functions(optimizer: Optimizer, param: Tensor) -> bool:
    """Whether some state of `param` is carried by a function and not by a power of the factor (Adafactor's)."""
    state = optimizer.state.get(param, {})
    return any(state.get(keys[0]) is not None for keys in state_rule(optimizer).together)


@torch.no_grad()
def carry_state_(
    optimizer: Optimizer,
    param: Tensor,
    factor: Tensor,
    gradient_gain: Tensor | None = None,
    *,
    skip: Collection[str] = (),
) -> None:
    """Carry the state of `param` along as it is multiplied by `factor` (stock2019, eq. 10 and algorithm 2).

    `factor` is positive and broadcasts to the shape of `param`, which is not changed here. Nothing happens
    where there is no state yet. What `check_optimizer` refuses is refused here too, before any change.

    `gradient_gain` is for a parameter whose gradient is multiplied by a number before the optimizer sees it,
    like ENorm's safe bias, by t² with t the scale of its layer's input: the change of that number,
    (t_new / t_old)². Gradients then change by gradient_gain / factor; averages of weights still by factor.
    `skip` names state that follows a power of the factor and has been carried already.

    No value is read on the host, so this can be captured in a CUDA graph.
    """
    rule = state_rule(optimizer)
    state = optimizer.state.get(param)
    if not state:
        return
    _check_state(type(optimizer).__name__, rule, state, param)

    # 1/f² soon leaves the range of half precision, so powers are taken in float32 at least. In-place products
    # below are computed in that precision too and rounded once, into the state's own dtype.
    dtype = torch.promote_types(torch.promote_types(factor.dtype, param.dtype.to_real()), torch.float32)
    w = factor.to(dtype)
    g = w.reciprocal() if gradient_gain is None else gradient_gain.to(dtype) / w
    for key, power in rule.powers.items():
        value = state.get(key)
        if power != 0.0 and value is not None and key not in skip:
            value.mul_(w**power if power > 0.0 else g**-power)
    for keys, carry in rule.together.items():
        if state.get(keys[0]) is not None:
            carry(state, w.expand(param.shape), g.expand(param.shape))


def step_is_linear(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Whether twice the gradient makes twice the step: with SGD and ASGD, not with Adam, signs or Muon."""
    return state_rule(optimizer).linear


def decoupled_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float | Tensor:
    """The share d of the weight that decoupled decay takes in one step: w ← (1 - d)·w, then the step.

    d = lr·weight_decay for AdamW, Adafactor, Muon and where `decoupled_weight_decay` is set; 0 where decay is
    part of the gradient or absent. A tensor, without a sync, where `lr` is one. Read it before a scheduler
    moves `lr`; a parameter without a gradient is not decayed. ASGD's `lambd` is not counted: it follows a
    step size of its own, kept in the state.
    """
    decoupled = group.get("decoupled_weight_decay", state_rule(optimizer).decoupled)
    if not decoupled or not group.get("weight_decay", 0.0):
        return 0.0
    decay: float | Tensor = decoupled(optimizer, group) if callable(decoupled) else group["lr"] * group["weight_decay"]
    return decay


def _carry_factored_squares(state: dict[str, Any], w: Tensor, g: Tensor) -> None:
    carry_factored_squares_(state["row_var"], state["col_var"], g)  # [..., o, 1] and [..., 1, i]


_ADAM: Rules = {"step": 0, "exp_avg": -1, "exp_avg_sq": -2}

# torch.optim by name: Adafactor and Muon are younger than the oldest torch we support.
_TORCH: dict[str, tuple[Rules, bool, bool]] = {
    # class: (rules, linear, decoupled)
    "SGD": ({"momentum_buffer": -1}, True, False),
    "ASGD": ({"step": 0, "eta": 0, "mu": 0, "ax": 1}, True, False),
    "Adam": ({**_ADAM, "max_exp_avg_sq": -2}, False, False),
    "AdamW": ({**_ADAM, "max_exp_avg_sq": -2}, False, True),
    "NAdam": ({**_ADAM, "mu_product": 0}, False, False),
    "RAdam": (_ADAM, False, False),  # linear in its first few steps, before it trusts its squares
    "Adamax": ({"step": 0, "exp_avg": -1, "exp_inf": -1}, False, False),
    "RMSprop": ({"step": 0, "square_avg": -2, "grad_avg": -1, "momentum_buffer": 0}, False, False),
    "Adagrad": ({"step": 0, "sum": -2}, False, False),
    "Adadelta": ({"step": 0, "square_avg": -2, "acc_delta": 0}, False, False),
    "Rprop": ({"step": 0, "prev": -1, "step_size": 0}, False, False),
    "Adafactor": (
        {"step": 0, "variance": -2, ("row_var", "col_var"): _carry_factored_squares},
        False,
        True,
    ),
    "Muon": ({"momentum_buffer": -1}, False, True),
}
for _name, (_rules, _linear, _decoupled) in _TORCH.items():
    if hasattr(torch.optim, _name):
        register_state_rule(getattr(torch.optim, _name), _rules, linear=_linear, decoupled=_decoupled)

_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "its history holds all parameters in one flat vector; use another optimizer",
    torch.optim.SparseAdam: "its gradients are sparse, factors are dense; use Adam and dense gradients",
}
