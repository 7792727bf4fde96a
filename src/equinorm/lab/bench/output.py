"""What goes with every measurement, how it is summed up, shown in the columns there are, and where it is written."""

from __future__ import annotations

import io
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table

from ...files import write_text
from ..training.trainer import about

__all__ = ["Timing", "facts", "hardware", "save", "show"]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median of n measurements and the range of their middle half."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        low, middle, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(middle, low, high, len(milliseconds))

    def __str__(self) -> str:
        digits = 3 if self.median < 1 else 2 if self.median < 100 else 1
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def hardware(device: torch.device) -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    gibibytes = f", {memory[0]:.0f} GiB" if memory else ""
    cpu = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{gibibytes}"
    return f"{torch.cuda.get_device_name(device)}; {cpu}" if device.type == "cuda" else cpu


def facts(device: torch.device) -> dict[str, Any]:
    return about(device) | {
        "hardware": hardware(device),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
    }


def show(items: Iterable[RenderableType], console: Console | None = None, width: int = 150) -> str:
    """Print to the terminal, and return the same as plain text."""
    text = io.StringIO()
    plain, terminal = Console(file=text, width=width), console or Console()
    for item in items:
        for target in (terminal, plain):
            parts = in_parts(item, target.width) if isinstance(item, Table) else [item]
            for part in parts:
                target.print(part, markup=False, highlight=False)
    return text.getvalue()


def in_parts(table: Table, width: int) -> list[Table]:
    """The table, or if it is too wide, tables of some of its columns each, with the first column in front of each."""
    needs = [max(cell_len(str(cell)) for cell in (column.header, *column.cells)) + 3 for column in table.columns]
    groups: list[list[int]] = [[]]
    for i, need in enumerate(needs[1:], 1):
        if groups[-1] and 1 + needs[0] + sum(needs[j] for j in groups[-1]) + need > width:
            groups.append([])
        groups[-1].append(i)
    if len(groups) == 1:
        return [table]
    parts = []
    for number, group in enumerate(groups):
        part = Table(title=None if number else table.title, title_justify="left", show_header=table.show_header)
        chosen = [table.columns[i] for i in (0, *group)]
        for column in chosen:
            part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
        for cells in zip(*(column.cells for column in chosen), strict=True):
            part.add_row(*cells)
        parts.append(part)
    return parts


def save(out: Path, name: str, text: str, rows: Iterable[Any], about_it: dict[str, Any]) -> list[Path]:
    """Write NAME.txt for readers and NAME.json with every number; of a quick run NAME_quick, and it says so."""
    out.mkdir(parents=True, exist_ok=True)
    if about_it.get("quick"):
        name += "_quick"
    head = "".join(f"{key}: {_words(value)}\n" for key, value in about_it.items())
    write_text(out / f"{name}.txt", f"{head}\n{text}")
    content = {**about_it, "rows": [asdict(row) for row in rows]}
    write_text(out / f"{name}.json", json.dumps(content, indent=1) + "\n")
    return [out / f"{name}.txt", out / f"{name}.json"]


def _words(value: Any) -> str:
    """Versions are read as "torch 2.11.0, python 3.12.3"."""
    if not isinstance(value, dict):
        return f"{value:.1f}" if isinstance(value, float) else str(value)
    return ", ".join(f"{name} {what}" for name, what in value.items() if what is not None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
