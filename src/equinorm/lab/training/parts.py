"""What a run is made of before its first step: model, optimizer and method, from its description and its seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import (
    AdaptiveGradientClipping,
    ENorm,
    ImplicitENorm,
    MeanShiftRejection,
    PathSGD,
    Symmetry,
    UnitFilters,
    balance_,
    trace,
)
from ...criteria import Norm, Path
from ...enorm.reference import balance_chain_, paper_views
from ...models.parametrized import originals, parametrized_layers
from ...msr import luma_gradient, parameter_groups, scaled_kernels
from ...unitfilters import UnitFilter
from ...unitfilters import parameter_groups as unit_filter_groups
from .. import nets as models
from .inputs import Inputs, Streamed
from .optimizers import BasisPathSGD, MuonAndSGD
from .precision import mixed_seed
from .runs import Optim, Run

__all__ = ["Parts", "build", "optimizer_of"]

CLASSIFIER = "head.classifier.weight"
ONCE = {"enorm_once": Norm, "path_once": Path}  # balanced by a criterion before the first step, and never again
METHODS = (
    *("none", "enorm", "enorm_chain", "implicit_enorm", "path_sgd", "msr", "unit_filters", "agc", "g_sgd"),
    *ONCE,
)


@dataclass(eq=False)
class Parts:
    model: models.Chain
    optimizer: torch.optim.Optimizer
    method: Any  # what has a state of its own (ENorm, MeanShiftRejection), is a penalty (ImplicitENorm), or None

    @property
    def penalty(self) -> ImplicitENorm | None:
        return self.method if isinstance(self.method, ImplicitENorm) else None


def build(run: Run, inputs: Inputs | Streamed) -> Parts:
    """The untrained network of a run with its optimizer and method; the same for the same seed on every device."""
    device = inputs.device
    examples = inputs.examples(500)
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(mixed_seed(run.seed, 0))
        model = models.build(run.model.name, classes=inputs.classes, in_shape=inputs.shape, **run.model.options)
        model = model.to(device)
        if inputs.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.initialise_from_data(model, examples)  # with dropout, if there is some
    example = examples[:2]
    name, options = run.method.name, dict(run.method.options)
    if name == "path_sgd":
        if run.optim.momentum or run.optim.norm_rate != 1 or run.optim.bias_rate != 1:
            raise ValueError(
                "path_sgd has no momentum and one learning rate: momentum must be 0, norm_rate and bias_rate 1"
            )
        rate: Any = torch.tensor(run.optim.lr, device=device)
        return Parts(model, PathSGD(model, example, lr=rate, weight_decay=run.optim.weight_decay), None)
    if name == "g_sgd":
        if run.optim.momentum or run.optim.weight_decay:
            raise ValueError("g_sgd has no momentum and no weight decay: both must be 0")
        chain = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        return Parts(model, BasisPathSGD(chain, torch.tensor(run.optim.lr, device=device)), None)
    if name in ONCE:
        balance_once_(run, model, example, options)
        return Parts(model, optimizer_of(run, model, None), None)
    symmetry = symmetry_of(run, model, example, options) if "enorm" in name else None
    penalty = ImplicitENorm(model, symmetry=symmetry, **options).to(device) if name == "implicit_enorm" else None
    optimizer = optimizer_of(run, model, penalty)
    if penalty is not None:
        return Parts(model, optimizer, penalty)
    if name == "enorm":  # gradients are not carried: the next step starts with new ones
        enorm = ENorm(model, optimizer, symmetry=symmetry, gradients=False, **options)
        enorm.attach()
        return Parts(model, optimizer, enorm)
    if name == "msr":
        # the first runs were made without `centre_luma`, and do not say so
        anchor = options.pop("classifier_luma", 0.0)
        rejection = MeanShiftRejection(model, optimizer, **{"centre_luma": False, **options})
        rejection.attach()
        if anchor:
            hold_length_(optimizer, model.get_parameter(CLASSIFIER), anchor)
        return Parts(model, optimizer, rejection)
    if name == "unit_filters":
        UnitFilters(model, optimizer, **options).attach()
    elif name == "agc":  # the classifier is not clipped (Brock et al. 2021b)
        AdaptiveGradientClipping(model, optimizer, keep=["head.classifier"], **options).attach()
    elif name == "enorm_chain":
        balance_after_steps_(optimizer, model, **options)
    elif name != "none":
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return Parts(model, optimizer, None)


def balance_after_steps_(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    c: float = 1.0,
    variant: Literal["paper", "released"] = "paper",
    biases: str = "follow",
) -> None:
    """A cycle of algorithm 1 of stock2019 after every step, of a chain: as in the paper, or as in its program, which
    leaves the last layer out and takes all norms before the cycle. With `biases="leave"`, as in that program, biases
    stay what they are and the function changes."""
    if biases not in ("follow", "leave"):
        raise ValueError(f'biases "follow" the weights or are "leave", left as they are; got {biases!r}')
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    weights = [layer.weight for layer in layers]
    offsets = [None if biases == "leave" else layer.bias for layer in layers]

    def buffers(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if p is None else optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]

    @torch.no_grad()
    def cycle(*_: Any) -> None:
        momenta = buffers(weights)
        views = paper_views([w if m is None else m for w, m in zip(weights, momenta, strict=True)])
        carried = [None if m is None else view for m, view in zip(momenta, views, strict=True)]
        balance_chain_(
            paper_views([w.detach() for w in weights]), offsets, carried, buffers(offsets), c=c, variant=variant
        )

    optimizer.register_step_post_hook(cycle)


def hold_length_(optimizer: torch.optim.Optimizer, weight: Tensor, luma: float) -> None:
    """LUMA for a weight that is no scaled kernel: in every step its rows are drawn to length 1 (ruff2020's program,
    where the classifier decays so)."""

    def pull(*_: Any) -> None:
        if weight.grad is not None:
            weight.grad += luma_gradient(weight.detach(), luma)

    optimizer.register_step_pre_hook(pull)


def balance_once_(run: Run, model: nn.Module, example: Tensor, options: dict[str, Any]) -> None:
    """Rescale the weights before training. With `batchnorm="ignore"` BatchNorm is taken for absent, so that weights
    move and its gains do not, and the function changes."""
    device, example = example.device, example.cpu()
    model.cpu()  # where criteria are solved; parameters stay the same objects
    symmetry = symmetry_of(run, model, example, options)
    balance_(model, example, criterion=ONCE[run.method.name](**options), symmetry=symmetry)
    model.to(device)


_SYMMETRIES: dict[str, Symmetry] = {}


def symmetry_of(run: Run, model: nn.Module, example: Tensor, options: dict[str, Any]) -> Symmetry:
    """The symmetry of a run's network, traced once for all runs of one architecture. Takes its own `options` out."""
    chosen = {name: options.pop(name) for name in ("batchnorm", "keep") if name in options}
    key = repr((run.model, tuple(example.shape), example.device, chosen))
    if key not in _SYMMETRIES:
        _SYMMETRIES[key] = trace(model, example, **chosen)
    return _SYMMETRIES[key].bind(model)


