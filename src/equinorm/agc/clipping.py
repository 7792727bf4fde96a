"""Gradients that are clipped before each step of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.closures import closure_of, with_closure
from ..models.handle import Handle
from ..models.patterns import Keep
from ..models.unwrapping import unwrap, unwrap_optimizers
from .functional import clip_gradients_

__all__ = ["AdaptiveGradientClipping"]


class AdaptiveGradientClipping:
    """No unit's gradient is longer than `clipping` times the unit itself (Brock et al. 2021b, section 4).

    >>> handle = equinorm.AdaptiveGradientClipping(model, optimizer, keep=["head"]).attach()
    >>> loss.backward(); optimizer.step()          # as ever, closures included

    Nothing happens before `attach()`. It makes networks with standardized weights train at large batches and learning
    rates; their gradients should be those of a mean over the batch, since the limit does not follow the loss's scale.
    With `GradScaler`, unscale gradients before the step, as for any clipping.

    Args:
        model: whose parameters are clipped.
        optimizer: one, or several; a parameter is clipped before a step of the one that has it.
        clipping: λ. The paper has 0.01 for batches of 4096 and up to 0.16 for 256; smaller for larger batches.
        eps: ε, the least length that a unit is taken to have, so that units of zeros can move.
        keep: names or patterns of modules and parameters that are not clipped. The paper clips all but the last layer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        clipping: float = 0.01,
        eps: float = 1e-3,
        keep: Iterable[str] = (),
    ) -> None:
        if not clipping > 0 or not eps > 0:
            raise ValueError(f"clipping and eps must be positive, got {clipping} and {eps}")
        self.optimizers = unwrap_optimizers(optimizer)
        inner = unwrap(model)
        kept = Keep(inner, keep)
        self.clipping, self.eps = clipping, eps
        self._clipped = {id(p): p for name, p in inner.named_parameters() if name not in kept}
        self._handle: Handle | None = None

    def attach(self) -> Handle:
        """Clip before every step from now on; `remove()` what is returned to stop."""
        if self._handle is not None:
            raise RuntimeError("already attached to this optimizer; remove() the first handle before attaching again")
        hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        self._handle = Handle(repr(self), hooks, then=self._detach)
        return self._handle

    def _detach(self) -> None:
        self._handle = None

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = closure_of(args, kwargs)
        if closure is None:
            self._clip_(optimizer)
            return None

        def clipped() -> Any:  # the gradients come into being in the closure, after this hook
            loss = closure()
            self._clip_(optimizer)
            return loss

        return with_closure(args, kwargs, clipped)

    def _clip_(self, optimizer: Optimizer) -> None:
        held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._clipped]
        clip_gradients_(held, self.clipping, self.eps)

    def __repr__(self) -> str:
        return f"AdaptiveGradientClipping({len(self._clipped)} parameters, clipping={self.clipping}, eps={self.eps})"
