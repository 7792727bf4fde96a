"""Take plain weights back: `nn.Conv2d` and `nn.Linear` that compute what a normalized model does in evaluation.

>>> plain = equinorm.fold(model)                     # EquiNorm layers and parametrized weights
>>> plain = equinorm.fold(model, example_inputs)     # and every norm that is a fixed affine map behind a layer
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .conversion import ConvertReport, deep_copy
from .equilibrium.layers import EquiNormLayer
from .models.graph import Call, ModuleGraph
from .models.running_statistics import has_running_statistics
from .models.surgery import (
    CHANNEL_NORMS,
    OTHER_NORMS,
    Norm,
    Plan,
    Row,
    bias_of,
    describe,
    gain_and_offset,
    is_noisy,
    is_parametrized,
    remove_noise_,
    replace_module,
    scale_outputs_,
    shift_outputs_,
    take_input_affine_,
    with_tail,
)
from .msr.rejection import InputNoise
from .norms.layers import NormalizationPropagation, _BatchRenorm, _MeanOnlyBatchNorm
from .symmetry.capture import unwrap
from .weightnorm.parametrizations import LAYERS, TRANSPOSED, bake_weight_

__all__ = ["fold"]


@overload
def fold(
    model: nn.Module, example_inputs: Any = None, *, inplace: bool = False, return_report: Literal[False] = False
) -> nn.Module: ...


@overload
def fold(
    model: nn.Module, example_inputs: Any = None, *, inplace: bool = False, return_report: Literal[True]
) -> tuple[nn.Module, ConvertReport]: ...


@torch.no_grad()
def fold(
    model: nn.Module, example_inputs: Any = None, *, inplace: bool = False, return_report: bool = False
) -> nn.Module | tuple[nn.Module, ConvertReport]:
    """Fold what a method added into plain convolutions and linear layers; outputs in evaluation stay the same.

    EquiNorm layers become plain ones with their running statistics (defazio2018, section 4); parametrized weights
    (weight norm and its kin, mean shift rejection) become plain weights, and input noise goes. With
    `example_inputs` the graph tells which batch norms (mean-only and renormalizing ones too) read the output of
    one layer that nobody else reads, and these are folded into it; so are those whose output only one layer reads,
    if it pads without zeros.

    Args:
        model: made by `convert` or by hand. Its mode, device and dtypes are kept.
        example_inputs: as for `convert`; without them norms of activations stay.
        inplace: change `model` itself instead of a deep copy.
        return_report: return `(model, report)`; the report says what was folded, and what stayed and why.

    >>> torch.onnx.export(equinorm.fold(model, images).eval(), (images,), "model.onnx", dynamo=True)
    """
    if unwrap(model) is not model:
        raise TypeError(f"fold the module inside the {type(model).__name__}, not the wrapper")
    if not inplace:
        model = deep_copy(model)
    name = type(model).__name__
    modes = {module: module.training for module in model.modules()}
    model.eval()  # what is folded is what evaluation computes
    try:
        norms, kept = _foldable_norms(model, example_inputs)
        rows: list[Row] = []
        root, new_of = _plain_layers(model, rows)
        for norm, layer in norms:
            _fold_into_(new_of.get(layer.module, layer.module), norm, behind=layer is norm.layer)
            new_of[norm.module] = new = with_tail(None, norm.tail)
            rows.append(Row(norm.path, describe(norm.module), describe(new), f"folded into {layer.path}"))
            replace_module(root, norm.module, new)
    finally:
        for module, mode in modes.items():
            module.training = mode
    for old, new in new_of.items():
        new.training = modes[old]
    report = ConvertReport(name, "fold", tuple(rows), _what_stayed(root, kept))
    return (root, report) if return_report else root


# -- layers ----------------------------------------------------------------------------------------------------


def _plain_layers(model: nn.Module, rows: list[Row]) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Make all layers plain; (the model, another object if it is such a layer itself, and new modules by old ones)."""
    new_of: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules()):
        was = describe(module)
        if is_noisy(module):
            remove_noise_(module)
            rows.append(Row(path, f"{was} with InputNoise", was, ""))
        if isinstance(module, InputNoise):
            new_of[module] = nn.Identity()
        elif isinstance(module, EquiNormLayer) and module.running_mean is not None:
            new_of[module] = module.to_plain()
        elif isinstance(module, LAYERS) and is_parametrized(module):
            bake_weight_(module)
            rows.append(Row(path, was, describe(module), ""))
        if (new := new_of.get(module)) is not None:
            replace_module(model, module, new)
            rows.append(Row(path, was, describe(new), ""))
    return new_of.get(model, model), new_of


# -- norms -----------------------------------------------------------------------------------------------------