def optimizer_of(run: Run, model: nn.Module, penalty: nn.Module | None) -> torch.optim.Optimizer:
    """The optimizer over parameter groups: what decays, what does not, what is slower than the rest (`part`: its
    learning rate over the run's), and the coefficients of implicit ENorm."""
    spec, device = run.optim, next(model.parameters()).device
    decay = 0.0 if penalty is not None else spec.weight_decay  # implicit ENorm's penalty takes its place
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": decay}]
    if any(True for _ in scaled_kernels(model)):
        groups = parameter_groups(model, decay)
    elif any(True for _ in parametrized_layers(model, UnitFilter)):
        groups = unit_filter_groups(model, decay)
    elif not spec.decay_norms:
        kinds = [[p for p in model.parameters() if of_outputs(p) == norms] for norms in (False, True)]
        groups = [{"params": kind, "weight_decay": d} for kind, d in zip(kinds, (decay, 0.0), strict=True)]
    groups = [{**group, **slower} for group in groups for slower in by_rate(group["params"], spec, model)]
    if spec.name == "muon":
        groups = [{**group, **kind} for group in groups for kind in by_shape(group["params"], model)]
    if penalty is not None:
        groups.append({"params": list(penalty.parameters()), "weight_decay": 0.0})
    on_gpu = device.type == "cuda"
    for group in groups:
        rate = group.get("part", 1.0) * spec.lr
        group["lr"] = torch.tensor(rate, device=device) if on_gpu else rate
    momentum = spec.schedule.at(0.0, run.epochs, spec.lr, spec.momentum)[1]
    kind: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": True}
    filled = [group for group in groups if group["params"]]
    if spec.name == "adam":
        return torch.optim.Adam(filled, lr=spec.lr, capturable=on_gpu, **kind)
    if spec.name == "adamw":
        return torch.optim.AdamW(filled, lr=spec.lr, capturable=on_gpu, **kind)
    if spec.name == "muon":
        return MuonAndSGD(filled, lr=spec.lr, momentum=momentum)
    if spec.name != "sgd":
        raise ValueError(f"unknown optimizer {spec.name!r}; there are sgd, adam, adamw and muon")
    return torch.optim.SGD(filled, lr=spec.lr, momentum=momentum, nesterov=spec.nesterov, **kind)


def by_rate(parameters: Iterable[nn.Parameter], spec: Optim, model: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters that learn equally fast."""
    named = dict(model.named_parameters())
    kernels = {id(originals(layer).original) for _, layer in scaled_kernels(model)} if spec.kernel_rate != 1 else set()
    own = {id(p): spec.bias_rate for name, p in named.items() if name.endswith("bias")}
    own |= {id(p): spec.classifier_rate for name, p in named.items() if name == CLASSIFIER}
    own |= dict.fromkeys(kernels, spec.kernel_rate)
    groups: dict[float, list[nn.Parameter]] = {}
    for p in parameters:
        part = (spec.norm_rate if of_outputs(p) else 1.0) * own.get(id(p), 1.0)
        groups.setdefault(part, []).append(p)
    return [{"params": several, "part": part} for part, several in groups.items()]


def by_shape(parameters: Iterable[nn.Parameter], model: nn.Module) -> list[dict[str, Any]]:
    """Groups of filters, which are orthogonalized, and of all else; the classifier's weights are no filters."""
    classifier = dict(model.named_parameters()).get(CLASSIFIER)
    groups: dict[bool, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.ndim >= 2 and not of_outputs(p) and p is not classifier, []).append(p)
    return [{"params": several, "orthogonal": orthogonal} for orthogonal, several in groups.items()]


def of_outputs(parameter: nn.Parameter) -> bool:
    """Whether it has one number for each output, as gains, offsets and biases, e^g of mean shift rejection too."""
    return parameter.numel() == (len(parameter) if parameter.ndim else 1)
