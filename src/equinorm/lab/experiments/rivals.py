"""What is used today in the place of batch norm, and other ways to use rescalings, beside the papers' methods (ours).

ResNet-110 in the set-up of ruff2020 for what stands in the place of norms; CIFAR-NV and the fully connected nets of
stock2019 for rescaling once (PathCond, ENorm) and for SGD on paths (G-SGD). `artifacts(chosen)` makes everything with
the learning rates that `rivals/tuning-g-sgd` decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Constant
from . import ruff2020, stock2019
from .artifacts import Artifact, Cell, Claim, seeds
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

__all__ = ["LONG", "SHORT", "TUNINGS", "artifacts"]

# -- in the place of norms: ResNet-110 ---------------------------------------------------------------------------------

SHORT_EPOCHS, RUNS, LONGEST = 60, 2, 3
LUMA = ruff2020.LUMA


def normed(norm: str, **options: Any) -> Run:
    """ResNet-110 with another norm, all else as BatchNorm has it: lr 0.1, weight decay 5e-4, an epoch of warm-up."""
    return changed(ruff2020.batchnorm(), norm=norm, **options)


def fixup() -> Run:
    """Its start and scalars; these have a tenth of the learning rate, as in the authors' program."""
    run = changed(ruff2020.batchnorm(), norm="none", init="he_fan_out", fixup=True)
    return replace(run, optim=replace(run.optim, norm_rate=0.1))


def normalizer_free(clipped: bool) -> Run:
    """Scaled weight standardization with branches that start at 0; with adaptive gradient clipping or without."""
    run = normed("centred_weightnorm", preact=True, skipinit=True, norm_options={})
    run = replace(run, optim=replace(run.optim, nesterov=True, decay_norms=False))
    return replace(run, method=Method("agc", {"clipping": 0.16})) if clipped else run


def rejection(norm: str = "msr") -> Run:
    """Mean shift rejection as the authors' program has it; with "msr+tlu" thresholds in the place of ReLUs."""
    return changed(ruff2020.program(), norm=norm)


def unit_filters() -> Run:
    """This project's: filters of length 1, a start from data, orthogonalized momentum, noise; rates of the record."""
    run = changed(ruff2020.BASE, init="he_fan_out", norm="unit_filters", noise=0.1, noise_per="channel")
    optim = Optim(
        lr=0.12,
        momentum=0.85,
        name="muon",
        schedule=replace(ruff2020.BASE.optim.schedule, warm_up=1.0),
        norm_rate=0.025,
    )
    return replace(run, method=Method("unit_filters"), optim=optim)


ROWS: dict[str, Run] = {
    "BatchNorm": ruff2020.batchnorm(),
    "GroupNorm": normed("groupnorm", norm_options={"groups": 8}),
    "Fixup": fixup(),
    "SWS + AGC (NF-ResNet)": normalizer_free(clipped=True),
    "SWS without AGC": normalizer_free(clipped=False),
    "EvoNorm-S0": normed("evonorm_s0", preact=True, norm_options={"groups": 8}),
    "FRN + TLU": normed("frn"),
    "DyT": normed("dyt"),
    "MSR": rejection(),
    "MSR + TLU": rejection("msr+tlu"),
    "unit filters + Muon": unit_filters(),
}

PROTOCOL = """\
ResNet-110, option A skips, in the set-up of ruff2020: SGD with momentum 0.9, batch 128, learning rate times 0.1 at half
and three quarters of training, crops of images padded by 4, flips; bfloat16 with float32 weights on a GPU. Every method
has the one learning rate of its paper or BatchNorm's and nothing chosen, so a method that does better with another rate
is at a disadvantage. BatchNorm, GroupNorm (8 groups), FRN + TLU and DyT (alpha 0.5): lr 0.1, weight decay 5e-4, one
epoch of warm-up. EvoNorm-S0 (8 groups) the same with the activation first: the authors' program has it so and refuses
other blocks. Fixup (Zhang et al. 2019): the same, with a tenth of the rate for its scalars; no mixup, which that paper
adds. SWS + AGC (Brock et al. 2021a and b): activation first, filters centred and of a learned length that is taken from
data at the start, a learned scale at the end of each branch that starts at 0, Nesterov's momentum, no decay of gains
and biases, clipping 0.16, which is the paper's for its smallest batch; alpha and beta of that paper are left out, since
a start from data and the learned scale do their work. The authors of DyT say that it does not do for BatchNorm in
classic convolutional networks. MSR is ruff2020's as its program has it (lr 0.4, zmg 0.9, noise 0.1), with thresholded
linear units beside, which that paper names as future work. Unit filters: lr 0.12 for filters (Muon, momentum 0.85),
0.003 for the rest, noise 0.1 per channel, as in this project's record."""


