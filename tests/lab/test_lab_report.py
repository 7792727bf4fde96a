"""The report: numbers, verdicts and claims from made-up records, in Markdown, on the page and in figures."""

from __future__ import annotations

import io
import json
import math
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from equinorm.errors import UserError
from equinorm.lab import report
from equinorm.lab.experiments.artifacts import Artifact, Cell, Claim, Compute, find, seeds
from equinorm.lab.report import figures, headline, markdown, style, terminal, wording
from equinorm.lab.report.results import Number, Result, Tally, evaluate, gains, metric_of, tally
from equinorm.lab.training.runs import Data, Method, Model, Optim, Run
from equinorm.lab.training.store import Computed, Record, Store

MINUS = "\N{MINUS SIGN}"
ABOUT = {
    "hardware": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "python": "3.12.3"},
    "commit": "0123456789ab",
    "command": "equinorm reproduce fake/figure1",
    "started": "2026-01-01T00:00:00+00:00",
}


def run_of(method: str, hidden: int, **changes: Any) -> Run:
    run = Run(Data("cifar10"), Model("fc", {"hidden": hidden}), Method(method), Optim(lr=0.05), epochs=10, label=method)
    return replace(run, **changes)


def record_of(run: Run, accuracy: float | None, seconds: float = 4.0, epochs: int = 10) -> Record:
    """A run that rises to `accuracy`; None: one that diverges after three epochs."""
    length = 3 if accuracy is None else epochs
    top = 30.0 if accuracy is None else accuracy
    lines = tuple(
        {
            "epoch": e,
            "test_accuracy": round(top * (1 - math.exp(-4 * e / epochs)) / (1 - math.exp(-4)), 3),
            "train_loss": 2.3 * math.exp(-e / 5),
            "filters": {"mean": 0.1 * e},
        }
        for e in range(1, length + 1)
    )
    if accuracy is None:
        return Record(run, "diverged", lines, {"reason": "loss is nan", "seconds": seconds}, ABOUT)
    return Record(run, "finished", lines, {"test_accuracy": accuracy, "seconds": seconds}, ABOUT)


def shrink(run: Run) -> Run:
    return replace(run, data=Data("digits"), epochs=1, model=Model("fc", {"hidden": 1}))


def lines_artifact(n: int = 3) -> Artifact:
    methods = {
        "Baseline": "none",
        "BN": "bn",
        "ENorm-1.2": "enorm",
        "ENorm-1.2 + BN": "enormbn",
        "ENorm + bias, plain": "b",
    }
    cells = tuple(
        Cell(row, str(depth), seeds(run_of(method, depth), n), paper=54.0 if row == "ENorm-1.2" else None)
        for row, method in methods.items()
        for depth in range(1, 20, 2)
    )
    return Artifact(
        "fake/figure1",
        "Fully connected nets: test accuracy over depth",
        "ENorm is ahead.",
        "60 epochs.\nHe.",
        cells,
        (
            Claim("ENorm-1.2 beats the baseline at 19 layers", lambda m: m["ENorm-1.2", "19"] > m["Baseline", "19"]),
            Claim("BN is worse than the baseline | at 1 layer", lambda m: m["BN", "1"] < m["Baseline", "1"]),
            Claim("Plain biases diverge at 19 layers", lambda m: math.isnan(m["ENorm + bias, plain", "19"])),
            Claim("There is a twentieth layer", lambda m: m["BN", "20"] > 0),
        ),
        kind="lines",
        x_label="intermediary layers",
        shrink=shrink,
    )


def curves_artifact() -> Artifact:
    cells = tuple(
        Cell(row, column, seeds(run_of(row, 100 + 10 * i + j), 5), paper=93.0 + i)
        for i, row in enumerate(("BatchNorm", "EquiNorm", "GroupNorm"))
        for j, column in enumerate(("CIFAR-10", "SVHN"))
    )
    return Artifact(
        "fake/figure2",
        "Curves of wide nets",
        "EquiNorm is faster.",
        "30 epochs.",
        cells,
        kind="curves",
        band="quartiles",
        tolerance=1.0,
    )


def bars_artifact() -> Artifact:
    cells = tuple(
        Cell(row, column, seeds(run_of(row, 200 + 10 * i + j), 3), paper=93.1 + 0.3 * i - j, paper_spread=0.2)
        for i, row in enumerate(("BN", "CZMI", "CZMIG", "CZMIG + noise"))
        for j, column in enumerate(("ResNet-56", "ResNet-110"))
    )
    return Artifact(
        "other/figure5", "Mean shift rejection against BN", "It is ahead.", "200 epochs.", cells, kind="bars"
    )


def table_artifact() -> Artifact:
    cells = tuple(
        Cell(row, column, seeds(run_of(row, 300 + 10 * i + j), 2), paper=88.0 + i)
        for i, row in enumerate(("Baseline", "BN", "GN", "ENorm-1.1"))
        for j, column in enumerate(("32", "128"))
    )
    return Artifact(
        "other/table4",
        "ResNet-18 by batch size",
        "ENorm is best at small batches.",
        "90 epochs.",
        cells,
        x_label="batch",
        shrink=shrink,
    )


def computed_artifact(draw: Callable[[dict[str, Any], Any], None] | None = None) -> Artifact:
    def cells(data: dict[str, Any]) -> dict[tuple[str, str], float]:
        return {(row, "elements"): value for row, value in data["elements"].items()}

    return Artifact(
        "other/table1",
        "Elements touched",
        "ENorm touches fewer.",
        "Counted.",
        (Cell("BN", "elements", (), paper=12_800_000, tolerance=1e5), Cell("ENorm", "elements", (), paper=11_000_000)),
        (Claim("ENorm touches fewer elements", lambda m: m["ENorm", "elements"] < m["BN", "elements"]),),
        Compute(lambda toy: {"elements": {"BN": 1, "ENorm": 1}}, cells, draw),
        unit="",
    )


def waiting_artifact() -> Artifact:
    cells = (Cell("BN", "224", seeds(run_of("imagenet", 18), 2), paper=69.8),)
    return Artifact("other/figure9", "ImageNet <later>", "It takes long.", "90 epochs.", cells, kind="curves")


