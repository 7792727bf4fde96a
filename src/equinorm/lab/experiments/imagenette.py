"""Imagenette at 128 pixels: in ImageNet's place for ResNet-18, and without batch statistics beside a twin (ours)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Linear
from .artifacts import Artifact, Claim, seeds
from .common import (
    Candidate,
    Choice,
    Chosen,
    Places,
    Settings,
    changed,
    choices_of,
    committed,
    grid,
    held_out,
    resolved,
    score,
    toy_candidate,
    toy_run,
    wins,
)
from .stock2019 import candidate_cell, in_use, row_run, with_final_norm

__all__ = ["TUNINGS", "artifacts"]

SIZE, CROP, HELD_OUT = 160, 128, 1_000
DATA = Data("imagenette", {"size": SIZE}, crop=CROP, flip=True, scale=(0.8, 1.35))
DATA_PROTOCOL = f"""\
Imagenette (ten classes of ImageNet, fast.ai's second split), a public copy cropped to squares and compressed once more:
9,469 training and 3,925 validation images at {SIZE} pixels. In training {CROP} x {CROP} crops of images magnified
by 0.8 to 1.35, which is 35 to 100 % of the area with sides 1:1, and flips; at test time the {CROP} x {CROP}
centre. Learning rates are chosen on {HELD_OUT:,} held-out training images."""

# -- in ImageNet's place: table 4 of stock2019 -------------------------------------------------------------------------

ROWS = ("Baseline", "BN", "GN", "ENorm-1", "ENorm-1.1", "EquiNorm")
BATCHES = (32, 256)
EPOCHS, TUNING_EPOCHS = 30, 10
RATES = {32: (0.003, 0.01, 0.03), 256: (0.02, 0.05, 0.15)}
PROVISIONAL: dict[str, Places] = {row: {batch: {"lr": RATES[batch][1]} for batch in BATCHES} for row in ROWS}
RESNET = Run(
    data=DATA,
    model=Model("resnet18", {"skips": "C", "init": "he"}),
    optim=Optim(momentum=0.9, weight_decay=1e-4, schedule=Linear(warm_up=1.0)),
    epochs=EPOCHS,
    precision="bfloat16",
)
TUNING, WHERE = "imagenette/tuning", "{}, batch {:g}"
SET_UP = f"""\
{DATA_PROTOCOL} ResNet-18 with learned (type C) skips and He's start, as in table 4 of stock2019; SGD with momentum 0.9,
weight decay 1e-4, one epoch of warm-up, then the learning rate falls linearly to 0. The baseline and ENorm have a
BatchNorm behind the classifier, GN has 32 groups, EquiNorm takes pixels in [0, 1]. bfloat16 with float32 weights on a
GPU."""


def resnet_run(row: str, batch: int, settings: Settings) -> Run:
    """ResNet-18 with a row's method."""
    base = replace(RESNET, batch=batch)
    if row == "EquiNorm":
        return replace(changed(base, norm="equinorm", lr=settings["lr"]), data=replace(DATA, inputs="unit"))
    return with_final_norm(row_run(base, row, {"groups": 32, **settings}, layers=1), row)


def resnet_candidates() -> Iterator[Candidate]:
    """Three learning rates for every row and batch size: one run each."""
    for row in ROWS:
        for batch in BATCHES:
            for lr in RATES[batch]:
                run = held_out(resnet_run(row, batch, {"lr": lr}), HELD_OUT, TUNING_EPOCHS)
                yield Candidate(row, batch, {"lr": lr}, seeds(run, 1))


def in_imagenets_place(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name="imagenette/resnet18",
        title="ResNet-18 on Imagenette, in ImageNet's place (ours)",
        says="",
        protocol=f"{SET_UP} {EPOCHS} epochs; rates, chosen on {TUNING_EPOCHS} epochs: {resolved(choices)}. n = 2.",
        cells=grid(ROWS, BATCHES, lambda row, at: resnet_run(row, at, choices[row].places[at]), n=2),
        claims=(
            Claim(
                "ENorm-1 is ahead of BN and GN at batch 32, as stock2019 has it on ImageNet (ours)",
                lambda means: all(wins(means, "ENorm-1", row, [32]) for row in ("BN", "GN")),
            ),
            Claim(
                "BN is worse at batch 32 than at 256 (ours)",
                lambda means: score(means["BN", "32"]) < score(means["BN", "256"]),
            ),
        ),
        x_label="batch size",
        shrink=toy_run,
    )


# -- without batch statistics: 5 and 20 epochs -------------------------------------------------------------------------

LENGTHS = (5, 20)
LEADERBOARD = {5: 85.77, 20: 91.57}
UNIT, TWIN, TWIN_SGD = "unit filters + Muon", "BatchNorm + Muon", "BatchNorm + SGD"
MUON = Optim(momentum=0.85, name="muon", schedule=Linear(warm_up=0.5), norm_rate=0.05)
FAST: dict[str, tuple[dict[str, Any], Method, Optim]] = {
    UNIT: ({"norm": "unit_filters"}, Method("unit_filters"), MUON),
    TWIN: ({"norm": "batchnorm"}, Method(), replace(MUON, norm_rate=1.0)),
    TWIN_SGD: (
        {"norm": "batchnorm"},
        Method(),
        Optim(momentum=0.9, nesterov=True, weight_decay=5e-4, schedule=Linear(warm_up=0.5)),
    ),
}
FAST_RATES = {UNIT: (0.03, 0.06, 0.12), TWIN: (0.01, 0.03, 0.1), TWIN_SGD: (0.03, 0.1, 0.3)}
FAST_PROVISIONAL: dict[str, Places] = {row: {5: {"lr": rates[1]}} for row, rates in FAST_RATES.items()}
FAST_TUNING, FAST_WHERE = "imagenette/tuning-fast", "{}, {:g} epochs"
FAST_SET_UP = f"""\
{DATA_PROTOCOL} ResNet-18 (option B skips), batch 64, label smoothing 0.1, half an epoch of warm-up, then the learning
rate falls linearly to 0. Without batch statistics: filters of length 1, gains and offsets from data at the start, Muon
with momentum 0.85 for filters, SGD at a twentieth of the rate for offsets. Its twins are the same net with BatchNorm,
with the same optimizer, and with SGD (Nesterov's momentum 0.9, decay 5e-4). bfloat16 with float32 weights on a GPU."""


def fast_run(row: str, epochs: int, settings: Settings) -> Run:
    """One of the short runs."""
    options, method, optim = FAST[row]
    model = Model("resnet18", {"init": "he_fan_out", **options})
    run = Run(DATA, model, method, replace(optim, lr=settings["lr"]), epochs, 64, precision="bfloat16")
    return replace(run, loss="smoothed")


def fast_candidates() -> Iterator[Candidate]:
    """Three learning rates for every row on five epochs: one run each."""
    for row, rates in FAST_RATES.items():
        for lr in rates:
            yield Candidate(row, 5, {"lr": lr}, seeds(held_out(fast_run(row, 5, {"lr": lr}), HELD_OUT), 1))


def without_statistics(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name="imagenette/without-statistics",
        title="Imagenette without batch statistics, 5 and 20 epochs (ours)",
        says="",
        protocol=f"{FAST_SET_UP} Rates, chosen on 5 epochs: {resolved(choices)}. n = 5. The published leaderboard "
        f"for 128 "
        f"pixels has {LEADERBOARD[5]} % after 5 epochs and {LEADERBOARD[20]} % after 20, of other nets on other copies "
        "of the images: the twins are what to compare with.",
        cells=grid(FAST, LENGTHS, lambda row, epochs: fast_run(row, epochs, choices[row].places[5]), n=5),
        claims=(
            Claim(
                "Without batch statistics it is within a point of the better twin (ours)",
                lambda means: all(
                    means[UNIT, str(e)] > max(score(means[row, str(e)]) for row in (TWIN, TWIN_SGD)) - 1
                    for e in LENGTHS
                ),
            ),
        ),
        x_label="epochs",
        shrink=toy_run,
    )


# -- choices -----------------------------------------------------------------------------------------------------------

TUNINGS: dict[str, tuple[Candidate, ...]] = {TUNING: tuple(resnet_candidates()), FAST_TUNING: tuple(fast_candidates())}


def tuning(name: str, where: str, set_up: str, title: str, choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name=name,
        title=f"Choosing learning rates for {title} (ours)",
        says="",
        protocol=f"{set_up} One run each, as many rates for every row. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, where) for candidate in TUNINGS[name]),
        claims=(in_use(choices, where),),
        compares=False,
        shrink=toy_candidate,
    )


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """All of it, with what the tunings decided (those of `chosen.json` by default)."""
    chosen = committed() if chosen is None else chosen
    choices = choices_of(TUNING, chosen, PROVISIONAL)
    fast = choices_of(FAST_TUNING, chosen, FAST_PROVISIONAL)
    return [
        tuning(TUNING, WHERE, SET_UP, "ResNet-18 on Imagenette", choices),
        in_imagenets_place(choices),
        tuning(FAST_TUNING, FAST_WHERE, FAST_SET_UP, "Imagenette without batch statistics", fast),
        without_statistics(fast),
    ]
