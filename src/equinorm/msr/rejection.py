"""What mean shift rejection does to the steps of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import counted
from ..launch import dense, kernels
from ..models.closures import closure_of, with_closure
from ..models.filters import filter_norm
from ..models.flat import refuse_flat_model, refuse_flat_optimizer
from ..models.frozen import held_by
from ..models.handle import Handle
from ..models.parametrized import originals
from ..models.sharding import Part, local, part_of, processes_of, reshard
from ..models.unwrapping import unwrap, unwrap_optimizers
from .apply import first_spatial, is_spatial, scaled_kernels
from .functional import centre_, luma_pull, window

__all__ = ["MeanShiftRejection"]


class MeanShiftRejection:
    """Gradient centring and LUMA in every step of an optimizer, and steps that a deep network survives.

    >>> handle = MeanShiftRejection(model, optimizer, z=0.85, luma=5e-4).attach()
    >>> loss.backward(); optimizer.step()          # as ever; closures, GradScaler, foreach and fused included

    Before every step, with V the kernels of `mean_shift_rejection_`:

    1. 2λ(‖V‖ - 1) V/‖V‖ is added to ∇V (ruff2020, section 3.4); `luma` is λ.
    2. ∇V loses z times its window mean (section 3.3), but for a first layer's. z = 0.85 is the paper's for residual
       networks, up to 1 for chains; 0 switches it off. With `centre_luma=False` this comes before 1: LUMA then holds
       window means back with all its force, and the loss moves them with 1 - z of its own.
    3. If lr · ‖∇V‖ / ‖V‖, all kernels taken as one vector, exceeds `max_step`, all gradients of the optimizer
       are scaled down by the one factor that makes them meet it. None: no limit, as in the paper.

    After it, the biases of these kernels are moved back so that they have made `bias_step` of their step. The
    biases of residual branches add up: n of them move the stream n times as far as one, which ends with every
    channel of it below zero and dead. None is 1/n for n biases; 1 is the paper's (which needs none: section 6).

    Parameters may be sharded (DTensor: FSDP2): each process works on its parts, and two numbers are added up over all.
    Put `mean_shift_rejection_` on the model before it is sharded, and make this and the optimizer afterwards.

    Model and optimizer may be wrapped (compiled, DDP, accelerate, Opacus). Of several optimizers it acts on the one
    that holds the kernels.

    As of `clip_grad_norm_`, gradients are changed in place; call the optimizer once for each backward pass.

    A model without scaled kernels can have its plain spatial kernels centred (except the first, if
    `exclude_first`): pass `luma=0`. With scaled kernels, which are centred is up to how they were made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        z: float = 0.85,
        luma: float = 5e-4,
        exclude_first: bool = True,
        *,
        max_step: float | None = 0.01,
        bias_step: float | None = None,
        centre_luma: bool = True,
    ) -> None:
        if luma < 0.0:
            raise ValueError(f"luma must not be negative, got {luma}")
        if max_step is not None and max_step <= 0.0:
            raise ValueError(f"max_step must be positive, or None for no limit; got {max_step}")
        model = unwrap(model)
        optimizers = unwrap_optimizers(optimizer)
        for one in optimizers:
            refuse_flat_optimizer(one)
        refuse_flat_model(model)
        reshard(model)
        layers = dict(scaled_kernels(model))
        if not layers and luma > 0.0:
            raise ValueError(
                "the model has no scaled kernels: call mean_shift_rejection_(model) before making the "
                "optimizer, or pass luma=0 to centre the gradients of its plain kernels only"
            )
        self._scaled = bool(layers)
        if not layers:
            first = first_spatial(model) if exclude_first else None
            layers = {name: m for name, m in model.named_modules() if is_spatial(m) and m is not first}
        if not layers:
            raise ValueError("the model has no spatial kernels whose gradients could be centred")

        optimizer = optimizers[0] if len(optimizers) == 1 else _holding(optimizers, layers)
        self.model, self.optimizer = model, optimizer
        self.z, self.luma, self.centre_luma, self.max_step = z, luma, centre_luma, max_step
        self._exclude_first = exclude_first
        self._kernels: dict[int, Tensor] = {}
        self._parts: dict[int, Part] = {}
        self._uncentred: set[int] = set()
        self._biases: list[Tensor] = []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, layer in layers.items():
            self._take(name, layer, groups)
        self._processes = processes_of(self._kernels.values())
        self.bias_step = 1.0 / max(len(self._biases), 1) if bias_step is None else bias_step
        self._before: list[Tensor] = []  # the biases before a step
        self._adapter: Any = None
        self._adapter_key: list[Any] = []
        self._handle: Handle | None = None
        self.steps = 0
        self._limited: Tensor | float = 0.0

    def _take(self, name: str, layer: nn.Module, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Check one layer against the optimizer and remember its kernel and bias."""
        V, own = layer.weight, [layer.weight]
        if self._scaled:
            scaled = originals(layer)[0]
            V = originals(layer).original
            own = [V, scaled.g]
            if not scaled.centred:
                self._uncentred.add(id(V))
        for p in own:
            if not isinstance(p, Tensor) or not p.requires_grad:
                continue
            if id(p) not in groups:
                raise ValueError(
                    f"the optimizer does not have {'V' if p is V else 'g'} of {name}: make it after "
                    "mean_shift_rejection_(model), for example from parameter_groups(model)"
                )
            if self.luma > 0.0 and groups[id(p)].get("weight_decay", 0.0) != 0.0:
                raise ValueError(
                    f"the optimizer decays {'V' if p is V else 'g'} of {name}, which luma replaces: use "
                    "parameter_groups(model, weight_decay), or pass luma=0 to have decay instead"
                )
        if isinstance(V, Tensor) and V.requires_grad:
            self._kernels[id(V)] = V
            self._parts[id(V)] = part = part_of(V, f"V of {name}")
            if set(window(V)) & set(part.split_axes()):
                raise ValueError(f"{name} is sharded along the window of its kernels: shard it along axis 0 or 1")
        if isinstance(layer.bias, Tensor) and id(layer.bias) in groups:
            self._biases.append(layer.bias)

    @property
    def limited(self) -> float:
        """How many steps were scaled down by `max_step`, of `steps` in all."""
        return float(self._limited)

    @torch.no_grad()
    def adapt_gradients_(self) -> None:
        """Points 1 to 3 above; what `attach` does before every step, for loops that do it by hand."""
        gradients: list[Tensor] = []
        scaled: list[tuple[Tensor, int]] = []  # V and the number of its parameter group
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    gradients.append(local(p.grad))
                    if id(p) in self._kernels:
                        scaled.append((p, number))
        if scaled and not self._adapt_fused_(scaled, gradients):
            self._adapt_plain_(scaled, gradients)
        self.steps += 1

    def _adapt_plain_(self, scaled: list[tuple[Tensor, int]], gradients: list[Tensor]) -> None:
        groups, scale = self.optimizer.param_groups, self._grad_scale()
        steps, lengths = [], []
        for V, number in scaled:
            assert V.grad is not None
            part, kernel, gradient = self._parts[id(V)], local(V), local(V.grad)
            exact = kernel.to(torch.promote_types(V.dtype, torch.float32))  # ‖V‖ - 1 is lost in half precision
            norm, z = self._filter_norm(exact, part), 0.0 if id(V) in self._uncentred else self.z
            if not self.centre_luma:
                centre_(gradient, z)
            if self.luma > 0.0:
                luma = -self.luma if groups[number].get("maximize", False) else self.luma
                gradient.addcmul_(exact, luma_pull(norm, luma if scale is None else luma * scale))
            if self.centre_luma:
                centre_(gradient, z)
            share = part.share(self._processes) ** 0.5
            steps.append(share * groups[number]["lr"] * torch.linalg.vector_norm(gradient, dtype=exact.dtype))
            lengths.append(share * torch.linalg.vector_norm(exact if set(part.split_axes()) - {0} else norm))
        if self.max_step is None:
            return
        step, length = self._norms_of_all(_norm(steps), _norm(lengths))
        excess = step / (self.max_step * length)
        if scale is not None:
            excess = excess / scale
        factor = excess.clamp_min(1.0).reciprocal()  # nothing is read on the host, so always multiplied
        for device in {gradient.device for gradient in gradients}:
            here = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(here, factor.to(device))
        self._limited_count(excess.device).add_(excess > 1.0)

    def _norms_of_all(self, *norms: Tensor) -> Iterable[Tensor]:
        """The norms of vectors of which every process has a part."""
        if self._processes.count == 1:
            return norms
        return self._processes.sum(torch.stack(norms).square()).sqrt()

    def _filter_norm(self, kernel: Tensor, part: Part) -> Tensor:
        """The norm of each filter that is here, of which others may hold the rest."""
        norm = filter_norm(kernel)
        if not set(part.split_axes()) - {0}:
            return norm
        squares = part.spread(norm.square() * part.share(self._processes), 0)
        return part.of(self._processes.sum(squares)).sqrt()

    def _adapt_fused_(self, scaled: list[tuple[Tensor, int]], gradients: list[Tensor]) -> bool:
        """The same in three launches on CUDA; False, and nothing done, where they cannot be used."""
        groups, scale = self.optimizer.param_groups, self._grad_scale()
        fused = kernels("equinorm.msr.kernels", *(V for V, _ in scaled), *gradients, scale)
        if fused is None or not all(map(dense, gradients)):
            return False
        if not all(dense(V) and V.grad is not None and V.grad.stride() == V.stride() for V, _ in scaled):
            return False
        signs = [-1.0 if group.get("maximize", False) else 1.0 for group in groups]
        all_kernels = [fused.Kernel(V, i, signs[i], id(V) not in self._uncentred) for V, i in scaled]
        key = [(id(kernel.V), kernel.sign, *kernel.layout) for kernel in all_kernels]
        key += [(gradient.dtype, gradient.numel()) for gradient in gradients]
        if key != self._adapter_key:
            self._adapter, self._adapter_key = fused.GradientAdapter(all_kernels, gradients), key
        self._adapter.adapt_(self.z, self.luma, scale, self.centre_luma)
        if self.max_step is not None:
            rates = [group["lr"] for group in groups]
            limited = self._limited_count(gradients[0].device)
            self._adapter.limit_(gradients, self.max_step, rates, scale, limited)
        return True

    def _grad_scale(self) -> Tensor | None:
        """The factor that gradients come with; GradScaler sets it for optimizers that unscale them."""
        return getattr(self.optimizer, "grad_scale", None)

    def _limited_count(self, device: torch.device) -> Tensor:
        """How many steps were limited, as a tensor that stays where it is, for a captured step to count in."""
        if not isinstance(self._limited, Tensor) or self._limited.device != device:
            self._limited = torch.full((), self.limited, dtype=torch.float32, device=device)
        return self._limited

    def attach(self) -> Handle:
        """Act in every `optimizer.step()` from now on, and in none before; `remove()` what is returned to stop."""
        if self._handle is not None:
            raise RuntimeError("already attached to this optimizer; remove() the first handle before attaching again")
        self._handle = Handle(
            f"mean shift rejection of {type(self.optimizer).__name__}",
            [
                self.optimizer.register_step_pre_hook(self._before_step),
                self.optimizer.register_step_post_hook(self._after_step),
            ],
            then=self._detach,
        )
        return self._handle

    def _detach(self) -> None:
        self._handle = None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.bias_step != 1.0:
            self._remember_biases()
        closure = closure_of(args, kwargs)
        if closure is None:
            self.adapt_gradients_()
            return None

        def adapted() -> Any:  # the gradients come into being in the closure, after this hook
            loss = closure()
            self.adapt_gradients_()
            return loss

        return with_closure(args, kwargs, adapted)

    @torch.no_grad()
    def _remember_biases(self) -> None:
        biases = [local(bias) for bias in self._biases]
        if [(b.device, b.dtype, b.shape) for b in self._before] != [(b.device, b.dtype, b.shape) for b in biases]:
            self._before = [torch.empty_like(bias) for bias in biases]
        if biases:
            torch._foreach_copy_(self._before, biases)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self.bias_step != 1.0 and self._biases:
            biases = [local(bias) for bias in self._biases]
            torch._foreach_lerp_(self._before, biases, self.bias_step)
            torch._foreach_copy_(biases, self._before)

    def __repr__(self) -> str:
        names = ("z", "luma", "centre_luma", "max_step", "bias_step")
        settings = ", ".join(f"{name}={_rounded(getattr(self, name))}" for name in names)
        kernels = counted(len(self._kernels), "scaled kernel" if self._scaled else "plain kernel")
        attached = f"{'' if self._handle is not None else 'not '}attached to {type(self.optimizer).__name__}"
        steps = f"{self.limited:.0f} of {counted(self.steps, 'step')} limited"
        return f"<MeanShiftRejection of {type(self.model).__name__}: {settings}; {kernels}, {attached}; {steps}>"

    def state_dict(self) -> dict[str, Any]:
        """The settings, how many steps there were and how many of them were limited."""
        return {
            "z": self.z,
            "luma": self.luma,
            "centre_luma": self.centre_luma,
            "max_step": self.max_step,
            "bias_step": self.bias_step,
            "steps": self.steps,
            "limited": self.limited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for key in ("z", "luma", "max_step", "bias_step", "steps"):
            setattr(self, key, state[key])
        self.centre_luma = state.get("centre_luma", False)  # which older states do not have
        if isinstance(self._limited, Tensor):  # captured steps count in it
            self._limited.fill_(state["limited"])
        else:
            self._limited = state["limited"]

    def __deepcopy__(self, memo: dict[int, Any]) -> MeanShiftRejection:
        """With its model and optimizer, attached if this one is: `copy.deepcopy((model, optimizer, msr))`."""
        twin = MeanShiftRejection(
            copy.deepcopy(self.model, memo),
            copy.deepcopy(self.optimizer, memo),
            self.z,
            self.luma,
            self._exclude_first,
        )
        twin.load_state_dict(self.state_dict())
        if self._handle is not None:
            twin.attach()
        return twin


def _holding(optimizers: Sequence[Optimizer], layers: Mapping[str, nn.Module]) -> Optimizer:
    """The one optimizer that has the kernels of these layers."""
    kernels_of = {id(p) for layer in layers.values() for p in layer.parameters() if p.ndim > 1}
    found = [optimizer for optimizer in optimizers if kernels_of & held_by([optimizer])]
    if len(found) != 1:
        raise ValueError(
            f"mean shift rejection acts on one optimizer, and {len(found) or 'none'} of the {len(optimizers)} hold its "
            "kernels: put the kernels, and what belongs to their layers, into one optimizer"
        )
    return found[0]


def _norm(parts: list[Tensor]) -> Tensor:
    """The norm of a vector from the norms of its parts, wherever these are."""
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def _rounded(setting: float | None) -> str:
    return f"{setting:.4g}" if isinstance(setting, float) else str(setting)