ELEMENTS = {"elements": {"BN": 12_810_432, "ENorm": 11_699_112}}


def records_of(artifact: Artifact, seed: int = 0) -> Iterator[Record]:
    """Records for every run, some of them diverged and some missing; none for `waiting_artifact`."""
    draw = random.Random(seed)
    for cell in artifact.cells if artifact.name != "other/figure9" else ():
        for i, run in enumerate(cell.runs):
            accuracy: float | None = (cell.paper or 90.0) + draw.gauss(0.1, 0.3)
            if artifact.kind == "lines":
                fall = {"Baseline": 0.2, "BN": 0.1}.get(cell.row, 0.03)
                accuracy = 55.2 - fall * int(cell.column) + draw.gauss(0, 0.25) + 0.2 * cell.row.endswith("+ BN")
                biased = cell.row.startswith("ENorm + bias") and int(cell.column) > 9
                if biased or (cell.row == "BN" and cell.column == "7" and i == 1):
                    accuracy = None
            elif cell.row == "BN" and cell.column == "ResNet-56" and i:
                continue
            yield record_of(run, accuracy, seconds=5.0 if "ENorm" in cell.row else 4.0)


def fill(store: Store, artifacts: Sequence[Artifact]) -> None:
    for artifact in artifacts:
        for record in records_of(artifact):
            store.write(record)
        if artifact.compute is not None:
            store.write_computed(artifact.name, ELEMENTS, about=ABOUT)


def every_artifact() -> list[Artifact]:
    return [
        lines_artifact(),
        curves_artifact(),
        bars_artifact(),
        table_artifact(),
        computed_artifact(),
        waiting_artifact(),
    ]


# -- numbers, verdicts and claims --------------------------------------------------------------------------------------


def number_of(values: Sequence[float | None], paper: float | None = None, **changes: Any) -> Number:
    """A cell with these accuracies (None: diverged), one run each."""
    runs = tuple(run_of("enorm", 1, seed=seed) for seed in range(len(values)))
    cell = Cell("ENorm", "1", runs, paper, tolerance=changes.pop("tolerance", None))
    artifact = Artifact("fake/x", "x", "x", "x", (cell,), **changes)
    records = {run.key: record_of(run, value) for run, value in zip(runs, values, strict=True)}
    return evaluate(artifact, records).numbers[0]


accuracies = st.lists(st.floats(0, 100), min_size=1, max_size=7)


@given(accuracies, st.integers(0, 2), st.floats(0, 100), st.floats(0, 5), st.sampled_from(["std", "quartiles"]))
def test_a_number_is_what_its_runs_say(
    values: list[float], diverged: int, paper: float, tolerance: float, band: str
) -> None:
    number = number_of([*values, *[None] * diverged], paper, tolerance=tolerance, band=band)
    plain = np.array(values)
    middle = plain.mean() if band == "std" else np.median(plain)
    assert (number.n, number.diverged) == (len(values), diverged)
    assert number.value == pytest.approx(middle, abs=1e-9)
    if len(values) < 2:
        assert number.low_high is None
    elif band == "std":
        deviation = plain.std(ddof=1)
        assert number.low_high == pytest.approx((middle - deviation, middle + deviation), abs=1e-6)
    else:
        assert number.low_high == pytest.approx(tuple(np.percentile(plain, [25, 75])), abs=1e-9)
    assert number.difference == pytest.approx(middle - paper, abs=1e-9)
    if abs(abs(middle - paper) - tolerance) > 1e-6:
        missed = "higher" if middle > paper else "not reproduced"
        assert number.verdict == ("reproduced" if abs(middle - paper) < tolerance else missed)


@pytest.mark.parametrize(
    ("values", "paper", "verdict", "shown", "n"),
    [
        ([54.0, 55.0], 54.2, "reproduced", "54.50 ± 0.71", "2"),
        ([54.0, 55.0], 53.9, "higher", "54.50 ± 0.71", "2"),
        ([54.0, 55.0], 55.1, "not reproduced", "54.50 ± 0.71", "2"),
        ([54.0], None, "measured", "54.00", "1"),
        ([54.0, None], 54.5, "reproduced", "54.00", "1, 1 diverged"),
        ([None, None], 54.5, "not reproduced", "diverged (2)", "0, 2 diverged"),
        ([None, None], None, "measured", "diverged (2)", "0, 2 diverged"),
        ([None, None], math.nan, "reproduced", "diverged (2)", "0, 2 diverged"),  # as the paper says
        ([54.0, None], math.nan, "not reproduced", "54.00", "1, 1 diverged"),
    ],
)
def test_verdicts(values: list[float | None], paper: float | None, verdict: str, shown: str, n: str) -> None:
    number = number_of(values, paper)
    assert (number.verdict, wording.measured(number), wording.n(number)) == (verdict, shown, n)


def test_what_is_missing_is_said() -> None:
    artifact = table_artifact()
    cell = artifact.cells[0]
    none, some = evaluate(artifact, {}), evaluate(artifact, {cell.runs[0].key: record_of(cell.runs[0], 88.1)})
    assert none.verdict == "not run"
    assert wording.counts(none) == "not run"
    assert (wording.measured(none.numbers[0]), wording.n(none.numbers[0])) == ("not run", "0 of 2")
    assert wording.n(some.numbers[0]) == "1 of 2"
    assert [number.verdict for number in some.numbers[:2]] == ["reproduced", "not run"]


def test_a_metric_is_found_by_its_path_or_in_the_last_epoch() -> None:
    assert metric_of({"filters": {"mean": 2}}, "filters.mean") == 2.0
    for odd in (
        {},
        {"filters": 3},
        {"filters": {"mean": None}},
        {"filters": {"mean": math.nan}},
        {"filters": {"mean": True}},
    ):
        assert metric_of(odd, "filters.mean") is None
    assert number_of([54.0], metric="filters.mean").value == pytest.approx(1.0)  # of epoch 10
    assert number_of([54.0], metric="nothing").verdict == "not run"
    assert number_of([54.0], metric="filters.mean@4").value == pytest.approx(0.4)
    assert number_of([54.0], metric="filters.mean@400").value == pytest.approx(1.0)  # the last there is
    assert number_of([54.0], metric="filters.mean@0").verdict == "not run"
    assert wording.metric_name("filters.mean@100") == "filters mean at epoch 100"


