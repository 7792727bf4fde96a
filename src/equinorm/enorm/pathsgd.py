"""Path-SGD, the rescaling-invariant baseline of stock2019 (section 6.1).

Neyshabur, Salakhutdinov, Srebro, "Path-SGD: path-normalized optimization in deep neural networks", 2015:
steepest descent for the path norm, γ² = Σ over input-output paths of Π w_e², approximated edge by edge:

    w_e ← w_e - lr/κ_e · ∂L/∂w_e,      κ_e = Σ over the paths through e of Π_{e' ≠ e} w_e'²  =  ∂γ²/∂(w_e²)

Where a rescaling multiplies a weight by f, its κ becomes κ/f² and its gradient g/f, so its step is multiplied
by f like the weight itself: Path-SGD trains every rescaling of a network in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from ..models.flat import refuse_shards
from ..models.inputs import as_arguments
from ..models.modes import evaluating
from .optimizer_state import register_state_rule

__all__ = ["PathSGD", "path_kappa"]

# What passes a unit that is not positively homogeneous is no sum over paths of products of weights.
_WITHOUT_PATHS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Softplus,
    nn.LogSigmoid,
    nn.Softmax,
    nn.LogSoftmax,
)


def path_kappa(model: nn.Module, example_inputs: Any) -> dict[str, Tensor]:
    """κ of every parameter, by name, from one forward and one backward pass (Neyshabur et al. 2015).

    The model runs with its parameters squared on an input of ones. Nothing in it is then negative, ReLUs are
    open, the sum of the outputs is γ², and its gradient with respect to the squared parameters is κ. A bias
    is a weight from a constant unit. Exact for linear and convolutional ReLU networks with sums,
    concatenations and mean pooling. Max-pooling counts the largest unit of each window, which bounds γ² from
    above over all that it might select. Leaky ReLUs count as open, so the slopes of a PReLU lie on no path;
    constants in `forward` count as they are, not squared; weights used twice along a path by the derivative.

    `example_inputs`: a tensor, a tuple of arguments or a dict of keyword arguments, of which only the shapes
    count; the first axis is the batch. The model runs in evaluation mode, and gets its own modes back.
    ValueError where there is no path norm: normalization, smooth activations, parametrized weights, integer
    inputs, κ negative or not finite.
    """
    _refuse_without_paths(model)
    args, kwargs = as_arguments(_ones(example_inputs))
    squared = {
        name: p.detach().to(_at_least_single(p)).square().requires_grad_() for name, p in model.named_parameters()
    }
    with torch.enable_grad(), evaluating(model):
        outputs = functional_call(model, squared, args, kwargs)
        sums = [leaf.sum() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        path_norm = torch.stack(sums).sum()
        kappas = torch.autograd.grad(path_norm, list(squared.values()), materialize_grads=True)
    if any(kappa.is_cuda for kappa in kappas) and torch.cuda.is_current_stream_capturing():
        return dict(zip(squared, kappas, strict=True))  # a graph cannot look at values; the steps before it did
    # The device is read once for all parameters.
    sound = torch.stack([((kappa >= 0) & kappa.isfinite()).all() for kappa in kappas])
    if not sound.all():
        name = list(squared)[sound.tolist().index(False)]
        raise ValueError(
            f"Path-SGD: κ of {name!r} is negative or not finite: either weights have diverged, or this is "
            f"not a network of sums, weights and ReLUs (a subtraction, a softmax, a smooth activation)"
        )
    return dict(zip(squared, kappas, strict=True))


def _refuse_without_paths(model: nn.Module) -> None:
    refuse_shards(model, "Path-SGD", "use equinorm.ENorm")
    for name, module in model.named_modules():
        if isinstance(module, _WITHOUT_PATHS):
            kind = type(module).__name__
            raise ValueError(f"Path-SGD needs a network of sums, weights and ReLUs; {name!r} is a {kind}")
        if parametrize.is_parametrized(module):
            raise ValueError(f"Path-SGD needs plain weights; {name!r} is parametrized, fold that in first")


def _at_least_single(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _ones(example_inputs: Any) -> Any:
    """Inputs of ones, a single example: a batch of B would give B times κ."""

    def ones(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            raise ValueError(f"Path-SGD sums paths from real inputs, but an example input is {value.dtype}")
        return torch.ones_like(value[:1], dtype=_at_least_single(value), requires_grad=False)

    return tree_map(ones, example_inputs)


class PathSGD(Optimizer):
    """Path-SGD (Neyshabur et al. 2015): each gradient is divided by κ, the squared weight of its paths.

    >>> optimizer = PathSGD(model, torch.randn(1, 3072), lr=0.01)
    >>> loss.backward(); optimizer.step()

    κ is computed afresh in every step, which costs a forward and backward pass of one example; `path_kappa`
    says for which networks there is one. All parameters of `model` that require a gradient are optimized, the
    others still take part in the paths. Pass the bare module, not a compiled or distributed wrapper.

    - There is no eps, it would spoil the invariance: a weight with κ = 0 stays. In a ReLU network a zero then
      blocks every path through it, and its gradient is zero as well. Not so for what lies on no path: slopes
      of a PReLU, or the branch that loses `torch.maximum` on an input of ones. These are not trained.
    - `weight_decay` is decoupled, w ← (1 - lr·weight_decay)·w, which commutes with rescaling; coupled decay
      does not. stock2019 uses 0.
    - Steps grow as paths shrink, so learning rates are not those of SGD: choose them for each architecture.
    """

    def __init__(
        self, model: nn.Module, example_inputs: Any, lr: float | Tensor = 1e-2, weight_decay: float = 0.0
    ) -> None:
        if not isinstance(lr, Tensor) and lr < 0.0:
            raise ValueError(f"lr must not be negative, got {lr}")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        path_kappa(model, example_inputs)  # refuses the model now rather than in the first step
        trainable = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trainable, {"lr": lr, "weight_decay": weight_decay})
        self._model = model
        self._inputs = tree_map(lambda x: x[:1].detach() if isinstance(x, Tensor) else x, example_inputs)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nfor the paths of {type(self._model).__name__}"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; with a closure, it is called first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kappa_by_name = path_kappa(self._model, self._inputs)
        kappas = {p: kappa_by_name[name] for name, p in self._model.named_parameters()}
        for group in self.param_groups:
            lr, weight_decay = group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                kappa = kappas[p]
                if weight_decay != 0.0:
                    p.mul_(1 - lr * weight_decay)
                p.sub_(lr * torch.where(kappa > 0, p.grad / kappa, 0.0))
        return loss


# Nothing to carry: Path-SGD remembers nothing and is invariant already.
register_state_rule(PathSGD, {}, linear=True, decoupled=True)
