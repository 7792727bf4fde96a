"""All or nothing: what is written in one of these blocks is undone if anything is raised in it, Ctrl-C too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["interrupts_deferred", "model_kept", "tensors_kept"]

DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def tensors_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """These tensors have their content of before if the block raises.

    >>> with tensors_kept(model.parameters()):
    ...     rescale(model)
    """
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad(), interrupts_deferred():
            for tensor, content in before:
                tensor.copy_(content)
        raise


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """A model is the very model it was if the block raises: modules, classes, hooks, attributes and all numbers.

    >>> with model_kept(model):
    ...     replace_layers(model)
    """
    modules = list(model.modules())
    kinds = [module.__class__ for module in modules]
    attributes = [dict(vars(module)) for module in modules]
    # the containers stay the objects they are: handles of hooks refer to them
    containers = [
        (value, value.copy())
        for held in attributes
        for value in held.values()
        if isinstance(value, dict | list | set) and type(value) in _CONTAINERS
    ]
    tensors = {id(t): t for module in modules for t in (*module._parameters.values(), *module._buffers.values())}
    try:
        with tensors_kept(t for t in tensors.values() if t is not None and not t.is_meta and not _has_no_values(t)):
            yield
    except BaseException:
        with interrupts_deferred():
            for module, kind, held in zip(modules, kinds, attributes, strict=True):
                module.__class__ = kind
                vars(module).clear()
                vars(module).update(held)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        raise


_CONTAINERS = tuple({dict, list, set, *(type(value) for value in vars(nn.Module()).values())})


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C and a request to end are delivered when the block has ended, so that it is done whole.

    >>> with interrupts_deferred():
    ...     move_everything()
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    arrived: list[tuple[int, Any]] = []
    before = {number: signal.getsignal(number) for number in DEFERRED}
    mine = [number for number, handler in before.items() if callable(handler)]
    for number in mine:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])
        for arrival, frame in arrived:
            handler = before[signal.Signals(arrival)]
            assert callable(handler)
            handler(arrival, frame)
