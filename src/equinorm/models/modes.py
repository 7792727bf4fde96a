"""Training and evaluation, module by module: some may be in evaluation on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating", "modes_kept"]


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Every module is in its mode again afterwards, those too that are no longer in the model; yields the modes.

    >>> with modes_kept(model):
    ...     model.eval()
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield modes
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode in here.

    >>> with evaluating(model), torch.no_grad():
    ...     logits = model(x)
    """
    with modes_kept(model) as modes:
        for module in modes:  # not `model.eval()`, which a module may have overridden
            module.training = False
        yield