def claim(holds: Any, accuracies: dict[str, list[float | None]], wanted: int = 2, toy: bool = False) -> tuple[str, str]:
    cells = tuple(Cell(row, "1", seeds(run_of(row, 1), wanted)) for row in accuracies)
    artifact = Artifact("fake/x", "x", "x", "x", cells, (Claim("a claim", holds),))
    records = {
        run.key: record_of(run, value)
        for cell in cells
        for run, value in zip(cell.runs, accuracies[cell.row], strict=False)
    }
    judged = evaluate(artifact, records, toy=toy).claims[0]
    return judged.verdict, judged.note


def test_claims() -> None:
    both: dict[str, list[float | None]] = {"A": [2.0, 4.0], "B": [1.0, 1.0]}
    assert claim(lambda m: m["A", "1"] == 3.0 > m["B", "1"], both) == ("reproduced", "")
    assert claim(lambda m: m["A", "1"] < m["B", "1"], both) == ("not reproduced", "")
    assert claim(lambda m: m["C", "1"] < 1, both) == ("not run", "missing: C at 1")
    assert claim(lambda m: True, {"A": [], "B": []}) == ("not run", "")
    assert claim(lambda m: all(v > 0 for v in m.values()), {"A": [], "B": [1.0, 2.0]}) == ("reproduced", "")
    assert claim(lambda m: m["A", "1"] > 0, {"A": [], "B": [1.0, 2.0]}) == ("not run", "missing: A at 1")
    assert claim(lambda m: m["A", "1"] > 0, {"A": [1.0]}) == (
        "reproduced",
        "single runs. some runs are missing, n = 1 of 2 at the least",
    )
    assert claim(lambda m: m["A", "1"] > m["B", "1"], {"A": [2.0], "B": [1.0, 1.0]}) == (
        "reproduced",
        "in part single runs. some runs are missing, n = 1 of 2 at the least",
    )
    lost: dict[str, list[float | None]] = {"A": [None, None], "B": [1.0, 2.0]}
    assert claim(lambda m: math.isnan(m["A", "1"]), lost) == ("reproduced", "diverged: A at 1")
    assert claim(lambda m: m["A", "1"] > m["B", "1"], lost) == ("not reproduced", "diverged: A at 1")
    assert claim(lambda m: m["A", "1"] > 0, both, toy=True)[0] == "toy"
    assert claim(lambda m: m["A", "1", "filters.mean@4"] == pytest.approx(0.4), both) == ("reproduced", "")
    assert claim(lambda m: m["A", "1", "filters.maen"] > 0, both) == ("not run", "missing: A at 1 at filters.maen")
    assert claim(lambda m: m["C", "1", "filters.mean@4"] > 0, both) == ("not run", "missing: C at 1")
    with pytest.raises(RuntimeError, match=r"'a claim' of fake/x failed: ZeroDivisionError"):
        claim(lambda m: 1 / 0, both)


def result_of(artifact: Artifact) -> Result:
    computed = None if artifact.compute is None else Computed(artifact.name, ELEMENTS, ABOUT)
    return evaluate(artifact, {record.run.key: record for record in records_of(artifact)}, computed)


def test_gains_on_the_baseline_and_on_batchnorm() -> None:
    result = result_of(lines_artifact())
    found = gains(result)
    assert list(found) == list(result.rows)
    assert found["Baseline"].baseline is None
    both = found["ENorm-1.2"]
    assert both.baseline is not None
    assert both.batch_norm is not None
    values = {row: [result.by_cell[row, column].value for column in result.columns] for row in result.rows}
    expected = np.mean(np.array(values["ENorm-1.2"]) - np.array(values["Baseline"]))
    assert both.baseline.mean == pytest.approx(expected)
    assert both.baseline.slowdown == pytest.approx(1.25)
    biased = found["ENorm + bias, plain"].baseline
    assert biased is not None
    assert (len(biased.points), biased.lost, biased.rescued) == (5, 5, 0)
    assert wording.gain(biased).endswith("diverges in 5 where Baseline trains")
    glance = wording.glance(result)
    assert (glance.best, glance.peers) == ("ENorm-1.2 + BN", ("ENorm-1.2",))
    assert glance.cost == "5 s a run, 1.25 times Baseline"
    assert gains(result_of(computed_artifact())) == {}
    assert gains(result_of(replace(lines_artifact(), compares=False))) == {}


def test_nothing_is_best_if_nothing_beats_the_reference() -> None:
    cells = tuple(Cell(row, "1", seeds(run_of(row, 1), 2)) for row in ("BN", "GN"))
    artifact = Artifact("fake/x", "x", "x", "x", cells)
    records = {run.key: record_of(run, top) for cell, top in zip(cells, (90, 80), strict=True) for run in cell.runs}
    assert wording.glance(evaluate(artifact, records)).best == "BN"


def test_single_runs_are_never_best() -> None:
    """ENorm once led two lines of the first table by 0.3 and 0.5 points, n = 1."""
    cells = tuple(Cell(row, "1", seeds(run_of(row, 1), 2)) for row in ("BN", "GN"))
    artifact = Artifact("fake/x", "x", "x", "x", cells)
    several, single = [record_of(run, 90) for run in cells[0].runs], [record_of(cells[1].runs[0], 95)]
    for records in (several + single, several[:1] + single):
        result = evaluate(artifact, {record.run.key: record for record in records})
        assert wording.glance(result).best == wording.NONE
        assert wording.gain(gains(result)["GN"].batch_norm) == "+5.00 (in part single runs)"


