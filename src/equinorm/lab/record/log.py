"""Finished runs, one JSON line each; what is there is not run again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import Config

__all__ = ["Log", "Row", "key_of", "mean", "spread", "table"]

Row = dict[str, Any]


def key_of(config: Config, seed: int, on: str, images: str) -> str:
    """One run: its setting, its seed, and which images it was trained and tested on.

    Only what is not a default counts, so that a new field leaves the keys of finished runs as they are.
    """
    plain = dataclasses.asdict(Config())
    setting = {name: value for name, value in dataclasses.asdict(config).items() if value != plain[name]}
    said = json.dumps([setting, seed, on, images], sort_keys=True)
    return hashlib.sha1(said.encode()).hexdigest()[:16]


class Log:
    """All rows of some folders; new ones go to the first folder, a file for each part.

    >>> log = Log(Path("out"), Path("results/without-batch-statistics"))
    """

    def __init__(self, out: Path, *more: Path, retry: bool = False) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        files = [file for folder in (out, *more) if folder.is_dir() for file in sorted(folder.glob("*.jsonl"))]
        self.rows: list[Row] = []
        seen = set()
        for row in (row for file in files for row in _read(file)):
            if row.get("key") not in seen and not (retry and "failed" in row):
                self.rows.append(row)
                seen.add(row.get("key"))
        self._by_key = {row["key"]: row for row in self.rows if "key" in row}

    def get(self, key: str) -> Row | None:
        return self._by_key.get(key)

    def append(self, row: Row) -> None:
        with (self.out / f"{row['part']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self._by_key[row["key"]] = row

    def of(self, part: str, **fields: Any) -> list[Row]:
        """The rows of a part that did not fail and have these values."""
        return [
            row
            for row in self.rows
            if row.get("part") == part and "failed" not in row and all(row.get(k) == v for k, v in fields.items())
        ]


def _read(file: Path) -> Iterator[Row]:
    """The rows of a file; half a line, left by a run that was killed, is passed over."""
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else float("nan")


def spread(values: Iterable[float]) -> float:
    """The standard deviation; NaN of fewer than two."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def table(rows: Sequence[Row]) -> str:
    """One line for each part and name, in the order of the rows."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.get("part", ""), row.get("name", ""), row.get("on", "")), []).append(row)
    lines = [f"{'part':7} {'name':44} {'on':8} {'n':>2} {'acc %':>6} {'±':>5} {'s':>7} {'ms/step':>8}"]
    for (part, name, on), group in groups.items():
        good = [row for row in group if "failed" not in row]
        accuracies = [row["accuracy"] for row in good if "accuracy" in row]
        seconds = mean(row["seconds"] for row in good if "seconds" in row)
        steps = mean(row["step_ms"] for row in good if "step_ms" in row)
        line = f"{part:7} {name[:44]:44} {on:8} {len(good):2d} {mean(accuracies):6.2f} {spread(accuracies):5.2f}"
        line += f" {seconds:7.2f} {steps:8.3f}"
        fresh = [row["accuracy_fresh_statistics"] for row in good if "accuracy_fresh_statistics" in row]
        line += f"  fresh statistics {mean(fresh):.2f}" if fresh else ""
        failed = [row["failed"] for row in group if "failed" in row]
        line += f"  failed {len(failed)}: {failed[0][:60]}" if failed else ""
        lines.append(line)
    return "\n".join(lines).replace("  nan", "     ")
