"""Say in words what is free in a model, what is frozen, and which line of the user's code froze it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from html import escape
from math import prod
from typing import Any, overload

import torch
from torch import Tensor, fx

from ..errors import meant
from .capture import Captured, is_torch_file, source_line
from .interpreter import Interpreter
from .scales import FROZEN
from .values import Form, axes_of


@dataclass(frozen=True)
class Row:
    """One axis (or group of axes) of one parameter."""

    parameter: str
    shape: tuple[int, ...]
    kind: str  # weight, bias, or "" where nothing is known
    axis: str  # "0 out", "1 in", ...
    free: int  # positions along this axis that can be rescaled
    total: int
    scales: int  # how many of their scales are independent
    because: str  # why the others are frozen


@dataclass(frozen=True)
class Explanation:
    """What `Symmetry.explain` returns: print it, or read `rows`, `summary`, `to_dict()`.

    >>> explanation[:10]                          # the same with the first ten rows
    >>> explanation["layer1.0.conv1.weight"]      # or with those of one parameter, or of a pattern
    """

    summary: str
    rows: tuple[Row, ...]
    unknown_ops: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int) -> Row: ...

    @overload
    def __getitem__(self, key: slice | str) -> Explanation: ...

    def __getitem__(self, key: int | slice | str) -> Row | Explanation:
        if isinstance(key, int):
            return self.rows[key]
        if isinstance(key, slice):
            return replace(self, rows=self.rows[key])
        rows = tuple(row for row in self.rows if fnmatchcase(row.parameter, key))
        if not rows:
            raise KeyError(f"no parameter is called {key!r}{meant(key, [row.parameter for row in self.rows])}")
        return replace(self, rows=rows)

    def __str__(self) -> str:
        if not self.rows:
            return self.summary
        lines = self._lines()
        widths = [max(len(line[i]) for line in [_HEAD, *lines]) for i in range(4)]
        shown = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in [_HEAD, (*("─" * w for w in widths), "─" * len(_HEAD[4])), *lines]
        ]
        return "\n".join([self.summary, "", *shown])

    def __repr__(self) -> str:
        return f"<explanation of {self.summary.splitlines()[0]}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEAD)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in self._lines())
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        summary = "<br>".join(map(escape, self.summary.splitlines()))
        return f"<p>{summary}</p>" + (f"<table><tr>{head}</tr>{rows}</table>" if self.rows else "")

    def _lines(self) -> list[tuple[str, ...]]:
        lines: list[tuple[str, ...]] = []
        last = None
        for row in self.rows:
            again = row.parameter == last
            last = row.parameter
            shape = "" if again else " x ".join(map(str, row.shape)) or "scalar"
            free = f"{row.free:,}" if row.free == row.total else f"{row.free:,} of {row.total:,}"
            if row.scales != row.free:
                free += f" ({row.scales:,} scale{'' if row.scales == 1 else 's'})"
            lines.append(("" if again else row.parameter, shape, row.axis, free, row.because))
        return lines


_HEAD = ("parameter", "shape", "axis", "free", "frozen because")


class Explainer:
    """Says what a trace found when it is first asked, and then lets go of the trace."""

    def __init__(self, model: str, captured: Captured, interpreter: Interpreter, num_scales: int) -> None:
        self._explain: Callable[[], Explanation] | None = partial(explain, model, captured, interpreter, num_scales)
        self._explanation: Explanation | None = None

    def __call__(self) -> Explanation:
        if self._explanation is None:
            assert self._explain is not None
            self._explanation, self._explain = self._explain(), None
        return self._explanation

    def __deepcopy__(self, memo: dict[int, Any]) -> Explainer:
        return self  # what was found does not change

    def __reduce__(self) -> tuple[Any, ...]:
        return _explained, (self(),)


def _explained(explanation: Explanation) -> Explainer:
    explainer = object.__new__(Explainer)
    explainer._explain, explainer._explanation = None, explanation
    return explainer


def explain(model: str, captured: Captured, t: Interpreter, num_scales: int) -> Explanation:
    rows: list[Row] = []
    for parameter in captured.every_parameter:
        form = t.forms.get(parameter.name)
        if parameter.frozen_because is not None:
            rows.append(_blocked(parameter.name, parameter.shape, parameter.frozen_because))
        elif form is None or not form.roles:
            rows.append(_blocked(parameter.name, parameter.shape, "not used by the forward pass"))
        else:
            rows += _rows(t, parameter.name, form)
    scaled = {row.parameter for row in rows if row.free}
    sizes = {p.name: prod(p.shape) for p in captured.every_parameter}
    moved, total = sum(sizes[name] for name in scaled), sum(sizes.values())
    share = f"{moved:,} of {total:,} parameter values move with them" if total else "it has no parameters"
    summary = f"{model}: {num_scales:,} free scale{'' if num_scales == 1 else 's'}; {share}"
    stops = Counter(
        re.sub(r" (in|at) .*", "", row.because.split("; ")[0]) for row in rows if row.because and row.free < row.total
    )
    common = ", ".join(f"{what} ({n})" for what, n in stops.most_common(4))
    if common:
        summary += f"\nfrozen most often because: {common}"
    if t.unknown_ops:
        summary += f"\nops without a rule, so frozen: {', '.join(sorted(t.unknown_ops))}"
    for op, error in sorted(t.failed_rules.items()):
        summary += f"\nfrozen because the rule of {op} failed, please report it: {error}"
    return Explanation(summary, tuple(rows), tuple(sorted(t.unknown_ops)))


def _blocked(name: str, shape: torch.Size, because: str) -> Row:
    return Row(name, tuple(shape), "", "all", 0, 1, 0, because)


def _rows(t: Interpreter, name: str, form: Form) -> list[Row]:
    kind = "weight" if form.multiplicative else "bias"
    stopped = [where(t, t.nodes[role.node]) for role in form.roles if role.freezes]
    rows = []
    for term, side in ((form.plus, "out"), (form.minus, "in")):
        if term is None:
            continue
        axes = axes_of(term) or frozenset()
        free = (term > FROZEN) & ~t.scales.is_frozen(term)
        reasons = _reasons(t, term, stopped, side)
        axis = " ".join([",".join(map(str, sorted(axes))), side]).strip()
        scales = len(t.scales.find(term[free])[0].unique())
        rows.append(Row(name, tuple(form.shape), kind, axis, int(free.sum()), term.numel(), scales, reasons))
    return rows


def _reasons(t: Interpreter, labels: Tensor, stopped: list[str], side: str) -> str:
    """Why the frozen labels of one term are frozen, the commonest reason first."""
    stuck = labels[t.scales.is_frozen(labels)]
    if not stuck.numel():
        return ""
    count: Counter[str] = Counter()
    numbers = t.scales.reason(stuck)
    for node, n in zip(*(x.tolist() for x in numbers.unique(return_counts=True)), strict=True):
        if node >= 0:
            count[where(t, t.nodes[node])] += n
        elif stopped:
            count[stopped[0]] += n
        else:
            count["it reads the model's input" if side == "in" else "it is added to a constant"] += n
    return "; ".join(reason for reason, _ in count.most_common(2))


def where(t: Interpreter, node: fx.Node) -> str:
    """The op, the module it is in and the line of the user's code it came from."""
    if node.op == "output":
        return "it is the model's output"
    if node.op == "placeholder":
        return "it reads the model's input"
    op = str(node.target).removeprefix("aten.").removesuffix(".default").split(".")[0].rstrip("_")
    modules = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = f" in {modules[-1]}" if modules and modules[-1] else ""
    return f"{op}{path}{_line(node, modules, t.captured.call_sites)}"


def _line(node: fx.Node, modules: list[str], call_sites: dict[str, str]) -> str:
    """The op's own line if it is the user's, else the user's line that called the module it is in."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [source_line(*f) for f in frames if not is_torch_file(f[0])]
    own = own or [call_sites[path] for path in modules if path in call_sites]
    return f" at {own[-1]}" if own else ""
