"""stock2019: "Equi-normalization of neural networks". ENorm against BN, GN, weight norm and Path-SGD.

What the paper cross-validates and does not print is chosen by two artifacts of our own, `tuning-fc` and
`tuning-cifar-nv`; `artifacts(chosen)` makes everything else with what they decided. What needs no training (table 1,
figures 6, 7 and 9) is computed in `stock2019_computed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Linear, Quadratic
from . import repro2019
from .artifacts import Artifact, Cell, Claim, seeds
from .common import (
    Candidate,
    Choice,
    Chosen,
    Means,
    Places,
    Settings,
    changed,
    choices_of,
    columns_of,
    committed,
    consistent,
    grid,
    held_out,
    nearest,
    over,
    resolved,
    setting_text,
    star,
    toy_candidate,
    toy_run,
    trained,
    wins,
)
from .stock2019_computed import FIGURE_6, FIGURE_7, FIGURE_9, TABLE_1

__all__ = ["LATER_TUNINGS", "TUNINGS", "artifacts"]

Choices = Mapping[str, Choice]  # by row
HELD_OUT = 10_000
WEIGHT_DECAY = 1e-3  # sections 6.1 and 6.2


# -- what the rows of tables and figures are ---------------------------------------------------------------------------

NORMS = {"BN": "batchnorm", "GN": "groupnorm", "WN + BN": "weightnorm+batchnorm", "ENorm-1.2 + BN": "batchnorm"}
TUNED = "ENorm-1.2, tuned"  # with learning rates that we choose instead of the published ones
METHODS = {
    "Path-SGD": Method("path_sgd"),
    "ENorm-1": Method("enorm", {"c": 1.0}),
    "ENorm-1.1": Method("enorm", {"c": 1.1}),
    "ENorm-1.2": Method("enorm", {"c": 1.2}),
    TUNED: Method("enorm", {"c": 1.2}),
    "ENorm-1.2 + BN": Method("enorm", {"c": 1.2, "batchnorm": "ignore"}),
}
IMPLICIT = {"ENorm-Impl-1": 1.0, "ENorm-Impl-1.1": 1.1, "ENorm-Impl-1.2": 1.2}


def implicit(c: float, decay: float, layers: int, weight_decay: float) -> Method:
    """Implicit ENorm with `decay` times the penalty that acts like the weight decay which it replaces.

    The penalty λ·Σ c^(2(q-k))·‖W_k‖² has the gradient 2λ·c^(2(q-k))·W_k, and the learned coefficients level its layers
    to their geometric mean, 2λ·c^(q-1). With c = 1 and decay = 1 that is weight decay.
    """
    return Method("implicit_enorm", {"c": c, "decay": decay * weight_decay / 2 * c ** (1 - layers)})


def row_run(base: Run, row: str, settings: Settings, layers: int) -> Run:
    """`base` with what a row stands for. `settings`: its learning rate, GN's groups, the decay of implicit ENorm."""
    method, optim = METHODS.get(row, Method()), replace(base.optim, lr=settings["lr"])
    if row in IMPLICIT:
        method = implicit(IMPLICIT[row], settings["decay"], layers, optim.weight_decay)
    if row in IMPLICIT or row == "Path-SGD":
        optim = replace(optim, weight_decay=0.0)
    norm: dict[str, Any] = {"norm": NORMS.get(row, "none")}
    if row == "GN":
        norm["norm_options"] = {"groups": settings["groups"]}
    return replace(changed(base, method=method, **norm), optim=optim)


def with_final_norm(run: Run, row: str) -> Run:
    """Sections 6.2 and 6.3: a BatchNorm behind the classifier of nets that have no norms otherwise."""
    return run if row in NORMS else changed(run, final_norm="batchnorm")


def _of(rows: Iterable[str], choices: Choices) -> Choices:
    """What was chosen for these rows; others have nothing to choose."""
    return {row: choices[row] for row in rows if row in choices}


def candidate_cell(candidate: Candidate, where: str) -> Cell:
    """A cell of a tuning artifact. `where` makes a row of a candidate's row and place: "{}, {:g} layers"."""
    row, text = where.format(candidate.row, candidate.at), setting_text(candidate.settings)
    return Cell(row, text, tuple(replace(run, label=f"{row}, {text}") for run in candidate.runs))


def in_use(choices: Choices, where: str) -> Claim:
    """The claim of a tuning artifact: the settings in use are its best."""
    places = [(row, at, settings) for row, choice in choices.items() for at, settings in choice.places.items()]
    return consistent({where.format(row, at): setting_text(settings) for row, at, settings in places})


# -- fully connected nets (section 6.1): figures 4, 8 and 10 -----------------------------------------------------------

DEPTHS = repro2019.DEPTHS
FC_RUNS = 3
FC_LAYERS = 2  # linear layers beside the p intermediary ones

FC = Run(
    data=repro2019.CIFAR10,
    model=Model("fc", {"width": 500, "bias": False, "init": "xavier"}),
    optim=Optim(weight_decay=WEIGHT_DECAY, schedule=Linear()),
    epochs=60,
    batch=256,
)

# repro2019's table 1, which the authors of stock2019 supplied. For ENorm + BN that is 0.1 throughout: repro2019 says
# that the 0.05 at 15, 17 and 19 layers is its own change.
PUBLISHED_RATES = {
    "Baseline": repro2019.LEARNING_RATES["Baseline"],
    "BN": repro2019.LEARNING_RATES["BN"],
    "ENorm-1.2": repro2019.LEARNING_RATES["ENorm"],
    "ENorm-1.2 + BN": (0.1,) * len(DEPTHS),
}

