"""repro2019: "Reproducibility of equi-normalization of neural networks". Deep fully connected nets on CIFAR-10."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Linear
from .artifacts import Artifact, Claim
from .common import Means, changed, grid, over, toy_run, trained, wins

__all__ = ["CIFAR10", "DEPTHS", "LEARNING_RATES", "artifacts", "fc_run", "shrink"]

DEPTHS = tuple(range(1, 20, 2))  # intermediary layers of 500 x 500
RUNS = 5  # the paper: two of Baseline and ENorm, one of the others

LEARNING_RATES = {  # table 1: initial learning rates, in the order of DEPTHS
    "Baseline": (0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05),
    "BN": (0.1,) * 10,
    "ENorm": (0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.01, 0.01),
    "ENorm + BN": (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05),
}

# Printed in sections 2 and 4.2. The deviations are means over images: those of all pixels are 0.247, 0.243, 0.262.
CIFAR10 = Data("cifar10", mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))

BASE = Run(
    data=CIFAR10,
    model=Model("fc", {"width": 500, "norm": "none", "bias": False, "init": "he"}),
    optim=Optim(weight_decay=1e-3, schedule=Linear()),
    epochs=60,
    batch=256,
)
ENORM = Method("enorm", {"c": 1.2})
PLAIN, SAFE, BIASED = "ENorm + bias, plain", "ENorm + bias, safe", "Baseline + bias"

PROTOCOL = """\
A linear layer 3072 x 500, p layers 500 x 500 and one 500 x 10, ReLU between them, no biases, He initialization. 60
epochs of SGD without momentum, batch 256, learning rate from table 1 decayed linearly to 0; no augmentation; the test
set is scored with the final weights. Inputs minus (0.4914, 0.4822, 0.4465) over (0.2023, 0.1994, 0.2010), as printed.
Weight decay is printed as «10e-3»; we read 1e-3, which is what stock2019 writes. He's initialization is taken as
normal with variance 2 / fan-in, which the paper does not say; stock2019 uses Xavier's, so these are not the runs of
its figure 4. ENorm is c = 1.2, one cycle after each step; in ENorm + BN, BatchNorm stands before each ReLU and ENorm
does not see it (`batchnorm="ignore"`), as published: there a cycle changes the function. We do not restart runs that
end in NaN, as the paper did. n = 5; the paper has two runs of Baseline and ENorm, one of the others. Matrix products
in TF32 on a GPU."""

RATES = "Learning rates (table 1), for p = 1, 3, ..., 19: " + "; ".join(
    f"{row}: {' '.join(f'{lr:g}' for lr in rates)}" for row, rates in LEARNING_RATES.items()
)


ROWS: dict[str, tuple[str, Method, dict[str, Any]]] = {  # the column of table 1, the method, options of the model
    "Baseline": ("Baseline", Method(), {}),
    "BN": ("BN", Method(), {"norm": "batchnorm"}),
    "ENorm": ("ENorm", ENORM, {}),
    "ENorm + BN": ("ENorm + BN", Method("enorm", {"c": 1.2, "batchnorm": "ignore"}), {"norm": "batchnorm"}),
    BIASED: ("Baseline", Method(), {"bias": True}),
    PLAIN: ("ENorm", Method("enorm", {"c": 1.2, "bias": "plain"}), {"bias": True}),
    SAFE: ("ENorm", Method("enorm", {"c": 1.2, "bias": "safe"}), {"bias": True}),
}


def fc_run(row: str, depth: int) -> Run:
    """A run of figure 2 (Baseline, BN, ENorm, ENorm + BN) or figure 3 (with biases)."""
    rates, method, options = ROWS[row]
    lr = LEARNING_RATES[rates][DEPTHS.index(depth)]
    return changed(BASE, method=method, lr=lr, hidden=depth, **options)


def shrink(run: Run) -> Run:
    """Two toy depths stand for the shallow and the deep nets."""
    return toy_run(run, hidden=1 if run.model.options["hidden"] <= 9 else 3)


# -- figure 2 ----------------------------------------------------------------------------------------------------------


def _ranking(means: Means) -> bool:
    order = ("ENorm + BN", "ENorm", "BN", "Baseline")
    totals = [over(means, row, DEPTHS) for row in order]
    return totals == sorted(totals, reverse=True)


def _best_at_most(means: Means) -> bool:
    rows = ("Baseline", "BN", "ENorm")
    return sum(all(wins(means, "ENorm + BN", row, [p]) for row in rows) for p in DEPTHS) > 5


FIGURE_2 = Artifact(
    name="repro2019/figure2",
    title="Fully connected nets on CIFAR-10, He's initialization",
    says="ENorm is ahead of the baseline at almost all depths and ENorm + BN is the best at most; BN lies between.",
    protocol=f"{PROTOCOL}\n{RATES}.",
    cells=grid(LEARNING_RATES, DEPTHS, fc_run, n=RUNS),
    claims=(
        Claim(
            "ENorm is ahead of the baseline at almost all depths (at least 8 of 10)",
            lambda means: wins(means, "ENorm", "Baseline", DEPTHS) >= 8,
        ),
        Claim(
            "ENorm + BN consistently outperforms BN (at every depth)",
            lambda means: wins(means, "ENorm + BN", "BN", DEPTHS) == len(DEPTHS),
        ),
        Claim("ENorm + BN is the best of the four at most depths", _best_at_most),
        Claim("Over all depths the ranking is ENorm + BN, ENorm, BN, Baseline", _ranking),
        Claim(
            "ENorm + BN is relatively poor with 19 layers: below its own mean over the other depths",
            lambda means: means["ENorm + BN", "19"] < over(means, "ENorm + BN", DEPTHS[:-1]),
        ),
        Claim(
            "The baseline falls with depth: the three deepest nets are below the three shallowest",
            lambda means: over(means, "Baseline", DEPTHS[-3:]) < over(means, "Baseline", DEPTHS[:3]),
        ),
    ),
    kind="lines",
    x_label="intermediary layers",
    shrink=shrink,
)

# -- figure 3 ----------------------------------------------------------------------------------------------------------

COULD_RUN, BEYOND = DEPTHS[:5], DEPTHS[5:]

FIGURE_3 = Artifact(
    name="repro2019/figure3",
    title="Fully connected nets with biases, He's initialization",
    says="With biases ENorm's loss is NaN beyond 9 intermediary layers; where it runs it is ahead of the baseline, and "
    "both are slightly better than without biases.",
    protocol=f"{PROTOCOL}\nBiases start at 0 and use the learning rates of the nets without. «Plain» rescales biases "
    "with their units, as published; «safe» (ours) also keeps their effective learning rate bounded, see "
    f"docs/enorm.md. A run that ends in NaN counts as no accuracy.\n{RATES}.",
    cells=grid(
        (BIASED, PLAIN, SAFE, "Baseline", "ENorm"),
        DEPTHS,
        fc_run,
        n=RUNS,
        paper={PLAIN: [None] * len(COULD_RUN) + [math.nan] * len(BEYOND)},
    ),
    claims=(
        Claim(
            "With plain biases ENorm does not train beyond 9 intermediary layers",
            lambda means: not any(trained(means, PLAIN, p) for p in BEYOND),
        ),
        Claim(
            "Up to 9 layers ENorm with plain biases is ahead of the baseline with biases (at least 4 of 5 depths)",
            lambda means: wins(means, PLAIN, BIASED, COULD_RUN) >= 4,
        ),
        Claim(
            "The baseline with biases is generally slightly better than without (at least 6 of 10 depths)",
            lambda means: wins(means, BIASED, "Baseline", DEPTHS) >= 6,
        ),
        Claim(
            "Up to 9 layers ENorm with plain biases is better than without (at least 3 of 5 depths)",
            lambda means: wins(means, PLAIN, "ENorm", COULD_RUN) >= 3,
        ),
        Claim(
            "With safe biases ENorm trains at every depth, within one point of ENorm without biases (ours)",
            lambda means: all(
                trained(means, SAFE, p) and means[SAFE, str(p)] > means["ENorm", str(p)] - 1 for p in DEPTHS
            ),
        ),
    ),
    kind="lines",
    x_label="intermediary layers",
    shrink=shrink,
)


# -- as the notebook has it --------------------------------------------------------------------------------------------

DEEP = (15, 17, 19)
NOTEBOOK, UNIFORM = "ENorm + BN, as its notebook", "ENorm + BN, He's uniform start"
NEGATIVE = "ENorm + BN, negative rates"
FALL = 0.1  # in all; from 0.05 that is below 0 after half of training


def _notebook_run(row: str, depth: int) -> Run:
    run = fc_run("ENorm + BN", depth)
    if row in (NOTEBOOK, UNIFORM):
        run = changed(run, init="he_uniform")
    if row in (NOTEBOOK, NEGATIVE):
        run = replace(run, optim=replace(run.optim, schedule=Linear(final=run.optim.lr - FALL)))
    return run


AS_ITS_NOTEBOOK = Artifact(
    name="repro2019/notebook",
    title="ENorm + BN in deep nets as the notebook of the reproduction has it (ours)",
    says="",
    protocol=f"{PROTOCOL}\nHere: the notebook starts from He's uniform distribution; and with 15 layers and more ENorm "
    "+ BN starts at a learning rate of 0.05 that falls by 0.1 / 60 in each epoch, so that it is negative after epoch "
    "30: gradient ascent with growing steps. Ours falls in every step. n = 5.",
    cells=grid((NOTEBOOK, UNIFORM, NEGATIVE, "ENorm + BN"), DEEP, _notebook_run, n=RUNS),
    claims=(
        Claim(
            "The negative learning rates cost accuracy at 15 to 19 layers (ours)",
            lambda means: wins(means, UNIFORM, NOTEBOOK, DEEP) == len(DEEP),
        ),
    ),
    kind="lines",
    x_label="intermediary layers",
    shrink=shrink,
)


def artifacts() -> list[Artifact]:
    return [FIGURE_2, FIGURE_3, AS_ITS_NOTEBOOK]
