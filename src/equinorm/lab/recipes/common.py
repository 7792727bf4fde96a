"""What the recipes share: grids of cells, sentences about means, choices on held-out images, toy sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .. import models
from ..artifacts import Cell, Claim, seeds
from ..runs import Data, Method, Run

__all__ = [
    "Choice",
    "Means",
    "best_columns",
    "changed",
    "columns_of",
    "consistent",
    "grid",
    "held_out",
    "nearest",
    "over",
    "resolved",
    "score",
    "setting_text",
    "toy_candidate",
    "toy_data",
    "toy_run",
    "trained",
    "wins",
]

Means = Mapping[tuple[str, str], float]
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


@dataclass(frozen=True)
class Choice:
    """A setting that the paper leaves to cross-validation: its value and what decided it.

    `chosen_on` names the artifact whose held-out accuracies were looked at, or says where else the value comes from;
    "not yet" marks a provisional value.
    """

    value: Mapping[Any, Any]
    chosen_on: str = "not yet"

    def __str__(self) -> str:
        return f"{setting_text(self.value)} (chosen on: {self.chosen_on})"


def setting_text(settings: Mapping[Any, Any]) -> str:
    """{"lr": 0.1, "groups": 10} as "lr 0.1, groups 10"; settings by depth or momentum one after the other."""
    if all(isinstance(value, Mapping) for value in settings.values()):
        return " | ".join(f"at {name}: {setting_text(value)}" for name, value in settings.items())
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def resolved(choices: Mapping[str, Choice]) -> str:
    """The choices as text for a protocol: "GN at 11: lr 0.05, groups 10 (chosen on: not yet); ..."."""
    return "; ".join(f"{name} {choice}" for name, choice in choices.items())


def nearest(by_number: Mapping[int, Any], number: int) -> Any:
    """The entry whose number is nearest, the smaller one if two are."""
    return by_number[min(by_number, key=lambda known: (abs(known - number), known))]


def held_out(run: Run, images: int, epochs: float | None = None) -> Run:
    """A candidate for `run`: trained without `images` of the training set and scored on them."""
    data = replace(run.data, held_out=images, evaluate="held_out")
    return replace(run, data=data, epochs=run.epochs if epochs is None else epochs)


def best_columns(means: Means) -> dict[str, str]:
    """The column with the best mean of each row: what a tuning artifact decides."""
    best: dict[str, str] = {}
    for row, column in means:
        if row not in best or score(means[row, column]) > score(means[row, best[row]]):
            best[row] = column
    return best


def consistent(chosen: Mapping[str, str]) -> Claim:
    """The recipe uses what a tuning artifact found best. `chosen`: the column in use for each row."""

    def holds(means: Means) -> bool:
        best = best_columns(means)
        return all(best[row] == column for row, column in chosen.items())

    return Claim("The settings written in the recipe are those with the best held-out accuracy (ours)", holds)


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