# What section 6.1 cross-validates and nobody has printed, by the depth at which it is tuned (on stock2019/tuning-fc);
# other depths use the nearest. These are in use until it has been run. `decay` multiplies implicit ENorm's penalty.
FC_PROVISIONAL: dict[str, Places] = {
    "GN": {11: {"lr": 0.1, "groups": 10}},
    "WN + BN": {5: {"lr": 0.1}, 11: {"lr": 0.1}, 19: {"lr": 0.1}},
    "Path-SGD": {5: {"lr": 0.005}, 11: {"lr": 0.005}, 19: {"lr": 0.005}},
    "ENorm-1": {5: {"lr": 0.05}, 11: {"lr": 0.05}, 19: {"lr": 0.05}},
    "ENorm-1.1": {5: {"lr": 0.05}, 11: {"lr": 0.05}, 19: {"lr": 0.05}},
    TUNED: {at: {"lr": 0.005} for at in (5, 11, 19)},  # not that of another row, whose runs would pass for tuned ones
    **{row: {11: {"lr": 0.05, "decay": 1.0}, 19: {"lr": 0.05, "decay": 1.0}} for row in IMPLICIT},
}


def fc_protocol(choices: Choices) -> str:
    return f"""\
A linear layer 3072 x 500, p layers 500 x 500 and one 500 x 10, ReLU between them, Xavier initialization (uniform). 60
epochs of SGD without momentum, batch 256, weight decay 1e-3 (none for Path-SGD), learning rate decayed linearly to 0,
inputs minus mean over deviation by channel. From repro2019, which asked the authors: no biases, final weights are
scored, the deviations are (0.2023, 0.1994, 0.2010). Learning rates are cross-validated over {{0.0005, 0.001, 0.005,
0.01, 0.05, 0.1}} in the paper and not printed. Baseline, BN, ENorm-1.2 and ENorm-1.2 + BN use those the authors gave
to repro2019 (its table 1, with 0.1 for ENorm + BN throughout, which is what it was given). The others are chosen on
10,000 held-out training images and then trained on all 50,000, at the depths named, the nearest of which decides for
the rest; {resolved(choices)}. «WN + BN» is not explained; we take it literally, weight norm on every layer and
BatchNorm behind all but the last, which is also how we read «each layer is followed by a BN layer». In ENorm-1.2 +
BN, ENorm does not see BatchNorm (`batchnorm="ignore"`). n = {FC_RUNS}; the paper does not give its n. Matrix products
in TF32 on a GPU. The paper prints no numbers here, only the plot."""


def fc_run(row: str, depth: int, settings: Settings) -> Run:
    """A run of figure 4 or 8, or a candidate for one."""
    return row_run(changed(FC, hidden=depth), row, settings, layers=depth + FC_LAYERS)


def fc_settings(choices: Choices, row: str, depth: int) -> Settings:
    """The learning rate that was published for a row, or what was chosen for it at the nearest depth."""
    if row in PUBLISHED_RATES:
        return {"lr": PUBLISHED_RATES[row][DEPTHS.index(depth)]}
    found: Settings = nearest(choices[row].places, depth)
    return found


def fc_candidates() -> Iterator[Candidate]:
    """The grid of the tuning: one run each."""
    high = (0.01, 0.05, 0.1)
    more, most = (0.005, *high), (0.0005, 0.001, 0.005, *high)
    rates = {"ENorm-1": more, "ENorm-1.1": more, TUNED: more, "WN + BN": high, "Path-SGD": most}
    tried: dict[str, list[Settings]] = {row: [{"lr": lr} for lr in several] for row, several in rates.items()}
    tried["GN"] = star(high, 0.05, "groups", (5, 10, 20, 50), 10)
    tried |= {row: star(high, 0.05, "decay", (0.1, 1.0, 10.0), 1.0) for row in IMPLICIT}
    for row, several in tried.items():
        for depth in FC_PROVISIONAL[row]:
            for settings in several:
                run = held_out(fc_run(row, int(depth), settings), HELD_OUT)
                yield Candidate(row, depth, settings, seeds(run, 1))


FC_TUNING, FC_WHERE = "stock2019/tuning-fc", "{}, {:g} layers"


def fc_tuning(choices: Choices) -> Artifact:
    return Artifact(
        name=FC_TUNING,
        title="Choosing learning rates for figures 4, 8 and 10",
        says="It cross-validates and does not print what it chose.",
        protocol="As figure 4, but trained on 40,000 images and scored on the 10,000 others of the training set. One "
        "run each. Learning rates are tuned at 5, 11 and 19 intermediary layers; those of implicit ENorm at 11 and "
        "19 and that of GN at 11, and together with their second setting, along two lines that cross instead of on "
        "the whole grid: every rate with 10 groups (a penalty of 1), every number of groups (every penalty) at 0.05. "
        "Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, FC_WHERE) for candidate in TUNINGS[FC_TUNING]),
        claims=(in_use(choices, FC_WHERE),),
        compares=False,
        shrink=lambda run: toy_candidate(run, hidden=2),
    )


FIGURE_4_ROWS = (
    *("Baseline", "BN", "GN", "WN + BN", "Path-SGD"),
    *("ENorm-1", "ENorm-1.1", "ENorm-1.2", "ENorm-1.2 + BN"),
)


def _warmed_up(run: Run) -> Run:
    return replace(run, optim=replace(run.optim, schedule=Linear(warm_up=5.0)))


Variants = dict[str, Callable[[Run], Run]]


def _rates(*rates: float) -> Variants:
    return {f"lr {lr:g}": partial(changed, lr=lr) for lr in rates}


VARIANTS: Variants = {  # of ENorm-1.2
    **_rates(0.01, 0.05, 0.1),
    "lr 0.05, five epochs of warm-up": lambda run: _warmed_up(changed(run, lr=0.05)),
    "He initialization": partial(changed, init="he"),
    "no weight decay": lambda run: replace(run, optim=replace(run.optim, weight_decay=0.0)),
    "three cycles a step": partial(changed, method=Method("enorm", {"c": 1.2, "cycles": 3})),
    "float32": lambda run: replace(run, precision="float32"),
}


