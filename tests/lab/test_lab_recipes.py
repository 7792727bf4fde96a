"""Recipes: every artifact that was promised, exact schedules, the papers' numbers, claims that can fail, toy sizes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equinorm.lab import nets as models
from equinorm.lab.experiments import arpit2019, common, repro2019, stock2019, stock2019_computed
from equinorm.lab.experiments.artifacts import Artifact, Claim, all_artifacts, find
from equinorm.lab.experiments.campaign import decide
from equinorm.lab.training.runs import Data, Model, Run
from equinorm.lab.training.schedules import Constant, Linear, Quadratic, Step, SuperConvergence
from equinorm.lab.training.store import Store

ARTIFACTS = dict(all_artifacts())
Means = dict[tuple[str, str], float]

every_artifact = pytest.mark.parametrize("name", ARTIFACTS)
every_computed = pytest.mark.parametrize("name", [name for name, a in ARTIFACTS.items() if a.compute is not None])


# -- what there is -----------------------------------------------------------------------------------------------------


def test_every_promised_artifact_is_there() -> None:
    stock = [*(f"table{i}" for i in range(1, 7)), *(f"figure{i}" for i in range(4, 11))]
    promised = {
        "stock2019": [*stock, "tuning-fc", "tuning-cifar-nv", "tuning-small-batches"],
        "defazio2018": ["figure2", "figure3", *(f"figure4{panel}" for panel in "abcd"), "quarter"],
        "ruff2020": ["table1", *(f"figure{i}" for i in range(1, 6)), "deflation", "effective-rate"],
        "repro2019": ["figure2", "figure3"],
        "arpit2019": [
            "quadratics",
            "weight-norm",
            "propagation",
            "depth",
            "width",
            "residual-blocks",
            "residual-width",
        ],
    }
    assert {f"{paper}/{name}" for paper, names in promised.items() for name in names} <= set(ARTIFACTS)


@every_artifact
def test_an_artifact_says_what_it_is(name: str) -> None:
    artifact = find(name)
    assert artifact.name == name
    assert artifact.title
    assert artifact.says or artifact.title.endswith("(ours)")
    assert len(artifact.protocol) > 40
    assert artifact.cells or artifact.compute
    places = [(cell.row, cell.column) for cell in artifact.cells]
    assert len(places) == len(set(places))
    assert all(cell.runs or artifact.compute for cell in artifact.cells)


@every_artifact
def test_runs_survive_being_written_down(name: str) -> None:
    for run in find(name).runs():
        again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
        assert again.key == run.key
        assert again.to_dict() == run.to_dict()


@every_artifact
def test_no_two_cells_are_the_same_runs(name: str) -> None:
    """A row or column that changes nothing would be a mistake in the recipe."""
    cells = find(name).cells
    keys = [run.key for cell in cells for run in cell.runs]
    assert len(keys) == len(set(keys))
    for cell in cells:
        assert [run.seed for run in cell.runs] == list(range(len(cell.runs)))
        assert len({replace(run, seed=0).key for run in cell.runs}) <= 1


def test_figures_share_their_runs_with_tables() -> None:
    def keys(name: str) -> set[str]:
        return {run.key for run in find(name).runs()}

    assert keys("stock2019/table2") < keys("stock2019/table5")
    assert keys("stock2019/table3") < keys("stock2019/table6")
    assert keys("stock2019/figure5") < keys("stock2019/table4")
    assert keys("defazio2018/figure2") == keys("defazio2018/quarter")
    for i in range(1, 6):
        assert keys(f"ruff2020/figure{i}") < keys("ruff2020/table1")
    assert keys("ruff2020/deflation") == keys("ruff2020/effective-rate")
    assert keys("ruff2020/figure5") < keys("ruff2020/deflation") < keys("ruff2020/variants-long")
    shared = [cell for cell in find("stock2019/figure8").cells if cell.row in ("Baseline", "ENorm-1.2")]
    assert {run.key for cell in shared for run in cell.runs} < keys("stock2019/figure4")


def test_luma_is_centred_where_that_is_something_else() -> None:
    """ruff2020: without centring, or with z = 1, where window means stay zero, it is what it is in table 1."""
    table = {cell.row: cell for cell in find("ruff2020/table1").cells}
    *changed, reference = find("ruff2020/table1-loss").cells
    assert {cell.row for cell in changed} == {row for row in table if "zmg 0.85" in row or "zmg 0.98" in row}
    assert (reference.runs, reference.paper) == (table["BatchNorm lr 0.1"].runs, None)
    for cell in changed:
        before = table[cell.row]
        assert (cell.paper, cell.paper_spread) == (before.paper, before.paper_spread)
        for run, other in zip(cell.runs, before.runs, strict=True):
            options = {**other.method.options, "centre_luma": True}
            assert run == replace(other, method=replace(other.method, options=options))


def test_xavier_and_he_are_not_mixed_up() -> None:
    """Figure 4 of stock2019 and figure 2 of repro2019 differ in their initialization, so they share no run."""
    he, xavier = (find(name).runs() for name in ("repro2019/figure2", "stock2019/figure4"))
    assert {run.model.options["init"] for run in he} == {"he"}
    assert {run.model.options["init"] for run in xavier} == {"xavier"}


# -- the papers' numbers -----------------------------------------------------------------------------------------------


def paper(name: str) -> Means:
    return {(cell.row, cell.column): cell.paper for cell in find(name).cells if cell.paper is not None}


@pytest.mark.parametrize(
    ("name", "row", "column", "number"),
    [
        ("stock2019/table1", "ResNet-18", "BN (B=256)", 636),
        ("stock2019/table1", "ResNet-50", "ENorm", 30),
        ("stock2019/table2", "GN", "16", 88.26),
        ("stock2019/table2", "ENorm-1.2", "128", 88.53),
        ("stock2019/table3", "BN", "64", 91.01),
        ("stock2019/table3", "ENorm-1", "8", 91.24),
        ("stock2019/table4", "ENorm-1", "64", 70.10),
        ("stock2019/table4", "ENorm-Impl-1", "128", 69.33),
        ("stock2019/table4", "GN", "256", 70.64),
        ("stock2019/table5", "ENorm-Impl-1", "128", 89.02),
        ("stock2019/table5", "Baseline", "256", 86.86),
        ("stock2019/table6", "ENorm-Impl-1.2", "256", 89.3),
        ("stock2019/table6", "GN", "32", 89.93),
        ("defazio2018/figure3", "EquiNorm", "CIFAR-10", 94.0),
        ("defazio2018/figure3", "BN", "CIFAR-10", 93.3),
        ("defazio2018/quarter", "EquiNorm, quarter of the batch", "CIFAR-10", 95.8),
        ("ruff2020/table1", "CZMIG lr 0.4, zmg 0.85, noise 0.1", "CIFAR-10", 94.03),
        ("ruff2020/table1", "CZMI lr 0.4, zmg 0, noise 0.1", "CIFAR-10", 93.33),
        ("ruff2020/table1", "BatchNorm lr 0.1", "CIFAR-10", 93.70),
        ("ruff2020/table1", "CZMIG lr 0.1, zmg 1, noise 0.1", "CIFAR-10", 91.03),
        ("arpit2019/weight-norm", "WN + mean-only BN", "CIFAR-10", 92.69),
        ("arpit2019/weight-norm", "BN", "CIFAR-10", 91.95),
    ],
)
def test_numbers_are_those_of_the_papers(name: str, row: str, column: str, number: float) -> None:
    assert paper(name)[row, column] == pytest.approx(number)


def test_spreads_are_those_of_the_papers() -> None:
    spreads = {
        cell.row: cell.paper_spread for name in ("ruff2020/table1", "defazio2018/figure3") for cell in find(name).cells
    }
    assert spreads["BatchNorm lr 0.1"] == 0.55
    assert spreads["CZMIG lr 0.2, zmg 0.85, noise 0"] == 0.18
    assert spreads["EquiNorm"] == 0.22


@pytest.mark.parametrize(
    "name", [*(f"stock2019/table{i}" for i in range(2, 7)), "stock2019/figure5", "ruff2020/table1"]
)
def test_the_papers_numbers_support_the_papers_claims(name: str) -> None:
    """All but the sentence of ruff2020 that its own table contradicts."""
    for claim in find(name).claims:
        assert claim.holds(paper(name)) == ("against the table" not in claim.text), claim.text


def test_learning_rates_of_repro2019() -> None:
    rates = {(cell.row, cell.column): cell.runs[0].optim.lr for cell in find("repro2019/figure2").cells}
    assert rates["Baseline", "7"] == 0.1
    assert rates["Baseline", "9"] == 0.05
    assert rates["ENorm", "15"] == 0.05
    assert rates["ENorm", "17"] == 0.01
    assert rates["ENorm + BN", "13"] == 0.1
    assert rates["ENorm + BN", "19"] == 0.05
    assert {rates["BN", str(depth)] for depth in range(1, 20, 2)} == {0.1}
    biased = {(cell.row, cell.column): cell.runs[0].optim.lr for cell in find("repro2019/figure3").cells}
    assert all(biased[repro2019.SAFE, p] == biased[repro2019.PLAIN, p] == rates["ENorm", p] for p in ("1", "9", "19"))
    # stock2019 was trained with what its authors supplied; 0.05 at 15 layers and more is repro2019's own change
    fourth = {(cell.row, cell.column): cell.runs[0].optim.lr for cell in find("stock2019/figure4").cells}
    assert fourth["ENorm-1.2 + BN", "19"] == 0.1


def test_protocol_of_repro2019() -> None:
    for run in find("repro2019/figure3").runs():
        assert (run.epochs, run.batch, run.optim.momentum, run.optim.weight_decay) == (60, 256, 0.0, 1e-3)
        assert run.optim.schedule == Linear()
        assert (run.data.mean, run.data.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert all(len(cell.runs) == 5 for cell in find("repro2019/figure2").cells)
    beyond = {cell.column for cell in find("repro2019/figure3").cells if cell.paper is not None}
    assert beyond == {"11", "13", "15", "17", "19"}  # where the paper's loss was NaN


def test_protocol_of_cifar_nv() -> None:
    for run in find("stock2019/table6").runs():
        assert (run.data.held_out, run.data.evaluate, run.data.crop) == (10_000, "test", 28)
        assert (run.epochs, run.optim.momentum, run.optim.schedule) == (128, 0.9, Quadratic(final=1e-4))
        normed = run.model.options["norm"] != "none"
        assert ("final_norm" in run.model.options) != normed  # only the baseline and ENorm have a last BatchNorm
        decays = run.method.name != "implicit_enorm"
        assert run.optim.weight_decay == (1e-3 if decays else 0.0)
    sizes = {(cell.column, len(cell.runs)) for cell in find("stock2019/table3").cells}
    assert sizes == {("8", 1), ("16", 1), ("32", 1), ("64", 1), ("128", 3)}


def test_choices_are_made_on_held_out_images_only() -> None:
    for name, candidates in stock2019.TUNINGS.items():
        runs = [run for candidate in candidates for run in candidate.runs]
        assert {run.key for run in runs} == {run.key for run in find(name).runs()}
        assert {(run.data.held_out, run.data.evaluate) for run in runs} == {(10_000, "held_out")}
    assert {run.epochs for run in find("stock2019/tuning-cifar-nv").runs()} == {32}
    assert {run.optim.lr for run in find("stock2019/tuning-cifar-nv").runs()} == {0.01, 0.05, 0.1}


def test_imagenet_scales_learning_rate_and_decay_with_the_batch() -> None:
    found = {(c.row, c.column): c.runs[0].optim for c in find("stock2019/table4").cells}
    assert (found["BN", "256"].lr, found["BN", "256"].weight_decay) == (0.1, 1e-4)
    assert found["BN", "32"].lr == pytest.approx(0.0125)
    assert found["GN", "64"].weight_decay == pytest.approx(3.1623e-5, rel=1e-4)


def test_implicit_penalty_acts_like_weight_decay() -> None:
    """With c = 1 the gradient 2λW is that of weight decay; with c the layers' geometric mean is."""
    assert stock2019.implicit(1.0, 1.0, 21, 1e-3).options["decay"] == pytest.approx(5e-4)
    q, c = 21, 1.2
    decay = stock2019.implicit(c, 1.0, q, 1e-3).options["decay"]
    gradients = [2 * decay * c ** (2 * (q - k)) for k in range(1, q + 1)]
    assert math.exp(sum(map(math.log, gradients)) / q) == pytest.approx(1e-3)


