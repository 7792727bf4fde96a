"""What `convert` and `fold` do to modules: replace them, put norms behind them, move gains and offsets into them.

A `Plan` collects what is to be done to a model. Nothing changes before all of it is noted.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from ..equilibrium import layers as equilibrium
from ..msr.rejection import _NoisyInput
from ..norms import layers as activation_norms
from ..weightnorm.parametrizations import _WITH_GAIN, LAYERS, TRANSPOSED, originals, tied_weights
from .graph import LAYER_OPS, NORM_OPS, Call, ModuleGraph, Step, channels_meet, has_own_forward

__all__ = ["Norm", "Plan", "Row"]

CHANNEL_NORMS = (
    _BatchNorm,
    nn.GroupNorm,
    _InstanceNorm,
    activation_norms.FilterResponseNorm,
    activation_norms._BatchRenorm,
    activation_norms._MeanOnlyBatchNorm,
)
"""Norms of inputs with channels in axis 1; any of them can stand where another one stood."""
OTHER_NORMS = (nn.LayerNorm, nn.RMSNorm)
OWN_LAYERS = (equilibrium.EquiNormLayer, activation_norms.NormalizationPropagation)

_TORCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_NOT_CALLED = "the forward pass does not call it on these inputs"


@dataclass(frozen=True)
class Row:
    """One module, and what was done with it."""

    module: str
    was: str
    now: str
    """Empty if it was kept."""
    why: str
    """Why it was kept, or a remark on the change."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the channels in axis 1 that a method may replace."""

    path: str
    module: nn.Module
    channels: int
    ndim: int
    """Axes of its input."""
    positions: int
    """Spatial positions of its input in the example; 1 for inputs of shape (batch, channels)."""
    calls: tuple[Call, ...]
    output: Step
    """What the norm itself puts out (in its first call)."""
    tail: dict[str, nn.Module]
    """Modules that the norm calls on what it puts out, like the activation of timm's `BatchNormAct2d`."""
    layer: Call | None
    """The call of the layer whose output it reads and nobody else does."""
    alone: str
    """Why there is no such layer."""

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype for what takes its place."""
        tensors = [*self.module.parameters(), *self.module.buffers(), self.output.value]
        like = next(t for t in tensors if t.is_floating_point())
        return {"device": like.device, "dtype": like.dtype}


class Plan:
    """What is to be done to a model: rows for the report, and steps that run once all is noted."""

    def __init__(
        self,
        model: nn.Module,
        graph: ModuleGraph,
        *,
        keep: Iterable[str] = (),
        final_batchnorm: bool = False,
        remove_rest: bool = False,
        fold: bool = False,
    ) -> None:
        self.model = model
        self.graph = graph
        self._fold = fold
        self.remove_rest = remove_rest
        """Whether norms that a method cannot take the place of are removed instead of kept."""
        self.converted: dict[str, Row] = {}
        self.kept: dict[str, Row] = {}
        self.already = 0
        """How many modules are what the method would make of them."""
        self._steps: list[Callable[[], object]] = []
        self.norms_behind: list[tuple[nn.Module, nn.Module]] = []
        """Layers, and the norms that are to go behind them."""
        self._keep = tuple(keep)
        self._tied = tied_weights(model)
        self._layers = self._called_layers()
        self.last = self._layers[-1] if self._layers else None
        """The layer that is called last."""
        self._final = self.last if final_batchnorm else None
        self.final_norm: str | None = None
        """The batch norm that stands behind it and is to stay."""
        self.norms = self._find_norms()
        """The norms that may be replaced, in the order of the forward pass."""

    # -- noting ------------------------------------------------------------------------------------------------

    def change(self, path: str, now: str, why: str = "", step: Callable[[], object] | None = None) -> None:
        """Note that the module at `path` becomes `now`, and the step that makes it so."""
        self.kept.pop(path, None)
        self.converted[path] = Row(path, describe(self.graph.modules[path]), now, why)
        if step is not None:
            self.later(step)

    def swap(self, path: str, new: nn.Module, why: str = "") -> None:
        """Note that `new` takes the place of the module at `path`."""
        old = self.graph.modules[path]
        self.change(path, describe(new), why, lambda: replace_module(self.model, old, new))

    def remove(self, norm: Norm, why: str = "") -> None:
        """Note that a norm goes; what it called on its own output stays."""
        self.swap(norm.path, with_tail(None, norm.tail), why)

    def leave(self, norm: Norm, why: str) -> None:
        """Note that a method cannot take the place of a norm: it is kept, or removed if that was asked for."""
        if self.remove_rest:
            self.hand_over(norm, f"removed as asked; {why}")
        else:
            self.keep(norm.path, why)

    def hand_over(self, norm: Norm, why: str = "", *, offset: bool = True) -> None:
        """Note that a norm goes, and that the layer before it takes its gain (and its offset) if it can."""
        remark = self.why_not_hand_over(norm)
        if norm.layer is not None and not remark and gain_and_offset(norm.module) != (None, None):
            self.later(partial(inherit_affine_, norm.layer.module, norm.module, offset))
            remark = f"{norm.layer.path} has its gain{' and offset' if offset else ''}"
        self.remove(norm, "; ".join(filter(None, (why, remark))))

    def why_not_hand_over(self, norm: Norm) -> str:
        """Why no layer can take the gain and offset of a norm; empty if one can."""
        gain, offset = gain_and_offset(norm.module)
        if gain is None and offset is None:
            return ""
        if norm.layer is None:
            return "its gain and offset go with it"
        why = self.refused(norm.layer.path, norm.layer.module, replace=False)
        if not why and isinstance(norm.layer.module, OWN_LAYERS):
            why = "it has its own"
        if not why and gain is not None and not bool((gain == 1).all()):
            why = self.why_not_change_weight(norm.layer)
        if not why and offset is not None:
            why = self.why_no_bias(norm.layer)
        return f"{norm.layer.path} cannot take its gain and offset: {why}" if why else ""

    def keep(self, path: str, why: str, *, already: bool = False) -> None:
        """Note that a module stays as it is; `already`: because it is what the method would make of it."""
        if path not in self.converted and path not in self.kept:
            self.kept[path] = Row(path, describe(self.graph.modules[path]), "", why)
            self.already += already

    def remark(self, path: str, text: str) -> None:
        """Add a remark to a change that was noted."""
        row = self.converted[path]
        self.converted[path] = replace(row, why="; ".join(filter(None, (row.why, text))))

    def later(self, step: Callable[[], object]) -> None:
        """Note a step that is part of a change, to be run after those before it."""
        self._steps.append(step)

    def run(self) -> None:
        """Make the changes, all but the norms that go behind layers."""
        for step in self._steps:
            step()

    def attach_norms(self) -> None:
        """Put the norms behind layers: last, because data-dependent initialization looks at the bare layers."""
        for layer, norm in self.norms_behind:
            attach_norm_(layer, norm)

    def ordered(self, rows: Mapping[str, Row]) -> tuple[Row, ...]:
        """Rows in the order in which the model registers its modules."""
        return tuple(rows[path] for path in self.graph.modules if path in rows)

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def has_no_norms(self) -> bool:
        """Whether the model has no norm of any kind, nor a layer that a method of this package made."""
        if self.graph.functions(NORM_OPS, CHANNEL_NORMS + OTHER_NORMS):
            return False
        marks = (*CHANNEL_NORMS, *OTHER_NORMS, *OWN_LAYERS)
        return not any(isinstance(m, marks) or is_parametrized(m) for m in self.model.modules())

    def layers(self) -> list[Call]:
        """The first call of every layer, in the order of the forward pass; what else has weights is noted as kept."""
        called = {call.module for call in self._layers}
        for path, module in self.graph.modules.items():
            if isinstance(module, LAYERS) and module not in called:
                read = not self.graph.calls.get(path) and self.graph.is_read(module)
                self.keep(path, "its weight is read without it being called" if read else _NOT_CALLED)
        for path, op in self.graph.functions(LAYER_OPS, LAYERS).items():
            self.keep(path, f"it calls {op} as a function, which cannot be replaced; layers that are modules can")
        return self._layers

    def _called_layers(self) -> list[Call]:
        first: dict[nn.Module, Call] = {}
        for call in self.graph.layer_calls():
            first.setdefault(call.module, call)
        return list(first.values())

    def ends(self) -> set[str]:
        """Paths of the layers that no norm belongs behind: the last one, and those that make an output."""
        found = set() if self.last is None else {self.last.path}
        for call in self._layers:
            step = self.graph.layer_step(call)
            if step is not None and any(reader.op == "output" for reader in step.users):
                found.add(call.path)
        return found

    def why_not(self, call: Call, *, replace: bool = False) -> str:
        """Why a method must not touch the weight of a layer (or not replace the layer); empty if it may."""
        path, layer = call.path, call.module
        if refused := self.refused(path, layer, replace=replace):
            return refused
        if is_parametrized(layer):
            return f"its weight is parametrized already ({describe_parametrizations(layer)})"
        if replace and has_own_forward(layer, torch_layer(layer)):
            return f"{type(layer).__name__} has a forward of its own"
        return self.why_not_change_weight(call)

    def why_not_change_weight(self, call: Call, *, baked: bool = False) -> str:
        """Why a layer's weight cannot be scaled; empty if it can. `baked`: a parametrization is gone by then."""
        layer = call.module
        if len(calls := self.graph.calls[call.path]) > 1:
            return f"it is called {len(calls)} times"
        if not self.graph.weight_is_used_as_it_is(call):
            return "its forward changes the weight before it is used"
        if is_parametrized(layer):
            if not baked and not isinstance(originals(layer)[0], _WITH_GAIN):
                return f"its weight is made by {describe_parametrizations(layer)}, which has no gain"
        elif (weight := layer._parameters.get("weight")) is None:
            return "its weight is not a parameter of its own"
        elif id(weight) in self._tied:
            return f"its weight is shared: {' = '.join(self._tied[id(weight)])}"
        return self.graph.read_elsewhere(call)

    def why_no_bias(self, call: Call) -> str:
        """Why a bias that the layer does not have could not be given to it; empty if it could."""
        layer = call.module
        if bias_of(layer) is None and has_own_forward(layer, torch_layer(layer)):
            return f"{call.path} has no bias, and a forward of its own that may not use one"
        return ""

    def why_no_norm_behind(self, call: Call) -> str:
        """Why no norm can be put behind a layer; empty if one can."""
        if refused := self.refused(call.path, call.module, replace=False):
            return refused
        if len(calls := self.graph.calls[call.path]) > 1:
            return f"it is called {len(calls)} times"
        step = self.graph.layer_step(call)
        if step is None or not channels_meet(call.module, step):
            return "its output does not have its channels in axis 1"
        if hasattr(call.module, "norm"):
            return "it has an attribute called norm already"
        return ""

    def refused(self, path: str, module: nn.Module, *, replace: bool = True) -> str:
        """Why a module must not be touched (or not be replaced), whatever the method; empty if it may."""
        inside = itertools.accumulate(path.split("."), "{}.{}".format)  # the module and all it is part of
        if any(fnmatchcase(name, pattern) for name in inside for pattern in self._keep):
            return "kept as asked"
        if replace and path == "":
            return "it is the model itself"
        if replace and has_hooks(module):
            return "it has hooks, which would be lost: convert the model before they are registered"
        return ""

    def _find_norms(self) -> list[Norm]:
        found = []
        for path, module in self.graph.modules.items():
            if isinstance(module, OTHER_NORMS):
                self.keep(path, "it normalizes each position by itself, not channels over positions")
            elif isinstance(module, CHANNEL_NORMS):
                norm = self._norm(path, module)
                if isinstance(norm, str):
                    self.keep(path, norm)
                else:
                    found.append(norm)
        for path, op in self.graph.functions(NORM_OPS, CHANNEL_NORMS + OTHER_NORMS).items():
            self.keep(path, f"it calls {op} as a function, which cannot be replaced; norms that are modules can")
        return sorted(found, key=lambda n: n.calls[0].steps[0].position)

    def _norm(self, path: str, module: nn.Module) -> Norm | str:
        """Describe a norm, or say why it cannot be replaced."""
        calls = tuple(self.graph.calls.get(path, ()))
        if refused := self.refused(path, module):
            return refused
        if not calls:
            return _NOT_CALLED
        if elsewhere := self.graph.read_elsewhere(calls[0]):
            return elsewhere
        shapes = [call.inputs[0].value.shape for call in calls if len(call.inputs) == 1]
        if len(shapes) < len(calls) or len({len(shape) for shape in shapes}) > 1 or not calls[0].outputs:
            return "its calls do not all read one tensor of the same kind"
        output, tail = calls[0].outputs[0], dict[str, nn.Module]()
        base = next((kind for kind in _TORCH_NORMS if isinstance(module, kind)), type(module))
        if has_own_forward(module, base):
            parts = norm_and_tail(calls[0]) if len(calls) == 1 else None
            if parts is None:
                return f"{type(module).__name__} has a forward of its own that does more than normalize"
            output, tail = parts
        feeder = self.graph.feeder(path)
        layer, alone = (feeder, "") if isinstance(feeder, Call) else (None, feeder)
        if layer is not None and layer is self._final and isinstance(module, _BatchNorm):
            self.already += 1
            self.final_norm = path
            return "the batch norm behind the last layer, as asked"
        if layer is not None and not self._fold and (after := _norm_after(calls[0])):
            # with this one gone the next one would be behind the layer, and converting again would take that too
            layer, alone = None, f"{after} normalizes its output once more"
        channels = getattr(module, "num_features", None) or module.num_channels
        positions = min(shape[2:].numel() for shape in shapes)
        return Norm(path, module, int(channels), len(shapes[0]), positions, calls, output, tail, layer, alone)  # type: ignore[arg-type]


