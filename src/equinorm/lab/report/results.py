"""What the records say about an artifact: numbers with n and spread beside the paper's, and which claims hold.

Nothing here reads or writes files. The rules:

- A number is the mean of the finished runs, or their median where the paper draws medians (`artifact.band`).
- It is reproduced if it is within the cell's (or else the artifact's) tolerance of the paper's number. An accuracy
  further above is «higher»: that is another finding than one that was not reached.
- Diverged runs are counted and shown, and are in no mean. A cell whose runs all diverged is NaN for claims, and is not
  reproduced, unless the paper's own number is NaN, which stands for "the paper says that it diverges".
- A claim is reproduced if it holds for those numbers, and not run if a cell it looks at was not run. It says so where
  it rests on single runs.
- What is counted over all artifacts (`tally`) is counted once: a number that a table and a figure share, a sentence
  that a paper says twice. Sentences of our own, and artifacts that repeat another with a choice of ours, are counted
  apart.
- Toy results have no verdicts: they show that the code runs, and nothing else.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ..experiments.artifacts import Artifact, Cell, Claim
from ..training.store import Computed, Record

__all__ = [
    "VERDICTS",
    "Chosen",
    "Gain",
    "Gains",
    "Judged",
    "Number",
    "Result",
    "Tally",
    "Verdict",
    "choices",
    "evaluate",
    "gains",
    "metric_of",
    "tally",
]

Verdict = Literal["reproduced", "in part", "higher", "not reproduced", "not run", "measured", "toy"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "in part", "higher", "not reproduced", "not run", "measured", "toy")


def metric_of(values: Mapping[str, Any], metric: str) -> float | None:
    """A metric by name, or by path ("filters.mean"); None if it is missing or not a finite number.

    "filters.mean@100" is what an artifact compares at epoch 100 and not at the end; here it is "filters.mean".
    """
    found: Any = values
    for part in metric.partition("@")[0].split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


@dataclass(frozen=True)
class Number:
    """One cell: what its runs gave, and how that compares."""

    cell: Cell
    artifact: Artifact
    records: tuple[Record, ...]  # of the runs that have ended
    computed: float | None = None  # the value of a cell without runs
    toy: bool = False

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The final metric of every finished run that has it."""
        if not self.cell.runs:
            return () if self.computed is None or not math.isfinite(self.computed) else (self.computed,)
        found = (_final(record, self.artifact.metric) for record in self.records if record.status == "finished")
        return tuple(value for value in found if value is not None)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def wanted(self) -> int:
        return len(self.cell.runs) or 1

    @cached_property
    def diverged(self) -> int:
        if not self.cell.runs:
            return int(self.computed is not None and not math.isfinite(self.computed))
        return sum(record.status == "diverged" for record in self.records)

    @property
    def was_run(self) -> bool:
        return bool(self.n or self.diverged)

    @cached_property
    def value(self) -> float:
        """Mean or median; NaN if nothing was run, or all of it diverged."""
        if not self.values:
            return math.nan
        middle = statistics.median if self.artifact.band == "quartiles" else statistics.fmean
        return float(middle(self.values))

    @cached_property
    def low_high(self) -> tuple[float, float] | None:
        """Mean ± standard deviation, or the quartiles; None with fewer than two runs."""
        if self.n < 2:
            return None
        if self.artifact.band == "quartiles":
            low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
            return low, high
        deviation = statistics.stdev(self.values)
        return self.value - deviation, self.value + deviation

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        paper = self.cell.paper
        if paper is None or not math.isfinite(paper) or not self.values or self.toy:
            return None
        return self.value - paper

    @property
    def tolerance(self) -> float:
        return self.artifact.tolerance if self.cell.tolerance is None else self.cell.tolerance

    @property
    def verdict(self) -> Verdict:
        if not self.was_run:
            return "not run"
        if self.toy:
            return "toy"
        if self.cell.paper is None:
            return "measured"
        if math.isnan(self.cell.paper):
            return "not reproduced" if self.values else "reproduced"
        # a little room, so that 0.1 + 0.2 is within 0.3
        if self.difference is None:
            return "not reproduced"
        if abs(self.difference) <= self.tolerance + 1e-9:
            return "reproduced"
        is_better = self.difference > 0 and self.artifact.metric.partition("@")[0].endswith("accuracy")
        return "higher" if is_better and self.cell.runs else "not reproduced"

    @property
    def is_single(self) -> bool:
        """Whether it rests on one run, whose spread is not known."""
        return bool(self.cell.runs) and self.n + self.diverged == 1

    @property
    def seconds(self) -> float | None:
        """The median time of a run that finished."""
        times = [time_of(r) for r in self.records if r.status == "finished"]
        known = [t for t in times if t is not None]
        return statistics.median(known) if known else None