def test_layers_that_the_implicit_penalty_counts() -> None:
    def layers(name: str, **options: object) -> int:
        net = models.build(name, classes=10, in_shape=(3, 28, 28), norm="none", **options)  # type: ignore[arg-type]
        return sum(isinstance(m, nn.Linear | nn.Conv2d) for m in net.modules())

    assert layers("cifar_nv", width=4) == stock2019.NV_LAYERS
    assert layers("fc", width=4, hidden=7) == 7 + stock2019.FC_LAYERS


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "epoch", "epochs", "lr", "expected"),
    [
        (Constant(), 7.5, 10, 0.3, 0.3),
        (Linear(), 0, 60, 0.1, 0.1),
        (Linear(), 30, 60, 0.1, 0.05),
        (Linear(), 59, 60, 0.06, 0.001),
        (Linear(), 60, 60, 0.1, 0.0),
        (Linear(final=0.02), 30, 60, 0.1, 0.06),
        (Linear(warm_up=2.0), 1, 4, 0.1, 0.0375),
        (Quadratic(), 0, 128, 0.1, 0.1),
        (Quadratic(), 64, 128, 0.1, 1e-4 + 0.0999 / 4),
        (Quadratic(), 128, 128, 0.1, 1e-4),
        (Quadratic(final=1e-5), 45, 90, 0.1, 1e-5 + 0.09999 / 4),
        (Step(), 99.99, 200, 0.4, 0.4),
        (Step(), 100, 200, 0.4, 0.04),
        (Step(), 150, 200, 0.4, 0.004),
        (Step(milestones=(0.5, 0.75)), 225, 300, 0.1, 0.001),
        (Step(milestones=(1 / 3, 2 / 3)), 60, 90, 0.1, 0.001),
        (Step(warm_up=1.0), 0.25, 200, 0.1, 0.025),
        (SuperConvergence(), 0, 30, 0.1, 0.1),
        (SuperConvergence(), 6.5, 30, 0.1, 0.3),
        (SuperConvergence(), 13, 30, 0.1, 0.5),
        (SuperConvergence(), 19.5, 30, 0.1, 0.3),
        (SuperConvergence(), 26, 30, 0.1, 0.1),
        (SuperConvergence(), 28, 30, 0.1, 0.01),
        (SuperConvergence(), 30, 30, 0.1, 0.001),
        (SuperConvergence(), 26, 60, 0.1, 0.5),
    ],
)
def test_learning_rates_at_known_points(
    schedule: Constant, epoch: float, epochs: float, lr: float, expected: float
) -> None:
    assert schedule.at(epoch, epochs, lr, 0.9)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("epoch", "momentum"),
    [
        (0, 0.95),
        (1, 0.95 - 0.1 / 13),
        (1.9, 0.95 - 0.1 / 13),
        (13, 0.85),
        (25.5, 0.85 + 1.2 / 13),
        (26, 0.85),
        (29.9, 0.85),
    ],
)
def test_momentum_of_super_convergence(epoch: float, momentum: float) -> None:
    assert SuperConvergence().at(epoch, 30, 0.1, 0.9)[1] == pytest.approx(momentum)
    assert Linear().at(epoch, 30, 0.1, 0.9)[1] == 0.9  # the others leave momentum alone


