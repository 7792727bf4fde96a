"""Checkpoints brought into the range of a half precision by exact rescaling, the ε of their norms with them.

    inputs = read_inputs(Path("batches.pt"))
    fitted = fit(model, inputs, folder)
    print(fitted)

Scales are rounded to powers of two, so no weight loses a digit. ε is not in a state dict: in a folder of transformers
it is an entry of the config, which all norms of a kind share, so their scales are tied; ε without an entry stays.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..balance import counting, optimum
from ..criteria import Half
from ..errors import UserError, counted
from ..files import write_text
from ..models.exact import Exact
from ..models.inputs import call
from ..symmetry import Symmetry, TraceError, trace
from ..symmetry.verify import relative_change
from . import checkpoints, pretrained, sources, verify
from .checkpoints import first_line

__all__ = [
    "Fitted",
    "config_entries",
    "epsilons_beside",
    "exact_outputs",
    "fit",
    "opened",
    "plan_of",
    "read_inputs",
    "state_in",
    "write_file",
    "write_folder",
]

CHANGED = 1e-12
"""What outputs may move by in float64, where all factors are powers of two."""


def read_inputs(path: Path) -> list[Any]:
    """Batches from a .pt file: what the model is called with (a tensor, a tuple, a dict), or a list of that.

    >>> batches = read_inputs(Path("inputs.pt"))
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}. Save what the model is called with: torch.save(x, file)"
        ) from error
    batches = data if isinstance(data, list) else [data]
    leaves = pytree.tree_leaves(batches)
    if not batches or not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise UserError(
            f"{path} must hold what the model is called with: a tensor, a tuple or a dict of tensors, or a list of such"
        )
    return batches


# -- ε in a config -----------------------------------------------------------------------------------------------------


def config_entries(folder: str, symmetry: Symmetry, arguments: Iterable[str] = ()) -> dict[str, list[str]]:
    """For each entry of a folder's config that sets ε, the numbers of norms that follow it.

    Found by changing the entry and building the model anew, without values.

    >>> config_entries("t5", symmetry)
    {'layer_norm_epsilon': ['encoder.block.0.layer.0.layer_norm.variance_epsilon', ...]}
    """
    config = pretrained.Pretrained.read(Path(folder).expanduser()).config
    now = {c.name: c.value(symmetry.model) for c in symmetry.carried}
    found: dict[str, list[str]] = {}
    empty = sources.empty_transformer(folder, arguments).model
    defaults = vars(empty.config)  # an entry that the file leaves out has its default
    for key in sorted({key for key in (*config, *defaults) if "eps" in key.lower()}):
        value = config.get(key, defaults.get(key))
        if not isinstance(value, float):
            continue
        other = sources.empty_transformer(folder, [*arguments, f"{key}={value * 2!r}"]).model
        follow = [c.name for c in symmetry.carried if c.value(other) == 2 * value and c.value(empty) == value]
        moved = [name for name in follow if now[name] == value]
        if moved:
            found[key] = moved
    return found


# -- the scales --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Fitted:
    """What was found: scales, what they do to a model in half precision, and what they cannot help."""

    symmetry: Symmetry
    log_scales: Tensor
    dtype: torch.dtype
    excess: tuple[float, float]  # the largest excess over the range, before and after
    notes: tuple[str, ...]
    config: dict[str, float] = field(default_factory=dict)  # entries, and what they become
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)  # ε by name, before and after

    def moved(self) -> nn.Module:
        """A copy of the model with these scales."""
        twin = copy.deepcopy(self.symmetry.model)
        self.symmetry.bind(twin).rescale_(self.log_scales)
        return twin

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        moved = int((self.log_scales != 0).sum())
        lines = [
            f"largest excess over the range of {name}: {self.excess[0]:.3g} -> {self.excess[1]:.3g}; "
            f"{moved:,} of {counted(len(self.log_scales), 'scale')} moved, by powers of two"
        ]
        lines += [f"config: {key} = {value:g}" for key, value in self.config.items()]
        return "\n".join([*lines, *(f"not helped: {note}" for note in self.notes)])