BN_WARMED_UP = "BN, five epochs of warm-up"


def _ahead_in_all_cases(row: str) -> Claim:
    """The headline of figure 4."""
    rivals = ("Baseline", "BN", "GN", "Path-SGD")
    return Claim(
        f"{row} outperforms the baseline, BN, GN and Path-SGD in all cases",
        lambda means: all(wins(means, row, rival, DEPTHS) == len(DEPTHS) for rival in rivals),
    )


def _fall(means: Means, row: str) -> float:
    """By how much accuracy falls from the three shallowest to the three deepest nets."""
    return over(means, row, DEPTHS[:3]) - over(means, row, DEPTHS[-3:])


def fc_figures(choices: Choices) -> list[Artifact]:
    """Figures 4, 8 and 10 and the variants of figure 4, with what was chosen for them."""

    def protocol(*rows: str) -> str:
        return fc_protocol(_of(rows, choices))

    def run(row: str, depth: int) -> Run:
        return fc_run(row, depth, fc_settings(choices, row, depth))

    def variant(row: str, depth: int) -> Run:
        if row == BN_WARMED_UP:
            return _warmed_up(run("BN", depth))
        return VARIANTS[row](run("ENorm-1.2", depth)) if row in VARIANTS else run(row, depth)

    figure_4 = Artifact(
        name="stock2019/figure4",
        title="Fully connected nets on CIFAR-10, Xavier's initialization",
        says="The baseline decreases substantially with depth, BN slowly; ENorm with c = 1.2 outperforms the baseline, "
        "BN, GN and Path-SGD in all cases.",
        protocol=protocol(*FIGURE_4_ROWS),
        cells=grid(FIGURE_4_ROWS, DEPTHS, run, n=FC_RUNS),
        claims=(
            _ahead_in_all_cases("ENorm-1.2"),
            Claim(
                "The baseline decreases substantially with depth (we say: by 2 points from the three shallowest to the "
                "three deepest nets)",
                lambda means: _fall(means, "Baseline") >= 2,
            ),
            Claim(
                "BN decays slowly with depth: less than half as fast as the baseline",
                lambda means: _fall(means, "BN") < _fall(means, "Baseline") / 2,
            ),
        ),
        kind="lines",
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )

    figure_8 = Artifact(
        name="stock2019/figure8",
        title="Implicit ENorm, fully connected nets on CIFAR-10",
        says="Implicit ENorm is generally better than the baseline but does not outperform explicit ENorm, in "
        "particular in deep nets.",
        protocol=f"{protocol(*IMPLICIT)}\nThe rescaling coefficients start at 1 and are trained with the weights at "
        "the same learning rate. The penalty takes the place of weight decay; its factor λ, cross-validated in the "
        "paper, is given in units of that weight decay (with c > 1 in the geometric mean over the layers). Settings "
        "were first tuned at 11 layers only; those for 19 were added to the tuning when nets of 17 and 19 layers had "
        "been seen to stay at 10 % test accuracy with c > 1 (their logs are kept, and in no number here).",
        cells=grid(("Baseline", *IMPLICIT, "ENorm-1.2"), DEPTHS, run, n=FC_RUNS),
        claims=(
            Claim(
                "Implicit ENorm is generally better than the baseline: each c at 6 or more of 10 depths",
                lambda means: all(wins(means, row, "Baseline", DEPTHS) >= 6 for row in IMPLICIT),
            ),
            Claim(
                "Implicit ENorm does not outperform explicit ENorm in deep nets (11 layers and more, on average)",
                lambda means: all(
                    over(means, row, DEPTHS[5:]) < over(means, "ENorm-1.2", DEPTHS[5:]) for row in IMPLICIT
                ),
            ),
        ),
        kind="lines",
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )

    figure_10 = Artifact(
        name="stock2019/figure10",
        title="Norm of a network in training, with and without ENorm",
        says="ENorm consistently leads to a lower energy.",
        protocol=f"{protocol('ENorm-1')}\nThree intermediary layers; the l2 norm of all weights after each epoch.",
        cells=grid(
            ("Baseline", "ENorm-1"), (3,), lambda row, depth: replace(run(row, depth), record=("energy",)), n=FC_RUNS
        ),
        claims=(Claim("With ENorm the norm ends lower", lambda means: means["ENorm-1", "3"] < means["Baseline", "3"]),),
        kind="curves",
        metric="energy.norm",
        unit="",
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )
    variants = Artifact(
        name="stock2019/variants",
        title="ENorm-1.2 at both ends of figure 4, one thing at a time (ours)",
        says="",
        protocol=f"{protocol('GN')}\nHere: ENorm-1.2 in the shallowest and the deepest nets of figure 4, with "
        "one choice changed in each row; in figure 4 its learning rates are 0.05 with 1 layer and 0.01 with 19. BN has "
        "the same warm-up once, at its published rates. Nothing was chosen by these runs.",
        cells=grid((*VARIANTS, "BN", BN_WARMED_UP, "GN"), (1, 19), variant, n=FC_RUNS),
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )
    tuned = Artifact(
        name="stock2019/figure4-tuned",
        title="Figure 4 with learning rates chosen for ENorm-1.2 as for the others (ours)",
        says="ENorm-1.2 is ahead in all cases; that is said of the learning rates of figure 4.",
        protocol=f"{protocol('GN', 'Path-SGD', TUNED)}\nFor ENorm-1.2 the authors gave 0.05, and 0.01 with 17 and 19 "
        "layers; for BN 0.1. Here the rates of ENorm-1.2 are chosen on held-out images, as those of the others are. "
        "Added after figure 4 had been seen; where the rates come out equal, so do the runs.",
        cells=grid(("Baseline", "BN", "GN", "Path-SGD", TUNED), DEPTHS, run, n=FC_RUNS),
        claims=(_ahead_in_all_cases(TUNED),),
        variant_of="stock2019/figure4",
        kind="lines",
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )
    return [figure_4, tuned, variants, figure_8, figure_10]


