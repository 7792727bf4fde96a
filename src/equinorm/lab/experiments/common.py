"""What the recipes share: grids of cells, sentences about means, choices on held-out images, toy sizes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, TypeVar

from .. import nets as models
from ..training.runs import Data, Method, Run
from .artifacts import Cell, Claim, Means, seeds

__all__ = [
    "Candidate",
    "Choice",
    "Chosen",
    "Means",
    "Places",
    "Settings",
    "changed",
    "choices_of",
    "choose",
    "chosen_text",
    "columns_of",
    "committed",
    "consistent",
    "grid",
    "held_out",
    "nearest",
    "over",
    "resolved",
    "score",
    "setting_text",
    "star",
    "toy_candidate",
    "toy_data",
    "toy_run",
    "trained",
    "wins",
]

Column = TypeVar("Column", int, float, str)

# -- runs and cells ----------------------------------------------------------------------------------------------------


def changed(run: Run, *, method: Method | None = None, lr: float | None = None, **options: Any) -> Run:
    """`run` with another method, learning rate or options of its model.

    changed(base, method=Method("enorm", {"c": 1.2}), lr=0.05, hidden=19)
    """
    return replace(
        run,
        model=replace(run.model, options={**run.model.options, **options}),
        method=run.method if method is None else method,
        optim=run.optim if lr is None else replace(run.optim, lr=lr),
    )


def grid(
    rows: Iterable[str],
    columns: Sequence[Column],
    run: Callable[[str, Column], Run],
    n: int | Callable[[str, Column], int],
    paper: Mapping[str, Sequence[float | None]] | None = None,
) -> tuple[Cell, ...]:
    """A cell for each row and column: n seeds of `run(row, column)`, and what the paper prints there.

    grid(["BN", "GN"], [8, 128], run, n=3, paper={"BN": [91.30, 89.09]})
    """
    made = []
    for row in rows:
        printed = (paper or {}).get(row, [None] * len(columns))
        for column, number in zip(columns, printed, strict=True):
            count = n if isinstance(n, int) else n(row, column)
            one = replace(run(row, column), label=row)
            made.append(Cell(row, str(column), seeds(one, count), paper=number))
    return tuple(made)


# -- claims ------------------------------------------------------------------------------------------------------------

CHANCE = 15.0  # % accuracy; with ten classes, guessing gives 10


def score(value: float) -> float:
    """A mean that can be compared: a run that diverged is worse than any other."""
    return -math.inf if math.isnan(value) else value


def trained(means: Means, row: str, column: object) -> bool:
    """Whether a network with ten classes learnt anything there."""
    return score(means[row, str(column)]) > CHANCE


def wins(means: Means, row: str, other: str, columns: Iterable[object]) -> int:
    """In how many columns `row` is ahead of `other`."""
    return sum(score(means[row, str(c)]) > score(means[other, str(c)]) for c in columns)


def over(means: Means, row: str, columns: Iterable[object]) -> float:
    """The mean of a row over columns."""
    values = [score(means[row, str(c)]) for c in columns]
    return sum(values) / len(values)


def columns_of(means: Means, *rows: str) -> list[str]:
    """The columns in which all these rows were run, for claims about «every batch size»; KeyError if there is none."""
    found = [{column for row, column in means if row == wanted} for wanted in rows]
    both = set.intersection(*found)
    if not both:
        raise KeyError(rows)
    return sorted(both)


# -- choices on held-out images ----------------------------------------------------------------------------------------

Settings = Mapping[str, Any]  # {"lr": 0.1, "groups": 10}
Places = Mapping[float, Settings]  # by where they were tried: a depth, a momentum
Chosen = Mapping[str, Mapping[str, Places]]  # what each tuning artifact decided, by row


@dataclass(frozen=True)
class Candidate:
    """A setting that is tried for a row of a table, somewhere: at a depth, with a momentum."""

    row: str
    at: float
    settings: Settings
    runs: tuple[Run, ...]  # trained without the held-out images and scored on them


def star(rates: Sequence[float], rate: float, name: str, values: Sequence[float], value: float) -> list[Settings]:
    """Candidates along two lines that cross: every rate with one value, and every value with one rate.

    star((0.01, 0.1), 0.1, "groups", (4, 8), 8)       # lr 0.01 with 8 groups, 0.1 with 4, 0.1 with 8
    """
    return [{"lr": lr, name: v} for lr in rates for v in values if lr == rate or v == value]


def choose(candidates: Iterable[Candidate], accuracy: Callable[[Run], float | None]) -> dict[str, Places]:
    """The settings with the best held-out accuracy, by row and place: of the mean over runs.

    `accuracy` is None for a run that has not ended, and NaN for one that diverged, which is worse than any other. Of
    equal settings those with the smaller learning rate win. A row of which anything has not been run is left out, and
    a place where nothing trained: the best of runs that all failed is no choice.
    """
    tried: dict[str, dict[float, list[tuple[float, tuple[float, ...], Settings]]]] = {}
    open_rows = set()
    for candidate in candidates:
        found = [accuracy(run) for run in candidate.runs]
        known = [score(value) for value in found if value is not None]
        if len(known) < len(found):
            open_rows.add(candidate.row)
            continue
        size = (candidate.settings["lr"], *(v for name, v in candidate.settings.items() if name != "lr"))
        places = tried.setdefault(candidate.row, {})
        if statistics.fmean(known) > CHANCE:
            places.setdefault(candidate.at, []).append((-statistics.fmean(known), size, candidate.settings))
    return {
        row: {at: min(found, key=lambda one: one[:2])[2] for at, found in places.items()}
        for row, places in tried.items()
        if row not in open_rows and places
    }


@dataclass(frozen=True)
class Choice:
    """What is used where the paper cross-validates, by where it was tuned, and what decided it.

    `chosen_on` names the artifact whose held-out accuracies were looked at; None marks a provisional value.
    """

    places: Places
    chosen_on: str | None = None

    def __str__(self) -> str:
        """ "at 5, 11: lr 0.1 | at 19: lr 0.05" """
        equal: dict[str, list[str]] = {}
        for at, settings in self.places.items():
            equal.setdefault(setting_text(settings), []).append(f"{at:g}")
        return " | ".join(f"at {', '.join(where)}: {text}" for text, where in equal.items())


def choices_of(tuning: str, chosen: Chosen, provisional: Mapping[str, Places]) -> dict[str, Choice]:
    """Of each row what its tuning artifact decided or, while it has not, a provisional value."""
    decided = chosen.get(tuning, {})
    return {row: Choice(decided[row], tuning) if row in decided else Choice(p) for row, p in provisional.items()}


def committed() -> Chosen:
    """What `chosen.json` says, which `equinorm campaign --choose` writes from the tuning runs of a store."""
    text = (files(__package__) / "chosen.json").read_text(encoding="utf-8")
    return {
        tuning: {row: {_number(at): settings for at, settings in places.items()} for row, places in rows.items()}
        for tuning, rows in json.loads(text).items()
    }


def chosen_text(chosen: Chosen) -> str:
    """The text of `chosen.json`: a line for each row and place."""
    tunings = []
    for tuning, rows in sorted(chosen.items()):
        lines = []
        for row, places in sorted(rows.items()):
            inside = ", ".join(f"{json.dumps(f'{at:g}')}: {json.dumps(dict(s))}" for at, s in sorted(places.items()))
            lines.append(f"    {json.dumps(row)}: {{{inside}}}")
        tunings.append(f"  {json.dumps(tuning)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(tunings) + "\n}\n" if tunings else "{}\n"


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


def setting_text(settings: Settings) -> str:
    """{"lr": 0.1, "groups": 10} as "lr 0.1, groups 10"."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def resolved(choices: Mapping[str, Choice]) -> str:
    """The choices as text for a protocol: "chosen on stock2019/tuning-fc: GN at 11: lr 0.05, groups 10; ..."."""
    by_source: dict[str, list[str]] = {}
    for row, choice in choices.items():
        source = f"chosen on {choice.chosen_on}" if choice.chosen_on else "provisional, not tuned yet"
        by_source.setdefault(source, []).append(f"{row} {choice}")
    return ". ".join(f"{source}: {'; '.join(texts)}" for source, texts in by_source.items())