def fit(
    model: nn.Module,
    inputs: Sequence[Any],
    folder: str | None = None,
    arguments: Sequence[str] = (),
    dtype: torch.dtype = torch.float16,
    headroom: float = 4.0,
    keep: Iterable[str] = (),
) -> Fitted:
    """The scales that bring a model into a dtype's range; nothing is written.

    For a folder of transformers, the ε of norms that share an entry of its config change together, and those without an
    entry stay.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        symmetry = trace(model, _cast(inputs[0], own), invariances=True, keep=keep, verify=False)
    except (TraceError, ValueError) as error:
        raise UserError(str(error)) from error
    entries = {} if folder is None else config_entries(folder, symmetry, arguments)
    if folder is not None:
        known = {name for names in entries.values() for name in names}
        symmetry = symmetry.holding(c.name for c in symmetry.carried if c.name not in known and not _stored(c, model))
        symmetry = symmetry.tying(entries.values())
    if not symmetry.num_scales:
        raise UserError("nothing to rescale: no scale is free. `equinorm trace` says why")
    criterion = Half(list(inputs), dtype, headroom)
    problem = criterion.problem(symmetry, counting(symmetry, None))
    found = optimum(symmetry, problem, criterion.tol)
    log_scales = _powers_of_two(symmetry, found.log_scales)
    zero = torch.zeros_like(log_scales)
    before = {c.name: c.value(model) for c in symmetry.carried}
    after = symmetry.others(log_scales)
    numbers = {
        name: (value, float(after[name]))
        for name, value in before.items()
        if isinstance(value, float) and value != after[name]
    }
    config = {key: numbers[names[0]][1] for key, names in entries.items() if names[0] in numbers}
    return Fitted(
        symmetry,
        log_scales,
        dtype,
        (problem.value(zero), problem.value(log_scales)),
        problem.notes(log_scales),
        config,
        numbers,
    )


def _stored(carried: Any, model: nn.Module) -> bool:
    """Whether it is a buffer, which is in the state dict."""
    return isinstance(carried.value(model), Tensor)


def _powers_of_two(symmetry: Symmetry, log_scales: Tensor) -> Tensor:
    """The nearest scales whose powers that occur are powers of two."""
    terms = [t for w in symmetry.moving for t in (w.out, w.into) if t is not None] + [c.term for c in symmetry.carried]
    exponents = torch.cat([term.exponent.reshape(-1) for term in terms]).unique()
    unit = math.log(2.0) * (2.0 if bool((exponents != exponents.round()).any()) else 1.0)
    return (log_scales / unit).round() * unit


def _power_of_two(factor: Callable[[], Tensor]) -> Tensor:
    """The factor without the rounding of its exponential."""
    return torch.exp2(torch.log2(factor()).round(decimals=9))


def plan_of(bound: pretrained.Bound, fitted: Fitted) -> pretrained.Plan:
    """What has to be written into a folder."""
    symmetry = fitted.symmetry
    buffers = [c.name for c in symmetry.carried if _stored(c, symmetry.model)]
    if buffers:
        raise UserError(f"running statistics would move too ({buffers[0]}), which folders cannot be written with yet")
    return pretrained.Plan(
        factors={
            bound.canonical(name): partial(_power_of_two, factor)
            for name, factor in pretrained.factors_when_due(symmetry, fitted.log_scales).items()
        },
        shifts={bound.canonical(w.name): w.shift for w in symmetry.moving if w.shift},
        counts={bound.canonical(w.name) for w in symmetry.parameters if w.multiplicative},
        p=2.0,
        config=dict(fitted.config),
        num_scales=symmetry.num_scales,
    )


# -- before and after --------------------------------------------------------------------------------------------------


@torch.no_grad()
def exact_outputs(model: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs in float64, whatever the model casts to inside."""
    twin = copy.deepcopy(model).double()
    with Exact():
        return [leaf for batch in inputs for leaf in _floats(call(twin, _cast(batch, torch.float64)))]


@dataclass(frozen=True)
class State:
    """A model in half precision on the inputs."""

    dtype: torch.dtype
    infinite: int  # numbers that modules put out which are infinite or no numbers
    numbers: int  # that modules put out
    error: float  # of the outputs, relatively; nan where they are no numbers

    def __str__(self) -> str:
        error = f"outputs off by {self.error:.1e}" if math.isfinite(self.error) else "outputs are no numbers"
        return f"{self.infinite:,} of {self.numbers:,} activations infinite or no numbers, {error}"