# -- figure 4 as the authors' program has it ---------------------------------------------------------------------------

RELEASED_IMAGES = 40_960
RELEASED_ROWS = ("Baseline", "BN", "GN", "Path-SGD", "ENorm-1", "ENorm-1.2")
KEPT = "ENorm-1.2, the classifier kept"
PAPERS_CYCLE = {"ENorm-1, the paper's cycle": "ENorm-1", "ENorm-1.2, the paper's cycle": "ENorm-1.2"}
LAST_LAYER = "head.classifier"


def released(c: float) -> Method:
    """ENorm's cycle as the authors' program has it: the last layer is left out, norms are those before the cycle."""
    return Method("enorm_chain", {"c": c, "variant": "released"})


def released_figure(choices: Choices) -> Artifact:
    """Figure 4 with the start, the images and the cycle of the authors' program."""

    def run(row: str, depth: int) -> Run:
        name = PAPERS_CYCLE.get(row, "ENorm-1.2" if row == KEPT else row)
        made = changed(fc_run(name, depth, fc_settings(choices, name, depth)), init="he")
        made = replace(made, data=replace(made.data, train=RELEASED_IMAGES))
        if row == KEPT:
            return replace(made, method=Method("enorm", {**made.method.options, "keep": [LAST_LAYER]}))
        return replace(made, method=released(made.method.options["c"])) if row in ("ENorm-1", "ENorm-1.2") else made

    return Artifact(
        name="stock2019/figure4-released",
        title="Figure 4 as the authors' program has it: the last layer is left out",
        says="ENorm with c = 1.2 outperforms the baseline, BN, GN and Path-SGD in all cases.",
        protocol=f"{fc_protocol(_of(('GN', 'Path-SGD', 'ENorm-1'), choices))}\nHere: what the authors' program has "
        f"otherwise. Weights start from He's normal distribution, {RELEASED_IMAGES:,} training images are seen, and "
        "ENorm's cycle leaves the last layer out, so that the classifier's norm is not moved, and takes the norms of "
        f"all layers before the cycle. In the row «{KEPT}» the last layer is left out by naming it in `keep=`, and "
        "norms are those of the moment; the rows of «the paper's cycle» have all layers. Learning rates are figure "
        "4's, none was chosen for this start. n = 3.",
        cells=grid((*RELEASED_ROWS, KEPT, *PAPERS_CYCLE), DEPTHS, run, n=FC_RUNS),
        claims=(_ahead_in_all_cases("ENorm-1.2"),),
        variant_of="stock2019/figure4",
        kind="lines",
        x_label="intermediary layers",
        shrink=repro2019.shrink,
    )


BIAS_DEPTHS = (1, 5, 9, 15, 19)
LEFT = "ENorm + bias, left as they are"


def _bias_run(row: str, depth: int) -> Run:
    if row == LEFT:
        method = Method("enorm_chain", {"c": 1.2, "biases": "leave"})
        return replace(repro2019.fc_run(repro2019.PLAIN, depth), method=method)
    return repro2019.fc_run(row, depth)


BIASES_LEFT = Artifact(
    name="stock2019/biases",
    title="Biases that are not balanced, as the authors advise, beside plain and safe ones (ours)",
    says="",
    protocol=f"The nets of repro2019's figure 3: {repro2019.PROTOCOL}\nHere: the authors advise not to balance biases, "
    "and their program leaves them as they are when the weights before and behind them are rescaled, which changes the "
    "function; the cycle is the paper's. n = 5.",
    cells=grid((LEFT, repro2019.PLAIN, repro2019.SAFE), BIAS_DEPTHS, _bias_run, n=5),
    claims=(
        Claim(
            "With biases left as they are ENorm trains at 15 and 19 layers (ours)",
            lambda means: all(trained(means, LEFT, depth) for depth in (15, 19)),
        ),
    ),
    kind="lines",
    x_label="intermediary layers",
    shrink=repro2019.shrink,
)

# -- CIFAR-NV (section 6.2): tables 2, 3, 5 and 6 ----------------------------------------------------------------------

BATCHES = (8, 16, 32, 64, 128, 256)
NV_LAYERS = 9  # linear layers of CIFAR-NV
NV_RATES, NV_GROUPS, NV_DECAYS = (0.01, 0.05, 0.1), (4, 8, 16, 32, 64), (0.1, 1.0, 10.0)
NV_TUNING_EPOCHS = 32
NV_ROWS = ("Baseline", "BN", "GN", "ENorm-1", "ENorm-1.2", "ENorm-Impl-1", "ENorm-Impl-1.2")
NO_MOMENTUM, MOMENTUM = 0.0, 0.9

NV = Run(
    data=replace(repro2019.CIFAR10, held_out=HELD_OUT, crop=28, flip=True),
    model=Model("cifar_nv", {"init": "xavier"}),
    optim=Optim(weight_decay=WEIGHT_DECAY, schedule=Quadratic(final=1e-4)),
    epochs=128,
    precision="bfloat16",
)