def test_everything_is_counted_once() -> None:
    def cell(row: str, top: float, n: int = 2) -> tuple[Cell, list[Record]]:
        made = Cell(row, "1", seeds(run_of(row, 1), n), paper=90.0)
        return made, [record_of(run, top) for run in made.runs]

    made = {"A": cell("A", 90.2), "B": cell("B", 91.0), "C": cell("C", 89.0, n=1)}
    records = {record.run.key: record for _, found in made.values() for record in found}
    cells = tuple(one for one, _ in made.values())
    ahead = Claim("B is ahead of A", lambda m: m["B", "1"] > m["A", "1"])
    table = Artifact("fake/table1", "x", "x", "x", cells, (ahead, Claim("C is ahead", lambda m: m["C", "1"] > 90)))
    figure = replace(
        table,
        name="fake/figure1",
        claims=(
            Claim("B wins", lambda m: m["B", "1"] > m["A", "1"], same_as=ahead.text),
            Claim("C is ahead", lambda m: m["C", "1"] > 80),
            Claim("C is behind", lambda m: m["C", "1"] < m["A", "1"]),
            Claim("All train (ours)", lambda m: min(m.values()) > 80),
        ),
    )
    variant = replace(table, name="fake/table1-otherwise", variant_of="fake/table1")
    results = [evaluate(artifact, records) for artifact in (table, figure, variant, waiting_artifact())]
    assert tally(results) == Tally(
        reproduced=1, higher=1, missed=1, holds=2, holds_in_part=1, single=1, ours=1, repeated=4
    )
    assert tally([evaluate(table, records, toy=True)]) == Tally()
    assert wording.summary(results) == (
        "3 of 4 tables and figures have results, some of them in part: 5 runs in all. "
        "Of 3 numbers that the papers print 1 is reproduced; 1 came out higher than printed, 1 lower or otherwise "
        "different. Of 3 claims of the papers 2 hold (1 of them by single runs, at least in part), 1 in one place and "
        "not in another, and 0 do not. Counted apart: 1 of 1 claim of our own holds; 4 repeat another or try it "
        "otherwise."
    )
    assert wording.counts(results[1]) == (
        "1 of 3 numbers and 3 of 3 claims reproduced; 1 number higher than in the paper; 1 of 1 claim of ours holds"
    )
    above = {run.key: record_of(run, 95) for cell in cells for run in cell.runs}
    assert evaluate(replace(table, claims=()), above).verdict == "higher"


@pytest.mark.parametrize(
    ("values", "verdict", "words"),
    [
        ((90, 90), "reproduced", "2 of 2 numbers reproduced"),
        ((90, 80), "in part", "1 of 2 numbers reproduced"),
        ((80, 80), "not reproduced", "0 of 2 numbers reproduced"),
        ((90,), "in part", "1 of 1 number reproduced; 1 of 2 runs are missing"),
        ((80,), "not reproduced", "0 of 1 number reproduced; 1 of 2 runs are missing"),
    ],
)
def test_the_verdict_of_an_artifact(values: tuple[int, ...], verdict: str, words: str) -> None:
    cells = tuple(Cell(row, "1", seeds(run_of(row, 1), 1), paper=90.0) for row in ("BN", "GN"))
    records = {cell.runs[0].key: record_of(cell.runs[0], value) for cell, value in zip(cells, values, strict=False)}
    result = evaluate(Artifact("fake/x", "x", "x", "x", cells), records)
    assert (result.verdict, wording.counts(result)) == (verdict, words)


def test_numbers_as_text() -> None:
    assert [wording.value(v, "%") for v in (54.634, -0.004, math.nan)] == ["54.63", "0.00", wording.NONE]
    assert [wording.value(v, "") for v in (1048576.0, 0.00123456, -12345.67)] == [
        "1,048,576",
        "0.001235",
        f"{MINUS}12,345.7",
    ]
    assert wording.signed(-1.234) == f"{MINUS}1.23"
    assert [wording.duration(s) for s in (4.123, 720, 12_300)] == ["4.12 s", "12 min", "3.4 h"]


# -- the first table ---------------------------------------------------------------------------------------------------

ROWS = {"no norm": "Baseline", "BatchNorm": "BN", "ENorm": "ENorm", "MSR": "M"}
SETTING = headline.Setting("MLP", "fake/x", {method: (row, "1") for method, row in ROWS.items()})


def line_of(
    paper: float | None = None, band: Literal["std", "quartiles"] = "std", **accuracies: list[float | None]
) -> headline.Line:
    """A line of the first table from accuracies by row: None for a run that diverged."""
    cells = tuple(Cell(row, "1", seeds(run_of(row, 1), 3), paper) for row, _ in SETTING.cells.values())
    records = {
        run.key: record_of(run, value)
        for cell in cells
        for run, value in zip(cell.runs, accuracies.get(cell.row, ()), strict=False)
    }
    (line,) = headline.lines([evaluate(Artifact("fake/x", "x", "x", "x", cells, band=band), records)], [SETTING])
    return line


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ({}, ""),
        ({"BN": [54.0, 54.2]}, ""),
        (
            {"Baseline": [50, 50.2], "BN": [54, 54.2], "ENorm": [55, 55.2]},
            "ENorm: +5.00 on no norm; +1.00 on BatchNorm",
        ),
        (
            {"Baseline": [50, 50.2], "BN": [54, 56], "ENorm": [55, 55.2]},
            "ENorm: +5.00 on no norm; +0.10 on BatchNorm (within the spread)",
        ),
        ({"Baseline": [50], "ENorm": [55]}, "undecided: highest ENorm, +5.00 on no norm (single runs)"),
        (
            {"Baseline": [None], "BN": [54], "ENorm": [55]},
            "undecided: highest ENorm, no norm diverges; +1.00 on BatchNorm (single runs)",
        ),
        ({"BN": [55.0], "M": [54.0]}, "undecided: highest BatchNorm, +1.00 on MSR (single runs)"),
        (
            {"BN": [55.0, 55.2], "M": [58.0], "ENorm": [54.0, 54.2]},
            "undecided: highest MSR, +2.90 on BatchNorm (single runs)",
        ),
        ({"BN": [55.0, 55.2], "M": [53.0], "ENorm": [54.0, 54.2]}, "BatchNorm: +1.00 on ENorm"),
        ({"Baseline": [55.0, 55.1], "BN": [54.0, 54.1]}, "no norm: +1.00 on BatchNorm"),
        ({"ENorm": [55.0], "M": [54.0]}, "undecided: highest ENorm, +1.00 on MSR (single runs)"),
    ],
)
def test_which_method_is_best(accuracies: dict[str, list[float | None]], verdict: str) -> None:
    line = line_of(**accuracies)  # type: ignore[arg-type]
    assert line.verdict == verdict
    assert line.best == (None if verdict.startswith("undecided") else verdict.split(":")[0] or None)
    assert all(line.numbers[name].n > 1 for name in line.leaders)


