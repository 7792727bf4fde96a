"""Put a method on a model, and take plain layers back. What the methods do stands in their rooms.

Which norm reads the output of which layer, and whether anybody else does, is read from the graph that
`torch.export` captures, never from the names of modules. What cannot be converted is kept, and the report says
why.

>>> model, report = equinorm.convert(resnet50(), "equinorm", torch.rand(2, 3, 224, 224), stats_fraction=0.25)
>>> print(report)
>>> plain, report = equinorm.fold(model, images)      # layers and norms as plain layers again
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .models.flat import refuse_flat_model, refuse_shards
from .models.graph import Call, ModuleGraph
from .models.kinds import (
    affine_of,
    is_channel_norm,
    is_method_layer,
    is_norm,
    method_hooks,
    plain_of,
    remove_method_hooks_,
)
from .models.layers import LAYERS, TRANSPOSED
from .models.modes import modes_kept
from .models.parametrized import bake_weight_
from .models.patterns import Keep
from .models.plan import Norm, Plan
from .models.replacing import batchnorm_for, norm_behind
from .models.reports import ConvertReport, ModuleRow, kept_table
from .models.running_statistics import has_running_statistics
from .models.saving import guard_saving_, note_norms
from .models.surgery import (
    bias_of,
    describe,
    gain_and_offset,
    is_parametrized,
    replace_module,
    scale_outputs_,
    shift_outputs_,
    take_input_affine_,
    with_tail,
)
from .models.undo import model_kept
from .models.unwrapping import unwrap
from .registry import Method, find_method, methods

__all__ = ["convert", "fold"]

# -- a method on a model ---------------------------------------------------------------------------------------


def convert(
    model: nn.Module,
    method: str | Method,
    example_inputs: Any,
    *,
    keep: Iterable[str] = (),
    final_batchnorm: bool = False,
    remove_rest: bool = False,
    init_batch: Any = None,
    inplace: bool = False,
    **options: Any,
) -> tuple[nn.Module, ConvertReport]:
    """Put a method on a model; returns the converted model and a report.

    Args:
        model: any module that `torch.export` can capture. Its mode, device, dtypes, memory formats and what
            requires gradients are kept.
        method: one of `equinorm.methods()`, or its name.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Only shapes matter.
        keep: names or patterns (`"layer4.*"`) of modules that must stay as they are.
        final_batchnorm: put a batch norm behind the last layer, and leave one that is there (stock2019, 6.2).
        remove_rest: remove the norms whose place a weight method cannot take, instead of keeping them.
        init_batch: real data, for the data-dependent initialization of the weight norm family.
        inplace: change `model` itself instead of a deep copy.
        options: those of the method, see `equinorm.methods()`.

    Converting a second time changes nothing. If anything is wrong an error says so before anything is changed.

    >>> model, report = equinorm.convert(model, "groupnorm", images, groups=16)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    chosen = find_method(method)
    if unwrap(model) is not model:
        raise TypeError(f"convert the model first and wrap it then: got a {type(model).__name__}")
    if init_batch is not None and chosen.init is None:
        expected = ", ".join(repr(other.name) for other in methods() if other.init is not None)
        raise ValueError(
            f"init_batch is for methods with a data-dependent initialization ({expected}), not {chosen.name!r}"
        )
    options = _checked_options(chosen, options)
    keep = Keep(model, keep).patterns
    refuse_flat_model(model)
    refuse_shards(model, "equinorm.convert", "convert the model before it is sharded")
    if not inplace:
        model = deep_copy(model)
    with model_kept(model) if inplace else nullcontext():
        return _convert(model, chosen, example_inputs, keep, final_batchnorm, remove_rest, init_batch, options)


def _convert(
    model: nn.Module,
    method: Method,
    example_inputs: Any,
    keep: Iterable[str],
    final_batchnorm: bool,
    remove_rest: bool,
    init_batch: Any,
    options: Mapping[str, Any],
) -> tuple[nn.Module, ConvertReport]:
    graph = ModuleGraph(model, example_inputs)
    plan = Plan(model, graph, keep=keep, final_batchnorm=final_batchnorm, remove_rest=remove_rest)
    method.plan(plan, **options)
    if final_batchnorm:
        _put_final_batchnorm(plan)
    report = ConvertReport(type(model).__name__, method.name, plan.ordered(plan.converted), plan.ordered(plan.kept))
    if not plan.converted and not plan.already:
        raise ValueError(_nothing(report, method.looks_for))
    guard_saving_(model)
    note_norms(model, ((norm.module, norm.layer.module) for norm in plan.norms if norm.layer is not None))
    plan.run()
    if method.init is not None and init_batch is not None and plan.converted:
        method.init(model, init_batch)
    plan.attach_norms()
    return model, report