NV_PAPER = {  # tables 5 and 6, of which tables 2 and 3 are a part
    NO_MOMENTUM: {
        "Baseline": (90.54, 90.65, 89.25, 88.81, 88.07, 86.86),
        "BN": (91.30, 91.13, 90.70, 89.74, 89.09, 87.94),
        "GN": (90.28, 88.26, 88.90, 88.55, 87.22, 85.49),
        "ENorm-1": (91.13, 91.31, 90.05, 89.26, 88.40, 87.26),
        "ENorm-1.2": (90.42, 90.94, 90.62, 89.68, 88.53, 87.20),
        "ENorm-Impl-1": (89.46, 89.90, 90.01, 89.47, 89.02, 87.49),
        "ENorm-Impl-1.2": (89.13, 90.14, 89.96, 89.29, 88.17, 87.37),
    },
    MOMENTUM: {
        "Baseline": (90.52, 90.20, 89.04, 88.18, 88.44, 88.49),
        "BN": (91.10, 91.24, 90.91, 91.01, 90.45, 89.54),
        "GN": (90.38, 90.71, 89.93, 89.80, 89.33, 86.97),
        "ENorm-1": (91.24, 91.01, 89.92, 89.25, 89.59, 88.81),
        "ENorm-1.2": (90.49, 90.97, 89.89, 89.46, 89.43, 88.70),
        "ENorm-Impl-1": (88.82, 89.94, 89.47, 89.0, 88.98, 88.7),
        "ENorm-Impl-1.2": (89.55, 89.84, 89.61, 89.28, 89.53, 89.3),
    },
}

# By momentum; chosen at batch 128 (on stock2019/tuning-cifar-nv). These are in use until it has been run.
NV_PROVISIONAL: dict[str, Places] = {
    "Baseline": {NO_MOMENTUM: {"lr": 0.05}, MOMENTUM: {"lr": 0.01}},
    "BN": {NO_MOMENTUM: {"lr": 0.05}, MOMENTUM: {"lr": 0.05}},
    "GN": {NO_MOMENTUM: {"lr": 0.05, "groups": 16}, MOMENTUM: {"lr": 0.05, "groups": 16}},
    "ENorm-1": {NO_MOMENTUM: {"lr": 0.05}, MOMENTUM: {"lr": 0.01}},
    "ENorm-1.2": {NO_MOMENTUM: {"lr": 0.05}, MOMENTUM: {"lr": 0.01}},
    "ENorm-Impl-1": {NO_MOMENTUM: {"lr": 0.05, "decay": 1.0}, MOMENTUM: {"lr": 0.01, "decay": 1.0}},
    "ENorm-Impl-1.2": {NO_MOMENTUM: {"lr": 0.05, "decay": 1.0}, MOMENTUM: {"lr": 0.01, "decay": 1.0}},
}

# With momentum, by batch size: learning rates that are chosen again where batches are small.
SMALL_BATCHES, SMALL_EPOCHS = (8, 32), 8
SMALL_PROVISIONAL: dict[str, Places] = {row: {b: {"lr": 0.01} for b in SMALL_BATCHES} for row in NV_ROWS[:5]}


def nv_protocol(choices: Choices, small: Choices) -> str:
    again = f"""\
Only with momentum, where a rate for large batches can be too much for small ones, learning rates are chosen again at
batch 8 and 32, on {SMALL_EPOCHS} epochs («at» is the batch size; others use the nearest); {resolved(small)}.
"""
    return f"""\
CIFAR-NV (Gitman & Ginsburg 2017), Xavier initialization, no biases (the paper is silent). 128 epochs of SGD on 40,000
images, the other 10,000 kept for choosing; 28 x 28 random crops and flips in training, the centre at test time; inputs
as in figure 4; weight decay 1e-3; the learning rate falls quadratically to 1e-4. BatchNorm and GroupNorm stand where
the published programs of this network have BatchNorm, behind the first and the second block (see `lab.models`). For
the baseline and ENorm a BatchNorm stands behind the classifier, for BN and GN it does not. Where the paper and the
authors' published program differ we follow the paper: the program has He's initialization, crops of images padded by
2, no BatchNorm behind the classifier, and leaves the last layer out of ENorm's cycle; its c is ours, the ratio of the
norms of neighbouring layers. The paper chooses the learning rate from {{0.01, 0.05, 0.1}} and GN's groups from
{{4, 8, 16, 32, 64}}, we think for each batch size, and does not print them. We choose both at batch 128 on a 32-epoch
schedule, with and without momentum («at» is the momentum), and reuse them at the other batch sizes;
{resolved(choices)}.
{again if small else ""}n = 3 at batch 128 with momentum, 1 elsewhere (the paper: 5). bfloat16 with float32 weights on a
GPU."""


def nv_run(row: str, batch: int, momentum: float, settings: Settings) -> Run:
    """A run of tables 2, 3, 5 and 6, or a candidate for one."""
    base = replace(NV, batch=batch, optim=replace(NV.optim, momentum=momentum))
    return with_final_norm(row_run(base, row, settings, NV_LAYERS), row)


def nv_settings(choices: Choices, small: Choices, row: str, batch: int, momentum: float) -> Settings:
    """What was chosen for a row at batch 128; with a small batch and the learning rate chosen there, if it was."""
    settings = choices[row].places[momentum]
    if batch < 128 and row in small:
        return {**settings, "lr": nearest(small[row].places, batch)["lr"]}
    return settings


def nv_candidates() -> Iterator[Candidate]:
    """The grid of the tuning: one run each."""
    tried: dict[str, list[Settings]] = {row: [{"lr": lr} for lr in NV_RATES] for row in NV_ROWS}
    tried["GN"] = star(NV_RATES, 0.05, "groups", NV_GROUPS, 16)
    tried |= {row: star(NV_RATES, 0.05, "decay", NV_DECAYS, 1.0) for row in NV_ROWS if row in IMPLICIT}
    for row, several in tried.items():
        for momentum in (MOMENTUM, NO_MOMENTUM):
            for settings in several:
                run = held_out(nv_run(row, 128, momentum, settings), HELD_OUT, epochs=NV_TUNING_EPOCHS)
                yield Candidate(row, momentum, settings, seeds(run, 1))


