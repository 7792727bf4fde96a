"""A run of a model that leaves no trace: what it changed outside of itself is taken back.

A model may do anything in its forward: register a table, keep a list of what it saw, count its calls, draw random
numbers, fill a cache. Where the tensors it computes with have no values, or stand on copies of its weights, none of
that may stay.
"""

from __future__ import annotations

import functools
import gc
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..models.unwrapping import as_written

__all__ = ["forgotten", "is_plain", "seed_all", "uncollected", "undisturbed"]

MOST_ELEMENTS = 10_000
"""Containers with more elements are put back, but nobody looks into them."""
MOST_OBJECTS = 20_000
"""Objects that are looked at: a module may hold a trainer, and with it everything there is."""
LARGEST_COPY = 1 << 26
"""Elements of the largest tensor that is copied for the case that the model writes to it."""
_CONTAINERS = (dict, list, set)
_TORCHS = vars(nn.Module()).keys()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be looked at, one beside the other."""
    if type(tensor) not in (Tensor, nn.Parameter) or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave random state and settings as they are, and keep caches out of the outputs (they would freeze keys); what
    other programs hang on a model for training does not act."""
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    fast_path, disabled = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    dtype = torch.get_default_dtype()
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    quiet = redirect_stderr(StringIO())  # where it fails, torch.export prints the whole graph
    kept = torch.random.fork_rng(devices=devices), _other_random_states_kept()
    with as_written(model), kept[0], kept[1], warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        try:
            if config is not None and cached:
                config.use_cache = False
            torch.backends.mha.set_fastpath_enabled(False)
            logging.disable(logging.CRITICAL)  # and logs tracebacks of errors that it raises anyway
            with torch.enable_grad():
                yield
        finally:
            torch.set_default_dtype(dtype)
            logging.disable(disabled)
            torch.backends.mha.set_fastpath_enabled(fast_path)
            if config is not None and cached:
                config.use_cache = cached


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which would look again and again through the many objects that an export makes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _other_random_states_kept() -> Iterator[None]:
    """Python's random state, and NumPy's where it is loaded."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


def seed_all(seed: int) -> None:
    """The same random numbers from torch, Python and NumPy, run for run."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def forgotten(model: nn.Module) -> Iterator[None]:
    """What a run puts into modules, into what they hold, and into caches of the files they come from is taken back.

    Attributes, buffers, lists and dicts are those of before, with the contents of before; so are the values of tensors
    that are no parameters, and random generators. Parameters are not looked at.
    """
    held = Held(model)
    # torch 2.6 looks right after the call whether containers hold tensors without values
    handle = model.register_forward_hook(lambda *_: held.restore_containers())
    try:
        yield
    finally:
        handle.remove()
        held.restore()


