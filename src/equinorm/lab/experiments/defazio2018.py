"""defazio2018: "Controlling covariate shift using equilibrium normalization of weights". EquiNorm against BN and GN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from ..training.runs import Data, Model, Optim, Run
from ..training.schedules import Step, SuperConvergence
from .artifacts import Artifact, Cell, Claim, Means, seeds
from .common import changed, grid, toy_run, wins

__all__ = ["artifacts"]

MIXUP = 6.0  # α, from the captions of figure 4

WRN = Run(
    data=Data("cifar10", padding=4, flip=True),
    model=Model("wrn_20_96", {"norm": "batchnorm", "init": "he_fan_out"}),
    optim=Optim(lr=0.1, momentum=0.9, weight_decay=1e-4, schedule=Step(milestones=(0.5, 0.75))),
    epochs=300,
    batch=128,
    precision="bfloat16",
)

NORMS: dict[str, dict[str, Any]] = {
    "BN": {"norm": "batchnorm"},
    "EquiNorm": {"norm": "equinorm"},
    "GN": {"norm": "groupnorm", "norm_options": {"groups": 32}},
    "EquiNorm, quarter of the batch": {"norm": "equinorm", "norm_options": {"stats_fraction": 0.25}},
}
QUARTER = "EquiNorm, quarter of the batch"


def normed(run: Run, row: str) -> Run:
    """`run` with a row's normalization, and the inputs that go with it: EquiNorm wants pixels that are not negative."""
    inputs = "unit" if "EquiNorm" in row else "standard"
    return replace(changed(run, **NORMS[row]), data=replace(run.data, inputs=inputs))


def with_mixup(run: Run) -> Run:
    return replace(run, data=replace(run.data, mixup=MIXUP, manifold=True))


NETWORK = """\
A wide ResNet with 20 layers and 96 planes, 9.7 M parameters, He initialization by fan-out (that its blocks are not
pre-activation is our reading: the number of parameters does not tell); 4 pixels of padding, random 32 x 32 crops and
flips; SGD with momentum 0.9, not Nesterov's, weight decay 1e-4 on all parameters, batch 128. GN has 32 groups, which
the paper does not give."""
CHOSEN = """\
EquiNorm is the single-pass variant, as in all of the paper's experiments, with balanced initialization and inputs in
[0, 1] (the paper recommends to leave out input normalization; for BN and GN the paper is silent and inputs are
normalized per channel). bfloat16 with float32 weights on a GPU."""
MANIFOLD = """\
Manifold mixup with alpha = 6 (from figure 4's captions), at the input or behind the first or second stage, one λ per
batch, as in Verma et al.'s code; the loss is the cross-entropy with mixed targets, where that code has a binary one for
each class."""

# -- figure 2 and the quarter-batch claim (section 6.1) ----------------------------------------------------------------

FULL_PROTOCOL = f"""\
{NETWORK} Learning rate 0.1, divided by 10 at epochs 150 and 225 of 300; no mixup.
{CHOSEN} One run each; the paper does not give its n here."""


def full_run(row: str, column: str) -> Run:
    return normed(WRN, row)


EARLY = "test_accuracy@10"


def rises(means: Means, row: str) -> bool:
    """Whether the test loss is higher before the second drop of the learning rate than behind the first."""
    return means[row, "CIFAR-10", "test_loss@225"] > means[row, "CIFAR-10", "test_loss@151"]


FIGURE_2 = Artifact(
    name="defazio2018/figure2",
    title="WRN on CIFAR-10 without mixup: test loss",
    says="EquiNorm converges faster and overfits: its test loss rises after the first drop of the learning rate. With "
    "statistics of a quarter of the batch no overfitting is visible.",
    protocol=f"{FULL_PROTOCOL} The epochs that decide the sentences about curves were fixed when those had been seen.",
    cells=grid(("BN", "EquiNorm", QUARTER), ("CIFAR-10",), full_run, n=1),
    claims=(
        Claim(
            "EquiNorm converges faster than BN: after 10 epochs its test accuracy is higher",
            lambda means: means["EquiNorm", "CIFAR-10", EARLY] > means["BN", "CIFAR-10", EARLY],
        ),
        Claim(
            "EquiNorm overfits more than BN: its test loss ends higher",
            lambda means: means["EquiNorm", "CIFAR-10"] > means["BN", "CIFAR-10"],
        ),
        Claim(
            "Its test loss rises between the two drops of the learning rate, and that of BN does not",
            lambda means: rises(means, "EquiNorm") and not rises(means, "BN"),
        ),
        Claim("With a quarter of the batch it does not rise", lambda means: not rises(means, QUARTER)),
    ),
    kind="curves",
    metric="test_loss",
    unit="",
    band="quartiles",
    shrink=toy_run,
)