def small_candidates() -> Iterator[Candidate]:
    """Learning rates for small batches with momentum: one run each."""
    for row, places in SMALL_PROVISIONAL.items():
        for batch in places:
            for lr in NV_RATES:
                run = nv_run(row, int(batch), MOMENTUM, {"groups": 16, "lr": lr})
                run = held_out(run, HELD_OUT, epochs=SMALL_EPOCHS)
                yield Candidate(row, batch, {"lr": lr}, seeds(run, 1))


def gn_candidates() -> Iterator[Candidate]:
    """Smaller learning rates for GN at batch 8, where all of the rates of the tables failed."""
    for lr in (0.0005, 0.001, 0.002, 0.005):
        run = nv_run("GN", 8, MOMENTUM, {"groups": 16, "lr": lr})
        yield Candidate("GN", 8, {"lr": lr}, seeds(held_out(run, HELD_OUT, epochs=SMALL_EPOCHS), 1))


GN_TUNING = "stock2019/tuning-gn-batch-8"
NV_TUNING, NV_WHERE = "stock2019/tuning-cifar-nv", "{}, momentum {:g}"
SMALL_TUNING, SMALL_WHERE = "stock2019/tuning-small-batches", "{}, batch {:g}"


def nv_tuning_rows(rows: Iterable[str]) -> tuple[str, ...]:
    """The rows of the tuning artifact that decide about these rows of the tables."""
    return tuple(NV_WHERE.format(row, at) for row in rows for at in NV_PROVISIONAL[row])


def nv_tuning(choices: Choices) -> Artifact:
    return Artifact(
        name=NV_TUNING,
        title="Choosing learning rates and groups for tables 2, 3, 5 and 6",
        says="It cross-validates and does not print what it chose.",
        protocol="As the tables, at batch 128 on a schedule of 32 epochs, scored on the 10,000 held-out images. One "
        "run each. Where there is a second setting (GN's groups, the penalty of implicit ENorm) it is tried at a "
        "learning rate of 0.05, and the learning rates with 16 groups and a penalty of 1. Of equal settings the "
        "smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, NV_WHERE) for candidate in TUNINGS[NV_TUNING]),
        claims=(in_use(choices, NV_WHERE),),
        compares=False,
        shrink=toy_candidate,
    )


def small_tuning(choices: Choices) -> Artifact:
    return Artifact(
        name=SMALL_TUNING,
        title="Choosing learning rates for small batches with momentum, tables 3 and 6",
        says="It cross-validates and does not print what it chose.",
        protocol=f"As the tables, on a schedule of {SMALL_EPOCHS} epochs, scored on the 10,000 held-out images; GN "
        "with 16 groups. One run each. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, SMALL_WHERE) for candidate in TUNINGS[SMALL_TUNING]),
        claims=(in_use(choices, SMALL_WHERE),),
        compares=False,
        shrink=toy_candidate,
    )


def gn_tuning(decided: bool, choices: Choices) -> Artifact:
    return Artifact(
        name=GN_TUNING,
        title="Choosing a learning rate for GN at batch 8 anew, table 3",
        says="It cross-validates and does not print what it chose.",
        protocol=f"As {SMALL_TUNING}, where GN at batch 8 stayed at chance or diverged with 0.01, 0.05 and 0.1: the "
        "best of runs that all failed is no choice. Smaller rates, added when table 3 had been seen, whose GN at batch "
        "8 has 0.01. One run each. Of equal settings the smaller rate is taken.",
        cells=tuple(candidate_cell(candidate, SMALL_WHERE) for candidate in LATER_TUNINGS[GN_TUNING]),
        claims=(in_use({"GN": Choice({8: choices["GN"].places[8]})}, SMALL_WHERE),) if decided else (),
        compares=False,
        shrink=toy_candidate,
    )


def _ahead_of_baseline(means: Means) -> bool:
    columns = columns_of(means, "Baseline", "ENorm-1")
    return wins(means, "ENorm-1", "Baseline", columns) == len(columns)


def _comparable_to_bn(means: Means) -> bool:
    small = [column for column in columns_of(means, "BN", "ENorm-1.2") if int(column) <= 32]
    if not small:
        raise KeyError("a batch size of 8, 16 or 32")
    return abs(over(means, "ENorm-1.2", small) - over(means, "BN", small)) <= 1


def _implicit_ahead_of_baseline(means: Means) -> bool:
    rows = ("ENorm-Impl-1", "ENorm-Impl-1.2")
    columns = columns_of(means, "Baseline", *rows)
    return sum(wins(means, row, "Baseline", columns) for row in rows) > len(columns)


def _implicit_behind_explicit(means: Means) -> bool:
    columns = columns_of(means, "ENorm-1", "ENorm-1.2", "ENorm-Impl-1", "ENorm-Impl-1.2")
    if len(columns) < 3:
        raise KeyError("three batch sizes")
    return all(over(means, f"ENorm-Impl-{c}", columns) < over(means, f"ENorm-{c}", columns) for c in ("1", "1.2"))


EXPLICIT_CLAIMS = (
    Claim(
        "ENorm systematically outperforms the baseline: ENorm-1 at every batch size that was run", _ahead_of_baseline
    ),
    Claim(
        "For small batches (8, 16, 32) ENorm-1.2 is comparable to BN (we say: within one point on average)",
        _comparable_to_bn,
    ),
)
IMPLICIT_CLAIMS = (
    Claim("Implicit ENorm is ahead of the baseline in most cases", _implicit_ahead_of_baseline),
    Claim("Implicit ENorm is not on a par with explicit ENorm (mean over batch sizes)", _implicit_behind_explicit),
)