class Held:
    """What a model holds besides its parameters, and how to put it back.

    >>> held = Held(model)
    >>> model(x)
    >>> held.restore()
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, tuple[Any, dict[str, Any]]] = {}  # objects with attributes
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._torchs: list[tuple[Any, Any]] = []  # parameters, buffers, modules, hooks: touched when the call is over
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._caches: list[tuple[Any, int]] = []
        skipped = {id(t) for t in (*model.parameters(), *model.buffers())}
        modules = list(model.modules())
        for module in modules:
            self._own(module)
        self._look([value for _, before in self._owners.values() for value in before.values()], skipped, inside=True)
        self._look_around({kind for module in modules for kind in type(module).__mro__}, modules, skipped)

    def _own(self, owner: Any) -> None:
        attributes = vars(owner)
        names = _TORCHS if isinstance(owner, nn.Module) else ()
        self._torchs += [(attributes[n], attributes[n].copy()) for n in names if isinstance(attributes.get(n), dict)]
        self._owners[id(owner)] = owner, {n: v for n, v in attributes.items() if n not in names or n == "training"}

    def _look(self, values: list[Any], skipped: set[int], inside: bool) -> None:
        """Remember what these values hold; with `inside` the attributes of objects too."""
        while values:
            value = values.pop()
            if isinstance(value, Tensor):
                if is_plain(value) and id(value) not in skipped and value.numel() <= LARGEST_COPY:
                    self._tensors[id(value)] = value, value.detach().clone()
            elif type(value) in _CONTAINERS or isinstance(value, tuple):
                if id(value) in self._containers:
                    continue
                if not isinstance(value, tuple):
                    self._containers[id(value)] = value, value.copy()
                if len(value) <= MOST_ELEMENTS:
                    values += value.values() if isinstance(value, dict) else value
            elif (state := _generator_state(value)) is not None:
                self._generators[id(value)] = value, state
            elif (
                inside and len(self._owners) < MOST_OBJECTS and id(value) not in self._owners and _has_attributes(value)
            ):
                self._own(value)
                values += self._owners[id(value)][1].values()

    def _look_around(self, kinds: set[type], modules: list[nn.Module], skipped: set[int]) -> None:
        """Caches beside the code of the modules: in their classes, and in the files where these are written."""
        functions = [v for m in modules for v in vars(m).values() if callable(v) and hasattr(v, "__module__")]
        mine = [kind for kind in kinds if not _is_torchs(kind)]
        names = {str(part.__module__) for part in (*mine, *functions) if not _is_torchs(part)}
        spaces = [vars(kind) for kind in mine] + [vars(sys.modules[name]) for name in names if name in sys.modules]
        for space in spaces:
            values = [v for v in space.values() if type(v) in _CONTAINERS or isinstance(v, Tensor)]
            if isinstance(space, dict):
                self._globals.append((space, {n: v for n, v in space.items() if isinstance(v, Tensor)}))
            self._caches += [
                (v, v.cache_info().misses) for v in space.values() if isinstance(v, functools._lru_cache_wrapper)
            ]
            own, self._containers = self._containers, {}
            self._look(values, skipped, inside=False)
            # of what others may write to as well only that is put back where tensors came in
            for key, (container, content) in self._containers.items():
                own.setdefault(key, (container, _OnlyTensors(content)))
            self._containers = own

    def restore_containers(self) -> None:
        for container, content in self._containers.values():
            if isinstance(content, _OnlyTensors):
                if not content.differs(container):
                    continue
                content = content.content
            _refill(container, content)

    @torch.no_grad()
    def restore(self) -> None:
        self.restore_containers()
        for container, content in self._torchs:
            if not _same(container, content):
                _refill(container, content)
        for owner, before in self._owners.values():
            attributes = vars(owner)
            names = _TORCHS if isinstance(owner, nn.Module) else ()
            for name in [n for n in attributes if n not in before and n not in names]:
                del attributes[name]
            attributes.update(before)
        for tensor, content in self._tensors.values():
            if not torch.equal(tensor, content):
                tensor.copy_(content)
        for generator, state in self._generators.values():
            _set_generator_state(generator, state)
        for space, tensors in self._globals:
            for name in [n for n, v in space.items() if isinstance(v, Tensor) and tensors.get(n) is not v]:
                del space[name]
            space.update(tensors)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


class _OnlyTensors:
    """The content of a container that is put back only if other tensors are in it now."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def differs(self, container: Any) -> bool:
        return _tensors_in(container) != _tensors_in(self.content)


def _tensors_in(container: Any) -> set[int]:
    if len(container) > MOST_ELEMENTS:
        return set()
    values = container.values() if isinstance(container, dict) else container
    return {id(v) for v in values if isinstance(v, Tensor)}


def _same(container: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return list(container) == list(content) and all(container[key] is content[key] for key in content)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _has_attributes(value: Any) -> bool:
    """Whether a value is an object of a class of the user's, with attributes that a run may set."""
    if isinstance(value, type) or (callable(value) and not isinstance(value, nn.Module)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_torchs(type(value))


def _is_torchs(part: Any) -> bool:
    root = str(part.__module__).partition(".")[0]
    return root in ("torch", "builtins", "numpy", "functools", "typing", "threading", "logging", "types", "equinorm")


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.Generator):
            return value.bit_generator.state
        if isinstance(value, numpy.random.RandomState):
            return value.get_state()
    return None


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)