def _cells(epochs: float, n: int) -> tuple[Cell, ...]:
    return tuple(
        Cell(name, ruff2020.DATA, seeds(replace(run, epochs=epochs, label=name), n)) for name, run in ROWS.items()
    )


def _ahead(row: str, *others: str) -> Callable[[Mapping[tuple[str, ...], float]], bool]:
    return lambda means: all(wins(means, row, other, [ruff2020.DATA]) for other in others)


SHORT = Artifact(
    name="rivals/resnet110",
    title="What is used today in the place of batch norm: ResNet-110, 60 epochs (ours)",
    says="",
    protocol=f"{PROTOCOL} {SHORT_EPOCHS} epochs, n = {RUNS}.",
    cells=_cells(SHORT_EPOCHS, RUNS),
    claims=(
        Claim("Adaptive gradient clipping helps (ours)", _ahead("SWS + AGC (NF-ResNet)", "SWS without AGC")),
        Claim("Thresholds help mean shift rejection (ours)", _ahead("MSR + TLU", "MSR")),
        Claim("DyT is behind BatchNorm in a convolutional network (ours)", _ahead("BatchNorm", "DyT")),
    ),
    shrink=toy_run,
)

LONG = Artifact(
    name="rivals/resnet110-long",
    title="The same, the best of them for 200 epochs (ours)",
    says="",
    protocol=f"{PROTOCOL} 200 epochs, n = {RUNS}. Run are the {LONGEST} with the best mean test accuracy after "
    f"{SHORT_EPOCHS} epochs; the others stay open.",
    cells=_cells(200, RUNS),
    shrink=toy_run,
)

# -- PathCond ----------------------------------------------------------------------------------------------------------

PATHCOND = Run(
    data=Data("cifar10"),
    model=Model("cifar_nv", {"norm": "batchnorm", "norms": "all", "init": "he_uniform"}),
    optim=Optim(lr=1e-3, schedule=Constant()),
    epochs=128,
    batch=128,
)
PLAIN, PROGRAM, EXACT = "as it starts", "PathCond, as its program", "PathCond, the exact criterion"
ENORM_ONCE, ENORM_ALWAYS = "ENorm-1, once", "ENorm-1, every step"
BALANCED = {
    PLAIN: Method(),
    PROGRAM: Method("path_once", {"batchnorm": "ignore"}),
    EXACT: Method("path_once"),
    ENORM_ONCE: Method("enorm_once"),
    ENORM_ALWAYS: Method("enorm", {"c": 1.0}),
}
EARLY = 3
SHOWN = {PLAIN: (40.1,), PROGRAM: (57.5,)}

PATHCOND_PROTOCOL = """\
The set-up of its authors' program as far as we know it: CIFAR-NV with BatchNorm behind every convolution, SGD with
learning rate 1e-3, constant, 128 epochs, 3 seeds; no momentum, batch 128, no augmentation, 32 x 32 images and He's
uniform start are our reading. Their program rescales convolutions and leaves BatchNorm's gains as they are, so the
function changes in training (in evaluation it does not yet: BatchNorm's running statistics are still 0 and 1, which
is how their program checks itself); that row solves the same criterion with BatchNorm taken for absent. The exact
criterion moves weights and gains and keeps the function. ENorm-1 balances once, or after every step. Matrix
products in TF32 on a GPU."""


def _pathcond(metric: str, name: str, title: str, **more: Any) -> Artifact:
    return Artifact(
        name=name,
        title=title,
        protocol=PATHCOND_PROTOCOL,
        cells=grid(
            BALANCED,
            ("CIFAR-NV + BN",),
            lambda row, _: changed(PATHCOND, method=BALANCED[row]),
            n=3,
            **more.pop("paper"),
        ),
        metric=metric,
        shrink=toy_run,
        **more,
    )


def _faster(row: str, other: str) -> Callable[[Mapping[tuple[str, ...], float]], bool]:
    return lambda means: bool(wins(means, row, other, ["CIFAR-NV + BN"]))


PATHCOND_EARLY = _pathcond(
    f"test_accuracy@{EARLY}",
    "rivals/pathcond",
    f"PathCond: test accuracy after {EARLY} epochs",
    says="After 3 epochs 57.5 % with PathCond, 40.1 without.",
    paper={"paper": SHOWN},
    claims=(
        Claim("PathCond is ahead after 3 epochs", _faster(PROGRAM, PLAIN)),
        Claim("The exact criterion is ahead too (ours)", _faster(EXACT, PLAIN)),
        Claim("ENorm-1 once does as much (ours)", _faster(ENORM_ONCE, PLAIN)),
    ),
)
PATHCOND_END = _pathcond(
    "test_accuracy", "rivals/pathcond-end", "The same after 128 epochs (ours)", says="", paper={"paper": None}
)

# -- rescaled once, and SGD on paths: the MLP grid ---------------------------------------------------------------------

