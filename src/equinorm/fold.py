"""Take plain weights back: `nn.Conv2d` and `nn.Linear` that compute what a normalized model does in evaluation.

>>> plain = equinorm.fold(model)                     # EquiNorm layers and parametrized weights
>>> plain = equinorm.fold(model, example_inputs)     # and every norm that is a fixed affine map behind a layer
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .activation_norms import NormalizationPropagation, _BatchRenorm, _MeanOnlyBatchNorm
from .convert import ConvertReport
from .equilibrium import _EquiNorm
from .meanshift import InputNoise
from .modulegraph import LAYERS, ModuleGraph
from .surgery import (
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
    with_tail,
)
from .symmetry.capture import unwrap
from .weightnorm import bake_weight_

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
    one layer that nobody else reads, and these are folded into it.

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
        model = copy.deepcopy(model)
    name = type(model).__name__
    modes = {module: module.training for module in model.modules()}
    model.eval()  # what is folded is what evaluation computes
    try:
        norms, kept = _foldable_norms(model, example_inputs)
        rows: list[Row] = []
        root, new_of = _plain_layers(model, rows)
        for norm in norms:
            assert norm.layer is not None
            _fold_into_(new_of.get(norm.layer.module, norm.layer.module), norm)
            new_of[norm.module] = new = with_tail(None, norm.tail)
            rows.append(Row(norm.path, describe(norm.module), describe(new), f"folded into {norm.layer.path}"))
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
        elif isinstance(module, _EquiNorm) and module.running_mean is not None:
            new_of[module] = module.to_plain()
        elif isinstance(module, LAYERS) and is_parametrized(module):
            bake_weight_(module)
            rows.append(Row(path, was, describe(module), ""))
        if (new := new_of.get(module)) is not None:
            replace_module(model, module, new)
            rows.append(Row(path, was, describe(new), ""))
    return new_of.get(model, model), new_of


# -- norms -----------------------------------------------------------------------------------------------------


def _foldable_norms(model: nn.Module, example_inputs: Any) -> tuple[list[Norm], dict[str, str]]:
    """The norms that can be folded into the layer before them, and why others cannot."""
    if example_inputs is None:
        return [], {}
    if not any(isinstance(module, CHANNEL_NORMS) for module in model.modules()):
        return [], {}
    plan = Plan(model, ModuleGraph(model, example_inputs), fold=True)
    kept = {row.module: row.why for row in plan.kept.values()}
    found = []
    for norm in plan.norms:
        why = _why_not(plan, norm)
        if why:
            kept[norm.path] = why
        else:
            found.append(norm)
    return found, kept


def _why_not(plan: Plan, norm: Norm) -> str:
    if affine_of(norm) is None:
        return _INPUT_DEPENDENT
    if norm.layer is None:
        return norm.alone
    if isinstance(norm.layer.module, _EquiNorm) and norm.layer.module.running_mean is None:
        return f"{norm.layer.path}, which feeds it, has weights that depend on the batch"
    why = ""
    if not isinstance(norm.layer.module, _EquiNorm):
        why = plan.why_not_change_weight(norm.layer, baked=True) or plan.why_no_bias(norm.layer)
    return f"{norm.layer.path}, which feeds it, cannot be changed: {why}" if why else ""


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


def _fold_into_(layer: nn.Module, norm: Norm) -> None:
    affine = affine_of(norm)
    assert affine is not None
    had_bias = bias_of(layer) is not None
    scale_outputs_(layer, affine[0])
    shift_outputs_(layer, affine[1])
    offset, bias, weight = gain_and_offset(norm.module)[1], bias_of(layer), layer.weight
    if not had_bias and bias is not None and isinstance(weight, Tensor):
        bias.requires_grad_(weight.requires_grad if offset is None else offset.requires_grad)


def _what_stayed(model: nn.Module, kept: dict[str, str]) -> tuple[Row, ...]:
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, (*CHANNEL_NORMS, *OTHER_NORMS)):
            why = kept.get(path, "example_inputs, which would tell what it reads, were not given")
            if not _has_running_statistics(module):
                why = _INPUT_DEPENDENT
        elif isinstance(module, NormalizationPropagation):
            why = "it holds a ReLU; the layer inside it is plain"
        elif isinstance(module, _EquiNorm):
            why = "it keeps no running statistics, so its weights depend on the batch"
        else:
            continue
        rows.append(Row(path, describe(module), "", why))
    return tuple(rows)


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(getattr(module, "running_mean", None), Tensor)


class _CallableModule(ModuleType):
    """`equinorm.fold` is the function until this module is imported, and the module from then on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fold(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
