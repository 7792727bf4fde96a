"""`equinorm convert` and `equinorm fold`: a method put on a named model and its checkpoint, and taken off again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..conversion import convert, fold
from ..errors import UserError
from ..models.reports import ConvertReport
from ..models.saving import SavingGuard
from . import checkpoints, sources, verify

__all__ = ["Outcome", "converted", "folded"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The state dict of a changed model, what was done to it, and by how much its outputs moved."""

    state: dict[str, Tensor]
    report: ConvertReport
    change: float


def converted(
    spec: str,
    method: str,
    checkpoint: Path | None = None,
    inputs: Sequence[str] = (),
    model_args: Iterable[str] = (),
    options: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> Outcome:
    """A named model with the values of a checkpoint, and a method on it.

    >>> converted("torchvision:resnet18", "msr", Path("resnet18.pth")).report.summary
    """
    model, examples = _loaded(spec, checkpoint, inputs, model_args)
    before, _ = verify.outputs(model, examples)
    made, report = _convert(model, method, examples[0], options, keep)
    after, _ = verify.outputs(made, examples)
    return Outcome(made.state_dict(), report, verify.relative_change(before, after))


def folded(
    spec: str,
    method: str,
    checkpoint: Path,
    inputs: Sequence[str] = (),
    model_args: Iterable[str] = (),
    options: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> Outcome:
    """A checkpoint of a converted model, as numbers for the plain model that compute the same.

    Where a batch norm stood there is one again, which changes nothing but adds a bias.

    >>> folded("torchvision:resnet18", "msr", Path("trained.pth")).state
    """
    model, examples = _loaded(spec, None, inputs, model_args)
    fresh = sources.copied(model, spec, model_args)
    architecture = SavingGuard(model)
    model.save_pretrained = architecture  # type: ignore[assignment]  # where `convert` notes what stood where
    made, _ = _convert(model, method, examples[0], options, keep, inplace=True)
    held = checkpoints.read(checkpoint)
    checkpoints.fit(held, made)
    checkpoints.adopt(held, made)
    before, _ = verify.outputs(made.eval(), examples)
    plain, report = fold(made, examples[0], inplace=True)
    try:
        state = architecture.as_before()
        fresh.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{spec} as it is built cannot hold the folded weights: {error}") from error
    after, _ = verify.outputs(fresh.eval(), examples)
    change, accepted = verify.relative_change(before, after), 1e3 * verify.tolerance(plain)
    if change > accepted:
        raise UserError(f"folding changed the outputs by {change:.1e}, so nothing was written. Please report this")
    return Outcome(state, report, change)


def _loaded(
    spec: str, checkpoint: Path | None, inputs: Sequence[str], model_args: Iterable[str]
) -> tuple[nn.Module, list[Any]]:
    source = sources.load(spec, model_args)
    shapes = tuple(sources.parse_input(text) for text in inputs) or source.inputs
    if not shapes:
        raise UserError(f"what does {spec} take? Give the shape of its input, such as --input 2,3,224,224")
    file = checkpoint or source.checkpoint
    if file is not None:
        held = checkpoints.read(file)
        checkpoints.fit(held, source.model)
        checkpoints.adopt(held, source.model)
    return source.model, [sources.example_inputs(shapes, source.model, seed) for seed in range(2)]


def _convert(
    model: nn.Module, method: str, example: Any, options: Iterable[str], keep: Iterable[str], inplace: bool = False
) -> tuple[nn.Module, ConvertReport]:
    given = dict(sources.option(text, "--option") for text in options)
    try:
        return convert(model, method, example, keep=tuple(keep), inplace=inplace, **given)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