QUARTER_CLAIM = Artifact(
    name="defazio2018/quarter",
    title="WRN on CIFAR-10 without mixup: statistics of a quarter of the batch",
    says="Using the first quarter of the batch for the statistics fixes the overfitting: EquiNorm 95.8 %, BN 94.7 %.",
    protocol=FULL_PROTOCOL,
    cells=grid(("BN", QUARTER, "EquiNorm"), ("CIFAR-10",), full_run, n=1, paper={"BN": (94.7,), QUARTER: (95.8,)}),
    claims=(
        Claim(
            "EquiNorm with a quarter of the batch is ahead of BN",
            lambda means: means[QUARTER, "CIFAR-10"] > means["BN", "CIFAR-10"],
        ),
        Claim(
            "and of EquiNorm with all of it (ours)",
            lambda means: means[QUARTER, "CIFAR-10"] > means["EquiNorm", "CIFAR-10"],
        ),
    ),
    band="quartiles",
    shrink=toy_run,
)

# -- figure 3: 30 epochs (section 6.2) ---------------------------------------------------------------------------------

SHORT = with_mixup(replace(WRN, epochs=30, optim=replace(WRN.optim, schedule=SuperConvergence())))
SHORT_RUNS = {"BN": 5, "EquiNorm": 5, "GN": 2}
SHORT_PAPER = {"BN": (93.3, 0.77), "EquiNorm": (94.0, 0.22)}  # median and interquartile range

FIGURE_3 = Artifact(
    name="defazio2018/figure3",
    title="WRN on CIFAR-10, 30 epochs of super-convergence",
    says="EquiNorm reaches a median of 94.0 % (interquartile range 0.22), BN 93.3 % (0.77).",
    protocol=f"{NETWORK} 30 epochs: the learning rate rises from 0.1 to 0.5 at epoch 13, falls to 0.1 at 26 and "
    "100-fold further to the end; momentum 0.95, 0.85, 0.95, and 0.85 after epoch 26, in whole epochs. The rises are "
    f"taken as straight lines, the last fall as exponential.\n{MANIFOLD}\n{CHOSEN} n = 5 for BN and EquiNorm, 2 for "
    "GN; the paper has 10.",
    cells=tuple(
        Cell(row, "CIFAR-10", seeds(replace(normed(SHORT, row), label=row), n), *SHORT_PAPER.get(row, (None, None)))
        for row, n in SHORT_RUNS.items()
    ),
    claims=(
        Claim(
            "After 30 epochs the median of EquiNorm is above that of BN (94.0 against 93.3)",
            lambda means: means["EquiNorm", "CIFAR-10"] > means["BN", "CIFAR-10"],
        ),
    ),
    kind="curves",
    band="quartiles",
    shrink=toy_run,
)

# -- what figure 3 leaves open (ours) ----------------------------------------------------------------------------------

Variant = Callable[[Run], Run]


def nesterov(run: Run) -> Run:
    return replace(run, optim=replace(run.optim, nesterov=True))


def warmed_up(run: Run) -> Run:
    return replace(run, optim=replace(run.optim, schedule=SuperConvergence(warm_up=1)))


def binary_and_nesterov(run: Run) -> Run:
    return nesterov(replace(run, loss="binary"))


def normalized(run: Run) -> Run:
    return replace(run, data=replace(run.data, inputs="standard"))


def less_mixed(run: Run) -> Run:
    """With mixup's alpha of the example in Verma et al.'s program."""
    return replace(run, data=replace(run.data, mixup=2.0))


def unmixed(run: Run) -> Run:
    return replace(run, data=replace(run.data, mixup=0.0, manifold=False))


WARM_UP, NO_MIXUP = "one epoch of warm-up", "no mixup"
BOTH = ("BN", "EquiNorm")
VARIANTS: dict[str, tuple[Variant, tuple[str, ...]]] = {
    "as in figure 3": (lambda run: run, (*BOTH, "GN")),
    "the binary loss of Verma et al.'s program": (lambda run: replace(run, loss="binary"), (*BOTH, "GN")),
    WARM_UP: (warmed_up, (*BOTH, "GN")),
    "Nesterov's momentum, that program's default": (nesterov, BOTH),
    "that loss and that momentum": (binary_and_nesterov, BOTH),
    "mixup with alpha = 2, its example": (less_mixed, BOTH),
    "mixup at the input alone": (lambda run: replace(run, data=replace(run.data, manifold=False)), BOTH),
    "activation first": (partial(changed, preact=True), BOTH),
    NO_MIXUP: (unmixed, BOTH),
    "normalized inputs": (normalized, ("EquiNorm",)),
    "TF32": (lambda run: replace(run, precision="tf32"), ("EquiNorm",)),
}