def _norm_after(call: Call) -> str:
    """The path of a norm that reads the output of a norm directly; empty if there is none."""
    readers = [reader for step in call.outputs for reader in step.users]
    return next((c.path for reader in readers for c in reader.calls if isinstance(c.module, CHANNEL_NORMS)), "")


# -- describing and replacing modules --------------------------------------------------------------------------


def torch_layer(layer: nn.Module) -> Any:
    """The torch class of a linear or convolutional layer."""
    return next(kind for kind in LAYERS if isinstance(layer, kind))


def outputs_of(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def bias_of(layer: nn.Module) -> Tensor | None:
    bias = layer._parameters.get("bias")
    return bias if isinstance(bias, Tensor) else None


def is_parametrized(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module, "weight")


def describe(module: nn.Module) -> str:
    """A module's class; with what its weight is parametrized by, and the norm put behind it."""
    if type(module) is nn.Sequential:
        return " + ".join(describe(child) for child in module) or "Sequential()"
    if isinstance(module, activation_norms.NormalizationPropagation):
        return f"NormalizationPropagation of {describe(module.layer)}"
    text = type(module).__name__
    if is_parametrized(module):
        text = f"{type(module).__bases__[0].__name__} with {describe_parametrizations(module)}"
    return f"{text} + {describe(module.norm)}" if is_attached(module) else text  # type: ignore[arg-type]


def describe_parametrizations(layer: nn.Module) -> str:
    return ", ".join(type(p).__name__.lstrip("_") for p in originals(layer))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that would be lost with it; those of `attach_norm_` do not count."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hook is not _through_norm for hooks in kinds for hook in hooks.values())


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` where `old` is, under all its names, in the same mode and with the norm behind it if it has one."""
    new.train(old.training)
    if is_attached(old):
        attach_norm_(new, old.norm)  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not old:
                continue
            if isinstance(new, nn.Identity) and name == "norm" and is_attached(parent):
                detach_norm_(parent)
            else:
                parent.register_module(name, new)


def with_tail(norm: nn.Module | None, tail: dict[str, nn.Module]) -> nn.Module:
    """A norm (or none), then the modules that were called on its output."""
    if not tail:
        return nn.Identity() if norm is None else norm
    return nn.Sequential(OrderedDict(tail if norm is None else {"norm": norm, **tail}))


def norm_and_tail(call: Call) -> tuple[Step, dict[str, nn.Module]] | None:
    """What a norm with a forward of its own does: its norm op, and the children it calls one after another on it.

    None if there is anything else between its input and its output.
    """
    norms = [step for step in call.own_steps if step.op.endswith("_norm")]
    if len(norms) != 1 or [s for s in norms[0].sources if not s.is_state] != call.inputs:
        return None
    at, tail = norms[0], dict[str, nn.Module]()
    while call.outputs != [at]:
        deeper = [user.calls[user.calls.index(call) + 1 :] for user in at.users if call in user.calls]
        children = {calls[0] if calls else None for calls in deeper}
        child = children.pop() if len(children) == 1 and len(deeper) == len(at.users) else None
        if child is None or child.inputs != [at] or len(child.outputs) != 1:
            return None
        tail[child.path.removeprefix(call.path + ".")] = child.module
        at = child.outputs[0]
    return norms[0], tail


# -- norms behind layers, noise before units -------------------------------------------------------------------
# Both by hooks: a container would change a layer's state-dict keys and hide its attributes from the model's code.


def attach_norm_(layer: nn.Module, norm: nn.Module) -> None:
    """Send what `layer` puts out through `norm`, which becomes its child of that name."""
    layer.register_module("norm", norm.train(layer.training))
    layer.register_forward_hook(_through_norm)


def detach_norm_(layer: nn.Module) -> None:
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _through_norm]:
        del layer._forward_hooks[key]
    del layer.norm


def is_attached(layer: nn.Module) -> bool:
    return _through_norm in layer._forward_hooks.values()


def _through_norm(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
    return layer.norm(output)  # type: ignore[operator]


def is_noisy(unit: nn.Module) -> bool:
    """Whether noise is put on the input of a module, by `add_input_noise_`."""
    return any(isinstance(hook, _NoisyInput) for hook in unit._forward_pre_hooks.values())


def remove_noise_(unit: nn.Module) -> None:
    for key in [key for key, hook in unit._forward_pre_hooks.items() if isinstance(hook, _NoisyInput)]:
        del unit._forward_pre_hooks[key]
        unit._forward_pre_hooks_with_kwargs.pop(key, None)


# -- gains and offsets -----------------------------------------------------------------------------------------


def gain_and_offset(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The parameters γ and β of a norm, where it has them."""
    gain, offset = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return gain if isinstance(gain, Tensor) else None, offset if isinstance(offset, Tensor) else None


@torch.no_grad()
def copy_affine_(new: nn.Module, old: nn.Module) -> None:
    """Give a norm the gain and offset of the one it replaces, where both have them."""
    for mine, given in zip(gain_and_offset(new), gain_and_offset(old), strict=True):
        if mine is not None and given is not None and mine.numel() == given.numel():
            mine.copy_(given.view_as(mine))
            mine.requires_grad_(given.requires_grad)


@torch.no_grad()
def scale_outputs_(layer: nn.Module, gain: Tensor) -> None:
    """Multiply a layer's weight (or the gain of its weight norm) and bias by one factor per output channel."""
    weight: Any = originals(layer).original0 if is_parametrized(layer) else layer.weight
    if isinstance(layer, TRANSPOSED) and not is_parametrized(layer):
        groups: Any = layer.groups  # the weight is (in, out / groups, *window)
        factor = gain.view(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = (weight.unflatten(0, (groups, -1)) * factor.to(weight)).flatten(0, 1)
        weight.copy_(scaled)
    elif isinstance(layer, TRANSPOSED):
        weight.mul_(gain.view(1, -1, *[1] * (weight.ndim - 2)).to(weight))
    else:
        weight.mul_(gain.view(-1, *[1] * (weight.ndim - 1)).to(weight))
    if (bias := bias_of(layer)) is not None:
        bias.mul_(gain.to(bias))


@torch.no_grad()
def take_input_affine_(layer: nn.Module, a: Tensor, c: Tensor) -> None:
    """W (a x + c) + b = (W a) x + (b + W c): what was done to each input channel is done by weight and bias.

    For linear layers and convolutions that pad with nothing but their input.
    """
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    assert isinstance(weight, Tensor)

    def meeting(values: Tensor) -> Tensor:
        """[inputs] -> [outputs, inputs / groups, 1, ...]: the input channels that each output sees."""
        seen = values.view(groups, 1, -1).expand(-1, len(weight) // groups, -1).flatten(0, 1)
        return seen.view(*seen.shape, *[1] * (weight.ndim - 2))

    exact = weight.double()
    shift_outputs_(layer, (exact * meeting(c)).flatten(1).sum(1))
    weight.copy_(exact * meeting(a))


@torch.no_grad()
def shift_outputs_(layer: nn.Module, offset: Tensor) -> None:
    """Add to the bias of a layer, which is made if there is none."""
    if (bias := bias_of(layer)) is not None:
        bias.add_(offset.to(bias))
    else:
        weight: Any = layer.weight
        values = offset.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
        layer.bias = nn.Parameter(values, requires_grad=offset.requires_grad)


def inherit_affine_(layer: nn.Module, norm: nn.Module, with_offset: bool = True) -> None:
    """y -> γ y + β by the layer's own parameters: what its norm does where means are 0 and variances 1."""
    gain, offset = gain_and_offset(norm)
    if gain is not None:
        scale_outputs_(layer, gain)
    if offset is not None and with_offset:
        shift_outputs_(layer, offset)