def deep_copy(model: nn.Module) -> nn.Module:
    """`copy.deepcopy`, with a remedy for models that cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        # Some keep tensors they computed, as timm's LeViT does in evaluation, and torch does not copy those.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TypeError(
            f"{type(model).__name__} cannot be copied: {reason}\nPass inplace=True to change it itself."
        ) from error


def _put_final_batchnorm(plan: Plan) -> None:
    if plan.final_norm is not None:
        return
    if plan.last is None:
        raise ValueError("final_batchnorm=True: the forward pass calls no linear or convolutional layer")
    if why := plan.why_no_norm_behind(plan.last):
        raise ValueError(f"final_batchnorm=True: no batch norm can stand behind {plan.last.path}: {why}")
    norm_behind(plan, plan.last, batchnorm_for)


def _checked_options(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(options) - set(method.options)):
        known = ", ".join(method.options) or "none"
        raise TypeError(f"method {method.name!r} has no option {', '.join(map(repr, unknown))}; it has {known}")
    return {**method.options, **options}


def _nothing(report: ConvertReport, looked_for: str) -> str:
    text = f"{report.model} has no module that {report.method!r} could convert"
    if not report.kept:
        return f"{text}: the forward pass calls no {looked_for}"
    return f"{text}\n\n{kept_table(report.kept)}"


# -- plain layers back -----------------------------------------------------------------------------------------


@torch.no_grad()
def fold(
    model: nn.Module, example_inputs: Any = None, *, keep: Iterable[str] = (), inplace: bool = False
) -> tuple[nn.Module, ConvertReport]:
    """Fold what a method added into plain convolutions and linear layers; outputs in evaluation stay the same.

    EquiNorm layers become plain ones with their running statistics (defazio2018, section 4); parametrized weights
    (weight norm and its kin, mean shift rejection) become plain weights, and input noise goes. With
    `example_inputs` the graph tells which batch norms (mean-only and renormalizing ones too) read the output of
    one layer that nobody else reads, and these are folded into it; so are those whose output only one layer reads,
    if it pads without zeros.

    Args:
        model: made by `convert` or by hand. Its mode, device and dtypes are kept.
        example_inputs: as for `convert`; without them norms of activations stay.
        keep: names or patterns of modules that stay as they are.
        inplace: change `model` itself instead of a deep copy.

    Returns the model and a report that says what was folded, and what stayed and why.

    >>> plain, report = equinorm.fold(model, images)
    >>> torch.onnx.export(plain.eval(), (images,), "model.onnx", dynamo=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if unwrap(model) is not model:
        raise TypeError(f"fold the module inside the {type(model).__name__}, not the wrapper")
    refuse_flat_model(model)
    refuse_shards(
        model, "equinorm.fold", "fold a copy of the model that is not sharded, with the weights loaded into it"
    )
    methods()  # of which the modules are
    kept_as_asked = Keep(model, keep)
    if not inplace:
        model = deep_copy(model)
    name = type(model).__name__
    with model_kept(model) if inplace else nullcontext(), modes_kept(model) as modes:
        model.eval()  # what is folded is what evaluation computes
        norms, kept = _foldable_norms(model, example_inputs, kept_as_asked)
        guard_saving_(model)
        note_norms(model, ((norm.module, layer.module) for norm, layer in norms if layer is norm.layer))
        rows: list[ModuleRow] = []
        root, new_of = _plain_layers(model, kept_as_asked, rows)
        for norm, layer in norms:
            _fold_into_(new_of.get(layer.module, layer.module), norm, behind=layer is norm.layer)
            new_of[norm.module] = new = with_tail(None, norm.tail)
            rows.append(ModuleRow(norm.path, describe(norm.module), describe(new), f"folded into {layer.path}"))
            replace_module(root, norm.module, new)
    for old, new in new_of.items():
        new.training = modes[old]
    return root, ConvertReport(name, "fold", tuple(rows), _what_stayed(root, kept, kept_as_asked))


# -- layers ----------------------------------------------------------------------------------------------------


def _plain_layers(model: nn.Module, keep: Keep, rows: list[ModuleRow]) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Make all layers plain; (the model, another object if it is such a layer itself, and new modules by old ones)."""
    new_of: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules()):
        if path in keep:
            continue
        was = describe(module)
        if hooks := method_hooks(module):
            remove_method_hooks_(module)
            rows.append(ModuleRow(path, f"{was} with {', '.join(hooks)}", was, ""))
        if isinstance(new := plain_of(module), nn.Module):
            new_of[module] = new
            replace_module(model, module, new)
            rows.append(ModuleRow(path, was, describe(new), ""))
        elif isinstance(module, LAYERS) and is_parametrized(module):
            bake_weight_(module)
            rows.append(ModuleRow(path, was, describe(module), ""))
    return new_of.get(model, model), new_of


# -- norms -----------------------------------------------------------------------------------------------------


def _foldable_norms(
    model: nn.Module, example_inputs: Any, keep: Keep
) -> tuple[list[tuple[Norm, Call]], dict[str, str]]:
    """The norms that can be folded and the layer before or behind them that takes them; and why others cannot."""
    if example_inputs is None:
        return [], {}
    if not any(is_channel_norm(module) for module in model.modules()):
        return [], {}
    plan = Plan(model, ModuleGraph(model, example_inputs), keep=keep.patterns, fold=True)
    kept = {row.module: row.why for row in plan.kept.values()}
    found = []
    for norm in plan.norms:
        if affine_of(norm.module) is None:
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
    if is_method_layer(norm.layer.module):
        if not isinstance(plain_of(norm.layer.module), nn.Module):
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


def _fold_into_(layer: nn.Module, norm: Norm, behind: bool) -> None:
    """Let a layer do what the norm behind it does to its output, or what the norm before it does to its input."""
    affine = affine_of(norm.module)
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


def _what_stayed(model: nn.Module, kept: Mapping[str, str], keep: Keep) -> tuple[ModuleRow, ...]:
    rows = []
    for path, module in model.named_modules():
        if path in keep and (is_norm(module) or is_method_layer(module) or is_parametrized(module)):
            why = "kept as asked"
        elif is_norm(module):
            why = kept.get(path, "example_inputs, which would tell what it reads, were not given")
            if not has_running_statistics(module):
                why = _INPUT_DEPENDENT
        elif isinstance(reason := plain_of(module), str):
            why = reason
        else:
            continue
        rows.append(ModuleRow(path, describe(module), "", why))
    return tuple(rows)