OPEN_CHOICES = Artifact(
    name="defazio2018/variants",
    title="What figure 3 leaves open, one thing at a time (ours)",
    says="",
    protocol=f"{FIGURE_3.protocol}\nHere: one choice changed in each row, in one of them two, n = 1. The binary loss "
    "has a ninth of the gradient as long as all classes are equally likely. Added after the first 7 runs of figure 3 "
    "had been seen: BN and GN were unstable in their first steps there, and one run of BN diverged. Nesterov's "
    "momentum, alpha = 2 and TF32 for EquiNorm were added when 12 of these runs were in: what helped BN had done "
    "nothing for EquiNorm. Mixup at the input alone was added when 15 were in, and those of figure 2, where EquiNorm "
    "is ahead without mixup. Nothing was chosen by these runs.",
    cells=tuple(
        Cell(name, row, (replace(variant(normed(SHORT, row)), label=name),))
        for name, (variant, rows) in VARIANTS.items()
        for row in rows
    ),
    compares=False,
    shrink=toy_run,
)


def chained(*variants: Variant) -> Variant:
    return lambda run: reduce(lambda done, variant: variant(done), variants, run)


LESS = "alpha = 2"
WITH_LESS: dict[str, tuple[Variant, tuple[str, ...], int]] = {  # and how many seeds
    f"alpha = 6, {WARM_UP}": (warmed_up, BOTH, 1),
    LESS: (less_mixed, BOTH, 3),
    f"{LESS}, {WARM_UP}": (chained(less_mixed, warmed_up), BOTH, 2),
    f"{LESS}, binary loss, Nesterov's momentum": (chained(less_mixed, binary_and_nesterov), BOTH, 1),
    f"{LESS}, normalized inputs": (chained(less_mixed, normalized), ("EquiNorm",), 1),
    NO_MIXUP: (unmixed, BOTH, 2),
}
TESTED_TWICE = replace(SHORT, record=("fresh_statistics",))

LESS_MIXUP = Artifact(
    name="defazio2018/variants-mixup",
    title="Figure 3 with less mixup (ours)",
    says="",
    protocol=f"{FIGURE_3.protocol}\nHere: alpha = 2, and no mixup. The paper prints alpha = 6 for figure 4 alone, "
    "whose networks are trained for much longer. Added when all of `defazio2018/variants` was in, where alpha = 2 "
    "gained 1.4 points for each method; what had helped one of them most there is tried again with it. n = 3 with "
    "alpha = 2 alone, 2 with warm-up and without mixup, 1 elsewhere. Nothing was chosen by these runs.",
    cells=tuple(
        Cell(name, row, seeds(replace(variant(normed(TESTED_TWICE, row)), label=name), n))
        for name, (variant, rows, n) in WITH_LESS.items()
        for row in rows
    ),
    compares=False,
    shrink=toy_run,
)

GRID: dict[str, Variant] = {
    "as it is": lambda run: run,
    WARM_UP: warmed_up,
    "binary loss, Nesterov's momentum": binary_and_nesterov,
    "binary loss, Nesterov's momentum, activation first, no final norm": chained(
        binary_and_nesterov, partial(changed, preact=True, last_activation=False)
    ),
}

NORMALIZED = Artifact(
    name="defazio2018/normalized",
    title="Figure 3 with normalized inputs and less mixup (ours)",
    says="",
    protocol=f"{FIGURE_3.protocol}\nHere: inputs normalized per channel for EquiNorm too, alpha = 2, and what the "
    "public manifold-mixup program has, from which the authors started: its binary loss and Nesterov's momentum, and "
    "the activation first with nothing between the last block and the mean over its map. Every setting n = 2; then the "
    "best of each method, by test accuracy, n = 4. Added when single runs of `defazio2018/variants-mixup` had been "
    "seen.",
    cells=tuple(
        Cell(
            name,
            row,
            seeds(replace(chained(normalized, less_mixed, variant)(normed(TESTED_TWICE, row)), label=name), 4),
        )
        for name, variant in GRID.items()
        for row in BOTH
    ),
    compares=False,
    shrink=toy_run,
)

FRESH_STATISTICS = replace(
    LESS_MIXUP,
    name="defazio2018/variants-statistics",
    title="Figure 3 and less mixup, statistics of images not mixed (ours)",
    protocol=f"{LESS_MIXUP.protocol}\nThe networks of `defazio2018/variants-mixup`, tested with running statistics "
    "that are taken anew at the end, of 50 batches of training images, augmented and not mixed: those that training "
    "leaves are of mixed images, and test images are not.",
    metric="fresh_statistics.test_accuracy",
)

