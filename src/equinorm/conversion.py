"""Put a method on a model: find its norms and layers by what the forward pass does, and replace them.

Which norm reads the output of which layer, and whether anybody else does, is read from the graph that
`torch.export` captures, never from the names of modules. What cannot be converted is kept, and the report says
why.

>>> model, report = equinorm.convert(resnet50(), "equinorm", torch.rand(2, 3, 224, 224), stats_fraction=0.25)
>>> print(report)
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from torch import nn

from .methods_of_old import WITH_DATA_DEPENDENT_INIT, batchnorm_for
from .models.graph import ModuleGraph
from .models.surgery import Plan, Row
from .registry import Method, find_method, methods, norm_behind, register_method
from .symmetry.capture import unwrap
from .weightnorm.init import data_dependent_init_

__all__ = ["ConvertReport", "Method", "Row", "convert", "methods", "register_method"]


@dataclass(frozen=True)
class ConvertReport:
    """What was done to each module of a model, and what was kept and why: print it, or read its rows."""

    model: str
    method: str
    converted: tuple[Row, ...]
    kept: tuple[Row, ...]

    @property
    def summary(self) -> str:
        head = f"{self.model}, {self.method}: "
        if not self.converted:
            return f"{head}nothing left to {'fold' if self.method == 'fold' else 'convert'}, {len(self.kept)} kept"
        count, done = len(self.converted), "folded" if self.method == "fold" else "converted"
        return f"{head}{count} module{'s' if count > 1 else ''} {done}, {len(self.kept)} kept"

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, lists and dicts, ready for JSON."""
        return {**asdict(self), "summary": self.summary}

    def __str__(self) -> str:
        parts = [self.summary]
        if self.converted:
            lines = [(_name(row), row.was, row.now, row.why) for row in self.converted]
            parts += ["", table(("module", "was", "is", "remark"), lines)]
        if self.kept:
            parts += ["", _kept_table(self.kept)]
        return "\n".join(parts)


def _name(row: Row) -> str:
    return row.module or "(the model)"


def _kept_table(rows: Sequence[Row]) -> str:
    return table(("kept", "is", "because"), [(_name(row), row.was, row.why) for row in rows])


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Columns of text; the last one is as wide as it is."""
    if not any(line[-1] for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rule = tuple("─" * width for width in (*widths[:-1], len(head[-1])))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, rule, *lines]
    )


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
    method = chosen.name
    if unwrap(model) is not model:
        raise TypeError(f"convert the model first and wrap it then: got a {type(model).__name__}")
    if init_batch is not None and method not in WITH_DATA_DEPENDENT_INIT:
        expected = ", ".join(map(repr, WITH_DATA_DEPENDENT_INIT))
        raise ValueError(f"init_batch is for methods with a data-dependent initialization ({expected}), not {method!r}")
    options = _checked_options(chosen, options)
    keep = _checked_patterns(model, keep)
    if not inplace:
        model = deep_copy(model)
    elif init_batch is not None:
        # Whether the data fits is only known once the model is converted: try it on a copy.
        asked = {"keep": keep, "final_batchnorm": final_batchnorm, "remove_rest": remove_rest, "init_batch": init_batch}
        convert(model, method, example_inputs, **asked, **options)
    graph = ModuleGraph(model, example_inputs)
    plan = Plan(model, graph, keep=keep, final_batchnorm=final_batchnorm, remove_rest=remove_rest)
    chosen.plan(plan, **options)
    if final_batchnorm:
        _put_final_batchnorm(plan)
    report = ConvertReport(type(model).__name__, method, plan.ordered(plan.converted), plan.ordered(plan.kept))
    if not plan.converted and not plan.already:
        raise ValueError(_nothing(report))
    plan.run()
    if init_batch is not None and plan.converted:
        data_dependent_init_(model, init_batch)
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


def _checked_patterns(model: nn.Module, keep: Iterable[str]) -> tuple[str, ...]:
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path, _ in model.named_modules()):
            raise ValueError(f"keep={pattern!r} matches no module of {type(model).__name__}")
    return patterns


def _nothing(report: ConvertReport) -> str:
    text = f"{report.model} has no module that {report.method!r} could convert"
    if not report.kept:
        return f"{text}: the forward pass calls no norm and no linear or convolutional layer"
    return f"{text}\n\n{_kept_table(report.kept)}"


class _CallableModule(ModuleType):
    """`equinorm.convert` is the function until this module is imported, and the module from then on."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, ConvertReport]:
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