@given(st.integers(1, 300), st.floats(0, 1), st.floats(1e-3, 1))
def test_schedules_stay_between_their_ends(epochs: int, t: float, lr: float) -> None:
    for schedule in (Linear(), Quadratic(final=1e-4), Step(), Constant()):
        rate, _ = schedule.at(t * epochs, epochs, lr, 0.9)
        assert 0.0 <= rate <= lr * (1 + 1e-9)
    rate, momentum = SuperConvergence().at(t * epochs, epochs, lr, 0.9)
    assert lr / 100 * (1 - 1e-9) <= rate <= 5 * lr * (1 + 1e-9)
    assert 0.85 - 1e-9 <= momentum <= 0.95 + 1e-9


def test_milestones_fall_on_the_papers_epochs() -> None:
    def drops(name: str, row: int = 0) -> list[int]:
        run = find(name).cells[row].runs[0]
        rates = [run.optim.schedule.lr(epoch, run.epochs, 1.0) for epoch in range(int(run.epochs))]
        return [epoch for epoch in range(1, len(rates)) if rates[epoch] < rates[epoch - 1]]

    assert drops("defazio2018/figure2") == [150, 225]
    assert drops("defazio2018/figure4c") == [80, 120]
    assert drops("defazio2018/figure4d") == [30, 60]
    assert drops("ruff2020/table1") == [100, 150]


