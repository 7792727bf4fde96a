"""Deep nets without norms, with optimizers whose steps are free of scale: does balance help there? (ours)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..training.runs import Method, Model, Optim, Run
from ..training.schedules import Linear
from . import repro2019
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
    nearest,
    resolved,
    toy_candidate,
    toy_run,
    wins,
)
from .stock2019 import candidate_cell, in_use

__all__ = ["TUNINGS", "artifacts"]

DEPTHS = (19, 30, 50)
HELD_OUT = 10_000
BASE = Run(
    data=repro2019.CIFAR10,
    model=Model("fc", {"width": 500, "norm": "none", "bias": False, "init": "he"}),
    epochs=20,
    batch=256,
)
SCHEDULE = Linear(warm_up=1.0)
OPTIMIZERS = {
    "SGD": Optim(momentum=0.9, weight_decay=1e-3, schedule=SCHEDULE),
    "AdamW": Optim(weight_decay=0.01, schedule=SCHEDULE, name="adamw"),
    "Muon": Optim(momentum=0.9, schedule=SCHEDULE, name="muon"),
}
ENORM = Method("enorm", {"c": 1.2})
ROWS = {f"{name}{', ENorm-1.2' * balanced}": (name, balanced) for name in OPTIMIZERS for balanced in (False, True)}
RATES = {"SGD": (0.001, 0.005, 0.02), "AdamW": (1e-4, 3e-4, 1e-3), "Muon": (0.002, 0.01, 0.05)}
PROVISIONAL: dict[str, Places] = {
    row: {at: {"lr": RATES[name][1]} for at in (19, 50)} for row, (name, _) in ROWS.items()
}
TUNING, WHERE = "deep/tuning", "{}, {:g} layers"


def deep_run(row: str, depth: int, settings: Settings) -> Run:
    """A net of that depth with a row's optimizer, balanced after every step or not."""
    name, balanced = ROWS[row]
    run = changed(BASE, method=ENORM if balanced else Method(), hidden=depth)
    return replace(run, optim=replace(OPTIMIZERS[name], lr=settings["lr"]))


def candidates() -> Iterator[Candidate]:
    """Three learning rates for every row, at the least and the greatest depth: one run each."""
    for row, (name, _) in ROWS.items():
        for depth in PROVISIONAL[row]:
            for lr in RATES[name]:
                run = held_out(deep_run(row, int(depth), {"lr": lr}), HELD_OUT)
                yield Candidate(row, depth, {"lr": lr}, seeds(run, 1))


TUNINGS: dict[str, tuple[Candidate, ...]] = {TUNING: tuple(candidates())}
SET_UP = """\
Fully connected nets of width 500 without norms and biases, He's normal start, on CIFAR-10: 20 epochs, batch 256, one
epoch of warm-up, then the learning rate falls linearly to 0. SGD has momentum 0.9 and weight decay 1e-3, AdamW decay
0.01, Muon momentum 0.9 for all matrices but the last, which SGD with Nesterov's momentum moves at the same rate. ENorm
is one cycle with c = 1.2 after each step, the optimizer's state carried along. Matrix products in TF32 on a GPU."""


def tuning(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name=TUNING,
        title="Choosing learning rates for deep nets with AdamW and Muon (ours)",
        says="",
        protocol=f"{SET_UP} Trained on 40,000 images, scored on the 10,000 others of the training set; one run "
        f"each, as "
        "many rates for every row. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, WHERE) for candidate in TUNINGS[TUNING]),
        claims=(in_use(choices, WHERE),),
        compares=False,
        shrink=lambda run: toy_candidate(run, hidden=2),
    )


def table(choices: Mapping[str, Choice]) -> Artifact:
    def helps(name: str) -> Claim:
        return Claim(
            f"ENorm helps {name} at every depth (ours)",
            lambda means: wins(means, f"{name}, ENorm-1.2", name, DEPTHS) == len(DEPTHS),
        )

    return Artifact(
        name="deep/optimizers",
        title="Deep nets without norms: SGD, AdamW and Muon, balanced after every step or not (ours)",
        says="",
        protocol=f"{SET_UP} Learning rates: {resolved(choices)}. n = 3.",
        cells=grid(ROWS, DEPTHS, lambda row, at: deep_run(row, at, nearest(choices[row].places, at)), n=3),
        claims=tuple(helps(name) for name in OPTIMIZERS),
        kind="lines",
        x_label="intermediary layers",
        shrink=lambda run: toy_run(run, hidden=2),
    )


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """With what the tuning decided (that of `chosen.json` by default)."""
    choices = choices_of(TUNING, committed() if chosen is None else chosen, PROVISIONAL)
    return [tuning(choices), table(choices)]