def _final(record: Record, metric: str) -> float | None:
    """The number that an artifact compares: at the end or, with "@100", at epoch 100, or at the last one before it."""
    if last := metric.partition("@")[2]:
        until = [metric_of(epoch, metric) for epoch in record.epochs if epoch["epoch"] <= int(last)]
        return until[-1] if until else None
    value = metric_of(record.final, metric)
    if value is None and record.epochs:
        value = metric_of(record.epochs[-1], metric)
    return value


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it."""

    text: str
    verdict: Verdict
    note: str = ""  # how many runs it rests on, which cells diverged or are missing
    ours: bool = False  # not the paper's sentence
    sentence: str = ""  # what it is counted by
    single: bool = False  # whether it rests on single runs


@dataclass(frozen=True)
class Result:
    """An artifact with everything that is known about it."""

    artifact: Artifact
    numbers: tuple[Number, ...]
    claims: tuple[Judged, ...]
    computed: Computed | None = None
    toy: bool = False

    @property
    def paper(self) -> str:
        return self.artifact.name.partition("/")[0]

    @cached_property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(number.cell.row for number in self.numbers))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(number.cell.column for number in self.numbers))

    @cached_property
    def by_cell(self) -> dict[tuple[str, str], Number]:
        return {(number.cell.row, number.cell.column): number for number in self.numbers}

    @property
    def form(self) -> Literal["list", "matrix", "folded list"]:
        """How the numbers are best read: one below the other, or methods × columns; a long, sparse list is folded."""
        if len(self.numbers) <= 12 or len(self.columns) < 2:
            return "list"
        return "matrix" if len(self.numbers) > 0.6 * len(self.rows) * len(self.columns) else "folded list"

    @property
    def was_run(self) -> bool:
        return self.computed is not None or any(number.was_run for number in self.numbers)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """Every record behind the artifact, each once."""
        return tuple({r.run.key: r for number in self.numbers for r in number.records}.values())

    @property
    def wanted(self) -> int:
        """How many runs there are to do in all."""
        return len(self.artifact.runs())

    def count(self, verdict: Verdict) -> int:
        """How many of the numbers that the paper prints have this verdict."""
        return sum(number.verdict == verdict for number in self.numbers if number.cell.paper is not None)

    def claims_that(self, verdict: Verdict, ours: bool = False) -> int:
        """How many of the paper's sentences, or of our own, have this verdict."""
        return sum(claim.verdict == verdict and claim.ours == ours for claim in self.claims)

    @property
    def verdict(self) -> Verdict:
        """Of the artifact as a whole: all of the paper's numbers and claims are reproduced, some, or none."""
        if not self.was_run:
            return "not run"
        if self.toy:
            return "toy"
        found = {n.verdict for n in self.numbers if n.cell.paper is not None} | {c.verdict for c in self.claims}
        if "reproduced" in found:
            return "in part" if found & {"higher", "not reproduced", "not run"} else "reproduced"
        if "not reproduced" in found:
            return "not reproduced"
        return "higher" if "higher" in found else "measured"


def evaluate(
    artifact: Artifact, records: Mapping[str, Record], computed: Computed | None = None, toy: bool = False
) -> Result:
    """Put the records of an artifact's runs, by their key, where they belong."""
    values = {} if computed is None or artifact.compute is None else artifact.compute.cells(computed.data)
    numbers = []
    for cell in artifact.cells:
        found = tuple(records[run.key] for run in cell.runs if run.key in records)
        numbers.append(Number(cell, artifact, found, values.get((cell.row, cell.column)), toy))
    known = {(number.cell.row, number.cell.column) for number in numbers}
    for (row, column), value in values.items():  # what was computed and is no cell of the paper's table
        if (row, column) not in known:
            numbers.append(Number(Cell(row, column, ()), artifact, (), value, toy))
    claims = tuple(_judge(artifact, claim, numbers, toy) for claim in artifact.claims)
    return Result(artifact, tuple(numbers), claims, computed, toy)


