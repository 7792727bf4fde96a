"""Safe biases: biases whose effective learning rate stays bounded when ENorm with c ≠ 1 shrinks the scales.

A stored bias b' = b·t has the gradient g/t, so its effective learning rate is lr/t². A bias is a weight from a constant
unit; scaling that unit like the layer's other inputs, by t_in, bounds it:

    linear steps (SGD):         the optimizer sees t_in²·g, and `.grad` is put back after its step
    normalized steps (Adam):    the step that was made is multiplied by t_in

docs/enorm.md, section Biases, has the derivation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..criteria.norm import Sum
from ..models.closures import closure_of, with_closure
from ..models.sharding import local
from ..symmetry import ScaledParameter, Symmetry, Term
from .optimizer_state import decoupled_decay, step_is_linear

__all__ = ["Gains", "SafeBiases"]


class SafeBiases:
    """The safe biases of one model, and what has to be done about them around every step of its optimizer.

        biases = SafeBiases(symmetry, optimizer, parameters)
        biases.measure(log_t)             # reads the gains off the scales, on their device
        biases.before_step()
        optimizer.step()
        biases.after_step()

    `ENorm` has hooks do that, and `ENormSGD` does it within its own step; each moves `gains` on as the scales move.
    """

    def __init__(self, symmetry: Symmetry, optimizer: Optimizer, parameters: Sequence[ScaledParameter]) -> None:
        """`parameters`: the biases that are safe, or their parts that are here; each has a `fan_in`."""
        self.symmetry, self.optimizer, self.parameters = symmetry, optimizer, tuple(parameters)
        self.attended = False  # somebody sees to them in every step
        self._before: dict[str, Tensor] = {}  # of a linear step the gradients, of a normalized one the biases
        self._pending = False
        self._versions: list[int] | None = None
        self._warned = False

    def __len__(self) -> int:
        return len(self.parameters)

    def measure(self, log_t: Tensor) -> None:
        """Make the gains anew from the scales since the start of training, on their device."""
        self.gains = Gains(self.parameters, log_t)

    # -- around a step -------------------------------------------------------------------------------------------------

    @property
    def linear(self) -> bool:
        """Whether the optimizer's step is linear in the gradient, so that scaling the gradient scales the step."""
        return step_is_linear(self.optimizer)

    @property
    def pending(self) -> bool:
        """Whether a step was prepared that has not been finished."""
        return self._pending

    def before_step(self) -> None:
        """Prepare a step on the gradients that there are."""
        self._pending = True
        if self.linear:
            self._scale_gradients()
        else:
            self._before.update({w.name: self.symmetry.values(w.name).detach().clone() for w in self.parameters})

    def after_step(self) -> None:
        """Finish a step that was prepared."""
        if self.linear:
            self._restore_gradients()
        else:
            self._shorten_steps()
        self.forget()
        self.watch()

    def before_hook(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For `register_step_pre_hook`; gradients that a closure makes are scaled after it."""
        closure = closure_of(args, kwargs)
        if closure is None or not self.linear:
            self.before_step()
            return None
        self._pending = True

        def scaled_closure() -> Any:
            self._restore_gradients()
            loss = closure()
            self._scale_gradients()
            return loss

        return with_closure(args, kwargs, scaled_closure)

    def forget(self) -> None:
        """Drop what was prepared for a step that will not be finished."""
        self._before.clear()
        self._pending = False

    @torch.no_grad()
    def _scale_gradients(self) -> None:
        """Linear steps: the optimizer sees t²·g. Weight decay is added by the optimizer later, so it is not scaled."""
        tensors = {w.name: self.symmetry.tensor(w.name) for w in self.parameters}
        present = {name: local(q.grad) for name, q in tensors.items() if q.grad is not None}
        if not present:
            return
        gradients = list(present.values())
        self._before.update(zip(present, torch._foreach_mul(gradients, 1.0), strict=True))  # copies, in one launch
        squares = self.gains.squares(torch.promote_types(gradients[0].dtype, torch.float32))
        torch._foreach_mul_(gradients, [squares[name] for name in present])

    @torch.no_grad()
    def _restore_gradients(self) -> None:
        tensors = {name: self.symmetry.tensor(name) for name in self._before}
        pairs = [(local(q.grad), self._before[name]) for name, q in tensors.items() if q.grad is not None]
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [old for _, old in pairs])
        self._before.clear()

    @torch.no_grad()
    def _shorten_steps(self) -> None:
        """Normalized steps: multiply the step that was made by t; decoupled weight decay is not part of it."""
        skipped = getattr(self.optimizer, "found_inf", None)  # a fused optimizer under GradScaler may have done nothing
        decay = {id(q): decoupled_decay(self.optimizer, g) for g in self.optimizer.param_groups for q in g["params"]}
        for name, t in self.gains.t_of.items():
            tensor, old = self.symmetry.tensor(name), self._before[name]
            if tensor.grad is None:
                continue
            here = local(tensor)
            decayed = old * (1 - decay[id(tensor)])
            shortened = decayed + t.to(here) * (here - decayed)
            here.copy_(shortened if skipped is None else torch.where(skipped.bool(), old, shortened))

    # -- what a rescaling asks -----------------------------------------------------------------------------------------

    def gradient_gain(self, name: str) -> Tensor | None:
        """By how much the gradient that the optimizer sees has changed by its gain; None: it has none that counts."""
        return self.gains.change_of[name].exp() if self.linear and name in self.gains.change_of else None

    # -- steps that nobody prepared ------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Note the biases as they are, so that `warn_if_unsafe` sees a step on them."""
        if self._warned or self.attended:
            return
        self._versions = [self.symmetry.tensor(w.name)._version for w in self.parameters]

    def warn_if_unsafe(self, stacklevel: int) -> None:
        """Warn, once, of a step on the biases since `watch` for which nothing was prepared."""
        if self._warned or self.attended or self._versions is None:
            return
        if self._versions != [self.symmetry.tensor(w.name)._version for w in self.parameters]:
            self._warned = True
            warnings.warn(
                "the optimizer's step did not see that biases are safe: attach() this ENorm, or call its before_step() "
                'before every optimizer.step(), or ask for bias="plain"',
                stacklevel=stacklevel + 1,
            )


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
        shares = [term.exponent.expand_as(term.index) / term.index.shape[-1] for term in fan_ins.values()]
        share = torch.cat([empty.double(), *(x.reshape(-1) for x in shares)])
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