def nearest(by_number: Mapping[float, Any], number: float) -> Any:
    """The entry whose number is nearest, the smaller one if two are."""
    return by_number[min(by_number, key=lambda known: (abs(known - number), known))]


def held_out(run: Run, images: int, epochs: float | None = None) -> Run:
    """A candidate for `run`: trained without `images` of the training set and scored on them."""
    data = replace(run.data, held_out=images, evaluate="held_out")
    return replace(run, data=data, epochs=run.epochs if epochs is None else epochs)


def consistent(chosen: Mapping[str, str]) -> Claim:
    """The recipe uses what a tuning artifact found best. `chosen`: the column in use for each row."""

    def holds(means: Means) -> bool:
        # equal accuracies are no contradiction
        return all(
            trained(means, row, column)
            and score(means[row, column]) >= max(score(value) for (other, _), value in means.items() if other == row)
            for row, column in chosen.items()
        )

    return Claim(
        "The settings that the recipe uses are those with the best held-out accuracy, and trained there (ours)", holds
    )


# -- toy size ----------------------------------------------------------------------------------------------------------

TOY_SIZE, TOY_IMAGES, TOY_BATCH, TOY_EPOCHS = 16, 128, 32, 2


def toy_data(data: Data, size: int = TOY_SIZE, images: int = TOY_IMAGES) -> Data:
    """The embedded digits in the place of `data`: as many colours, crops and paddings in proportion."""
    native = 32 if data.crop is None or data.crop <= 32 else 224
    return replace(
        data,
        name="digits",
        options={"size": size, "channels": 3},
        train=images,
        held_out=images // 2 if data.held_out else 0,
        crop=None if data.crop is None else data.crop * size // native,
        padding=(data.padding + 1) // 2,
    )


def toy_run(run: Run, **smaller: Any) -> Run:
    """`run` on the digits with a tiny model: the same method, schedule and record, in well under a second.

    What only makes a run larger is lost (batch size, length, precision), so that runs which differ in nothing else are
    one toy run. `smaller`: options of the model that its own toy size does not set.
    """
    options = {**run.model.options, **models.toy(run.model.name), **smaller}
    method = run.method
    if method.name == "implicit_enorm":  # its penalty goes with the depth, which is lost
        method = replace(method, options={**method.options, "decay": 5e-4})
    return replace(
        run,
        data=toy_data(run.data),
        model=replace(run.model, options=options),
        method=method,
        epochs=TOY_EPOCHS,
        batch=TOY_BATCH,
        precision="float32",
    )


def toy_candidate(run: Run, **smaller: Any) -> Run:
    """One toy run for all candidates of a choice: what is chosen from does not matter there."""
    run = toy_run(run, **smaller)
    options = dict(run.model.options)
    if "norm_options" in options:
        options["norm_options"] = {**options["norm_options"], "groups": 4}
    return replace(run, model=replace(run.model, options=options), optim=replace(run.optim, lr=0.05))