def test_cells_of_the_first_table() -> None:
    numbers = line_of(paper=54.3, BN=[54.0, 54.2], ENorm=[None, None, None], Baseline=[50.0, 51.0, 52.0]).numbers
    assert wording.headline(numbers["BatchNorm"]) == ("54.10 ± 0.14", "n 2 of 3, paper\xa054.3\xa0✓")
    assert wording.headline(numbers["no norm"]) == ("51.00 ± 1.00", "n 3, paper\xa054.3\xa0✗")
    assert wording.headline(numbers["ENorm"]) == ("diverged (3)", "n 0, 3 diverged, paper\xa054.3\xa0✗")
    assert wording.headline(numbers["MSR"]) == ("not run", "paper\xa054.3")
    numbers = line_of(band="quartiles", BN=[50.0, 52.0, 53.0]).numbers
    assert wording.headline(numbers["BatchNorm"]) == ("52.00", "IQR 1.50, n 3")


def test_methods_in_short() -> None:
    lines = [
        line_of(Baseline=[50.0, 50.2], BN=[54.0, 56.0], ENorm=[55.0, 55.2], M=[None]),
        line_of(Baseline=[50.0, 50.2], BN=[54.0, 54.2], ENorm=[53.0, 53.2]),
        line_of(Baseline=[50.0], BN=[54.0], ENorm=[63.0]),  # single runs never make a lead
        line_of(BN=[54.0]),  # nothing to compare with
        line_of(BN=[54.0, 54.2], ENorm=[53.0, 53.2], M=[None, None]),
    ]
    cost = headline.Cost("MLP", "no norm", {"no norm": 1.0, "BatchNorm": 1.5, "ENorm": 1.1}, "GPU")
    costs = [cost, replace(cost, times={"no norm": 1.0, "ENorm": 1.2}), replace(cost, unit="BatchNorm")]
    assert [wording.in_short(found) for found in headline.summaries(lines, costs)] == [
        ("no norm", "0 of 2", "", f"{MINUS}4.90 to {MINUS}4.00", ""),
        ("BatchNorm", "3 of 3: MLP; MLP; MLP", "+4.00 to +4.90", "", "1.50"),
        ("ENorm", "1 of 3: MLP", "+3.00 to +5.00", f"{MINUS}1.00 to +0.10", "1.10 to 1.20"),
        ("MSR", "0 of 1", "", "", ""),
    ]
    assert headline.summaries([], costs) == []


def test_every_setting_of_the_first_table_is_in_a_recipe() -> None:
    for setting in headline.SETTINGS:
        result = evaluate(find(setting.artifact), {})
        assert set(setting.cells) <= set(headline.METHODS)
        assert set(setting.cells.values()) <= set(result.by_cell)
    assert len(headline.lines([evaluate(find(s.artifact), {}) for s in headline.SETTINGS])) == len(headline.SETTINGS)
    assert headline.lines([evaluate(find("ruff2020/table1").toy(), {}, toy=True)]) == []


def write_benchmarks(folder: Path) -> None:
    steps = [("no norm", 10.0), ("BN", 15.0), ("ENorm", 10.5), ("LN", 20.0), ("MSR", math.nan)]
    rows: list[dict[str, Any]] = [
        {"network": "ResNet-18, batch 256", "mode": "eager", "variant": variant, "step": {"median": t}, "failed": ""}
        for variant, t in steps
    ]
    rows += [{**rows[0], "variant": "GN", "failed": "RuntimeError"}, {**rows[0], "network": "ResNet-18, batch 32"}]
    about = {"hardware": "NVIDIA H200; AMD EPYC, 16 cores"}
    (folder / "bench_steps_resnet18_eager_gpu.json").write_text(json.dumps({**about, "rows": rows}))
    lab = [
        ("FC-19", 1, 2.0),
        ("FC-19, BN", 1, 3.0),
        ("FC-19, BN", 8, 9.0),
        ("WRN, BN", 1, 4.0),
        ("WRN, EquiNorm", 1, 5.0),
    ]
    (folder / "bench_lab_gpu.json").write_text(
        json.dumps({**about, "rows": [{"name": name, "side_by_side": k, "step": t} for name, k, t in lab]})
    )


def test_costs_are_those_of_the_benchmarks(tmp_path: Path) -> None:
    assert headline.costs(tmp_path) == []
    write_benchmarks(tmp_path)
    assert headline.costs(tmp_path) == [
        headline.Cost("FC-19", "no norm", {"no norm": 1.0, "BatchNorm": 1.5}, "NVIDIA H200"),
        headline.Cost("WRN", "BatchNorm", {"BatchNorm": 1.0, "EquiNorm": 1.25}, "NVIDIA H200"),
        headline.Cost(
            "ResNet-18, batch 256, eager", "no norm", {"no norm": 1.0, "BatchNorm": 1.5, "ENorm": 1.05}, "NVIDIA H200"
        ),
    ]
    first = tmp_path / "bench_steps_resnet18_eager_gpu.json"
    later = json.loads(first.read_text())
    later["started"] = "2026-01-02"
    later["rows"] = [row for row in later["rows"] if row["variant"] in ("no norm", "ENorm")]
    later["rows"][1]["step"]["median"] = 10.2
    (tmp_path / "bench_steps_resnet18_eager_again_gpu.json").write_text(json.dumps(later))  # before it in the alphabet
    assert headline.costs(tmp_path)[2].times == {"no norm": 1.0, "BatchNorm": 1.5, "ENorm": 1.02}
    (tmp_path / "bench_steps_resnet18_eager_again_gpu.json").unlink()
    first.write_text('{"rows": 3}')
    assert len(headline.costs(tmp_path)) == 2


