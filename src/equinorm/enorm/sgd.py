"""SGD and one ENorm cycle in one optimizer; on a GPU the weights are read once for both (stock2019, algorithm 2)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..launch import is_capturing
from ..models.handle import Handle
from .enorm import ENorm

if TYPE_CHECKING:
    from .steps.triton import Descent, TritonStep

__all__ = ["ENormSGD"]

# torch wraps `step` so that it calls hooks, once any SGD was made; here the outer `step` has called them already
_descend_by_torch = inspect.unwrap(torch.optim.SGD.step)


class ENormSGD(torch.optim.SGD):
    """`torch.optim.SGD` that keeps the network balanced: each step is one of SGD and an ENorm cycle.

    >>> optimizer = ENormSGD(model, torch.randn(1, 3, 224, 224), lr=0.1, momentum=0.9, weight_decay=1e-4, c=1.2)
    >>> loss.backward(); optimizer.step()

    The same numbers as SGD with an attached `ENorm`, but on a GPU the pass that makes SGD's step also takes the sums
    that ENorm needs. Everything else is as in SGD: schedulers, `param_groups`, hooks, a learning rate that is a tensor
    (read on the device, so it may change between replays of a captured step). Its state dict also holds ENorm's.

    Args:
        model, example_inputs: as in `ENorm`. Pass the bare module, not a compiled or distributed wrapper.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in SGD.
        params: parameters or parameter groups, as SGD takes them; by default all that require a gradient.
        gradients: whether `.grad` moves along, see `ENorm`. Not by default: gradients are made anew after a step.
        balancing: p, c, cycles, every, bias, batchnorm, parameters, keep, companions, symmetry and backend of `ENorm`.

    The attribute `enorm` is the ENorm inside; `why_not` says why the last step was not fused, and is empty if it was.
    What is not fused is a step of torch's SGD and then one of ENorm: where ENorm's own kernels cannot be used, where a
    gradient does not lie in memory like its parameter, and in the first step if there is dampening.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        params: Iterable[Any] | None = None,
        maximize: bool = False,
        gradients: bool = False,
        **balancing: Any,
    ) -> None:
        trained = [q for q in model.parameters() if q.requires_grad] if params is None else params
        super().__init__(trained, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self._begin(_Inside(model, self, example_inputs, gradients=gradients, **balancing))

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nwith {self.enorm!r}"

    def _begin(self, enorm: ENorm) -> None:
        self.enorm = enorm
        enorm.biases.attended = True
        self.why_not = "no step was made yet"
        self._seen: list[Any] = []
        self._descent: Descent | None = None

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """SGD's step and ENorm's; with a closure, it is called first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        both = self._both_at_once()
        if both is None:
            self._step_apart()
        else:
            step, descent = both
            with step.descending(descent):
                self.enorm.step()
            # of those that ENorm does not know
            changed = [q for q in descent.parameters[step.memory.count :] if q.grad is not None]
            torch.autograd.graph.increment_version(changed)
        return loss

    def _step_apart(self) -> None:
        """Torch's step, then ENorm's."""
        self.enorm.biases.before_step()
        _descend_by_torch(self)
        self.enorm.step()

    # -- both at once --------------------------------------------------------------------------------------------------

    def _both_at_once(self) -> tuple[TritonStep, Descent] | None:
        """The pass that makes both steps, on the present tensors; None, and `why_not`, if there is none."""
        enorm = self.enorm
        if enorm.backend != "triton":
            self.why_not = f"ENorm's backend is {enorm.backend!r}"
            return None
        if (enorm.calls + 1) % enorm.every:
            self.why_not = "ENorm does not act in this step"
            return None
        step: Any = enorm.prepared
        group_of = {q: number for number, group in enumerate(self.param_groups) for q in group["params"]}
        parameters = list(dict.fromkeys([*enorm.weights().values(), *group_of]))  # those of ENorm first
        tensors = _Tensors(
            parameters=parameters,
            gradients=[q.grad if q in group_of else None for q in parameters],
            groups=[group_of.get(q, 0) for q in parameters],
        )
        if not is_capturing(step.device):
            self._make_momenta(tensors)
        tensors.momenta = [
            None if g is None or not self.param_groups[number]["momentum"] else self.state[q].get("momentum_buffer")
            for q, g, number in zip(parameters, tensors.gradients, tensors.groups, strict=True)
        ]
        seen = [step, *tensors.groups, *map(id, parameters)]
        seen += [_form(t) for some in (parameters, tensors.gradients, tensors.momenta) for t in some]
        if seen != self._seen:
            self._seen = []
            self.why_not = self._obstacle(step, tensors)
            if self.why_not:
                return None
            self._seen = seen
        self.why_not = ""
        descent = self._descent
        assert descent is not None
        used = self.param_groups[: max(tensors.groups) + 1]  # whatever comes after these holds no parameter
        descent.bind(tensors.gradients, tensors.momenta, [_numbers(group, step.device) for group in used])
        return step, descent

    def _make_momenta(self, tensors: _Tensors) -> None:
        """Averages of gradients that begin in this step. Torch begins with the gradient: from 0 that is the same."""
        for q, g, number in zip(tensors.parameters, tensors.gradients, tensors.groups, strict=True):
            group = self.param_groups[number]
            if g is None or g.layout != torch.strided or not group["momentum"] or group["dampening"]:
                continue
            if self.state[q].get("momentum_buffer") is None:
                self.state[q]["momentum_buffer"] = torch.zeros_like(q)

    def _obstacle(self, step: TritonStep, tensors: _Tensors) -> str:
        """Why these tensors cannot be stepped on at once; empty if they can, and then `_descent` is made for them."""
        from .steps.structure import InexpressibleError
        from .steps.triton import Descent

        parameters, gradients, momenta, groups = (
            tensors.parameters,
            tensors.gradients,
            tensors.momenta,
            tensors.groups,
        )
        if not step.fits(parameters[: step.memory.count]):
            return "the model was moved, or laid out anew in memory"
        descent = self._descent
        if descent is None or not descent.is_for(step, parameters, groups):
            if is_capturing(step.device):
                return "the step is captured, and none before it was made in the same way"
            try:
                descent = Descent(step, parameters, groups)
            except InexpressibleError as inexpressible:
                return str(inexpressible)
        for q, g, m, number in zip(parameters, gradients, momenta, groups, strict=True):
            if g is not None and m is None and self.param_groups[number]["momentum"]:
                return "averages of gradients begin with this step"
            if any(t is not None and t.dtype != q.dtype for t in (g, m)):
                return "a gradient or its average has another dtype than its parameter"
        for some in (gradients, momenta):
            if any((a is None) != (b is None) for a, b in zip(some, descent.fitting(some), strict=True)):
                return "a gradient or its average does not lie in memory like its parameter"
        self._descent = descent
        return ""

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """That of SGD; and ENorm's, as "enorm"."""
        return {**super().state_dict(), "enorm": self.enorm.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class, or of torch's SGD: then the scales start to count here."""
        enorm = state_dict.get("enorm", {"log_t": torch.zeros_like(self.enorm.log_t), "calls": 0})
        self.enorm.check_state(enorm)
        super().load_state_dict(dict(state_dict))
        self.enorm.load_state_dict(enorm)

    def __deepcopy__(self, memo: dict[int, Any]) -> ENormSGD:
        """A copy on a copy of the model. (Optimizers drop their hooks when copied.)"""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        model = copy.deepcopy(self.enorm.symmetry.model, memo)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._begin(self.enorm.bind(model, twin))
        twin.enorm.companions = [other.bind(copy.deepcopy(other.model, memo)) for other in self.enorm.companions]
        return twin


@dataclass
class _Tensors:
    """All parameters of the optimizer and of ENorm, and what belongs to each of them."""

    parameters: list[Tensor]
    gradients: list[Tensor | None]
    groups: list[int]  # the number of its parameter group
    momenta: list[Tensor | None] = field(default_factory=list)


class _Inside(ENorm):
    """ENorm as a part of its optimizer, which sees to safe biases and to calling it."""

    def attach(self) -> Handle:
        raise RuntimeError("ENormSGD takes ENorm's step within its own: there is nothing to attach")

    def __deepcopy__(self, memo: dict[int, Any]) -> ENorm:
        optimizer = copy.deepcopy(self.optimizer, memo)
        assert isinstance(optimizer, ENormSGD)
        return optimizer.enorm


def _form(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """How a tensor lies in memory, wherever that is."""
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.dtype, tensor.shape, strides


def _numbers(group: Mapping[str, Any], device: torch.device) -> tuple[float | Tensor, ...]:
    """What SGD's step is made with, as `Descent.bind` takes it."""
    numbers = (
        group["lr"],
        group["weight_decay"],
        group["momentum"],
        1.0 - group["dampening"],
        group["nesterov"],
        -1.0 if group["maximize"] else 1.0,
    )
    return tuple(x if isinstance(x, Tensor) and x.device == device else float(x) for x in numbers)