class _Watched(Mapping[tuple[str, ...], float]):
    """The values by (row, column) or (row, column, metric); remembers which cells were looked at."""

    def __init__(self, numbers: Sequence[Number]) -> None:
        self._numbers: dict[tuple[str, ...], Number] = {(n.cell.row, n.cell.column): n for n in numbers if n.was_run}
        self.seen: dict[tuple[str, ...], Number] = {}

    def __getitem__(self, key: tuple[str, ...]) -> float:
        place, metric = key[:2], key[2:]
        number = self.seen[place] = self._numbers[place]
        if metric:
            number = replace(number, artifact=replace(number.artifact, metric=metric[0]))
            if not number.was_run:
                raise KeyError(key)  # no run has that metric
        return number.value

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def _judge(artifact: Artifact, claim: Claim, numbers: Sequence[Number], toy: bool) -> Judged:
    judged = Judged(claim.text, "not run", ours=claim.ours, sentence=claim.sentence)
    values = _Watched(numbers)
    if not values:
        return judged
    try:
        true = bool(claim.holds(values))
    except KeyError as error:
        missing = error.args[0] if error.args else ""
        place = " at ".join(map(str, missing)) if isinstance(missing, tuple) else str(missing)
        return replace(judged, note=f"missing: {place}" if place else "")
    except Exception as error:
        raise RuntimeError(
            f"claim {claim.text!r} of {artifact.name} failed: {type(error).__name__}: {error}"
        ) from error
    seen = tuple(values.seen.values())
    verdict: Verdict = "toy" if toy else "reproduced" if true else "not reproduced"
    return replace(judged, verdict=verdict, note=_evidence(seen), single=any(number.is_single for number in seen))


def _evidence(seen: Sequence[Number]) -> str:
    """What a claim rests on, where that is not simply all of several runs."""
    single = [number for number in seen if number.is_single and not number.toy]
    notes = ["single runs" if len(single) == len(seen) else "in part single runs"] if single else []
    short = [number for number in seen if number.n + number.diverged < number.wanted]
    if short:
        least = min(short, key=lambda number: number.n + number.diverged)
        notes.append(f"some runs are missing, n = {least.n} of {least.wanted} at the least")
    lost = [f"{number.cell.row} at {number.cell.column}" for number in seen if not number.values]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        notes.append(f"diverged: {'; '.join(lost[:3])}{more}")
    return ". ".join(notes)


# -- counted over all artifacts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """Distinct numbers that the papers print and distinct sentences of theirs, and what became of them."""

    reproduced: int = 0  # numbers
    higher: int = 0
    missed: int = 0
    holds: int = 0  # sentences of the papers, wherever they were tried as the paper has it
    holds_in_part: int = 0  # in one table of the paper, and not in another
    fails: int = 0
    single: int = 0  # of those that hold, how many rest on single runs, in whole or in part
    ours: int = 0  # sentences of our own that hold
    ours_fail: int = 0
    repeated: int = 0  # claims that say again what another says, or try it with a choice of ours

    @property
    def numbers(self) -> int:
        return self.reproduced + self.higher + self.missed

    @property
    def claims(self) -> int:
        return self.holds + self.holds_in_part + self.fails


def tally(results: Sequence[Result]) -> Tally:
    """Every number and every sentence once, of those that were run; toy runs say nothing.

    tally(written.results).holds
    """
    numbers: dict[Any, Verdict] = {}
    sentences: dict[tuple[str, str], list[Judged]] = {}
    own: list[Judged] = []
    repeated = 0
    for result in results:
        decided = [claim for claim in result.claims if claim.verdict in ("reproduced", "not reproduced")]
        own += [claim for claim in decided if claim.ours]
        theirs = [claim for claim in decided if not claim.ours]
        if result.artifact.variant_of:
            repeated += len(theirs)
            continue
        for claim in theirs:
            known = sentences.setdefault((result.paper, claim.sentence), [])
            repeated += bool(known)
            known.append(claim)
        for number in result.numbers:
            if number.cell.paper is not None and number.was_run and not number.toy:
                runs = frozenset(run.key for run in number.cell.runs) or (number.cell.row, number.cell.column)
                numbers[result.paper, result.artifact.metric, runs] = number.verdict
    found = [{claim.verdict for claim in claims} for claims in sentences.values()]
    single = [any(claim.single for claim in claims) for claims in sentences.values()]
    verdicts = list(numbers.values())
    return Tally(
        reproduced=verdicts.count("reproduced"),
        higher=verdicts.count("higher"),
        missed=verdicts.count("not reproduced"),
        holds=found.count({"reproduced"}),
        holds_in_part=sum(len(one) > 1 for one in found),
        fails=found.count({"not reproduced"}),
        single=sum(alone for one, alone in zip(found, single, strict=True) if one == {"reproduced"}),
        ours=sum(claim.verdict == "reproduced" for claim in own),
        ours_fail=sum(claim.verdict == "not reproduced" for claim in own),
        repeated=repeated,
    )


