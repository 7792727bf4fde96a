"""Engines that keep all parameters in flat pieces of memory, where a layer's weight is no tensor of its own.

FSDP1, DeepSpeed's ZeRO and PyTorch's ZeroRedundancyOptimizer: weights, gradients or the optimizer's state lie there in
a form whose parts nobody but the engine knows. They are recognized by name, as none need be installed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .sharding import is_sharded

__all__ = ["refuse_flat_model", "refuse_flat_optimizer", "refuse_shards"]

_SHARD_INSTEAD = (
    "Shard with torch.distributed.fsdp.fully_shard (FSDP2) instead: trace before it is applied, "
    "symmetry = equinorm.trace(model, example_inputs), and give symmetry= afterwards"
)


def refuse_flat_model(model: nn.Module) -> None:
    """Raise, with nothing changed, where an engine keeps the parameters of a model in flat pieces."""
    if _is_of(model, "deepspeed.runtime"):
        raise TypeError(
            f"{type(model).__name__} of DeepSpeed keeps weights and optimizer state in flat pieces. {_SHARD_INSTEAD}; "
            "or balance the bare model before deepspeed.initialize"
        )
    for name, module in model.named_modules():
        if _is_a(module, "FullyShardedDataParallel"):
            where = f" around {name!r}" if name else ""
            raise TypeError(
                f"FullyShardedDataParallel (FSDP1){where} keeps the weights of several layers in one flat parameter. "
                f"{_SHARD_INSTEAD}"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise TypeError(f"DeepSpeed's ZeRO-3 has cut {name!r} into flat pieces. {_SHARD_INSTEAD}")


def refuse_flat_optimizer(optimizer: Any) -> None:
    """Raise, with nothing changed, where an optimizer, or class of them, keeps its state in pieces."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if _is_a(optimizer, "ZeroRedundancyOptimizer"):
        raise TypeError(
            f"{kind.__name__} keeps the state of each parameter in one process only, where the others cannot make it "
            "follow the weights: use the optimizer that it wraps, or shard its state along with the weights by "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if _is_of(optimizer, "deepspeed.runtime"):
        raise TypeError(
            f"{kind.__name__} of DeepSpeed keeps weights and their state in flat pieces, so it cannot follow a "
            f"rescaling. {_SHARD_INSTEAD}"
        )


def refuse_shards(model: nn.Module, who: str, remedy: str) -> None:
    """Raise, with nothing changed, where parameters are sharded (DTensor, or flat) and `who` cannot have that."""
    refuse_flat_model(model)
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise TypeError(f"{who} needs whole parameters, and {name!r} is sharded over processes (DTensor): {remedy}")


def _mro(thing: Any) -> tuple[type, ...]:
    return (thing if isinstance(thing, type) else type(thing)).__mro__


def _is_a(thing: Any, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith("torch.distributed.") for base in _mro(thing))


def _is_of(thing: Any, package: str) -> bool:
    return any(base.__module__.startswith(package) for base in _mro(thing))
