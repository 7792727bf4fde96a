"""Numbers and facts as text: what the Markdown report and the page both say, without the mark-up of either."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import counted
from ..training.store import Record
from .results import Chosen, Gain, Gains, Number, Result, Verdict, gains, tally, time_of

if TYPE_CHECKING:
    from .headline import Cost, Summary

__all__ = [
    "CHOICE",
    "COSTS",
    "HEADLINE",
    "IN_SHORT",
    "LEGEND",
    "MARKS",
    "NONE",
    "RUN_COSTS",
    "SHORTLY",
    "TOY",
    "Glance",
    "Provenance",
    "capital",
    "caption",
    "choice",
    "cost_name",
    "counts",
    "difference",
    "duration",
    "gain",
    "glance",
    "glances",
    "headline",
    "in_short",
    "measured",
    "metric_name",
    "n",
    "paper",
    "provenance",
    "signed",
    "slowdown",
    "slug",
    "summary",
    "value",
]

MARKS: dict[Verdict, str] = {
    "reproduced": "✓",
    "in part": "◐",
    "higher": "▲",
    "not reproduced": "✗",
    "not run": "",
    "measured": "",
    "toy": "",
}
NONE = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_TOGETHER = "\N{NO-BREAK SPACE}"

LEGEND = (
    "✓ reproduced: within the tolerance, which stands in brackets after the difference. ▲ higher than the paper's "
    "accuracy by more than that. ✗ not reproduced: lower, or another number. ◐ in part. Diverged runs are counted, "
    "and are in no mean. Gains are in points of accuracy: the mean over the columns of a table or figure, and the "
    "range; those within the spread of the runs mean little, and no method is the best by single runs."
)
RUN_COSTS = (
    "Costs are the median time of a run on its device. Of runs that shared it they are their part: an even one in logs "
    "without pace, whatever ran beside them, and a lower bound in logs without device_seconds, where it is not known "
    "how many there were."
)
COSTS = "The time of a training step, as a multiple of that without a norm. An empty cell was not measured."
HEADLINE = (
    "Test accuracy on CIFAR-10 in %, mean ± standard deviation or median and interquartile range (IQR), and what the "
    "paper prints, where it prints a number. The best of a line is bold; a difference is «within the spread» if it "
    "is less than two standard errors. Nothing is bold where the highest is a single run, or all are: that is "
    "undecided. An empty cell: not in the paper, and not tried."
)
IN_SHORT = ("method", "best or level with the best in", "over no norm", "over BatchNorm", "time of a step")
SHORTLY = (
    "By method, over the settings of the table below: in which it is the best or behind the best by less than two "
    "standard errors, its lead in points of test accuracy on CIFAR-10 from the least to the largest, and the time of a "
    "training step over networks, where no norm is 1. MSR is mean shift rejection. Single runs are in none of this."
)
CHOICE = ("chosen for", "setting", "held-out accuracy", "next best", "candidates run")
TOY = (
    "Every run here was shrunk to seconds on the embedded digits, to show that the code runs. No number here says "
    "anything about a method."
)


def slug(name: str) -> str:
    """The name of an artifact in files and links."""
    return name.replace("/", "-")


# -- numbers -----------------------------------------------------------------------------------------------------------


def value(number: float, unit: str) -> str:
    """54.63, 1,048,576 or 0.00123: two decimals for percentages, four digits for anything else."""
    if not math.isfinite(number):
        return NONE
    if unit == "%":
        text = f"{number:.2f}"
    elif number == int(number) and abs(number) < 1e15:
        text = f"{int(number):,}"
    else:
        text = f"{number:,.1f}" if abs(number) >= 1000 else f"{number:.4g}"
    if not text.strip("-0.,"):
        text = text.lstrip("-")  # no "-0.00"
    return text.replace("-", _MINUS)


def signed(number: float, unit: str = "%") -> str:
    return ("+" if number >= 0 else "") + value(number, unit)


def measured(number: Number) -> str:
    """Ours with its spread: "54.63 ± 0.15", "54.6 [54.4, 54.9]", "diverged (5)" or "not run"."""
    unit = number.artifact.unit
    if not number.values:
        return f"diverged ({number.diverged})" if number.diverged else "not run"
    text = value(number.value, unit)
    if number.low_high is not None:
        low, high = number.low_high
        quartiles = number.artifact.band == "quartiles"
        text += f" [{value(low, unit)}, {value(high, unit)}]" if quartiles else f" ± {value(high - number.value, unit)}"
    return text


def n(number: Number) -> str:
    """How many runs a number rests on: "5", "3 of 5", "4, 1 diverged"."""
    if not number.cell.runs:
        return "computed" if number.was_run else NONE
    if not number.was_run:
        return f"0 of {number.wanted}"
    ended = number.n + number.diverged
    text = f"{number.n}" if ended == number.wanted else f"{number.n} of {number.wanted}"
    return f"{text}, {number.diverged} diverged" if number.diverged else text


def paper(number: Number) -> str:
    """What the paper prints."""
    cell = number.cell
    if cell.paper is None:
        return NONE
    if math.isnan(cell.paper):
        return "diverged"
    large = cell.paper == int(cell.paper) and abs(cell.paper) >= 1e5
    text = f"{int(cell.paper):,}" if large else f"{cell.paper:.6g}"
    text = text.replace("-", _MINUS)
    if cell.paper_spread is None:
        return text
    quartiles = number.artifact.band == "quartiles"  # there a spread is the distance between them
    return f"{text} (IQR {cell.paper_spread:g})" if quartiles else f"{text} ± {cell.paper_spread:g}"


def difference(number: Number) -> str:
    """Ours minus the paper's, with what counts as reproduced."""
    if number.difference is None:
        return NONE
    return f"{signed(number.difference, number.artifact.unit)} (±{number.tolerance:g})"


