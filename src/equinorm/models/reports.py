"""What was done to the modules of a model, as rows of a table: in plain text, and in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

__all__ = ["ConvertReport", "ModuleRow", "html_table", "kept_table", "table"]


@dataclass(frozen=True)
class ModuleRow:
    """One module, and what was done with it."""

    module: str
    was: str
    now: str
    """Empty if it was kept."""
    why: str
    """Why it was kept, or a remark on the change."""

    @property
    def name(self) -> str:
        return self.module or "(the model)"


@dataclass(frozen=True)
class ConvertReport:
    """What was done to each module of a model, and what was kept and why: print it, or read its rows."""

    model: str
    method: str
    converted: tuple[ModuleRow, ...]
    kept: tuple[ModuleRow, ...]

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

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def __str__(self) -> str:
        parts = [self.summary]
        if self.converted:
            parts += ["", table(_CONVERTED, [(row.name, row.was, row.now, row.why) for row in self.converted])]
        if self.kept:
            parts += ["", kept_table(self.kept)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self.summary)}</p>"]
        if self.converted:
            parts.append(html_table(_CONVERTED, [(row.name, row.was, row.now, row.why) for row in self.converted]))
        if self.kept:
            parts.append(html_table(_KEPT, [(row.name, row.was, row.why) for row in self.kept]))
        return "".join(parts)


_CONVERTED = ("module", "was", "is", "remark")
_KEPT = ("kept", "is", "because")


def kept_table(rows: Sequence[ModuleRow]) -> str:
    return table(_KEPT, [(row.name, row.was, row.why) for row in rows])


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Columns of text; the last one is as wide as it is."""
    head, lines = _without_empty_end(head, lines)
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rule = tuple("─" * width for width in (*widths[:-1], len(head[-1])))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, rule, *lines]
    )


def html_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """The same for a notebook."""
    head, lines = _without_empty_end(head, lines)
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _without_empty_end(
    head: tuple[str, ...], lines: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """Without a last column in which nothing stands."""
    return (head, lines) if any(line[-1] for line in lines) else (head[:-1], [line[:-1] for line in lines])
