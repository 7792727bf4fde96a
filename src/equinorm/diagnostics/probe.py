"""Run a model and leave no trace on it: what every instrument stands on.

Parameters and buffers are handed to the model by `torch.func.functional_call`, buffers as copies, so running
statistics stay as they are whatever happens. Random numbers are drawn from the present state, which is put back:
every run of one instrument sees the same dropout masks, and the training that follows the same numbers as without it.
The model runs in the mode it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ..models.unwrapping import unwrap

Loss = Callable[[Any, Any], Tensor]
"""`loss_fn(outputs, targets)`: a single number."""
Batch = tuple[Any, Any]
"""(inputs, targets); inputs are a tensor, a tuple of arguments or a dict of keyword arguments."""
Parameters = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Result:
    """What an instrument has measured: plain tensors, and a dict ready for JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}


def plain(value: Any) -> Any:
    """Tensors as numbers or lists of numbers, inside of dicts, lists and tuples too."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Probe:
    """A model's loss on one batch, as a pure function of its trainable parameters.

    >>> loss, gradient = Probe(model, F.cross_entropy, (x, y)).gradient()
    """

    def __init__(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> None:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError("a batch is a pair (inputs, targets); pass (inputs, None) if the loss needs no targets")
        self.model, self.loss_fn = unwrap(model), loss_fn
        self.inputs, self.targets = batch
        self.parameters = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient: call model.requires_grad_(True) first")

    def loss(self, parameters: Parameters | None = None) -> Tensor:
        """The loss where the parameters have the given values; the model's own by default."""
        with torch.no_grad():
            return self._loss(self.parameters if parameters is None else parameters).detach()

    def gradient(
        self, parameters: Parameters | None = None, *, create_graph: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradient there; zeros for a parameter that the loss does not depend on."""
        at = self.leaves(parameters)
        loss, found = self.gradient_at(at, create_graph=create_graph)
        return loss.detach(), found

    def leaves(self, parameters: Parameters | None = None) -> Parameters:
        """The parameters as tensors of their own that gradients can be asked for."""
        chosen = self.parameters if parameters is None else parameters
        return {name: value.detach().requires_grad_() for name, value in chosen.items()}

    def gradient_at(self, leaves: Parameters, *, create_graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradient at `leaves`, both differentiable with `create_graph`."""
        with torch.enable_grad():
            loss = self._loss(leaves)
            found = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph, materialize_grads=True)
        return loss, dict(zip(leaves, found, strict=True))

    def moved(self, direction: Mapping[str, Tensor], step: float | Tensor) -> Parameters:
        """θ + step · direction."""
        with torch.no_grad():
            return {name: value + step * direction[name] for name, value in self.parameters.items()}

    def _loss(self, parameters: Mapping[str, Tensor]) -> Tensor:
        with same_random_state(self.model, self.inputs):  # the loss may draw numbers too
            loss = self.loss_fn(run(self.model, self.inputs, parameters), self.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn(outputs, targets) must return a single number, it returned {shape}")
        return loss.reshape(())


def run(model: nn.Module, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
    """The model's outputs, with other values for some parameters; buffers and random state stay as they are."""
    model = unwrap(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = arguments(inputs)
    with same_random_state(model, inputs):
        return functional_call(model, {**buffers, **(parameters or {})}, args, kwargs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional and keyword arguments of `forward`."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


@contextmanager
def same_random_state(model: nn.Module, inputs: Any = None) -> Iterator[None]:
    """Whatever random numbers are drawn inside, generators are left as they were found."""
    tensors = [*model.parameters(), *(t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))]
    devices = {t.device for t in tensors if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    numbers = sorted({device.index or 0 for device in devices if device.type == kind})
    with torch.random.fork_rng(numbers, device_type=kind):
        yield


# -- vectors made of the tensors of a dict -----------------------------------------------------------------------------


def norm(tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors taken as one vector, in float32 or wider, on the device of the first."""
    parts = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
    wide = [torch.linalg.vector_norm(t.detach(), dtype=wider(t.dtype)) for t in parts]
    return torch.linalg.vector_norm(torch.stack([part.to(wide[0].device) for part in wide]))


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The inner product of two dicts of tensors with the same names."""
    parts = [(a[n].detach().to(wider(a[n].dtype)) * b[n].detach()).sum() for n in a]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# -- layers and filters ------------------------------------------------------------------------------------------------


def is_layer(module: nn.Module) -> bool:
    """Does the module own a weight with rows and columns, plain or parametrized? (Linear, conv, embedding, ...)"""
    if isinstance(module, parametrize.ParametrizationList):
        return False  # its layer is meant
    own = [p for p in module._parameters.values() if p is not None]
    if parametrize.is_parametrized(module):
        own += [p for inner in module.parametrizations.children() for p in inner.parameters()]  # type: ignore
    return any(p.ndim > 1 and p.numel() > p.shape[0] for p in own)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of the model by name, in the order of registration."""
    return {name: module for name, module in unwrap(model).named_modules() if is_layer(module)}


def channel_axis(layer: nn.Module, output: Tensor) -> int:
    """The axis of a layer's output that counts its units: the second one after a convolution, else the last."""
    weight = getattr(layer, "weight", None)
    window = weight.ndim - 2 if isinstance(weight, Tensor) else 0
    return max(output.ndim - window - 1, 0) if window > 0 else output.ndim - 1


def filter_axis(layer: nn.Module) -> int:
    """The axis of a layer's weight that counts its filters."""
    return int(isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d))


def filters(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Parameter -> (its values, axis of its filters), for every parameter that holds filters or rows.

    Parametrized weights appear by the parameter behind them: v of weight norm, V of mean shift rejection. Gains, which
    have one number per filter, do not.
    """
    model = unwrap(model)
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        path, parametrized, _ = f".{name}".partition(".parametrizations.")
        owner = (path if parametrized else path.rpartition(".")[0]).removeprefix(".")
        axis = filter_axis(modules[owner])
        if parameter.ndim > 1 and parameter.is_floating_point() and parameter.numel() > parameter.shape[axis]:
            found[name] = (parameter.detach(), axis)
    return found


def by_filter(tensor: Tensor, axis: int) -> Tensor:
    """One row per filter, in float32 or wider."""
    return tensor.detach().movedim(axis, 0).flatten(1).to(wider(tensor.dtype))


@contextmanager
def watching(
    modules: Mapping[str, nn.Module], look: Callable[[str, nn.Module, Any, Tensor], None], *, inputs: bool = False
) -> Iterator[None]:
    """Call `look(name, module, inputs, output)` whenever one of the modules has run; the second run is `name#2`.

    `output` is the first tensor that the module returns. With `inputs`, `look` is called before it runs, with the
    first tensor that goes in.
    """
    counts: dict[str, int] = {}
    names = {module: name for name, module in modules.items()}

    def call(module: nn.Module, given: Any, shown: Any) -> None:
        tensor = next((t for t in pytree.tree_leaves(shown) if isinstance(t, Tensor)), None)
        if tensor is None:
            return
        name = names[module]
        counts[name] = counts.get(name, 0) + 1
        look(name if counts[name] == 1 else f"{name}#{counts[name]}", module, given, tensor)

    if inputs:
        handles = [m.register_forward_pre_hook(lambda module, args: call(module, args, args)) for m in names]
    else:
        handles = [m.register_forward_hook(lambda module, args, output: call(module, args, output)) for m in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
