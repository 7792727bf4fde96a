"""The first tables of the report: which method helps, where, by how much, at what cost.

A line for each setting that the papers argue with, a column for each method, from the results of the artifacts that
hold them; and lines for the cost of a training step, from what `equinorm bench` has measured. Before it a summary of
both, with a line for each method.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..experiments import defazio2018, ruff2020
from .results import Number, Result
from .wording import signed

__all__ = ["COSTS_MISSING", "METHODS", "Cost", "Line", "Setting", "Summary", "costs", "lines", "summaries"]

NO_NORM, BATCH_NORM = "no norm", "BatchNorm"
METHODS = (NO_NORM, BATCH_NORM, "GroupNorm", "ENorm", "ENorm + BN", "EquiNorm", "MSR")
COSTS_MISSING = "Costs have not been measured on a GPU yet: `equinorm bench steps lab` does it."


@dataclass(frozen=True)
class Setting:
    """A network and how it is trained: an artifact, and which of its cells (row and column) stands for which method."""

    name: str
    artifact: str
    cells: Mapping[str, tuple[str, str]]
    note: str = ""


def _column(column: str, rows: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {method: (row, column) for method, row in rows.items()}


_TABLE_3 = {NO_NORM: "Baseline", BATCH_NORM: "BN", "GroupNorm": "GN", "ENorm": "ENorm-1"}
_FIGURE_4 = {**_TABLE_3, "ENorm": "ENorm-1.2", "ENorm + BN": "ENorm-1.2 + BN"}
_REPRO = {NO_NORM: "Baseline", BATCH_NORM: "BN", "ENorm": "ENorm", "ENorm + BN": "ENorm + BN"}
_BOTH = {BATCH_NORM: "BN", "EquiNorm": "EquiNorm"}
_WRN = {**_BOTH, "GroupNorm": "GN"}
_TABLE_1 = _column(ruff2020.DATA, {BATCH_NORM: ruff2020.BN, "MSR": ruff2020.BEST})
SETTINGS = (
    Setting("MLP-11, Xavier init", "stock2019/figure4", _column("11", _FIGURE_4), "11 hidden layers; ENorm: c = 1.2"),
    Setting("MLP-19, Xavier init", "stock2019/figure4", _column("19", _FIGURE_4)),
    Setting("MLP-19, He init", "repro2019/figure2", _column("19", _REPRO)),
    Setting("CIFAR-NV, batch 8", "stock2019/table3", _column("8", _TABLE_3), "momentum; ENorm: c = 1"),
    Setting("CIFAR-NV, batch 32", "stock2019/table3", _column("32", _TABLE_3)),
    Setting("CIFAR-NV, batch 128", "stock2019/table3", _column("128", _TABLE_3)),
    Setting(
        "CIFAR-NV, batch 128, lr 0.05",
        "stock2019/variants-cifar-nv",
        {NO_NORM: ("lr 0.05", "Baseline"), "ENorm": ("lr 0.05", "ENorm-1")},
        "also for ENorm; tried when the line above was in",
    ),
    Setting("WRN, 30 epochs, mixup 6", "defazio2018/figure3", _column("CIFAR-10", _WRN), "WRN-20-96; mixup's alpha"),
    Setting(
        "WRN, 30 epochs, mixup 6, warm-up",
        "defazio2018/variants",
        {method: (defazio2018.WARM_UP, column) for method, column in _WRN.items()},
        "one epoch",
    ),
    Setting(
        "WRN, 30 epochs, mixup 2",
        "defazio2018/variants-mixup",
        {method: (defazio2018.LESS, column) for method, column in _BOTH.items()},
    ),
    Setting(
        "WRN, 30 epochs, mixup 2, warm-up",
        "defazio2018/variants-mixup",
        {method: (f"{defazio2018.LESS}, {defazio2018.WARM_UP}", column) for method, column in _BOTH.items()},
    ),
    Setting(
        "WRN, 300 epochs",
        "defazio2018/quarter",
        _column("CIFAR-10", {BATCH_NORM: "BN", "EquiNorm": defazio2018.QUARTER}),
        "no mixup; EquiNorm: a quarter of the batch",
    ),
    Setting("ResNet-110, 200 epochs", "ruff2020/table1", _TABLE_1, "MSR: lr 0.4, zmg 0.85, noise 0.1"),
    Setting(
        "ResNet-110, LUMA in the loss", "ruff2020/table1-loss", _TABLE_1, "MSR's; tried when the line above was in"
    ),
    Setting(
        "ResNet-110, as in Fixup's program",
        "ruff2020/variants-long",
        _column(ruff2020.DATA, {BATCH_NORM: ruff2020.BN_FIXUP, "MSR": ruff2020.BEST_FIXUP}),
        "BatchNorm: gains of 0 at the end of each branch",
    ),
    Setting(
        "ResNet-110, mixup 1",
        "ruff2020/variants-long",
        _column(ruff2020.DATA, {BATCH_NORM: ruff2020.BN_MIXUP, "MSR": ruff2020.BEST_MIXUP}),
    ),
)


@dataclass(frozen=True)
class Line:
    """A setting with its numbers by method; methods that the paper does not have there are missing."""

    setting: Setting
    numbers: Mapping[str, Number]

    @property
    def ranking(self) -> list[str]:
        """The methods that were run and did not diverge, the best first."""
        values = {method: number.value for method, number in self.numbers.items() if number.values}
        return sorted(values, key=lambda method: -values[method])

    @property
    def highest(self) -> str | None:
        """The method with the highest accuracy, if there are two to compare; of single runs too."""
        return self.ranking[0] if len(self.ranking) > 1 else None

    @property
    def best(self) -> str | None:
        """The method with the highest accuracy, if it and another were run more than once.

        Nobody leads where the highest is a single run, and nobody over single runs alone.
        """
        several = [name for name in self.ranking if self.numbers[name].n > 1]
        return self.highest if len(several) > 1 and several[0] == self.highest else None

    @property
    def leaders(self) -> list[str]:
        """The best method, and those that are behind it by less than two standard errors; no single runs."""
        best = self.best
        if best is None:
            return []
        return [name for name in self.ranking if name == best or _level(self.numbers[best], self.numbers[name])]

    def lead(self, method: str, reference: str, least: int = 1) -> float | None:
        """By how many points a method is ahead of another; None where one of them has fewer than `least` values."""
        both = [self.numbers.get(name) for name in (method, reference)]
        first, second = (number.value if number is not None and number.n >= least else None for number in both)
        return None if first is None or second is None else first - second

    @property
    def verdict(self) -> str:
        """ "ENorm: +2.31 on no norm; +0.40 on BatchNorm (within the spread)"; empty if there is nothing to compare.

        Where nobody leads it begins with "undecided: highest ENorm".
        """
        best = self.highest
        if best is None:
            return ""
        run = [name for name in (NO_NORM, BATCH_NORM) if name in self.numbers and self.numbers[name].was_run]
        others = [name for name in run if name != best]
        if best == BATCH_NORM or not others:
            others.append(self.ranking[1])
        said = "; ".join(self._over(best, name) for name in dict.fromkeys(others))
        return f"{best}: {said}" if self.best else f"undecided: highest {best}, {said}"

    def _over(self, best: str, name: str) -> str:
        lead = self.lead(best, name)
        if lead is None:
            return f"{name} diverges"
        return f"{signed(lead)} on {name}{_caution(self.numbers[best], self.numbers[name])}"


def _level(a: Number, b: Number) -> bool:
    """Whether two numbers differ by less than two standard errors; single runs, which have none, do not."""
    if min(a.n, b.n) < 2:
        return False
    error = math.sqrt(statistics.variance(a.values) / a.n + statistics.variance(b.values) / b.n)
    return abs(a.value - b.value) <= 2 * error


def _caution(a: Number, b: Number) -> str:
    """What to think of the difference of two numbers."""
    if min(a.n, b.n) < 2:
        return " (single runs)"
    return " (within the spread)" if _level(a, b) else ""


def lines(results: Iterable[Result], settings: Sequence[Setting] = SETTINGS) -> list[Line]:
    """The settings whose artifacts are among the results. Toy runs say nothing about methods: none of them."""
    by_name = {result.artifact.name: result for result in results if not result.toy}
    return [
        Line(setting, {method: by_name[setting.artifact].by_cell[cell] for method, cell in setting.cells.items()})
        for setting in settings
        if setting.artifact in by_name
    ]


# -- costs -------------------------------------------------------------------------------------------------------------

_VARIANTS = {
    "": NO_NORM,
    "no norm": NO_NORM,
    "BN": BATCH_NORM,
    "GN": "GroupNorm",
    "ENorm": "ENorm",
    "ENorm-1.2": "ENorm",
    "ENorm-1.2 + BN": "ENorm + BN",
    "EquiNorm": "EquiNorm",
    "MSR": "MSR",
}


@dataclass(frozen=True)
class Cost:
    """The time of a training step of one network by method, as a multiple of the time of `unit`."""

    network: str
    unit: str
    times: Mapping[str, float]
    hardware: str

    def cells(self) -> list[str]:
        """By method; empty where it was not measured."""
        return [f"{self.times[method]:.2f}" if method in self.times else "" for method in METHODS]


def costs(folder: Path) -> list[Cost]:
    """What `equinorm bench` has measured on a GPU, in the files that it left in a folder.

    Of what several logs have the newest counts; each is relative to the unit of its own log.
    """
    files = [(folder / "bench_lab_gpu.json", _of_lab)]
    files += [(path, _of_steps) for path in sorted(folder.glob("bench_steps_*_gpu.json"))]
    found: dict[tuple[str, str, str], dict[str, tuple[str, float]]] = {}
    for path, read in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            hardware, started = str(content["hardware"]).partition(";")[0], str(content.get("started", ""))
            by_network: dict[str, dict[str, float]] = {}
            for network, variant, milliseconds in read(content["rows"]):
                if variant in _VARIANTS and math.isfinite(milliseconds):
                    by_network.setdefault(network, {})[_VARIANTS[variant]] = milliseconds
        except (OSError, ValueError, KeyError, TypeError):  # not measured, or by another version
            continue
        for network, times in by_network.items():
            unit = NO_NORM if NO_NORM in times else BATCH_NORM
            if unit in times and len(times) > 1:
                known = found.setdefault((network, unit, hardware), {})
                for method, time in times.items():
                    known[method] = max(known.get(method, ("", 0.0)), (started, time / times[unit]))
    return [
        Cost(network, unit, {method: ratio for method, (_, ratio) in known.items()}, hardware)
        for (network, unit, hardware), known in found.items()
    ]


def _of_lab(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Of the laboratory's own networks, with one run on the device."""
    for row in rows:
        if row["side_by_side"] == 1:
            network, _, variant = row["name"].partition(", ")
            yield network, variant, row["step"]


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Of ResNet-18 and 50 for ImageNet with the usual batch, eager and compiled."""
    for row in rows:
        if row["network"] in ("ResNet-18, batch 256", "ResNet-50, batch 256") and not row["failed"]:
            yield f"{row['network']}, {row['mode']}", row["variant"], row["step"]["median"]


# -- in short ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A method over all lines: where it leads, by how much, and what a step with it takes (no norm: 1)."""

    method: str
    leads: tuple[str, ...]  # settings in which it is the best or level with it
    lines: int  # settings in which it was run more than once, as another was
    over_none: tuple[float, ...]
    over_batch_norm: tuple[float, ...]
    times: tuple[float, ...]


def summaries(lines: Sequence[Line], costs: Sequence[Cost]) -> list[Summary]:
    """Of every method that was compared with another. Single runs never make a lead: they are in no count here."""
    compared = [line for line in lines if sum(number.n > 1 for number in line.numbers.values()) > 1]
    found = []
    for method in METHODS:
        mine = [line for line in compared if method in line.numbers and _was_repeated(line.numbers[method])]
        leads = tuple(line.setting.name for line in mine if method in line.leaders)
        none, batch_norm = (
            tuple(
                gain for line in mine if reference != method and (gain := line.lead(method, reference, 2)) is not None
            )
            for reference in (NO_NORM, BATCH_NORM)
        )
        times = tuple(cost.times[method] for cost in costs if method in cost.times and cost.unit == NO_NORM != method)
        if mine:
            found.append(Summary(method, leads, len(mine), none, batch_norm, times))
    return found


def _was_repeated(number: Number) -> bool:
    """Whether more than one of its runs has ended, be it in divergence."""
    return number.n + number.diverged > 1
