"""Running statistics taken anew: for averaged weights (SWA, EMA), and where training saw other inputs than evaluation.

`torch.optim.swa_utils.update_bn` does this for torch's batch norms; it does not see the layers of this library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .unwrapping import unwrap

__all__ = ["has_running_statistics", "update_statistics_"]


@torch.no_grad()
def update_statistics_(model: nn.Module, batches: Iterable[Any]) -> tuple[str, ...]:
    """Replace the running statistics of layers by their averages over `batches`; returns the layers' names.

    For every layer that keeps some: EquiNorm, mean-only batch norm, batch renorm, torch's batch and instance norms, and
    whatever else has a `running_mean` and a `momentum`. These are in training mode meanwhile, so each batch is
    normalized by its own statistics, and all batches count alike. The rest of the model is in evaluation mode: dropout
    and noise do not count. Layers that no batch reaches, as auxiliary heads, keep their statistics.

    `batches`: what a data loader gives. Of a tuple or list the first element is the model's input, a dict holds keyword
    arguments. Tensors are brought to the device of the model. If there is no batch, or anything fails, the model is
    left as it was.

    >>> update_statistics_(averaged, loader)
    """
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(
            f"expected a data loader or a list of batches, got a single {type(batches).__name__}: [it] will do"
        )
    model = unwrap(model)
    tracking = ((n, m) for n, m in model.named_modules() if has_running_statistics(m) and hasattr(m, "momentum"))
    layers: dict[str, Any] = dict(tracking)
    if not layers:
        return ()
    device = next(chain(model.parameters(), model.buffers())).device
    modes = {module: module.training for module in model.modules()}
    momenta: dict[Any, float | None] = {layer: layer.momentum for layer in layers.values()}
    before = {buffer: buffer.clone() for layer in momenta for buffer in layer.buffers(recurse=False)}
    runs = dict.fromkeys(momenta, 0)

    def weigh(layer: Any, _: Any) -> None:
        runs[layer] += 1
        layer.momentum = 1 / runs[layer]

    hooks = [layer.register_forward_pre_hook(weigh) for layer in momenta]
    try:
        model.eval()
        for layer in momenta:
            layer.training = True  # and not what is inside it, as the dropout in norms of timm's
        for batch in batches:
            _run(model, batch, device)
        if not any(runs.values()):
            raise ValueError("there was no batch: give a data loader or a list (has an iterator been used up?)")
        for layer, times in runs.items():
            if times and isinstance(count := getattr(layer, "num_batches_tracked", None), Tensor):
                # a layer that averages over all batches goes on from these; another may have schedules that count
                count.copy_(before[count]) if momenta[layer] is not None else count.fill_(times)
    except BaseException:
        for buffer, value in before.items():
            buffer.copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for module, training in modes.items():
            module.training = training
    return tuple(name for name, layer in layers.items() if runs[layer])


def has_running_statistics(module: nn.Module) -> bool:
    return isinstance(getattr(module, "running_mean", None), Tensor)


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    if isinstance(batch, tuple | list):
        batch = batch[0]
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})
    args, kwargs = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    model(*args, **kwargs)
