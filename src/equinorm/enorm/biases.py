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
from ..models.frozen import held_by
from ..models.sharding import local
from ..models.undo import copy_all_
from ..symmetry import ScaledParameter, Symmetry, Term
from .optimizer_state import decoupled_decay, state_rule, step_is_linear

__all__ = ["Gains", "SafeBiases"]


class SafeBiases:
    """The safe biases of one model, and what has to be done about them around every step of its optimizers.

        biases = SafeBiases(symmetry, [optimizer], parameters)
        biases.measure(log_t)             # reads the gains off the scales, on their device
        biases.before_step()
        optimizer.step()
        biases.after_step()

    `ENorm` has hooks do that, and `ENormSGD` does it within its own step; each moves `gains` on as the scales move.
    """

    def __init__(
        self, symmetry: Symmetry, optimizers: Sequence[Optimizer], parameters: Sequence[ScaledParameter]
    ) -> None:
        """`parameters`: the biases that are safe, or their parts that are here; each has a `fan_in`."""
        self.symmetry, self.optimizers, self.parameters = symmetry, tuple(optimizers), tuple(parameters)
        self.attended = False  # somebody sees to them in every step
        self._counted: list[int] = []
        self._of: list[list[str]] = []
        self._before: dict[str, Tensor] = {}  # of a linear step the gradients, of a normalized one the biases
        self._copies: dict[str, Tensor] = {}  # and the second copies of them that some optimizers keep
        self._pending: set[int] = set()  # the numbers of the optimizers whose steps were prepared
        self._versions: list[int] | None = None
        self._warned = False

    def _held(self, number: int) -> list[str]:
        """The names of the biases that an optimizer holds; those that none holds have no gradient that counts."""
        counted = [sum(len(group["params"]) for group in each.param_groups) for each in self.optimizers]
        if counted != self._counted:  # at first, and when groups have been added
            taken: set[str] = set()
            self._of, self._counted = [], counted
            tensors = {w.name: self.symmetry.tensor(w.name) for w in self.parameters}
            for optimizer in self.optimizers:
                held = held_by([optimizer])
                self._of.append([name for name, q in tensors.items() if id(q) in held and name not in taken])
                taken.update(self._of[-1])
        return self._of[number]

    def __len__(self) -> int:
        return len(self.parameters)

    def measure(self, log_t: Tensor) -> None:
        """Make the gains anew from the scales since the start of training, on their device."""
        self.gains = Gains(self.parameters, log_t)

    # -- around a step -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step was prepared that has not been finished."""
        return bool(self._pending)

    def before_step(self, number: int | None = None) -> None:
        """Prepare a step of the optimizer with this number, or of all, on the gradients that there are."""
        for each in self._numbers(number):
            self._pending.add(each)
            if step_is_linear(self.optimizers[each]):
                self._scale_gradients(each)
            else:
                self._remember(each)

    def after_step(self, number: int | None = None) -> None:
        """Finish the steps that were prepared, of one optimizer or of all."""
        for each in self._numbers(number):
            if each not in self._pending:
                continue
            if step_is_linear(self.optimizers[each]):
                self._restore_gradients(each)
            else:
                self._shorten_steps(each)
            self._forget(each)
        self.watch()

    def before_hook(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For `register_step_pre_hook` of an optimizer; gradients that a closure makes are scaled after it."""
        closure = closure_of(args, kwargs)
        if closure is None or not step_is_linear(self.optimizers[number]):
            self.before_step(number)
            return None
        self._pending.add(number)

        def scaled_closure() -> Any:
            self._restore_gradients(number)
            loss = closure()
            self._scale_gradients(number)
            return loss

        return with_closure(args, kwargs, scaled_closure)

    def forget(self) -> None:
        """Drop what was prepared for steps that will not be finished."""
        for each in range(len(self.optimizers)):
            self._forget(each)

    def _forget(self, number: int) -> None:
        for name in self._held(number):
            self._before.pop(name, None)
            self._copies.pop(name, None)
        self._pending.discard(number)

    def _numbers(self, number: int | None) -> Iterable[int]:
        return range(len(self.optimizers)) if number is None else (number,)

    @torch.no_grad()
    def _scale_gradients(self, number: int) -> None:
        """Linear steps: the optimizer sees t²·g. Weight decay is added by the optimizer later, so it is not scaled."""
        tensors = {name: self.symmetry.tensor(name) for name in self._held(number)}
        present = {name: local(q.grad) for name, q in tensors.items() if q.grad is not None}
        if not present:
            return
        gradients = list(present.values())
        self._before.update(zip(present, torch._foreach_mul(gradients, 1.0), strict=True))  # copies, in one launch
        squares = self.gains.squares(torch.promote_types(gradients[0].dtype, torch.float32))
        torch._foreach_mul_(gradients, [squares[name] for name in present])

    @torch.no_grad()
    def _restore_gradients(self, number: int) -> None:
        before = {name: self._before.pop(name) for name in self._held(number) if name in self._before}
        tensors = {name: self.symmetry.tensor(name) for name in before}
        pairs = [(local(q.grad), before[name]) for name, q in tensors.items() if q.grad is not None]
        if pairs:
            try:
                torch._foreach_copy_([gradient for gradient, _ in pairs], [old for _, old in pairs])
            except BaseException:
                copy_all_(pairs)
                raise

    @torch.no_grad()
    def _remember(self, number: int) -> None:
        """Normalized steps: the biases as they are, and the second copies that some optimizers keep of them."""
        optimizer = self.optimizers[number]
        second = state_rule(optimizer).second_copy
        for name in self._held(number):
            tensor = self.symmetry.tensor(name)
            self._before[name] = local(tensor).detach().clone()
            if second is not None:
                state = optimizer.state.get(tensor, {})
                copy = local(second.read(state)).clone() if second.key in state else self._before[name]
                self._copies[name] = copy

    @torch.no_grad()
    def _shorten_steps(self, number: int) -> None:
        """Normalized steps: multiply the step that was made by t; decoupled weight decay is not part of it.

        Where the weight only follows a second copy (schedule-free's z), the step is shortened there, and the weight
        moves by its share of that.
        """
        optimizer = self.optimizers[number]
        second = state_rule(optimizer).second_copy
        skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer under GradScaler may have done nothing
        groups = {id(q): group for group in optimizer.param_groups for q in group["params"]}
        decay = {id(group): decoupled_decay(optimizer, group) for group in optimizer.param_groups}
        new: list[tuple[Tensor, Tensor]] = []
        for name in self._held(number):
            tensor = self.symmetry.tensor(name)
            if tensor.grad is None or name not in self._before:
                continue
            old, here, group = self._before[name], local(tensor), groups[id(tensor)]
            t, share = self.gains.t_of[name].to(here), decay[id(group)]
            if second is not None and second.key in (state := optimizer.state.get(tensor, {})):
                stepped = local(second.read(state)) - (self._copies[name] - old * share)
                copy = local(state[second.key])
                new.append((copy, copy + (t - 1) * stepped))
                new.append((here, here.add((t - 1) * stepped, alpha=second.share(group))))
                continue
            decayed = old * (1 - share)
            shortened = decayed + t * (here - decayed)
            new.append((here, shortened if skipped is None else torch.where(skipped.bool(), old, shortened)))
        self._forget(number)
        copy_all_(new)

    # -- what a rescaling asks -----------------------------------------------------------------------------------------

    def log_gradient_gain(self, name: str) -> Tensor | None:
        """By how much the gradient that the optimizer sees has changed by its gain; None: it has none that counts."""
        if name not in self.gains.change_of:
            return None
        linear = any(name in self._held(i) and step_is_linear(each) for i, each in enumerate(self.optimizers))
        return self.gains.change_of[name] if linear else None

    def gradient_gain(self, name: str) -> Tensor | None:
        """The exponential of `log_gradient_gain`."""
        log = self.log_gradient_gain(name)
        return None if log is None else log.exp()

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