def _foldable_norms(model: nn.Module, example_inputs: Any) -> tuple[list[tuple[Norm, Call]], dict[str, str]]:
    """The norms that can be folded and the layer before or behind them that takes them; and why others cannot."""
    if example_inputs is None:
        return [], {}
    if not any(isinstance(module, CHANNEL_NORMS) for module in model.modules()):
        return [], {}
    plan = Plan(model, ModuleGraph(model, example_inputs), fold=True)
    kept = {row.module: row.why for row in plan.kept.values()}
    found = []
    for norm in plan.norms:
        if affine_of(norm) is None:
            kept[norm.path] = _INPUT_DEPENDENT
        elif isinstance(before := _layer_before(plan, norm), Call):
            found.append((norm, before))
        elif isinstance(behind := _layer_behind(plan, norm), Call):
            found.append((norm, behind))
        else:
            kept[norm.path] = "; ".join(filter(None, (before, behind)))
    return found, kept


def _layer_before(plan: Plan, norm: Norm) -> Call | str:
    """The layer whose output a norm reads, if it can take the norm; or why there is none."""
    if norm.layer is None:
        return norm.alone
    if isinstance(norm.layer.module, EquiNormLayer):
        if norm.layer.module.running_mean is None:
            return f"{norm.layer.path}, which feeds it, has weights that depend on the batch"
    elif why := plan.why_not_change_weight(norm.layer, baked=True) or plan.why_no_bias(norm.layer):
        return f"{norm.layer.path}, which feeds it, cannot be changed: {why}"
    return norm.layer


def _layer_behind(plan: Plan, norm: Norm) -> Call | str:
    """The layer that reads the output of a norm, if it can take the norm; or why it cannot, if there is one."""
    if len(norm.calls) > 1 or norm.tail:
        return ""
    layer = plan.graph.consumer(norm.output)
    if isinstance(layer, str):
        return layer
    if isinstance(layer.module, TRANSPOSED):
        return f"{layer.path}, which reads it, is transposed and spreads an offset unevenly"
    if _pads_with_zeros(layer.module):
        return f"{layer.path}, which reads it, pads it with zeros, not with its offset"
    if why := plan.why_not_change_weight(layer, baked=True) or plan.why_no_bias(layer):
        return f"{layer.path}, which reads it, cannot be changed: {why}"
    return layer


def _pads_with_zeros(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros" or layer.padding == "valid":
        return False
    padding: Any = layer.padding
    if padding == "same":
        return any(size > 1 for size in layer.kernel_size)  # type: ignore[union-attr]
    return any(padding)


_INPUT_DEPENDENT = "it uses statistics of its input"


def affine_of(norm: Norm) -> tuple[Tensor, Tensor] | None:
    """a and c of y = a x + c per channel, which a norm with running statistics is in evaluation; in float64."""
    module = norm.module
    gain, offset = gain_and_offset(module)
    one = torch.ones(norm.channels, dtype=torch.float64, device=norm.place["device"])
    a = one if gain is None else gain.double()
    c = one - one if offset is None else offset.double()
    if isinstance(module, _MeanOnlyBatchNorm):
        return one, c - module.running_mean.double()
    if isinstance(module, _BatchRenorm):
        a = a / module.running_std.double()
        return a, c - a * module.running_mean.double()
    if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
        a = a / torch.sqrt(module.running_var.double() + module.eps)
        return a, c - a * module.running_mean.double()
    return None


def _fold_into_(layer: nn.Module, norm: Norm, behind: bool) -> None:
    """Let a layer do what the norm behind it does to its output, or what the norm before it does to its input."""
    affine = affine_of(norm)
    assert affine is not None
    had_bias = bias_of(layer) is not None
    if behind:
        scale_outputs_(layer, affine[0])
        shift_outputs_(layer, affine[1])
    else:
        take_input_affine_(layer, *affine)
    offset, bias, weight = gain_and_offset(norm.module)[1], bias_of(layer), layer.weight
    if not had_bias and bias is not None and isinstance(weight, Tensor):
        bias.requires_grad_(weight.requires_grad if offset is None else offset.requires_grad)


def _what_stayed(model: nn.Module, kept: dict[str, str]) -> tuple[Row, ...]:
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, (*CHANNEL_NORMS, *OTHER_NORMS)):
            why = kept.get(path, "example_inputs, which would tell what it reads, were not given")
            if not has_running_statistics(module):
                why = _INPUT_DEPENDENT
        elif isinstance(module, NormalizationPropagation):
            why = "it holds a ReLU; the layer inside it is plain"
        elif isinstance(module, EquiNormLayer):
            why = "it keeps no running statistics, so its weights depend on the batch"
        else:
            continue
        rows.append(Row(path, describe(module), "", why))
    return tuple(rows)


class _CallableModule(ModuleType):
    """`equinorm.fold` is the function until this module is imported, and the module from then on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fold(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