EXPLICIT_SAYS = "ENorm outperforms the baseline in all cases; for small batches ENorm-1.2 is comparable to BN."
IMPLICIT_SAYS = "Implicit ENorm is better than the baseline in most cases, but not on a par with explicit ENorm."


def nv_table(number: int, momentum: float, implicit: bool, choices: Choices, small: Choices) -> Artifact:
    """Tables 2 and 3, or 5 and 6, which add implicit ENorm and batches of 256."""
    rows, batches = (NV_ROWS, BATCHES) if implicit else (NV_ROWS[:5], BATCHES[:5])
    return Artifact(
        name=f"stock2019/table{number}",
        title=f"CIFAR-NV on CIFAR-10, {'with' if momentum else 'no'} momentum{', implicit ENorm too' * implicit}",
        says=IMPLICIT_SAYS if implicit else EXPLICIT_SAYS,
        protocol=nv_protocol(_of(rows, choices), _of(rows, small)),
        cells=grid(
            rows,
            batches,
            lambda row, batch: nv_run(row, batch, momentum, nv_settings(choices, small, row, batch, momentum)),
            n=lambda row, batch: 3 if batch == 128 and momentum and row not in IMPLICIT else 1,
            paper={row: NV_PAPER[momentum][row][: len(batches)] for row in rows},
        ),
        claims=IMPLICIT_CLAIMS if implicit else EXPLICIT_CLAIMS,
        x_label="batch size",
        shrink=toy_run,
    )


NV_RATE_VARIANTS = _rates(0.01, 0.05)
NV_OTHER_VARIANTS: Variants = {
    "He initialization": partial(changed, init="he"),
    "biases": partial(changed, bias=True),
    "no BatchNorm behind the classifier": partial(changed, final_norm=None),
    "crops of images padded by 2": lambda run: replace(run, data=replace(run.data, padding=2)),
}
FASTER = "ENorm-1, lr 0.05"


def nv_variants(choices: Choices) -> Artifact:
    """What the paper leaves open, and where the authors' program differs from it."""
    rows = ("Baseline", "ENorm-1", "ENorm-1.2")
    starts = {row: nv_run(row, 128, MOMENTUM, choices[row].places[MOMENTUM]) for row in rows}
    starts[FASTER] = changed(starts["ENorm-1"], lr=0.05)

    def part(variants: Variants, columns: Sequence[str]) -> tuple[Cell, ...]:
        return grid(
            variants,
            columns,
            lambda variant, column: variants[variant](starts[column]),
            n=lambda variant, _: 3 if variant == "lr 0.05" else 1,
        )

    return Artifact(
        name="stock2019/variants-cifar-nv",
        title="Baseline and ENorm of table 3 at batch 128, one thing at a time (ours)",
        says="",
        protocol=f"{nv_protocol(_of(rows, choices), {})}\nHere: momentum, batch 128, one choice changed in each "
        "row; n = 3 with lr 0.05, 1 elsewhere. Added after table 3 had been seen. ENorm-1.2, and ENorm-1 at 0.05 with "
        "the other changes, were added when all else here was in: at 0.05 ENorm-1 is ahead of the baseline, at 0.01, "
        "which was chosen for it, behind. Nothing was chosen by these runs.",
        cells=(
            *part(NV_RATE_VARIANTS, rows),
            *part(NV_OTHER_VARIANTS, ("Baseline", "ENorm-1", FASTER)),
        ),
        compares=False,
        shrink=toy_run,
    )


RELEASED_NV = {"Baseline": Method(), "BN": Method(), "ENorm-1.1": released(1.1)}


def _released_nv_run(row: str, batch: int) -> Run:
    run = row_run(replace(NV, batch=batch, optim=replace(NV.optim, momentum=MOMENTUM)), row, {"lr": 0.05}, NV_LAYERS)
    run = changed(run, method=RELEASED_NV[row], init="he", end="released")
    return replace(run, data=replace(run.data, padding=2))


RELEASED_CIFAR_NV = Artifact(
    name="stock2019/cifar-nv-released",
    title="CIFAR-NV with the head of the authors' program, batch 128, momentum",
    says=EXPLICIT_SAYS,
    protocol="As table 3 but for what the authors' program has otherwise: He's initialization, crops of images padded "
    "by 2, a head that averages one corner of 5 x 5 of a map of 9 x 9, after a ReLU on the logits; no BatchNorm behind "
    "it; a cycle that leaves the last layer out. ENorm has c = 1.1, learning rate 0.05 and momentum 0.9, as in the "
    "command of its README; the others have the same. 128 epochs on 40,000 images, batch 128, weight decay 1e-3, the "
    "learning rate falls quadratically to 1e-4. n = 3. bfloat16 with float32 weights on a GPU.",
    cells=grid(
        RELEASED_NV,
        (128,),
        _released_nv_run,
        n=3,
        paper={row: (NV_PAPER[MOMENTUM][row][BATCHES.index(128)],) for row in ("Baseline", "BN")},
    ),
    claims=(
        Claim(
            "ENorm outperforms the baseline: ENorm-1.1 at batch 128",
            lambda means: bool(wins(means, "ENorm-1.1", "Baseline", [128])),
        ),
    ),
    variant_of="stock2019/table3",
    x_label="batch size",
    shrink=toy_run,
)


def nv_tables(choices: Choices, small: Choices) -> list[Artifact]:
    return [
        nv_table(2, NO_MOMENTUM, False, choices, {}),
        nv_table(3, MOMENTUM, False, choices, small),
        nv_table(5, NO_MOMENTUM, True, choices, {}),
        nv_table(6, MOMENTUM, True, choices, small),
        nv_variants(choices),
    ]


