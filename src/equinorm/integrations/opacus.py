"""Opacus: what of this library mixes the examples of a batch, and models without it.

Importing this tells Opacus' `ModuleValidator` about EquiNorm and about the norms with statistics of the batch, so that
`PrivacyEngine.make_private` refuses them as it refuses BatchNorm. `fix` makes a model that it takes.

    private, report = fix(model, images, method="msr")
    module, optimizer, loader = PrivacyEngine().make_private(module=private, ...)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..conversion import convert, deep_copy
from ..equilibrium.layers import EquiNormLayer
from ..models.modes import modes_kept
from ..models.reports import ConvertReport, kept_table
from ..models.surgery import replace_module
from ..norms.layers import BatchRenorm, MeanOnlyBatchNorm

try:
    from opacus.validators import ModuleValidator
    from opacus.validators.errors import ShouldReplaceModuleError
except ImportError as error:
    raise ImportError("equinorm.integrations.opacus needs Opacus: pip install opacus") from error

__all__ = ["METHODS", "fix", "validate"]

METHODS = ("groupnorm", "msr")
"""What `fix` can put in the place of layers with batch statistics."""


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _mixes(module: nn.Module) -> list[Exception]:
    return [
        ShouldReplaceModuleError(
            f"{type(module).__name__} takes statistics over the batch, so the gradient of one example depends on the "
            "others and cannot be bounded by itself. equinorm.integrations.opacus.fix(model, example_inputs) replaces "
            "it by group norm or by mean shift rejection"
        )
    ]


def validate(model: nn.Module) -> list[Exception]:
    """What Opacus' validator finds, and besides it what its hooks cannot see: parametrized layers without a bias.

    Opacus computes the gradients of a parametrized weight with the layer, if the layer has a parameter of its own.
    """
    errors: list[Exception] = list(ModuleValidator.validate(model))
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module) and not any(p.requires_grad for p in module.parameters(recurse=False)):
            errors.append(
                ShouldReplaceModuleError(
                    f"{name or type(module).__name__} has a parametrized weight and no bias, and Opacus finds no "
                    "gradients per example for it: give the layer a bias, or fold the model"
                )
            )
    return errors


def fix(
    model: nn.Module, example_inputs: Any, method: str = "groupnorm", **options: Any
) -> tuple[nn.Module, ConvertReport]:
    """A copy of a model in which no layer has statistics of the batch, and the report of `convert`.

    EquiNorm layers become plain layers, with their weight, gain and offset, and then take `method` as batch norms do:
    "groupnorm" puts group norms in their place, "msr" scaled kernels (mean shift rejection), which keep the offsets of
    norms as biases. `options` are those of the method in `convert`. Where something stays that Opacus would refuse,
    ValueError says what and why.

    >>> private, report = fix(resnet18(), images, method="groupnorm", groups=16)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    fixed = deep_copy(model)
    for layer in [module for module in fixed.modules() if isinstance(module, EquiNormLayer)]:
        behind = nn.Sequential(layer.bare(), _norm_of(layer))
        if layer is fixed:
            fixed = behind.train(layer.training)
        else:
            replace_module(fixed, layer, behind)
    if method == "msr":
        options = {"bias": True, **options}
    report = ConvertReport(type(model).__name__, method, (), ())
    if _found_in_training(fixed):
        fixed, report = convert(fixed, method, example_inputs, inplace=True, **options)
    if errors := _found_in_training(fixed):
        found = "\n".join(map(str, errors))
        kept = f"\n\n{kept_table(report.kept)}" if report.kept else ""
        raise ValueError(f"Opacus would still refuse this model after method={method!r}:\n{found}{kept}")
    return fixed, report


def _found_in_training(model: nn.Module) -> list[Exception]:
    """What there is to find but for the mode."""
    with modes_kept(model):
        return validate(model.train())


@torch.no_grad()
def _norm_of(layer: EquiNormLayer) -> nn.Module:
    """A batch norm with the gain and the offset of an EquiNorm layer, for a method to replace."""
    axes = layer.weight.ndim - 2  # of a kernel's window; 0 for a linear layer
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes]
    channels: Any = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    norm = kind(channels, affine=layer.affine, device=layer.weight.device, dtype=layer.weight.dtype)
    for mine, theirs in ((norm.weight, layer.gain), (norm.bias, layer.bias)):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
            mine.requires_grad_(theirs.requires_grad)
    return norm


def _group_norm_behind(layer: EquiNormLayer, num_groups: int | None = None, **_: Any) -> nn.Module:
    """What Opacus' `ModuleValidator.fix`, which sees one module at a time, puts in the place of an EquiNorm layer."""
    norm = _norm_of(layer)
    return nn.Sequential(layer.bare(), _group_norm(norm, num_groups))


@torch.no_grad()
def _group_norm(norm: nn.Module, num_groups: int | None = None, **_: Any) -> nn.Module:
    channels: Any = norm.num_features
    affine = getattr(norm, "weight", None) is not None
    if num_groups is None:
        # what may have no positions needs two channels in a group
        flat = isinstance(norm, nn.BatchNorm1d) or 2 in getattr(norm, "axes", ())
        num_groups = math.gcd(32, channels // 2 if flat and channels % 2 == 0 else 1 if flat else channels)
    group_norm = nn.GroupNorm(num_groups, channels, affine=affine)
    for mine, theirs in ((group_norm.weight, norm.weight), (group_norm.bias, norm.bias)):
        if affine and isinstance(theirs, Tensor):
            mine.copy_(theirs)
    return group_norm


for _base, _fixer in (
    (EquiNormLayer, _group_norm_behind),
    (BatchRenorm, _group_norm),
    (MeanOnlyBatchNorm, _group_norm),
):
    for _kind in _with_subclasses(_base):
        ModuleValidator.VALIDATORS[_kind] = _mixes
        ModuleValidator.FIXERS[_kind] = _fixer