def test_the_first_page(tmp_path: Path) -> None:
    artifact = find("stock2019/table3")
    store = Store(tmp_path)
    for cell in artifact.part(columns=["128"]).cells:
        for run in cell.runs:
            store.write(record_of(run, (cell.paper or 0.0) + 0.1 * run.seed))
    report.write(store, tmp_path, [artifact])
    assert "Costs have not been measured on a GPU yet" in (tmp_path / "methods.md").read_text()
    write_benchmarks(tmp_path)
    made = report.write(store, tmp_path, [artifact])
    text, page = (tmp_path / "methods.md").read_text(), made.page.read_text()
    assert "**90.55 ± 0.10**<br>n 3, paper\xa090.45\xa0✓" in text
    assert "| not run<br>paper\xa091.24 |" in text
    assert "BatchNorm: +2.01 on no norm; +0.86 on ENorm" in text
    assert "| FC-19, NVIDIA H200 | no norm = 1 | 1.00 | 1.50 |" in text
    assert text.index("## Accuracy, setting by setting") < text.index("## What a step costs")
    assert "](stock2019.md#stock2019-table3)" in text
    Checker(page)
    assert "<b>90.55 ± 0.10</b></span> <small>n 3, paper\xa090.45\xa0✓</small>" in page
    assert page.count(", NVIDIA H200</td>") == 3
    assert "| BatchNorm | 1 of 1: CIFAR-NV, batch 128 | +2.01 |  | 1.50 |" in text
    readme = made.readme.read_text()
    assert "[which method helps, and what it costs](methods.md)" in readme
    assert len(readme.splitlines()) < 40  # one screen


def test_what_was_chosen_stands_beside_the_table_it_was_chosen_from(tmp_path: Path) -> None:
    artifact = find("stock2019/tuning-cifar-nv").part(["BN, momentum 0.9", "GN, momentum 0.9"])
    store = Store(tmp_path)
    tops: dict[str, float | None] = {"lr 0.01": 70.0, "lr 0.05": 71.0, "lr 0.1": None, "lr 0.05, groups 8": 71.0}
    for cell in artifact.cells:
        if cell.column in tops:
            store.write(record_of(cell.runs[0], tops[cell.column]))
    text = markdown.render([report.section(store, artifact)])
    assert "| BN, momentum 0.9 | lr 0.05 | 71.00 | 70.00: lr 0.01 | 3 of 3 |" in text
    assert f"| GN, momentum 0.9 | lr 0.05, groups 8 | 71.00 | {wording.NONE} | 1 of 7 |" in text
    assert "chosen for" not in markdown.render([report.section(store, find("stock2019/table3"))])
    made = report.write(store, tmp_path / "out", [artifact])
    assert "<td>lr 0.05, groups 8</td>" in made.page.read_text()


# -- figures -----------------------------------------------------------------------------------------------------------


def all_kinds() -> list[Artifact]:
    def draw(data: dict[str, Any], figure: Any) -> None:
        figure.subplots().bar([0, 1], list(data["elements"].values()))

    return [
        lines_artifact(),
        curves_artifact(),
        bars_artifact(),
        table_artifact(),
        computed_artifact(),
        computed_artifact(draw),
    ]