# -- claims ------------------------------------------------------------------------------------------------------------


class MadeUp(dict[tuple[str, ...], float]):
    """Means; those of other metrics, (row, column, metric), are made up when they are asked for."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw

    def __missing__(self, place: tuple[str, ...]) -> float:
        if len(place) == 2:
            raise KeyError(place)
        self[place] = self[place[:2]] * self.draw.uniform(0.5, 1.5)
        return self[place]


def made_up(artifact: Artifact, seed: int) -> Means:
    """Means in which rows differ, change over the columns, and sometimes diverge; on a scale that varies."""
    draw = random.Random(seed)
    places = [(cell.row, cell.column) for cell in artifact.cells]
    if artifact.compute is not None:
        places = list(artifact.compute.cells(computed(artifact)))
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    scale = draw.choice((1.0, 30.0, 90.0, 1000.0))
    level = {row: scale * draw.random() for row in rows}
    slope = {row: scale * draw.choice((0.0, 0.05, 0.5, -0.05, -0.5)) / len(columns) for row in rows}
    lost = {row: draw.choice((None, None, None, draw.randrange(len(columns)))) for row in rows}
    made = MadeUp(draw)
    for row, column in places:
        i, last = columns.index(column), lost[row]
        fine = last is None or i <= last or draw.random() < 0.02
        made[row, column] = level[row] + slope[row] * i + 0.001 * scale * draw.random() if fine else math.nan
    return made


_computed: dict[str, Mapping[str, object]] = {}


def computed(artifact: Artifact) -> Mapping[str, object]:
    assert artifact.compute is not None
    if artifact.name not in _computed:
        _computed[artifact.name] = artifact.compute.function(True)
    return _computed[artifact.name]


def worlds(artifact: Artifact) -> Iterator[Means]:
    """What the paper prints, what is computed at toy size, and made-up numbers."""
    yield {(cell.row, cell.column): cell.paper for cell in artifact.cells if cell.paper is not None}
    if artifact.compute is not None:
        yield dict(artifact.compute.cells(computed(artifact)))
    yield from (made_up(artifact, seed) for seed in range(3000))


def verdict(claim: Claim, means: Means) -> bool | None:
    try:
        return bool(claim.holds(means))
    except KeyError:
        return None


ELSEWHERE = ("stock2019/figure7", "arpit2019/depth", "arpit2019/width", "arpit2019/residual")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, artifact in ARTIFACTS.items()
        if artifact.claims and not name.startswith(ELSEWHERE) and "/tuning" not in name  # those have one claim, tested
    ],
)
def test_claims_can_be_true_and_false(name: str) -> None:
    for claim in find(name).claims:
        seen: set[bool] = set()
        for means in worlds(find(name)):
            seen |= {v for v in [verdict(claim, means)] if v is not None}
            if len(seen) == 2:
                break
        assert seen == {True, False}, claim.text


@pytest.mark.parametrize("name", [name for name in ARTIFACTS if name.startswith(ELSEWHERE)])
def test_claims_about_norms_can_be_true_and_false(name: str) -> None:
    """Claims that look further than the toy sizes go."""
    kept = {
        **{("scaled WN", str(n)): 0.4 if n == 10 else 1.1 for n in arpit2019.WIDTHS},
        **{(row, str(n)): 1.0 for row in ("scaled WN", "divided by B") for n in (*arpit2019.DEPTHS, 2)},
        **{("divided by B", str(n)): 2.7 for n in (*arpit2019.BLOCK_WIDTHS, *arpit2019.BLOCKS)},
        ("spread over layers", "100"): 1.001,
        ("WN", "20"): 1e-3,
        ("not divided", "50"): 1e9,
        **{("l2 norm", str(cycle)): 1.0 + 1 / (cycle + 1) for cycle in stock2019_computed.CYCLES},
    }
    if name == "arpit2019/width":
        kept["scaled WN", "10"] = 0.4
    lost = {
        place: 1 / value if place[0] in ("WN", "not divided") else 3 + i
        for i, (place, value) in enumerate(kept.items())
    }
    for claim in find(name).claims:
        assert claim.holds(kept), claim.text
        if "nearer to 1" not in claim.text:
            assert not claim.holds(lost), claim.text


@every_artifact
def test_claims_without_runs_are_not_decided(name: str) -> None:
    """The report shows a KeyError as "not run"; a claim about nothing must not come out true."""
    for claim in find(name).claims:
        with pytest.raises(KeyError):
            claim.holds({})


def tuned(name: str, best: int) -> tuple[common.Chosen, Means]:
    """Made-up held-out accuracies, in which one candidate of each row and place is ahead: what they decide."""
    scores, means, seen = {}, {}, dict[tuple[str, float], int]()
    for candidate, cell in zip(stock2019.TUNINGS[name], find(name).cells, strict=True):
        number = seen[candidate.row, candidate.at] = seen.get((candidate.row, candidate.at), -1) + 1
        scores[candidate.runs[0].key] = means[cell.row, cell.column] = 51.0 if number == best else 50.0
    return {name: common.choose(stock2019.TUNINGS[name], lambda run: scores[run.key])}, means


@pytest.mark.parametrize("name", stock2019.TUNINGS)
@pytest.mark.parametrize("best", [0, 2])
def test_a_tuning_decides_what_the_recipe_uses(name: str, best: int) -> None:
    chosen, means = tuned(name, best)
    others = [tuned(other, best)[0] for other in stock2019.TUNINGS]
    assert set(chosen[name]) == {candidate.row for candidate in stock2019.TUNINGS[name]}
    made = {artifact.name: artifact for artifact in stock2019.artifacts({k: v for o in others for k, v in o.items()})}
    (claim,) = made[name].claims
    assert claim.holds(means)
    assert not claim.holds({**means, next(place for place, value in means.items() if value == 51): math.nan})
    figure, row, column, place = {
        stock2019.FC_TUNING: ("figure4", "Path-SGD", "19", 19),
        stock2019.NV_TUNING: ("table2", "GN", "32", 0.0),
        stock2019.SMALL_TUNING: ("table3", "BN", "16", 8),
    }[name]
    (cell,) = made[f"stock2019/{figure}"].part([row], [column]).cells
    settings = chosen[name][row][place]
    assert cell.runs[0].optim.lr == settings["lr"]
    assert cell.runs[0].model.options.get("norm_options", {}).get("groups") == settings.get("groups")
    assert f"chosen on {name}" in made[f"stock2019/{figure}"].protocol
    assert "not tuned yet" not in made[f"stock2019/{figure}"].protocol


def test_what_is_committed_is_what_the_committed_runs_decide() -> None:
    """`equinorm campaign --choose` writes it."""
    store = Store(Path(__file__).parents[2] / "results")
    assert decide(store) == common.committed()
    assert common.committed()  # some of the tuning runs are there


def test_provisional_settings_are_among_the_candidates() -> None:
    for name, provisional in (("fc", stock2019.FC_PROVISIONAL), ("cifar-nv", stock2019.NV_PROVISIONAL)):
        candidates = stock2019.TUNINGS[f"stock2019/tuning-{name}"]
        tried = [(c.row, c.at, c.settings) for c in candidates]
        assert all((row, at, s) in tried for row, places in provisional.items() for at, s in places.items())


def test_a_protocol_speaks_of_the_choices_of_its_own_rows() -> None:
    assert stock2019.TUNED not in find("stock2019/figure4").protocol
    assert stock2019.TUNED in find("stock2019/figure4-tuned").protocol
    assert "Impl" not in find("stock2019/table3").protocol
    assert "ENorm-Impl-1.2 at" in find("stock2019/table6").protocol


def test_small_batches_keep_what_else_was_chosen() -> None:
    chosen = {stock2019.NV_TUNING: {"GN": {0.0: {"lr": 0.1, "groups": 4}, 0.9: {"lr": 0.1, "groups": 8}}}}
    chosen[stock2019.SMALL_TUNING] = {"GN": {8: {"lr": 0.01}, 32: {"lr": 0.05}}}
    tables = {artifact.name: artifact for artifact in stock2019.artifacts(chosen)}

    def used(table: int, batch: int) -> tuple[float, int]:
        (cell,) = tables[f"stock2019/table{table}"].part(["GN"], [str(batch)]).cells
        return cell.runs[0].optim.lr, cell.runs[0].model.options["norm_options"]["groups"]

    assert [used(3, batch) for batch in (8, 32, 128)] == [(0.01, 8), (0.05, 8), (0.1, 8)]
    assert [used(2, batch) for batch in (8, 32, 128)] == [(0.1, 4)] * 3


def test_plain_biases_count_as_lost_by_nan_or_chance() -> None:
    claim = find("repro2019/figure3").claims[0]
    for lost in (math.nan, 10.0):
        assert claim.holds({(repro2019.PLAIN, str(p)): lost for p in repro2019.DEPTHS})
    assert not claim.holds({(repro2019.PLAIN, str(p)): 54.0 if p == 19 else math.nan for p in repro2019.DEPTHS})


def test_batch_sizes_that_were_not_run_do_not_count() -> None:
    table = find("stock2019/table3")
    ahead = table.claims[0]
    part = {key: value for key, value in paper(table.name).items() if key[1] in ("8", "128")}
    assert ahead.holds(part)
    assert not ahead.holds({**part, ("Baseline", "8"): 99.0})


# -- toy size ----------------------------------------------------------------------------------------------------------


def toy_runs() -> dict[str, Run]:
    return {run.key: run for artifact in ARTIFACTS.values() for run in artifact.toy().runs()}


@every_artifact
def test_toy_runs_are_small_and_miss_no_method(name: str) -> None:
    artifact, toy = find(name), find(name).toy()
    for run in toy.runs():
        assert (run.data.name, run.data.train) == ("digits", 128)
        assert (run.epochs, run.batch, run.seed) == (2, 32, 0)

    def kinds(of: Artifact) -> set[tuple[str, str, str]]:
        return {(run.method.name, str(sorted(run.method.options)), str(run.model.options["norm"])) for run in of.runs()}

    assert kinds(toy) == kinds(artifact)
    assert {run.optim.schedule for run in toy.runs()} == {run.optim.schedule for run in artifact.runs()}
    assert {(cell.row, cell.column) for cell in toy.cells} == {(cell.row, cell.column) for cell in artifact.cells}


def test_every_toy_model_can_be_built_and_run() -> None:
    distinct = {json.dumps([run.model.name, run.model.options], sort_keys=True): run for run in toy_runs().values()}
    for run in distinct.values():
        size = run.data.crop or run.data.options["size"]
        net = models.build(run.model.name, classes=10, in_shape=(3, size, size), **run.model.options)
        assert sum(p.numel() for p in net.parameters()) < 100_000
        with torch.no_grad():
            assert net(torch.rand(4, 3, size, size)).shape == (4, 10)


def test_every_model_can_be_built_at_full_size() -> None:
    runs = [run for artifact in ARTIFACTS.values() for run in artifact.runs()]
    runs = [run for run in runs if run.model.options.get("hidden", 19) == 19 and not run.model.options.get("noise")]
    distinct = {json.dumps([run.model.name, run.model.options], sort_keys=True): run for run in runs}
    for run in distinct.values():
        size, options = run.data.crop or 32, dict(run.model.options)
        real = options["norm"] == "equinorm"  # looks at the weights that were drawn
        with torch.device("cpu" if real else "meta"):
            options |= {"width": 4} if real else {}
            models.build(run.model.name, classes=10, in_shape=(3, size, size), **options)


def test_toy_data_keeps_how_images_are_used() -> None:
    toy = common.toy_data(Data("cifar10", held_out=10_000, evaluate="held_out", crop=28, flip=True))
    assert toy == Data(
        "digits", {"size": 16, "channels": 3}, train=128, held_out=64, evaluate="held_out", crop=14, flip=True
    )
    assert common.toy_data(Data("imagenet", crop=224, scale=(1.0, 3.5))).crop == 16
    padded = common.toy_data(Data("cifar10", padding=4, mixup=6.0, manifold=True, inputs="unit"))
    assert (padded.padding, padded.mixup, padded.manifold, padded.inputs) == (2, 6.0, True, "unit")


# -- what is computed --------------------------------------------------------------------------------------------------


@every_computed
def test_computed_results_are_plain_data_that_can_be_drawn(name: str) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    compute = find(name).compute
    assert compute is not None
    data = json.loads(json.dumps(computed(find(name))))
    cells = compute.cells(data)
    assert cells
    assert all(isinstance(v, float | int) and math.isfinite(v) for v in cells.values())
    assert dict(cells) == dict(compute.cells(dict(computed(find(name)))))
    if compute.draw is not None:
        figure = figures.Figure()
        compute.draw(data, figure)
        assert figure.axes
        assert all(axes.lines or axes.collections for axes in figure.axes)


def test_elements_of_a_net_counted_by_hand() -> None:
    conv, head = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Linear(4, 2)
    net = nn.Sequential(conv, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    assert stock2019_computed.count_elements(net, (3, 8, 8)) == {"weights": 3 * 4 * 9 + 8, "activations": 4 * 64}


def test_elements_of_resnet18_are_the_papers() -> None:
    net = models.build("resnet18", classes=1000, in_shape=(3, 224, 224), norm="batchnorm")
    counted = {"ResNet-18": stock2019_computed.count_elements(net, (3, 224, 224))}
    rounded = [round(value) for value in stock2019_computed.table_1_cells(counted).values()]
    assert rounded == [12, 636, 40]


def test_two_layers_of_the_chain_are_scaled() -> None:
    energies = [e.mean() for e in stock2019_computed.column_energies(stock2019_computed.unbalanced_chain(20, 64))]
    assert energies[5] / energies[4] == pytest.approx(1.2, rel=0.02)
    assert energies[11] / energies[10] == pytest.approx(0.8, rel=0.02)


def test_descent_on_a_quadratic() -> None:
    path = arpit2019.descend((2.0, 1.0), 0.5, 3)
    assert path == [[1.0, 1.0], [0.0, 0.5], [0.0, 0.25], [0.0, 0.125]]


@pytest.mark.parametrize(("divide", "low", "high"), [(True, 1 / math.e, math.e), (False, 20.0, math.inf)])
def test_residual_blocks_divided_by_their_number_keep_the_norm(divide: bool, low: float, high: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 100)
    with torch.no_grad():
        ratio = arpit2019.norm_ratio(arpit2019.ResidualReLU(100, 20, divide)(x), x)
    assert low <= ratio <= high


# -- what recipes share ------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 30), st.integers(), min_size=1), st.integers(0, 30))
def test_nearest(entries: dict[int, int], number: int) -> None:
    found = common.nearest(entries, number)
    gap = min(abs(key - number) for key in entries)
    assert found == entries[min(key for key in entries if abs(key - number) == gap)]


RATES = (0.01, 0.05, 0.1)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.sampled_from([5, 11]), st.sampled_from(RATES)),
        st.lists(st.sampled_from([None, math.nan, 50.0, 50.5, 51.0]), min_size=1, max_size=2),
    )
)
def test_the_best_candidate_is_chosen(tried: dict[tuple[str, int, float], list[float | None]]) -> None:
    """Against all pairs compared: by the mean over seeds, then by the smaller rate; nothing without all runs, and
    nothing where none of them trained."""
    base = Run(Data("cifar10"), Model("fc"))
    accuracies: dict[str, float | None] = {}
    candidates = []
    for (row, at, lr), values in tried.items():
        runs = tuple(
            replace(common.changed(base, lr=lr, hidden=at), seed=s, batch=ord(row)) for s in range(len(values))
        )
        candidates.append(common.Candidate(row, at, {"lr": lr}, runs))
        accuracies |= {run.key: value for run, value in zip(runs, values, strict=True)}
    chosen = common.choose(candidates, lambda run: accuracies[run.key])
    rows = {row for row, _, _ in tried}
    complete = {row for row in rows if not any(None in v for (r, _, _), v in tried.items() if r == row)}
    trained = {(row, at) for (row, at, _), v in tried.items() if row in complete and not any(map(math.isnan, v))}
    assert set(chosen) == {row for row, _ in trained}

    def mean(values: list[float | None]) -> float:
        return -1.0 if any(v is None or math.isnan(v) for v in values) else sum(v or 0.0 for v in values) / len(values)

    for row, places in chosen.items():
        assert set(places) == {at for r, at in trained if r == row}
        for at, settings in places.items():
            own = {lr: mean(v) for (r, a, lr), v in tried.items() if (r, a) == (row, at)}
            better = [lr for lr in own if own[lr] > own[settings["lr"]]]
            equal = [lr for lr in own if own[lr] == own[settings["lr"]] and lr < settings["lr"]]
            assert not better
            assert not equal


def test_a_diverged_run_is_never_ahead() -> None:
    assert common.wins({("a", "1"): 20.0, ("b", "1"): math.nan}, "a", "b", [1]) == 1
    assert common.wins({("a", "1"): 20.0, ("b", "1"): math.nan}, "b", "a", [1]) == 0


def test_candidates_along_two_lines() -> None:
    found = common.star((0.01, 0.05, 0.1), 0.05, "groups", (5, 10, 20), 10)
    assert [(s["lr"], s["groups"]) for s in found] == [(0.01, 10), (0.05, 5), (0.05, 10), (0.05, 20), (0.1, 10)]


def test_choices_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, _ = tuned("stock2019/tuning-cifar-nv", 1)
    (tmp_path / "chosen.json").write_text(common.chosen_text(chosen))
    monkeypatch.setattr(common, "files", lambda package: tmp_path)
    assert common.committed() == chosen
    assert common.chosen_text({}) == "{}\n"


def test_choices_as_text() -> None:
    places = {5: {"lr": 0.1}, 11: {"lr": 0.1}, 19: {"lr": 0.05}}
    choices = {"GN": common.Choice({11: {"lr": 0.1, "groups": 10}}), "BN": common.Choice(places, "x/tuning")}
    assert common.resolved(choices) == (
        "provisional, not tuned yet: GN at 11: lr 0.1, groups 10. "
        "chosen on x/tuning: BN at 5, 11: lr 0.1 | at 19: lr 0.05"
    )