def caption(result: Result) -> str:
    """What the numbers of an artifact are: "Test accuracy in %, mean ± standard deviation"."""
    artifact = result.artifact
    if not result.records:
        return f"Computed{f', in {artifact.unit}' if artifact.unit else ''}"
    unit = f" in {artifact.unit}" if artifact.unit else ""
    middle = "median [quartiles]" if artifact.band == "quartiles" else "mean ± standard deviation"
    return capital(f"{metric_name(artifact.metric)}{unit}, {middle}")


def metric_name(metric: str) -> str:
    """ "filters.mean@100" as "filters mean at epoch 100"."""
    return re.sub("[_.]", " ", metric).replace("@", " at epoch ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """4.1 s, 12 min, 3.4 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def counts(result: Result) -> str:
    """ "10 of 12 numbers and 5 of 6 claims reproduced", of those that were run; and how many runs are missing."""
    if not result.was_run:
        return "not run"
    if result.toy:
        return "toy, no verdict"
    parts = []
    higher = result.count("higher")
    pairs = (
        ("number", result.count("reproduced"), higher, result.count("not reproduced")),
        ("claim", result.claims_that("reproduced"), 0, result.claims_that("not reproduced")),
    )
    for name, good, above, bad in pairs:
        if good + above + bad:
            parts.append(f"{good} of {counted(good + above + bad, name)}")
    own = {verdict: result.claims_that(verdict, ours=True) for verdict in ("reproduced", "not reproduced")}
    said = [" and ".join(parts) + " reproduced"] if parts else []
    if higher:
        said.append(f"{counted(higher, 'number')} higher than in the paper")
    if sum(own.values()):
        said.append(f"{own['reproduced']} of {counted(sum(own.values()), 'claim')} of ours {_hold(own['reproduced'])}")
    said = said or ["measured; the paper prints no number to compare with"]
    missing = result.wanted - len(result.records)
    return "; ".join([*said, *[f"{missing} of {result.wanted} runs are missing"] * bool(missing)])


def _hold(number: int) -> str:
    return "holds" if number == 1 else "hold"


# -- which method helps ------------------------------------------------------------------------------------------------


def headline(number: Number) -> tuple[str, str]:
    """A cell of the first table: ("94.10 ± 0.12", "n 5, paper 94.03 ✓")."""
    ours, parts = measured(number), [f"n {n(number)}"] * number.was_run
    if number.low_high is not None and number.artifact.band == "quartiles":
        low, high = number.low_high
        ours, parts = value(number.value, number.artifact.unit), [f"IQR {value(high - low, '%')}", *parts]
    if number.cell.paper is not None:
        parts.append(f"paper {number.cell.paper:.6g} {MARKS[number.verdict]}".strip().replace(" ", _TOGETHER))
    return ours, ", ".join(parts)


def in_short(found: Summary) -> tuple[str, str, str, str, str]:
    """A line of the table before the first one."""
    where = f"{len(found.leads)} of {found.lines}" + (f": {'; '.join(found.leads)}" if found.leads else "")
    gains = (_range(found.over_none, signed), _range(found.over_batch_norm, signed))
    return found.method, where, *gains, _range(found.times, lambda time: f"{time:.2f}")


def _range(numbers: Sequence[float], text: Callable[[float], str]) -> str:
    """ "+0.10 to +6.60", of one number itself."""
    return " to ".join(dict.fromkeys(text(end(numbers)) for end in (min, max))) if numbers else ""


def cost_name(cost: Cost) -> str:
    return f"time of a step, {cost.network}, {cost.hardware}"


def choice(found: Chosen) -> tuple[str, str, str, str, str]:
    """A line of the table that a choice was made from."""
    second = NONE if found.second is None else f"{measured(found.second)}: {found.second.cell.column}"
    return found.row, found.best.cell.column, measured(found.best), second, f"{found.tried} of {found.wanted}"


def gain(found: Gain | None) -> str:
    """ "+2.10 (-0.20 to +3.90)": the mean over columns and its range; and where only one of the two trains."""
    if found is None:
        return NONE
    parts = []
    if found.points:
        text = signed(found.mean)
        if len(found.points) > 1:
            text += f" ({signed(min(found.points))} to {signed(max(found.points))})"
        parts.append(text)
    if found.rescued:
        parts.append(f"trains in {found.rescued} where {found.reference} diverges")
    if found.lost:
        parts.append(f"diverges in {found.lost} where {found.reference} trains")
    return "; ".join(parts) + (" (in part single runs)" if found.single else "")


def slowdown(found: Gain | None) -> str:
    return NONE if found is None or found.slowdown is None else f"{found.slowdown:.2f} times {found.reference}"


@dataclass(frozen=True)
class Glance:
    """A line of the first table: the best method of an artifact, by how much, and at what cost.

    There is none where nothing is compared, and where what is ahead rests on single runs.
    """

    result: Result
    best: str
    gains: Gains
    cost: str
    peers: tuple[str, ...] = ()  # methods that differ from the best by less than its spread

    @property
    def also(self) -> str:
        return f", and within the spread {', '.join(self.peers)}" if self.peers else ""


def glance(result: Result) -> Glance:
    """All methods are compared with one reference: the baseline or, where there is none, BatchNorm."""
    found = gains(result)
    against = {row: both.baseline for row, both in found.items() if both.baseline is not None}
    against = against or {row: both.batch_norm for row, both in found.items() if both.batch_norm is not None}
    if not against:
        return Glance(result, NONE, Gains(None, None), _cost(result.numbers))
    scores = {row: gain.score for row, gain in against.items()}
    scores[next(iter(against.values())).reference] = 0.0
    best = max(scores, key=lambda row: scores[row])
    own = [number for number in result.numbers if number.cell.row == best]
    if any(number.is_single for number in own) or all(gain.single for gain in against.values()):
        return Glance(result, NONE, Gains(None, None), _cost(result.numbers))
    singles = {number.cell.row for number in result.numbers if number.is_single}
    near = tuple(
        row for row in scores if row != best and row not in singles and scores[row] > scores[best] - _spread(own)
    )
    both = found.get(best, Gains(None, None))
    cost = ", ".join(text for text in (_cost(own), slowdown(both.first)) if text != NONE) or NONE
    return Glance(result, best, both, cost, near)


def _spread(numbers: Iterable[Number]) -> float:
    """Half the width of the typical band."""
    widths = [(number.low_high[1] - number.low_high[0]) / 2 for number in numbers if number.low_high is not None]
    return statistics.fmean(widths) if widths else 0.0


def _cost(numbers: Iterable[Number]) -> str:
    times = [number.seconds for number in numbers]
    known = [seconds for seconds in times if seconds is not None]
    return f"{duration(statistics.median(known))} a run" if known else NONE


def glances(results: Sequence[Result]) -> list[Glance]:
    """Of all that was run; comparisons of methods first."""
    return sorted((glance(result) for result in results if result.was_run), key=lambda found: found.best == NONE)


def summary(results: Sequence[Result]) -> str:
    """One sentence on the whole."""
    run = [result for result in results if result.was_run]
    if not run:
        return f"None of the {len(results)} tables and figures has been run yet."
    runs = len({record.run.key for result in run for record in result.records})
    if any(result.toy for result in run):
        return f"{len(run)} of {len(results)} tables and figures were run at toy size, {runs} runs."
    found = tally(run)
    sentences = [
        f"{len(run)} of {len(results)} tables and figures have results, some of them in part: {runs:,} runs in all."
    ]
    if found.numbers:
        sentences.append(
            f"Of {counted(found.numbers, 'number')} that the papers print {found.reproduced} "
            f"{'is' if found.reproduced == 1 else 'are'} reproduced; "
            f"{found.higher} came out higher than printed, {found.missed} lower or otherwise different."
        )
    if found.claims:
        text = f"Of {counted(found.claims, 'claim')} of the papers {found.holds} {_hold(found.holds)}"
        text += f" ({found.single} of them by single runs, at least in part)" if found.single else ""
        text += f", {found.holds_in_part} in one place and not in another" if found.holds_in_part else ""
        sentences.append(f"{text}, and {found.fails} {'does' if found.fails == 1 else 'do'} not.")
    apart = []
    if found.ours + found.ours_fail:
        apart.append(f"{found.ours} of {counted(found.ours + found.ours_fail, 'claim')} of our own {_hold(found.ours)}")
    if found.repeated:
        apart.append(f"{found.repeated} repeat another or try it otherwise")
    if apart:
        sentences.append(f"Counted apart: {'; '.join(apart)}.")
    return " ".join(sentences)


# -- where numbers come from -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provenance:
    """Hardware, versions, commits and time behind an artifact."""

    runs: str
    hardware: str
    versions: str
    commits: str
    seconds: str
    scripts: str  # what started runs and cannot be looked up

    @property
    def sentence(self) -> str:
        parts = (self.runs, self.seconds, self.hardware, self.versions, self.commits, self.scripts)
        return "; ".join(part for part in parts if part)


def provenance(result: Result) -> Provenance:
    abouts = [record.about for record in result.records]
    if result.computed is not None:
        abouts.append(result.computed.about)
    hardware = _several(_plain(about.get("hardware")) for about in abouts)
    versions = _several(_plain(about.get("versions")) for about in abouts)
    commits = _several(_plain(about.get("commit")) for about in abouts)
    done = f"{len(result.records)} of {result.wanted} runs" if result.wanted else "computed"
    return Provenance(
        done, hardware, versions, commits and f"commit {commits}", _total(result.records), _unknown_scripts(abouts)
    )


def _unknown_scripts(abouts: Iterable[Mapping[str, Any]]) -> str:
    """How many runs were started by a script that is not in the repository, and which."""
    first = [str(about.get("command") or "").partition(" ")[0] for about in abouts]
    unknown = [name for name in first if name.endswith(".py") and Path(name).name not in _scripts()]
    if not unknown:
        return ""
    names = ", ".join(sorted(set(unknown)))
    return f"{counted(len(unknown), 'run')} started by a script that is not in the repository ({names})"


@cache
def _scripts() -> frozenset[str]:
    """The names of all files of this package."""
    return frozenset(path.name for path in Path(__file__).parents[2].rglob("*.py"))


def _total(records: Sequence[Record]) -> str:
    times = [time_of(record) for record in records]
    known = [seconds for seconds in times if seconds is not None]
    return f"{duration(sum(known))} in all, {duration(statistics.median(known))} a run" if known else ""


def _plain(found: object) -> str:
    if isinstance(found, dict):
        return " ".join(f"{key} {item}" for key, item in found.items() if item is not None)
    return "" if found is None else str(found)


def _several(texts: Iterable[str]) -> str:
    """Distinct texts, the most frequent first; with counts if there are several."""
    found = Counter(text for text in texts if text)
    if len(found) < 2:
        return "".join(found)
    return ", ".join(f"{text} ({counted(count, 'run')})" for text, count in found.most_common())