@pytest.mark.parametrize("artifact", all_kinds(), ids=lambda artifact: f"{artifact.kind} {artifact.name}")
def test_a_figure_of_each_kind(artifact: Artifact) -> None:
    result = result_of(artifact)
    made = figures.draw(result)
    assert made is not None
    svg, png = style.svg_and_png(made)
    tree = ElementTree.fromstring(svg.decode())
    texts = {"".join(node.itertext()).strip() for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert artifact.title in " ".join(texts)
    if artifact.compute is None:
        assert set(result.rows) <= texts
    assert png.startswith(b"\x89PNG")
    again = figures.draw(result_of(artifact))
    assert again is not None
    assert style.svg_and_png(again) == (svg, png)  # not a byte differs


def test_nothing_is_drawn_of_what_was_not_run() -> None:
    assert figures.draw(evaluate(waiting_artifact(), {})) is None


def drawn(result: Result) -> list[str]:
    made = figures.draw(result)
    assert made is not None
    return [text.get_text() for axes in made.axes for text in axes.texts] + [text.get_text() for text in made.texts]


def test_diverged_runs_are_shown() -> None:
    result = result_of(lines_artifact())
    made = figures.draw(result)
    assert made is not None
    crosses = [line for line in made.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses) == 6  # five cells of plain biases, and one run of BN
    assert "1/3" in drawn(result)
    everything_lost = evaluate(curves_artifact(), {run.key: record_of(run, None) for run in curves_artifact().runs()})
    made = figures.draw(everything_lost)
    assert made is not None
    assert sum(line.get_marker() == "x" for axes in made.axes for line in axes.lines) == 30


@pytest.mark.parametrize(("ends", "enlarged"), [((93.4, 92.9), True), ((93.4, 60.0), False), ((93.4,), False)])
def test_the_end_of_curves_that_come_to_lie_on_each_other_is_drawn_larger(
    ends: tuple[float, ...], enlarged: bool
) -> None:
    cells = tuple(Cell(f"method {i}", "CIFAR-10", seeds(run_of(f"method {i}", 40 + i), 1)) for i in range(len(ends)))
    artifact = Artifact("fake/x", "x", "x", "x", cells, kind="curves")
    records = {}
    for cell, end in zip(cells, ends, strict=True):
        record = record_of(cell.runs[0], end)
        log = tuple({"epoch": e, "test_accuracy": 10 + (end - 10) * min(1, e / 50)} for e in range(1, 101))
        records[cell.runs[0].key] = replace(record, epochs=log)
    made = figures.draw(evaluate(artifact, records))
    assert made is not None
    insets = made.axes[0].child_axes
    assert len(insets) == enlarged
    for inset in insets:
        assert inset.get_xlim() == pytest.approx((80.2, 100))
        low, high = inset.get_ylim()
        assert 92 < low < 92.9
        assert 93.4 < high < 94
        assert [line.get_color() for line in inset.lines] == [line.get_color() for line in made.axes[0].lines]


def test_a_few_values_far_below_do_not_flatten_the_others() -> None:
    cells = tuple(Cell(row, str(d), seeds(run_of(row, d), 1)) for row in ("Baseline", "BN") for d in range(5))
    artifact = Artifact("fake/x", "x", "x", "x", cells, kind="lines")
    records = {
        c.runs[0].key: record_of(c.runs[0], 10.0 if c.column == "4" and c.row == "BN" else 54.0 + int(c.column))
        for c in cells
    }
    result = evaluate(artifact, records)
    made = figures.draw(result)
    assert made is not None
    assert made.axes[0].get_ylim()[0] > 50
    assert "↓ 10" in drawn(result)


def test_values_far_below_in_one_column_stand_above_each_other() -> None:
    cells = tuple(Cell(row, str(d), seeds(run_of(row, d), 1)) for row in ("Baseline", "BN", "GN") for d in range(5))
    artifact = Artifact("fake/x", "x", "x", "x", cells, kind="lines")
    records = {
        c.runs[0].key: record_of(c.runs[0], 10.0 if c.column == "4" and c.row != "GN" else 54.0 + int(c.column))
        for c in cells
    }
    made = figures.draw(evaluate(artifact, records))
    assert made is not None
    heights = [text.xyann[1] for text in made.axes[0].texts if text.get_text() == "↓ 10"]
    assert len(set(heights)) == 2


def test_a_row_far_below_does_not_flatten_the_others() -> None:
    cells = tuple(Cell(f"try {i}", "CIFAR-10", seeds(run_of("BN", i), 1)) for i in range(7))
    artifact = Artifact("fake/x", "x", "x", "x", cells)
    records = {c.runs[0].key: record_of(c.runs[0], 10.0 if i == 3 else 93.0 + 0.1 * i) for i, c in enumerate(cells)}
    result = evaluate(artifact, records)
    made = figures.draw(result)
    assert made is not None
    assert made.axes[0].get_xlim()[0] > 92
    assert "← 10" in drawn(result)


METHODS = [
    "Baseline",
    "BN",
    "BatchNorm",
    "ENorm",
    "ENorm-1.2",
    "lr = 0.1",
    "lr = 0.4",
    "x",
    "ENorm + BN",
    "GN",
    "ENorm + bias, safe",
    "ENorm + bias, plain",
    "CZMIG",
]


@given(st.lists(st.sampled_from(METHODS), unique=True))
def test_methods_keep_their_colour_and_differ(methods: list[str]) -> None:
    found = style.looks(methods)
    assert len({(look.colour, look.line) for look in found.values()}) == len(methods)
    alone = {name: style.looks([name])[name] for name in methods}
    for name in {"Baseline", "BN", "ENorm", "GN"} & set(methods):
        assert found[name].colour == alone[name].colour


# -- what is written ---------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Every tag is closed, and nothing comes from elsewhere."""

    void = ("meta", "input", "br", "hr", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> report.WrittenReport:
    folder = tmp_path_factory.mktemp("results")
    store = Store(folder)
    fill(store, every_artifact())
    torn = folder / "runs" / "cifar10-fc" / "torn.jsonl"
    torn.write_text('{"run"')
    return report.write(store, folder, every_artifact())


def test_the_markdown(written: report.WrittenReport) -> None:
    folder = written.readme.parent
    text = written.readme.read_text()
    assert text.startswith("# Results\n")
    assert "runs/cifar10-fc/torn.jsonl is torn" in text
    assert "![Our accuracies minus the papers'](figures/all-numbers.svg)" in text
    fake, other = (folder / f"{paper}.md" for paper in ("fake", "other"))
    head = fake.read_text().partition("\n## ")[0]
    assert "**ENorm-1.2 + BN** and within the spread ENorm-1.2" in head
    assert "1.25 times Baseline" in head
    assert "Not run yet: [other/figure9](#other-figure9)" in other.read_text()
    every = [text, fake.read_text(), other.read_text()]
    assert "`equinorm reproduce fake/figure1`" in every[1]
    assert "NVIDIA H200" in every[1]
    assert "✗ not reproduced | BN is worse than the baseline \\| at 1 layer" in every[1]
    assert "not run | There is a twentieth layer | missing: BN at 20" in every[1]
    assert "| BN | ResNet-56 | 93" in every[2]
    assert "| 1 of 3 | 93.1 ± 0.2 |" in every[2]
    assert "ImageNet &lt;later>" in every[2]
    links = []
    for one in every:
        for table in re.findall(r"(?:^\|.*\n)+", one, re.M):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1
        links += re.findall(r"\]\(([^)#]+)\)", one)
        anchors = re.findall(r"\(#([^)]+)\)", one)
        assert all(f'<a id="{anchor}"></a>' in one for anchor in anchors)
    assert len(links) > 200
    assert all((folder / link).exists() for link in links)


def test_the_page(written: report.WrittenReport) -> None:
    text = written.page.read_text()
    checked = Checker(text)
    for tag, name, value in checked.attributes:
        if name in ("href", "src", "xlink:href") and not value.startswith("#"):
            assert (written.page.parent / value).exists(), (tag, value)
    # the names of XML formats inside figures are the only addresses
    assert set(re.findall(r"https?://([^/\"\s]+)", text)) <= {"www.w3.org"}
    ids = [value for _, name, value in checked.attributes if name == "id"]
    assert {"fake-figure1", "other-figure9"} <= set(ids)
    assert text.count('class="card ') == 5
    assert len(text.encode()) < 1 << 20
    assert "ImageNet &lt;later&gt;" in text
    verdicts = {v for _, name, value in checked.attributes if name == "data-verdict" for v in value.split("|")}
    assert {"reproduced", "higher", "not reproduced", "not run", "measured"} == verdicts


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("b.py /tmp/data /tmp/store", "1 run started by a script that is not in the repository (b.py)"),
        ("/home/me/try.py", "1 run started by a script that is not in the repository (/home/me/try.py)"),
        ("cli.py reproduce fake/figure1", ""),
        ("equinorm train b.py", ""),
    ],
)
def test_scripts_that_cannot_be_looked_up_are_named(command: str, said: str) -> None:
    record = replace(record_of(run_of("BN", 5), 60.0), about={**ABOUT, "command": command})
    artifact = Artifact("fake/one", "One", "", "", (Cell("BN", "5", (record.run,)),))
    assert wording.provenance(evaluate(artifact, {record.run.key: record})).scripts == said