# -- what held-out images decide ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A row of an artifact that chooses: its best candidate, and the one after it."""

    row: str
    best: Number
    second: Number | None
    tried: int
    wanted: int


def choices(result: Result) -> list[Chosen]:
    """Of an artifact whose runs are scored on held-out images: what they choose in each row; of others, nothing."""
    runs = [run for number in result.numbers for run in number.cell.runs]
    if result.toy or not runs or any(run.data.evaluate != "held_out" for run in runs):
        return []
    found = []
    for row in result.rows:
        own = [number for number in result.numbers if number.cell.row == row]
        tried = [number for number in own if number.was_run]
        ranked = sorted((n for n in tried if n.values and not n.diverged), key=lambda n: -n.value)  # stable
        if ranked:
            second = ranked[1] if len(ranked) > 1 else None
            found.append(Chosen(row, ranked[0], second, len(tried), len(own)))
    return found


# -- which method helps, and at what cost ------------------------------------------------------------------------------

_BASELINE = re.compile(r"(baseline|no norm\w*|none|standard|normal)\b(?!.*\+)", re.I)
_BATCH_NORM = re.compile(r"(bn|batch ?norm\w*|batch normali[sz]ation)\b(?!.*\+)", re.I)


@dataclass(frozen=True)
class Gain:
    """A method against a reference of the same artifact, over the columns where both were run."""

    row: str
    reference: str
    points: tuple[float, ...]  # differences, where both have a value
    rescued: int  # columns where only the reference diverged
    lost: int  # columns where only the method diverged
    slowdown: float | None  # times as long per run, on the same hardware
    single: bool = False  # whether any of it rests on single runs: that is no lead

    @property
    def mean(self) -> float:
        return statistics.fmean(self.points) if self.points else math.nan

    @property
    def score(self) -> float:
        """For ranking: a column that only one of the two survives counts like ten points."""
        total = sum(self.points) + 10.0 * (self.rescued - self.lost)
        return total / (len(self.points) + self.rescued + self.lost)


@dataclass(frozen=True)
class Gains:
    """A method against the two references; None where there is none, or it is the method itself."""

    baseline: Gain | None
    batch_norm: Gain | None

    @property
    def first(self) -> Gain | None:
        """Against the baseline, if there is one."""
        return self.baseline or self.batch_norm


def gains(result: Result) -> dict[str, Gains]:
    """Of every method: what it gains on the baseline and on BatchNorm, where the artifact has those rows.

    Only where more is better: accuracies of trained nets. Toy runs are not compared.
    """
    compares = result.artifact.compares and result.artifact.metric.endswith("accuracy")
    if not compares or not result.records or result.toy:
        return {}
    baseline, batch_norm = (
        next((row for row in result.rows if pattern.match(row)), None) for pattern in (_BASELINE, _BATCH_NORM)
    )
    pairs = {row: Gains(_gain(result, row, baseline), _gain(result, row, batch_norm)) for row in result.rows}
    return {row: found for row, found in pairs.items() if found.first is not None}


def time_of(record: Record) -> float | None:
    """Seconds of the device that a run took: its share, where others ran beside it."""
    seconds = metric_of(record.final, "seconds")
    return None if seconds is None else seconds / record.together


def _gain(result: Result, row: str, reference: str | None) -> Gain | None:
    if reference is None or reference == row:
        return None
    points, ratios, rescued, lost, single = [], [], 0, 0, False
    for column in result.columns:
        ours, theirs = (result.by_cell.get((name, column)) for name in (row, reference))
        if ours is None or theirs is None or not ours.was_run or not theirs.was_run:
            continue
        single |= ours.is_single or theirs.is_single
        if ours.values and theirs.values:
            points.append(ours.value - theirs.value)
            alone = all(r.together == 1 for number in (ours, theirs) for r in number.records)
            if alone and ours.seconds and theirs.seconds and _hardware(ours) == _hardware(theirs):
                ratios.append(ours.seconds / theirs.seconds)
        rescued += bool(ours.values and not theirs.values)
        lost += bool(theirs.values and not ours.values)
    if not (points or rescued or lost):
        return None
    slowdown = statistics.median(ratios) if ratios else None
    return Gain(row, reference, tuple(points), rescued, lost, slowdown, single)


def _hardware(number: Number) -> set[str]:
    return {str(record.about.get("hardware")) for record in number.records}