G_SGD = "G-SGD"
G_SGD_TUNING, WHERE = "rivals/tuning-g-sgd", "{}, {:g} layers"
G_SGD_PROVISIONAL: dict[str, Places] = {G_SGD: {at: {"lr": 0.01} for at in (5, 11, 19)}}
G_SGD_RATES = (0.001, 0.005, 0.01, 0.05, 0.1)
MLP_ROWS: dict[str, tuple[str, Method]] = {  # whose learning rates, and the method
    "Baseline": ("Baseline", Method()),
    "ENorm-1.2": ("ENorm-1.2", Method("enorm", {"c": 1.2})),
    "ENorm-1, once": ("Baseline", Method("enorm_once")),
    "ENorm-1.2, once": ("Baseline", Method("enorm_once", {"c": 1.2})),
    "PathCond, once": ("Baseline", Method("path_once")),
    G_SGD: (G_SGD, Method("g_sgd")),
}


def mlp_run(row: str, depth: int, settings: Settings) -> Run:
    """A net of figure 4 of stock2019 with one of these methods."""
    run = changed(stock2019.fc_run("Baseline", depth, settings), method=MLP_ROWS[row][1])
    return replace(run, optim=replace(run.optim, weight_decay=0.0)) if row == G_SGD else run


def g_sgd_candidates() -> Iterator[Candidate]:
    """Its learning rates: one run each."""
    for depth in G_SGD_PROVISIONAL[G_SGD]:
        for lr in G_SGD_RATES:
            run = held_out(mlp_run(G_SGD, int(depth), {"lr": lr}), stock2019.HELD_OUT)
            yield Candidate(G_SGD, depth, {"lr": lr}, seeds(run, 1))


TUNINGS: dict[str, tuple[Candidate, ...]] = {G_SGD_TUNING: tuple(g_sgd_candidates())}


def g_sgd_tuning(choices: Mapping[str, Choice]) -> Artifact:
    return Artifact(
        name=G_SGD_TUNING,
        title="Choosing learning rates for G-SGD (ours)",
        says="",
        protocol="As figure 4 of stock2019, but trained on 40,000 images and scored on the 10,000 others of the "
        "training set; one run each. Of equal settings the smaller rate is taken.",
        cells=tuple(stock2019.candidate_cell(candidate, WHERE) for candidate in TUNINGS[G_SGD_TUNING]),
        claims=(stock2019.in_use(choices, WHERE),),
        compares=False,
        shrink=lambda run: toy_candidate(run, hidden=2),
    )


def mlp(choices: Mapping[str, Choice]) -> Artifact:
    def run(row: str, depth: int) -> Run:
        if row == G_SGD:
            return mlp_run(row, depth, nearest(choices[G_SGD].places, depth))
        rates = stock2019.PUBLISHED_RATES[MLP_ROWS[row][0]]
        return mlp_run(row, depth, {"lr": rates[stock2019.DEPTHS.index(depth)]})

    return Artifact(
        name="rivals/mlp",
        title="Fully connected nets: rescaled once, and SGD on paths (ours)",
        says="",
        protocol="The nets of figure 4 of stock2019: Xavier's start, 60 epochs, batch 256, weight decay 1e-3, learning "
        "rate decayed linearly to 0. «Once» is the balance before the first step, at the baseline's rates; ENorm-1.2 "
        "after every step is that of figure 4. G-SGD (Meng et al. 2019) has no weight decay and starts with its "
        "skeleton weights set to 1, which changes the start; its rates are chosen on held-out images at 5, 11 and 19 "
        f"layers: {resolved(choices)}. n = {stock2019.FC_RUNS}. Matrix products in TF32 on a GPU.",
        cells=grid(MLP_ROWS, stock2019.DEPTHS, run, n=stock2019.FC_RUNS),
        claims=(
            Claim(
                "Balancing once helps: ENorm-1 once is ahead of the baseline at 6 or more of 10 depths (ours)",
                lambda means: wins(means, "ENorm-1, once", "Baseline", stock2019.DEPTHS) >= 6,
            ),
            Claim(
                "G-SGD is ahead of the baseline at 6 or more of 10 depths (ours)",
                lambda means: wins(means, G_SGD, "Baseline", stock2019.DEPTHS) >= 6,
            ),
        ),
        kind="lines",
        x_label="intermediary layers",
        shrink=_shallow,
    )


def _shallow(run: Run) -> Run:
    return toy_run(run, hidden=2)


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """All of it, with what the tuning decided (that of `chosen.json` by default)."""
    choices = choices_of(G_SGD_TUNING, committed() if chosen is None else chosen, G_SGD_PROVISIONAL)
    return [SHORT, LONG, PATHCOND_EARLY, PATHCOND_END, g_sgd_tuning(choices), mlp(choices)]
