"""Training with differential privacy on CIFAR-10: GroupNorm with weight standardization, unit filters, mean shift
rejection (ours)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Constant
from .artifacts import Artifact, Claim, seeds
from .common import (
    Candidate,
    Choice,
    Chosen,
    Places,
    Settings,
    choices_of,
    committed,
    grid,
    held_out,
    resolved,
    score,
    toy_candidate,
    toy_run,
)
from .stock2019 import candidate_cell, in_use

__all__ = ["BATCH", "DELTA", "EPOCHS", "EPSILON", "IMAGES", "NOISE", "STEPS", "TUNINGS", "artifacts"]

EPSILON, DELTA = 8.0, 1e-5
IMAGES, BATCH, EPOCHS = 50_000, 1024, 20
STEPS = EPOCHS * -(-IMAGES // BATCH)
NOISE = 0.74
"""The multiplier with which Opacus' accountant (1.6.0, PRV, its default) gives ε below 8 at δ = 1e-5 after STEPS
steps of a part BATCH / IMAGES; its older accountant (RDP) gives 8.93. tests/integrations/test_opacus.py asks it
again."""
CLIP = 1.0
HELD_OUT = 5_000

GROUPED, UNIT, MSR = "GroupNorm + WS", "unit filters", "mean shift rejection"
METHODS: dict[str, tuple[dict[str, Any], Method]] = {
    GROUPED: ({"norm": "weight_standardization+groupnorm", "norm_options": {"groups": 16}}, Method()),
    UNIT: ({"norm": "unit_filters", "data_init": False}, Method("unit_filters")),
    MSR: ({"norm": "msr"}, Method("msr", {"z": 0.9, "luma": 5e-4, "centre_luma": True})),
}
RATES = (0.5, 1.0, 2.0)
PROVISIONAL: dict[str, Places] = {row: {EPSILON: {"lr": RATES[1]}} for row in METHODS}
COLUMN = f"epsilon {EPSILON:g}"
TUNING, WHERE = "private/tuning", "{}, epsilon {:g}"

SET_UP = f"""\
CIFAR-10 with ε = {EPSILON:g} and δ = {DELTA:g}: each image's gradient is made no longer than {CLIP:g}, and normal noise
of {NOISE:g} times that length is added to their sum. The multiplier is the one for which Opacus' PRV accountant gives ε
below {EPSILON:g} after {STEPS} steps of {BATCH} of {IMAGES:,} images. It assumes batches that are drawn independently,
while ours are of equal size and go through all images in each epoch, as is usual. WRN-16-2 (activation first, 0.7 M
parameters), {EPOCHS} epochs of SGD with momentum 0.9 at a constant learning rate, no augmentation, no average of
weights; De et al. 2022 have 81.4 % with a WRN-40-4, many augmentations of each image and far more compute. Filters of
unit filters and mean shift rejection keep the lengths of their start, which is not taken from data: that would not be
private. Choosing learning rates is not accounted for, for any method. bfloat16 with float32 weights on a GPU."""


def private_run(row: str, settings: Settings) -> Run:
    """WRN-16-2 with a row's method."""
    options, method = METHODS[row]
    optim = Optim(lr=settings["lr"], momentum=0.9, schedule=Constant(), clip=CLIP, noise_multiplier=NOISE)
    model = Model("wrn", {"depth": 16, "widen": 2, "init": "he", **options})
    return Run(Data("cifar10"), model, method, optim, EPOCHS, BATCH, precision="bfloat16")


def candidates() -> Iterator[Candidate]:
    """Three learning rates for each method: one run each."""
    for row in METHODS:
        for lr in RATES:
            yield Candidate(row, EPSILON, {"lr": lr}, seeds(held_out(private_run(row, {"lr": lr}), HELD_OUT, 10), 1))


TUNINGS: dict[str, tuple[Candidate, ...]] = {TUNING: tuple(candidates())}


def tuning(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name=TUNING,
        title="Choosing learning rates for private training (ours)",
        says="",
        protocol=f"{SET_UP} Here: 10 epochs on 45,000 images, scored on the {HELD_OUT:,} others of the training "
        "set; one run each, three rates for every method. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, WHERE) for candidate in TUNINGS[TUNING]),
        claims=(in_use(choices, WHERE),),
        compares=False,
        shrink=toy_candidate,
    )


def keeps_up(row: str, who: str) -> Claim:
    """Within half a point of GroupNorm with weight standardization, or above."""
    return Claim(
        f"{who} at least as good as GroupNorm with weight standardization, within half a point (ours)",
        lambda means: score(means[row, COLUMN]) > score(means[GROUPED, COLUMN]) - 0.5,
    )


def table(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name="private/cifar10",
        title="Private training of WRN-16-2 on CIFAR-10 (ours)",
        says="",
        protocol=f"{SET_UP} Learning rates: {resolved(choices)}. n = 3.",
        cells=grid(METHODS, (COLUMN,), lambda row, _: private_run(row, choices[row].places[EPSILON]), n=3),
        claims=(keeps_up(UNIT, "Unit filters are"), keeps_up(MSR, "Mean shift rejection is")),
        shrink=toy_run,
    )


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """With what the tuning decided (that of `chosen.json` by default)."""
    choices = choices_of(TUNING, committed() if chosen is None else chosen, PROVISIONAL)
    return [tuning(choices), table(choices)]