@torch.no_grad()
def state_in(model: nn.Module, inputs: Sequence[Any], dtype: torch.dtype, exact: Sequence[Tensor]) -> State:
    """How a model fares in a dtype, against its outputs in float64.

    >>> state_in(model, [x], torch.float16, exact_outputs(model, [x])).infinite
    """
    twin = copy.deepcopy(model).to(dtype)
    found = [0, 0]

    def count(module: nn.Module, args: Any, result: Any) -> None:
        for leaf in _floats(result):
            found[0] += int((~torch.isfinite(leaf)).sum())
            found[1] += leaf.numel()

    handles = [m.register_forward_hook(count) for m in twin.modules() if not any(m.children())]
    try:
        outputs = [leaf for batch in inputs for leaf in _floats(call(twin, _cast(batch, dtype)))]
    except Exception as error:  # it is the user's model that runs
        raise UserError(f"the model does not run in {dtype}: {first_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in outputs)
    change = relative_change([leaf.double() for leaf in outputs], list(exact)) if finite else math.nan
    return State(dtype, found[0], found[1], change)


def _floats(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    cast: Callable[[Any], Any] = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    return pytree.tree_map(cast, batch)


# -- what the command does ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Opened:
    """A model with the values of its checkpoint."""

    model: nn.Module
    checkpoint: checkpoints.Checkpoint | None  # None: random weights
    folder: str | None  # of transformers, where that is to be written as a whole


def opened(spec: str, file: Path | None, arguments: Iterable[str]) -> Opened:
    """The model that a user names, with the checkpoint's values."""
    source = sources.load(spec, arguments)
    kind, _, folder = spec.partition(":")
    file = file or (source.checkpoint if kind != "hf" else None)
    held = None
    if file is not None:
        held = checkpoints.read(file)
    elif source.checkpoint is not None or source.folder is not None:
        read = source.folder or pretrained.Pretrained.read(Path(folder).expanduser())
        held = pretrained.Bound(read, source.model).checkpoint()
    if held is not None:
        checkpoints.fit(held, source.model)
        checkpoints.adopt(held, source.model)
    whole = kind == "hf" and file is None and held is not None
    return Opened(source.model, held, folder if whole else None)


def write_folder(folder: str, arguments: Sequence[str], fitted: Fitted, inputs: Sequence[Any], output: Path) -> float:
    """Write the folder with its new ε, if the model made of it computes the same; by how much outputs moved."""
    before = exact_outputs(fitted.symmetry.model, inputs)
    bound = pretrained.Bound(
        pretrained.Pretrained.read(Path(folder).expanduser()), sources.empty_transformer(folder, arguments).model
    )

    def check(old: pretrained.Bound, new: pretrained.Bound) -> pretrained.Check:
        made = opened(f"hf:{new.folder.path}", None, arguments).model
        change = relative_change(exact_outputs(made, inputs), before)
        return pretrained.Check(change, accepted(fitted), "the whole model", "float64")

    return pretrained.write(bound, plan_of(bound, fitted), output, check).check.change


def write_file(fitted: Fitted, held: checkpoints.Checkpoint, inputs: Sequence[Any], output: Path) -> float:
    """Write the checkpoint, and beside it the ε, which no checkpoint holds; by how much outputs moved."""
    symmetry, model = fitted.symmetry, fitted.symmetry.model
    before = exact_outputs(model, inputs)
    symmetry.rescale_(fitted.log_scales)
    change = relative_change(exact_outputs(model, inputs), before)
    if not change <= accepted(fitted):
        raise UserError(f"the outputs changed by {change:.1e} in float64, so nothing was written. Please report this")
    buffers = {c.name: c.value(model) for c in symmetry.carried if _stored(c, model)}
    written = checkpoints.give_back(model, (w.name for w in symmetry.moving), held)
    written = written.with_tensors({name: x for name, x in buffers.items() if isinstance(x, Tensor)})
    written.write(output)
    if fitted.numbers:
        write_text(epsilons_beside(output), json.dumps({k: new for k, (_, new) in fitted.numbers.items()}, indent=1))
    return change


def epsilons_beside(output: Path) -> Path:
    """Where the ε of a checkpoint are written.

    >>> epsilons_beside(Path("vae.safetensors"))
    PosixPath('vae.epsilons.json')
    """
    return output.with_suffix(".epsilons.json")


def accepted(fitted: Fitted) -> float:
    """Powers of two lose nothing; a gain that is stored minus 1 is rounded once more."""
    moved = fitted.symmetry.factors(fitted.log_scales)
    shifted = [w.name for w in fitted.symmetry.moving if w.shift and bool((moved[w.name] != 1).any())]
    dtypes = {fitted.symmetry.tensor(name).dtype for name in shifted}
    return max(
        (CHANGED if dtype == torch.float64 else 10 * verify.TOLERANCE[dtype] for dtype in dtypes), default=CHANGED
    )