# -- figure 4: larger experiments (sections 6.1, 6.3, 6.4) -------------------------------------------------------------

PREACT = with_mixup(replace(WRN, model=Model("preact_resnet", {"depth": 152, "init": "he_fan_out"})))
PANELS = {
    "a": ("CIFAR-10", PREACT, 10),
    "b": ("CIFAR-100", replace(PREACT, data=replace(PREACT.data, name="cifar100")), 10),
    "c": (
        "SVHN",
        replace(
            with_mixup(WRN),
            data=Data("svhn", {"extra": True}, padding=4, mixup=MIXUP, manifold=True),
            epochs=160,
            batch=256,
        ),
        10,
    ),
    "d": (
        "ImageNet",
        replace(
            WRN,
            data=Data("imagenet", crop=224, flip=True),
            model=Model("resnet50", {"init": "he_fan_out"}),
            optim=replace(WRN.optim, schedule=Step(milestones=(1 / 3, 2 / 3))),
            epochs=90,
            batch=256,
        ),
        3,
    ),
}
PREACT_PROTOCOL = f"""\
Pre-activation ResNet-152 with bottlenecks, 58.1 M parameters; otherwise as figure 2: SGD with momentum 0.9, weight
decay 1e-4, batch 128, learning rate 0.1 divided by 10 at epochs 150 and 225 of 300, padding 4, crops and flips.
{MANIFOLD}
{CHOSEN} The paper has 10 runs, and shows medians and quartiles."""
PANEL_PROTOCOLS = {
    "a": PREACT_PROTOCOL,
    "b": PREACT_PROTOCOL,
    "c": f"""\
The WRN of figure 2 on SVHN with its extra images, batch 256, learning rate divided by 10 at epochs 80 and 120. The
paper does not say when training ends; we take 160, as the other schedules end at 4/3 of the second drop. It uses two
GPUs with statistics per GPU, 128 images each; with one process ours are of 256. Crops but no flips (the paper is
silent): a mirrored digit is not one. GN has 32 groups.
{MANIFOLD}
{CHOSEN} The paper has 10 runs.""",
    "d": f"""\
ResNet-50 («standard»), preliminary experiments of which the paper gives no settings. We take the usual ones: 90
epochs, batch 256, learning rate 0.1 divided by 10 at epochs 30 and 60, weight decay 1e-4, crops of 8 to 100 % of the
area, flips; no mixup. {CHOSEN} The paper has 3 runs.""",
}
SAME = 0.5  # points within which the paper's «essentially the same» is read


def figure_4(panel: str, says: str, *claims: Claim) -> Artifact:
    data, run, n = PANELS[panel]
    return Artifact(
        name=f"defazio2018/figure4{panel}",
        title=f"{'WRN' if panel == 'c' else 'ResNet-50' if panel == 'd' else 'PreActResNet-152'} on {data}",
        says=says,
        protocol=PANEL_PROTOCOLS[panel],
        cells=grid(("BN", "EquiNorm", "GN"), (data,), lambda row, _: normed(run, row), n=n),
        claims=claims,
        kind="curves",
        band="quartiles",
        shrink=toy_run,
    )


def essentially_the_same(data: str) -> Claim:
    return Claim(
        f"{data}: EquiNorm ends essentially at the accuracy of BN (we say: within {SAME} points)",
        lambda means: abs(means["EquiNorm", data] - means["BN", data]) <= SAME,
    )


FIGURES_4 = (
    figure_4(
        "a",
        "The final accuracy is essentially the same; EquiNorm converges significantly faster in the early epochs.",
        essentially_the_same("CIFAR-10"),
    ),
    figure_4("b", "Similar to CIFAR-10.", essentially_the_same("CIFAR-100")),
    figure_4(
        "c",
        "EquiNorm is essentially as good as BN; GroupNorm appears inferior.",
        essentially_the_same("SVHN"),
        Claim(
            "GN is behind BN and EquiNorm",
            lambda means: all(wins(means, r, "GN", ["SVHN"]) for r in ("BN", "EquiNorm")),
        ),
    ),
    figure_4(
        "d",
        "EquiNorm has a generalization gap to BN and GN.",
        Claim(
            "EquiNorm is behind BN and GN",
            lambda means: all(wins(means, r, "EquiNorm", ["ImageNet"]) for r in ("BN", "GN")),
        ),
    ),
)


def artifacts() -> list[Artifact]:
    return [FIGURE_3, OPEN_CHOICES, LESS_MIXUP, FRESH_STATISTICS, FIGURE_2, QUARTER_CLAIM, *FIGURES_4, NORMALIZED]