def test_panels_share_an_axis_unless_it_hides_what_they_show() -> None:
    first, second, empty = figures._common_limits([[90.0, 91.0], [91.0, 92.0], []])
    assert first == second
    assert empty is None
    assert first is not None
    assert first[0] < 90 < 92 < first[1]
    near, far, near_too = figures._common_limits([[90.0, 93.5], [75.0, 88.0], [91.0, 93.0]])
    assert near == near_too
    assert near is not None
    assert near[0] > 88
    assert far is None
    assert figures._common_limits([[10.0, 11.0], [90.0, 91.0]]) == [None, None]
    assert figures._common_limits([[90.0, 91.0], []]) == [None, None]
    assert figures._common_limits([[90.0], [90.0]]) == [None, None]


def test_writing_again_changes_nothing(written: report.WrittenReport) -> None:
    folder = written.readme.parent
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    report.write(Store(folder), folder, every_artifact())
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_figure_goes_with_its_records(tmp_path: Path) -> None:
    artifact = table_artifact()
    fill(Store(tmp_path), [artifact])
    report.write(Store(tmp_path), tmp_path, [artifact])
    assert (tmp_path / "figures" / "other-table4.svg").exists()
    for path in tmp_path.glob("runs/*/*.jsonl"):
        path.unlink()
    report.write(Store(tmp_path), tmp_path, [artifact])
    assert not list((tmp_path / "figures").iterdir())
    assert "None of the 1 tables and figures has been run yet." in (tmp_path / "README.md").read_text()


def test_one_artifact(tmp_path: Path) -> None:
    fill(Store(tmp_path), [table_artifact()])
    text = markdown.render([report.section(Store(tmp_path), table_artifact(), tmp_path)])
    assert "## other/table4: ResNet-18 by batch size" in text
    assert "](figures/other-table4.svg)" in text
    assert (tmp_path / "figures" / "other-table4.png").exists()
    assert not (tmp_path / "README.md").exists()


def test_nothing_is_put_into_the_papers_mouth(tmp_path: Path) -> None:
    theirs = table_artifact()
    fill(Store(tmp_path), [theirs])
    for artifact, times in ((theirs, 1), (replace(theirs, says=""), 0)):
        made = report.write(Store(tmp_path), tmp_path, [artifact])
        pages = (tmp_path / "other.md", made.page)
        assert [path.read_text().count("The paper: ") for path in pages] == [times, times]


def test_toy_results_cannot_be_mistaken(tmp_path: Path) -> None:
    artifacts = [lines_artifact(), table_artifact(), computed_artifact()]
    store = Store(tmp_path / "toy")
    for artifact in artifacts:
        for run in artifact.toy().runs() if artifact.shrink else ():
            store.write(record_of(run, 54.0, epochs=1))
    store.write_computed("other/table1", {"elements": {"BN": 12_800_000, "ENorm": 1}}, toy=True)
    made = report.write(store, tmp_path / "toy", artifacts, toy=True)
    pages = sorted((tmp_path / "toy").glob("*.md"))
    for text in ("".join(path.read_text() for path in pages), made.page.read_text()):
        assert "TOY results: not measurements" in text
        assert "✓" not in text
        assert "✗" not in text
        assert text.count("TOY ") >= 4
        assert "times Baseline" not in text
        assert "equinorm reproduce fake/figure1 --toy" in text
    for path in (tmp_path / "toy" / "figures").glob("*.svg"):
        assert ">TOY</text>" in path.read_text()
    # the same records say nothing about the artifacts themselves
    with pytest.raises(UserError, match="holds toy runs only: say --toy"):
        report.write(store, tmp_path / "real", artifacts)
    assert not (tmp_path / "real").exists()
    fill(Store(tmp_path / "real"), artifacts)
    with pytest.raises(UserError, match="holds runs, but no toy runs: leave out --toy"):
        report.write(Store(tmp_path / "real"), tmp_path / "toy", artifacts, toy=True)
    report.write(Store(tmp_path / "real"), tmp_path / "real", artifacts)
    with pytest.raises(UserError, match="toy results: give another folder for measurements"):
        report.write(store, tmp_path / "toy", artifacts)
    with pytest.raises(UserError, match="measurements: give another folder for toy results"):
        report.write(store, tmp_path / "real", artifacts, toy=True)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out"):
        report.write(Store(tmp_path), tmp_path / "out", [waiting_artifact()])


@pytest.mark.parametrize("width", [80, 40])
def test_on_a_terminal(written: report.WrittenReport, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    store = Store(written.readme.parent)
    terminal.show([report.section(store, artifact) for artifact in every_artifact()], console)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "<" not in text.replace("<later>", "")  # no mark-up
    assert "54" in text
    assert "equinorm reproduce other/table4" in " ".join(text.split())


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def test_tensorboard_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equinorm.lab.report.tensorboard.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        report.write(Store(tmp_path), tmp_path / "out", [table_artifact()], tensorboard=True)
    assert not (tmp_path / "out").exists()


def test_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            self.folder = str(Path(folder).relative_to(tmp_path / "tensorboard"))

        def __enter__(self) -> SummaryWriter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((self.folder, name, value, step))

    monkeypatch.setattr("equinorm.lab.report.tensorboard.find_spec", lambda name: name)
    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    fill(Store(tmp_path), [table_artifact()])
    report.write(Store(tmp_path), tmp_path, [table_artifact()], tensorboard=True)
    assert len({folder for folder, *_ in scalars}) == 16
    mine = [s for s in scalars if s[0] == "other-table4/ENorm-1.1, 128/seed 1" and s[1] == "train_loss"]
    assert [step for *_, step in mine] == list(range(1, 11))
