"""Federated averaging over clients with skewed labels: BatchNorm, GroupNorm and unit filters (ours)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    choices_of,
    committed,
    grid,
    held_out,
    resolved,
    toy_candidate,
    toy_run,
    wins,
)
from .stock2019 import candidate_cell, in_use

__all__ = ["TUNINGS", "artifacts"]

CLIENTS, ALPHA, BATCH, ROUNDS, HELD_OUT = 4, 0.1, 32, 20, 5_000
COLUMNS = ("skewed", "even")
METHODS: dict[str, tuple[dict[str, Any], Method]] = {
    "BN": ({"norm": "batchnorm"}, Method()),
    "GN": ({"norm": "groupnorm", "norm_options": {"groups": 8}}, Method()),
    "unit filters": ({"norm": "unit_filters", "data_init": False}, Method("unit_filters")),
}
RATES = (0.01, 0.03, 0.1)
PROVISIONAL: dict[str, Places] = {row: {BATCH: {"lr": RATES[1]}} for row in METHODS}
TUNING, WHERE = "federated/tuning", "{}, batch {:g}"
EVEN = 1000.0

SET_UP = f"""\
CIFAR-10 over {CLIENTS} clients: of every class, parts drawn from Dirichlet({ALPHA:g}) («skewed»; another draw for each
seed, the same for all methods), or from Dirichlet({EVEN:g}) («even»). In each of {ROUNDS} rounds every client
starts from the common network, makes one pass over its images in batches of {BATCH} with SGD (momentum 0.9 from
zero, weight decay 5e-4), and the common network is then the mean of the clients', weighed by their images,
BatchNorm's running statistics included (FedAvg, McMahan et al. 2017). ResNet-20, crops of images padded by 4,
flips; the learning rate falls linearly to 0. A run of Flower (`scripts/federated_flower.py`) ends with the same
weights. Unit filters start at the lengths of He's start, without a look at data. bfloat16 with float32 weights on
a GPU."""


def federated_run(row: str, column: str, settings: Settings) -> Run:
    """ResNet-20 with a row's method on a column's clients."""
    options, method = METHODS[row]
    data = Data("cifar10", padding=4, flip=True, clients=CLIENTS, dirichlet=ALPHA if column == "skewed" else EVEN)
    model = Model("resnet_cifar", {"depth": 20, "init": "he_fan_out", **options})
    optim = Optim(lr=settings["lr"], momentum=0.9, weight_decay=5e-4, schedule=Linear())
    return Run(data, model, method, optim, ROUNDS, BATCH, precision="bfloat16")


def candidates() -> Iterator[Candidate]:
    """Three learning rates for each method, on skewed clients: one run each."""
    for row in METHODS:
        for lr in RATES:
            run = held_out(federated_run(row, "skewed", {"lr": lr}), HELD_OUT, ROUNDS / 2)
            yield Candidate(row, BATCH, {"lr": lr}, seeds(run, 1))


TUNINGS: dict[str, tuple[Candidate, ...]] = {TUNING: tuple(candidates())}


def tuning(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name=TUNING,
        title="Choosing learning rates for federated training (ours)",
        says="",
        protocol=f"{SET_UP} Here: half as many rounds on 45,000 images, scored on the {HELD_OUT:,} others of the "
        "training set; one run each, three rates for every method. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, WHERE) for candidate in TUNINGS[TUNING]),
        claims=(in_use(choices, WHERE),),
        compares=False,
        shrink=toy_candidate,
    )


def table(choices: Mapping[str, Choice]) -> Artifact:
    def run(row: str, column: str) -> Run:
        return federated_run(row, column, choices[row].places[BATCH])

    return Artifact(
        name="federated/cifar10",
        title="Four clients with skewed labels: ResNet-20 on CIFAR-10 (ours)",
        says="",
        protocol=f"{SET_UP} Learning rates: {resolved(choices)}. n = 3.",
        cells=grid(METHODS, COLUMNS, run, n=3),
        claims=(
            Claim(
                "With skewed labels BN is behind GN and unit filters (ours)",
                lambda means: all(wins(means, row, "BN", ["skewed"]) for row in ("GN", "unit filters")),
            ),
        ),
        shrink=toy_run,
    )


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """With what the tuning decided (that of `chosen.json` by default)."""
    choices = choices_of(TUNING, committed() if chosen is None else chosen, PROVISIONAL)
    return [tuning(choices), table(choices)]
