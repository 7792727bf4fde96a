"""The campaign: what is wanted, what the tunings decide, how long it takes, sittings that finish what they begin."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equinorm.errors import UserError
from equinorm.lab.experiments import campaign, common, stock2019
from equinorm.lab.experiments.artifacts import all_artifacts, find
from equinorm.lab.experiments.campaign import ITEMS, Estimate, Item, Speeds, decide, named, plan, standing, table, work
from equinorm.lab.training.runs import Run
from equinorm.lab.training.store import Record, Store
from equinorm.lab.training.trainer import Outcome, save_checkpoint, train_all


def record_of(
    run: Run, accuracy: float = 50.0, seconds: float = 24.0, together: int = 8, hardware: str = "NVIDIA H200"
) -> Record:
    final = {"test_accuracy": accuracy, "seconds": seconds, "device_seconds": seconds / together, "pace": 1e-3}
    return Record(run, "finished", (), final, {"hardware": hardware})


def records_of(runs: Iterable[Run], accuracy: float = 50.0) -> dict[str, Record]:
    return {run.key: record_of(run, accuracy) for run in runs}


def item(name: str) -> Item:
    (found,) = (item for item in ITEMS if item.name == name)
    return found


# -- what is wanted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [item.name for item in ITEMS])
def test_an_item_names_what_there_is(name: str) -> None:
    wanted = item(name)
    cells = find(wanted.artifact).cells
    assert set(wanted.rows) <= {cell.row for cell in cells}
    assert set(wanted.columns) <= {cell.column for cell in cells}
    assert wanted.note
    runs = wanted.runs(all_artifacts())
    assert runs
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert {run.data.name for run in runs} <= {"cifar10", "mnist", "imagenette"}
    before = [other.name for other in ITEMS[: ITEMS.index(wanted)]]
    assert wanted.name not in before
    assert not wanted.after or wanted.after in before


def seeds_by_cell(*names: str) -> dict[tuple[str, str], int]:
    """How often each cell of an artifact is wanted by these items together."""
    keys = {run.key for name in names for run in item(name).runs(all_artifacts())}
    cells = find(item(names[0]).artifact).cells
    return {(c.row, c.column): n for c in cells if (n := sum(run.key in keys for run in c.runs))}


def test_the_list_is_the_one_that_was_asked_for() -> None:
    depths = [str(depth) for depth in range(1, 20, 2)]
    figure4 = seeds_by_cell("figure4")
    assert set(figure4.values()) == {3}
    assert {column for _, column in figure4} == set(depths)
    assert {row for row, _ in figure4} >= {"Baseline", "BN", "GN", "WN + BN", "Path-SGD", "ENorm-1", "ENorm-1.2 + BN"}
    assert set(seeds_by_cell("figure8").values()) == {3}
    with_momentum = seeds_by_cell("table3-128", "table3-32", "table3-8")
    assert Counter(with_momentum.values()) == {3: 5, 1: 10}
    assert {column for (_, column), n in with_momentum.items() if n == 3} == {"128"}
    without = seeds_by_cell("table2-128", "table2-32")
    assert {(column, n) for (_, column), n in without.items()} == {("128", 1), ("32", 1)}
    rates = seeds_by_cell("table3-rates")
    rows = ("Baseline", "ENorm-1", "ENorm-1.2")
    assert rates == {(f"lr {lr}", row): n for lr, n in (("0.01", 1), ("0.05", 3)) for row in rows}
    assert rates.items() <= seeds_by_cell("table3-variants").items()
    assert set(seeds_by_cell("table6-128")) == {("ENorm-Impl-1", "128"), ("ENorm-Impl-1.2", "128")}
    assert seeds_by_cell("defazio-figure3") == {
        ("BN", "CIFAR-10"): 5,
        ("EquiNorm", "CIFAR-10"): 5,
        ("GN", "CIFAR-10"): 2,
    }
    assert len(seeds_by_cell("defazio-figure2")) == 3
    ruff = seeds_by_cell("ruff-headlines", "ruff-others")
    assert len(ruff) == len(find("ruff2020/table1").cells)
    assert Counter(ruff.values()) == {2: 4, 1: 7}
    assert set(seeds_by_cell("repro-figure2").values()) == set(seeds_by_cell("repro-figure3").values()) == {5}
    tunings = {run.key for name in stock2019.TUNINGS for run in find(name).runs()}
    names = ("tuning-fc", "tuning-nv", "tuning-small", "tuning-nv-implicit")
    assert {run.key for name in names for run in item(name).runs(all_artifacts())} == tunings


def test_items_are_found_by_name_artifact_and_paper() -> None:
    assert named([]) == ITEMS
    assert [found.name for found in named(["stock2019/table3", "figure4"])] == [
        "figure4",
        "table3-128",
        "table3-32",
        "table3-8",
    ]
    assert {found.artifact.split("/")[0] for found in named(["ruff2020"])} == {"ruff2020"}
    with pytest.raises(UserError, match=r"no item 'figure99'; did you mean figure8 .* It has tuning-fc, figure4"):
        named(["figure99"])


def test_an_item_can_take_the_best_rows_of_another() -> None:
    """The best of each column by mean accuracy in the store; while runs are missing, the first of the list."""
    first, second = item("defazio-normalized"), item("defazio-normalized-4")
    artifacts = all_artifacts()
    rows = list(dict.fromkeys(cell.row for cell in find(first.artifact).cells))

    def chosen(records: dict[str, Record]) -> list[tuple[str, str, int]]:
        cells = second.part(artifacts, records).cells
        return [(cell.row, cell.column, len(cell.runs)) for cell in cells]

    accuracies = {
        (row, column): 90.0 + (i if column == "BN" else -i)
        for i, row in enumerate(rows)
        for column in ("BN", "EquiNorm")
    }
    records = {
        run.key: record_of(run, accuracies[cell.row, cell.column])
        for cell in first.part(artifacts, {}).cells
        for run in cell.runs
    }
    assert sorted(chosen(records)) == sorted([(rows[-1], "BN", 4), (rows[0], "EquiNorm", 4)])
    records.popitem()
    assert {column for _, column, _ in chosen(records)} == {"BN", "EquiNorm"}
    (found,) = (s for s in standing(records, [first, second]) if s.item is second)
    assert found.waits


# -- what the tunings decide -------------------------------------------------------------------------------------------


def test_an_item_waits_for_its_tuning_and_uses_what_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "committed", dict)
    (before,) = standing({}, [item("figure4")])
    assert before.waits
    runs = find(stock2019.FC_TUNING).runs()
    records = records_of(runs[:-1])
    assert standing(records, [item("figure4")])[0].waits
    best = [run for run in runs if run.method.name == "path_sgd" and run.optim.lr == 0.1]
    records = records_of(runs) | {run.key: record_of(run, 60.0) for run in best}
    (after,) = standing(records, [item("figure4")])
    assert not after.waits
    rates = {run.optim.lr for run in after.wanted if run.method.name == "path_sgd"}
    assert rates == {0.1}
    assert {run.optim.lr for run in before.wanted if run.method.name == "path_sgd"} == {0.005}
    records |= records_of(after.wanted)
    assert standing(records, [item("figure4")])[0].missing == ()


def test_a_decision_is_written_for_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = Store(tmp_path), tmp_path / "chosen.json"
    monkeypatch.setattr(campaign, "committed", dict)
    assert decide(store) == {}
    rows = {row for row in stock2019.FC_PROVISIONAL if row != "GN"}
    for candidate in stock2019.TUNINGS[stock2019.FC_TUNING]:
        if candidate.row in rows:  # one row is not ready
            store.write(record_of(candidate.runs[0], 50.0 + candidate.settings["lr"]))
    assert campaign.write_chosen(store, path)
    assert not campaign.write_chosen(store, path)
    written = json.loads(path.read_text())
    assert set(written) == {stock2019.FC_TUNING}
    assert set(written[stock2019.FC_TUNING]) == rows
    assert written[stock2019.FC_TUNING]["ENorm-1"] == {"5": {"lr": 0.1}, "11": {"lr": 0.1}, "19": {"lr": 0.1}}
    with pytest.raises(UserError, match="cannot write"):
        campaign.write_chosen(store, tmp_path / "nowhere" / "chosen.json")


def test_runs_in_the_store_decide_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed: common.Chosen = {stock2019.FC_TUNING: {"GN": {11: {"lr": 0.7, "groups": 3}}, "odd": {5: {"lr": 0.3}}}}
    monkeypatch.setattr(campaign, "committed", lambda: committed)
    assert decide({}) == committed
    found = decide(records_of(find(stock2019.FC_TUNING).runs()))[stock2019.FC_TUNING]
    assert found["GN"] == {11: {"lr": 0.01, "groups": 10}}
    assert found["odd"] == {5: {"lr": 0.3}}


# -- how long it takes -------------------------------------------------------------------------------------------------

FC = replace(find("repro2019/figure2").runs()[0], seed=0)


def test_estimates_come_from_runs_of_the_same_kind() -> None:
    records = [record_of(replace(FC, epochs=30, seed=s), seconds=t) for s, t in enumerate((8.0, 16.0, 24.0))]
    speeds = Speeds(records)
    assert speeds(FC).of(8) == pytest.approx(2 * 16 / 8 + campaign.SET_UP)  # twice as long as the one in the middle
    assert speeds(FC).alone > speeds(FC).of(4) > speeds(FC).of(8) > speeds(FC).floor
    assert Speeds(records, "NVIDIA H200")(FC) == speeds(FC)
    assert Speeds(records, "NVIDIA A100")(FC) == Speeds()(FC)
    on_cpu = [record_of(FC, seconds=1e4, hardware="CPU, 2 threads", together=1)]
    assert Speeds(on_cpu)(FC) == Speeds()(FC)
    assert Speeds(on_cpu, "CPU")(FC).alone == pytest.approx(1e4 + campaign.SET_UP)
    guessed = [replace(record, final={"seconds": 24.0}, about=record.about | {"side_by_side": 8}) for record in records]
    assert Speeds(guessed)(FC) == Speeds()(FC)
    uneven = [replace(record, final={k: v for k, v in record.final.items() if k != "pace"}) for record in records]
    assert Speeds(uneven)(FC) == Speeds()(FC)
    biased = replace(FC, model=replace(FC.model, options={**FC.model.options, "bias": True}), seed=9)
    assert Speeds([*records, record_of(biased, seconds=1e4)])(FC) == speeds(FC)  # biases may be slower
    lost = [replace(record, status="diverged") for record in records]
    assert Speeds(lost)(FC) == Speeds()(FC)


def test_estimates_without_runs() -> None:
    """What was measured on an H200, roughly: 3 s for 19 layers with 8 side by side, 1.7 and 1 s an epoch."""
    speeds = Speeds()
    deep = common.changed(FC, hidden=19)
    assert 2 < speeds(deep).of(8) < 5
    assert speeds(FC).of(8) < speeds(deep).of(8) / 2
    wide, deepest = find("defazio2018/figure3").runs()[0], find("ruff2020/table1").runs()[0]
    assert 45 < speeds(wide).of(8) < 65
    assert 150 < speeds(deepest).of(8) < 250
    small, usual = (find("stock2019/table3").part(["BN"], [b]).runs()[0] for b in ("8", "128"))
    assert speeds(small).floor > speeds(usual).floor
    assert speeds(find("repro2019/figure2").toy().runs()[0]) == campaign.TOY


def test_steps_are_those_of_the_trainer() -> None:
    assert campaign.steps(FC) == 60 * 196
    held_out = find("stock2019/tuning-cifar-nv").runs()[0]
    assert campaign.steps(held_out) == 32 * 313
    assert campaign.steps(find("repro2019/figure2").toy().runs()[0]) == 2 * 4


# -- what fits ---------------------------------------------------------------------------------------------------------

RUNS = [replace(FC, seed=seed) for seed in range(12)]
times = st.tuples(st.floats(0.1, 100), st.floats(0.1, 1)).map(lambda pair: Estimate(pair[0], pair[0] * pair[1]))


def wall(estimates: Sequence[Estimate], side_by_side: int) -> float:
    """Seconds until all are done: each takes its part of the device, and none is faster than by itself."""
    k = min(len(estimates), side_by_side)
    return max([sum(e.of(k) for e in estimates), *(e.alone for e in estimates)]) if estimates else 0.0


@given(
    st.lists(times, min_size=12, max_size=12),
    st.floats(0, 300),
    st.integers(1, 8),
    st.sets(st.integers(0, 11), max_size=2),
)
def test_what_is_begun_can_be_finished(
    estimates: list[Estimate], seconds: float, side_by_side: int, started: set[int]
) -> None:
    by_key = {run.key: estimate for run, estimate in zip(RUNS, estimates, strict=True)}
    begun = {RUNS[i].key: 0.5 for i in started}
    chosen = plan(RUNS, seconds, lambda run: by_key[run.key], side_by_side, begun)
    assert begun.keys() <= {run.key for run in chosen}
    assert [run.key in begun for run in chosen] == sorted((run.key in begun for run in chosen), reverse=True)
    for several in ([run for run in chosen if run.key in begun], [run for run in chosen if run.key not in begun]):
        assert several == sorted(several, key=RUNS.index)
    left = [Estimate(e.alone / 2, e.floor / 2) if run.key in begun else e for run in chosen for e in [by_key[run.key]]]
    if len(chosen) > len(begun):
        assert campaign.MARGIN * wall(left, side_by_side) <= seconds * (1 + 1e-9)
    if not chosen:
        assert all(campaign.MARGIN * e.alone > seconds for e in estimates)


def test_a_run_that_does_not_fit_is_passed_over() -> None:
    by_seed = [Estimate(10, 10), Estimate(1000, 1000), Estimate(10, 10)]
    assert [run.seed for run in plan(RUNS[:3], 60, lambda run: by_seed[run.seed])] == [0, 2]


# -- sittings ----------------------------------------------------------------------------------------------------------


class Trainer:
    """In the place of `train_all`: writes a record for each run, or for some of them."""

    def __init__(self, most: int = 10**6, interrupted: bool = False) -> None:
        self.most, self.interrupted = most, interrupted
        self.rounds: list[list[Run]] = []

    def __call__(self, runs: Sequence[Run], store: Store, **options: Any) -> Outcome:
        self.rounds.append(list(runs))
        done = Outcome(unfinished=list(runs[self.most :]), interrupted=self.interrupted)
        for run in runs[: self.most]:
            best = run.data.evaluate == "held_out" and run.optim.lr == 0.01
            done.trained.append(record_of(run, 60.0 if best else 50.0))
            store.write(done.trained[-1])
        return done


def test_one_command_tunes_and_goes_on(tmp_path: Path) -> None:
    store, train, said = Store(tmp_path), Trainer(), list[str]()
    done = work(store, named(["tuning-fc", "figure10"]), train=train, say=said.append, device="cpu")
    tuning = len(item("tuning-fc").runs(all_artifacts()))
    assert [len(runs) for runs in train.rounds] == [tuning, 6]
    assert {run.optim.lr for run in train.rounds[1] if run.method.name == "enorm"} == {0.01}
    assert len(done.trained) == tuning + 6
    assert done.sentence() == f"{tuning + 6} runs trained; done."
    assert [line.split(":")[0] for line in said] == [f"{tuning} runs of tuning-fc", "6 runs of figure10"]


def test_what_waits_is_said(tmp_path: Path) -> None:
    train = Trainer()
    done = work(Store(tmp_path), named(["figure4", "figure10"]), train=train, device="cpu")
    assert not train.rounds
    assert "figure4, figure10 wait for tuning-fc" in done.sentence()


def test_a_sitting_begins_only_what_it_can_finish(tmp_path: Path) -> None:
    items = named(["defazio-figure2", "repro-figure2"])
    train = Trainer()
    work(Store(tmp_path / "short"), items, minutes=5, train=train, say=lambda text: None, device="cpu")
    assert {run.model.name for runs in train.rounds for run in runs} == {"fc"}
    train = Trainer()
    work(Store(tmp_path / "long"), items, minutes=5, sitting=90, train=train, say=lambda text: None, device="cpu")
    assert {run.model.name for run in train.rounds[0]} == {"fc", "wrn_20_96"}


def test_what_comes_before_a_waiting_item_goes_first_if_it_fits(tmp_path: Path) -> None:
    items = named(["tuning-nv", "table3-128"]) + named(["repro-figure2"])
    assert [found.name for found in items] == ["tuning-nv", "table3-128", "repro-figure2"]
    for minutes, models in ((60, {"cifar_nv"}), (0.3, {"fc"})):
        train = Trainer(most=0)
        work(Store(tmp_path), items, minutes=minutes, train=train, say=lambda text: None, device="cpu")
        assert {run.model.name for run in train.rounds[0]} == models


@pytest.mark.parametrize("train", [Trainer(most=0), Trainer(most=5, interrupted=True)])
def test_no_round_follows_one_that_was_cut_short(tmp_path: Path, train: Trainer) -> None:
    done = work(Store(tmp_path), named(["repro-figure2"]), train=train, say=lambda text: None, device="cpu")
    assert len(train.rounds) == 1
    assert done.interrupted == train.interrupted
    assert len(done.unfinished) == 200 - len(done.trained)
    assert f"{200 - len(done.trained)} in progress or not begun: the same command goes on" in done.sentence()


def test_what_was_begun_here_goes_first(tmp_path: Path) -> None:
    store, train = Store(tmp_path), Trainer(most=0)
    last = item("repro-figure2").runs(all_artifacts())[-1]
    save_checkpoint(store.checkpoint(last), {"training": {"done": 196 * 45}, "seconds": 3.0})
    work(store, named(["repro-figure2"]), minutes=0.5, train=train, say=lambda text: None, device="cpu")
    assert train.rounds[0][0].key == last.key


def test_a_sitting_at_toy_size(tmp_path: Path) -> None:
    """The real trainer: a tuning, and a figure that uses what it chose."""
    items = named(["tuning-fc", "figure10"])
    calls = []

    def train(runs: Sequence[Run], store: Store, **options: Any) -> Outcome:
        calls.append(len(runs))
        return train_all(runs, store, **options)

    done = work(Store(tmp_path), items, toy=True, train=train, say=lambda text: None, device="cpu")
    assert calls == [9, 2]
    assert all(record.status == "finished" for record in done.trained)
    assert {record.run.data.evaluate for record in done.trained} == {"held_out", "test"}
    assert all(not s.missing for s in standing(Store(tmp_path), items, toy=True))
    assert all("energy" in record.epochs[-1] for record in done.trained if record.run.record)


def test_the_table() -> None:
    tuning = len(item("tuning-fc").runs(all_artifacts()))
    records = records_of(item("repro-figure2").runs(all_artifacts())[:50])
    text = table(standing(records, named(["tuning-fc", "figure4", "repro-figure2"])))
    head, first, second, third, last = text.splitlines()
    assert head.split() == ["item", "artifact", "done", "minutes", "left"]
    assert first.split()[:3] == ["tuning-fc", "stock2019/tuning-fc", f"0/{tuning}"]
    assert second.endswith("(after tuning-fc)")
    assert third.split()[2] == "50/200"
    assert last.split()[:2] == ["all", f"50/{tuning + 270 + 200}"]
    whole = table(standing(records_of(item("repro-figure2").runs(all_artifacts())), named(["repro-figure2"])))
    assert "200/200" in whole
    assert math.isclose(
        float(last.split()[2]), sum(float(row.split()[3]) for row in (first, second, third)), abs_tol=0.2
    )
