"""All or nothing: what is written in one of these blocks is undone if anything is raised in it, Ctrl-C too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copy_all_", "interrupts_deferred", "model_kept", "tensors_kept"]

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")  # those that the system has
DEFERRED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


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


@torch.no_grad()
def copy_all_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into each tensor what comes with it: into all of them, before what is raised meanwhile is heard.

    >>> copy_all_([(weight, new_weight), (bias, new_bias)])
    """
    raised: BaseException | None = None
    with interrupts_deferred():
        for tensor, content in pairs:
            try:
                tensor.copy_(content)
            except BaseException as error:  # noqa: PERF203
                raised = raised or error
                tensor.copy_(content)
    if raised is not None:
        raise raised


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C, a request to end and whatever else a signal's handler would raise are delivered when the block has ended,
    so that it is done whole.

    >>> with interrupts_deferred():
    ...     move_everything()
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    arrived: list[tuple[int, Any]] = []
    before = {number: signal.getsignal(number) for number in DEFERRED}
    mine = [(number, handler) for number, handler in before.items() if callable(handler)]
    try:
        for number, _ in mine:
            signal.signal(number, lambda number, frame: arrived.append((number, frame)))
        yield
    finally:
        _all([partial(signal.signal, number, handler) for number, handler in mine])
        _all([partial(handler, number, frame) for number, frame in arrived for each, handler in mine if each == number])


def _all(calls: Sequence[Callable[[], Any]]) -> None:
    """Make every call, whatever one of them raises."""
    if calls:
        try:
            calls[0]()
        finally:
            _all(calls[1:])