# -- ImageNet (section 6.3): table 4 and figure 5 ----------------------------------------------------------------------

IMAGENET_BATCHES = (32, 64, 128, 256)
IMAGENET_DECAY = {32: 1e-5, 64: 10**-4.5, 128: 1e-4, 256: 1e-4}
IMAGENET_PAPER = {
    "Baseline": (66.20, 68.60, 69.20, 69.58),
    "BN": (68.01, 69.38, 70.83, 71.37),
    "GN": (68.94, 68.90, 70.69, 70.64),
    "ENorm-1": (69.70, 70.10, 71.03, 71.14),
}
IMPLICIT_128 = 69.33  # appendix C

IMAGENET = Run(
    data=Data("imagenet", crop=224, flip=True),
    model=Model("resnet18", {"skips": "C", "init": "he"}),
    optim=Optim(momentum=0.9, schedule=Quadratic(final=1e-5)),
    epochs=90,
    precision="bfloat16",
)

IMAGENET_PROTOCOL = """\
ResNet-18 with learned (type C) skips, He initialization, augmentation of Szegedy et al. 2014 (crops of 8 to 100 % of
the image's area) and flips. 90 epochs of SGD with momentum 0.9, learning rate
0.1 B / 256 falling quadratically to 1e-5, weight decay 1e-4 for B = 128 and 256, 10^-4.5 for 64 and 1e-5 for 32; GN
has 32 groups; the baseline and ENorm have a BatchNorm behind the classifier.
The paper trains on 8 GPUs with BatchNorm's statistics per GPU (B / 8 images) and reports the median of the last five
epochs; we score the last epoch, and statistics are those of the processes the run is spread over: 8 for the paper's.
n = 1."""


def imagenet_run(row: str, batch: int) -> Run:
    base = replace(IMAGENET, batch=batch, optim=replace(IMAGENET.optim, weight_decay=IMAGENET_DECAY[batch]))
    settings = {"lr": 0.1 * batch / 256, "groups": 32, "decay": 1.0}
    return with_final_norm(row_run(base, row, settings, layers=1), row)


def imagenet_shrink(run: Run) -> Run:
    """Learning rate and weight decay belong to the batch size, which is lost."""
    toy = toy_run(run)
    return replace(toy, optim=replace(toy.optim, lr=0.1, weight_decay=1e-4))


TABLE_4 = Artifact(
    name="stock2019/table4",
    title="ResNet-18 (type C) on ImageNet",
    says="ENorm outperforms BN and GN for batches of 32 to 128; BN suffers from small batches.",
    protocol=IMAGENET_PROTOCOL,
    cells=(
        *grid(IMAGENET_PAPER, IMAGENET_BATCHES, imagenet_run, n=1, paper=IMAGENET_PAPER),
        *grid(("ENorm-Impl-1",), (128,), imagenet_run, n=1, paper={"ENorm-Impl-1": (IMPLICIT_128,)}),
    ),
    claims=(
        Claim(
            "ENorm-1 outperforms BN and GN for batch sizes 32 to 128",
            lambda means: all(wins(means, "ENorm-1", row, (32, 64, 128)) == 3 for row in ("BN", "GN")),
        ),
        Claim(
            "BN decreases with small batches",
            lambda means: means["BN", "32"] < means["BN", "64"] < means["BN", "128"] < means["BN", "256"],
        ),
    ),
    x_label="batch size",
    shrink=imagenet_shrink,
)

FIGURE_5 = Artifact(
    name="stock2019/figure5",
    title="ResNet-18 (type C) on ImageNet, batch 64: training curves",
    says="BN and GN converge faster, ENorm ends higher.",
    protocol=IMAGENET_PROTOCOL,
    cells=grid(
        IMAGENET_PAPER, (64,), imagenet_run, n=1, paper={row: values[1:2] for row, values in IMAGENET_PAPER.items()}
    ),
    claims=(
        Claim(
            "ENorm-1 ends above BN, GN and the baseline",
            lambda means: all(wins(means, "ENorm-1", row, (64,)) for row in ("BN", "GN", "Baseline")),
        ),
    ),
    kind="curves",
    x_label="batch size",
    shrink=imagenet_shrink,
)


# -- all of it ---------------------------------------------------------------------------------------------------------

TUNINGS: dict[str, tuple[Candidate, ...]] = {
    FC_TUNING: tuple(fc_candidates()),
    NV_TUNING: tuple(nv_candidates()),
    SMALL_TUNING: tuple(small_candidates()),
}
LATER_TUNINGS = {GN_TUNING: tuple(gn_candidates())}  # which decide again where those above found nothing that trains


def artifacts(chosen: Chosen | None = None) -> list[Artifact]:
    """Every table and figure, with the settings that the tunings decided (those of `chosen.json` by default)."""
    chosen = committed() if chosen is None else chosen
    fc = choices_of(FC_TUNING, chosen, FC_PROVISIONAL)
    nv = choices_of(NV_TUNING, chosen, NV_PROVISIONAL)
    small = choices_of(SMALL_TUNING, chosen, SMALL_PROVISIONAL)
    computed, tunings = [TABLE_1, FIGURE_6, FIGURE_7, FIGURE_9], [fc_tuning(fc), nv_tuning(nv), small_tuning(small)]
    anew = chosen.get(GN_TUNING, {}).get("GN", {})
    if anew:
        small = {**small, "GN": Choice({**small["GN"].places, **anew}, GN_TUNING)}
    tunings.append(gn_tuning(bool(anew), small))
    later = [released_figure(fc), BIASES_LEFT, RELEASED_CIFAR_NV]
    return [*computed, *tunings, *fc_figures(fc), *nv_tables(nv, small), TABLE_4, FIGURE_5, *later]
