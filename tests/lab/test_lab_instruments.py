"""The benchmark that draws the instruments' pictures on CIFAR-10, on toy data: what it measures, keeps and says."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equinorm.diagnostics import Context, plot_gradient_scans
from equinorm.lab import nets as models
from equinorm.lab.bench import instruments as bench
from equinorm.lab.bench.throughput import random_images
from equinorm.lab.experiments.common import toy_run
from equinorm.lab.training.inputs import Inputs, inputs_of
from equinorm.lab.training.training import Training

CPU = torch.device("cpu")
LABELS = {name: [run.label for run in part.runs()] for name, part in bench.PARTS.items()}


def toy(name: str, label: str) -> Any:
    return toy_run(next(run for run in bench.PARTS[name].runs() if run.label == label))


def texts(figure: Any) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_everything_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run, run again (nothing to do), run longer (all anew), draw."""
    command = ["--toy", "--device", "cpu", "--out", str(tmp_path)]
    bench.main(command)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"vgg.jsonl", "resnet110.jsonl", "cost.jsonl"}
    capsys.readouterr()

    bench.main([*command, "--only", "vgg", "resnet110"])
    assert capsys.readouterr().out.count("done before") == 9
    assert (tmp_path / "vgg.jsonl").read_bytes() == first["vgg.jsonl"]

    bench.main([*command, "--only", "resnet110", "--epochs-resnet", "3"])
    assert "done before" not in capsys.readouterr().out
    rows = bench.read(tmp_path / "resnet110.jsonl")
    assert [row["run"] for row in bench.summaries(rows)] == LABELS["resnet110"]
    assert {row["epochs"] for row in bench.summaries(rows)} == {3}
    for label in LABELS["resnet110"]:  # before the first epoch and after each
        assert [row["step"] for row in rows if row["run"] == label and "step" in row] == [0, 4, 8, 12]

    bench.main([*command, "--draw"])
    assert {path.name for path in tmp_path.iterdir()} - set(first) == {
        "vgg_landscape.svg",
        "vgg_landscape.png",
        "resnet110_filters.svg",
        "resnet110_filters.png",
    }
    assert "95 % interval" in capsys.readouterr().out


def test_the_set_up_is_that_of_the_sources() -> None:
    vgg = {run.label: run for run in bench.vgg_runs()}
    assert list(vgg) == ["none", "BatchNorm", "ENorm", "ENorm, lr 0.05", "EquiNorm", "MSR"]
    assert {run.optim.lr for label, run in vgg.items() if label != "ENorm, lr 0.05"} == {0.1}
    assert vgg["EquiNorm"].data.inputs == "unit"
    decayed, plain, luma = bench.resnet110_runs()
    assert (decayed.optim.weight_decay, plain.optim.weight_decay, luma.optim.weight_decay) == (5e-4, 0, 0)
    assert luma.method.options["luma"] == 5e-4
    for run in (*vgg.values(), decayed, plain, luma):  # so that a shorter run is the beginning of a longer one
        rates = [run.optim.schedule.at(epoch, 20, run.optim.lr, 0.9)[0] for epoch in (1.0, 10.0, 19.9)]
        assert rates == [run.optim.lr] * 3


# -- watching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["BatchNorm", "ENorm", "EquiNorm", "MSR"])
def test_a_watched_run_is_the_run_to_the_last_bit(label: str) -> None:
    run = toy("vgg", label)
    inputs = inputs_of(run, None, CPU)
    plain = Training(run, inputs)
    while not plain.finished:
        plain.step()
    watched = bench.Watched(run, inputs, bench.landscape_at(0.1), every=3)
    while not watched.over:
        watched.advance()
    rows = watched.close()
    assert [row["step"] for row in rows[:-1]] == [0, 3, 6]
    assert all(math.isfinite(row["landscape"]["beta"]) for row in rows[:-1])
    a, b = plain.state_dict(), watched.training.state_dict()
    assert a["log"] == b["log"]
    assert all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])


def test_all_runs_are_measured_on_the_same_images() -> None:
    one, other = toy("vgg", "none"), toy("vgg", "BatchNorm")
    (x, y), (u, v) = (
        bench.Watched(run, inputs_of(run, None, CPU), bench.landscape_at(0.1), 2).batch() for run in (one, other)
    )
    assert torch.equal(x, u)
    assert torch.equal(y, v)
    assert len(y) == one.batch


def test_an_instrument_that_touches_the_weights_is_found_out() -> None:
    def heavy_handed(context: Context) -> dict[str, Any]:
        with torch.no_grad():
            next(context.model.parameters()).mul_(1 + 1e-6)
        return {}

    run = toy("vgg", "none")
    with pytest.raises(RuntimeError, match="has changed model"):
        bench.Watched(run, inputs_of(run, None, CPU), heavy_handed, 2).advance()


def test_stopped_runs_are_kept_as_far_as_they_got_and_made_again(tmp_path: Path) -> None:
    options = bench.parse(["--toy", "--device", "cpu", "--out", str(tmp_path), "--epochs-resnet", "30"])
    calls = iter(range(100))
    bench.run_part("resnet110", options, lambda: next(calls) >= 1)  # until the host had to wait
    (summary,) = bench.summaries(bench.read(tmp_path / "resnet110.jsonl"))
    assert (summary["epochs"], summary["asked_epochs"]) == (bench.AHEAD, 30)
    wanted = [bench.prepared(run, bench.PARTS["resnet110"], options) for run in bench.resnet110_runs()]
    assert not any(bench.is_done(run, [summary]) for run in wanted)
    assert bench.is_done(wanted[0], [summary | {"epochs": 30}])
    assert bench.is_done(wanted[0], [summary | {"diverged": True}])
    assert not bench.is_done(replace(wanted[0], seed=1), [summary | {"epochs": 30}])


def test_a_diverged_run_ends_in_the_epoch_in_which_it_diverged() -> None:
    log = [{"train_loss": loss} for loss in (2.3, math.nan, math.nan)]
    assert [len(bench.until_divergence(log[:n])) for n in range(4)] == [0, 1, 2, 2]


def test_lengths_of_filters() -> None:
    """Every second filter of one layer at a hundredth of its length: both shares are theirs."""
    model = models.build("resnet110", classes=10, in_shape=(3, 8, 8), **models.toy("resnet110"))
    context = Context(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    before = bench.filters(context)
    assert len(before["quantiles"]) == bench.QUANTILES
    assert [float(before[key]) for key in ("below_half", "below_tenth", "lost")] == [0, 0, 0]
    layers = {name: p for name, p in model.named_parameters() if ".branch." in name and p.ndim == 4}
    every_filter = sum(len(weight) for weight in layers.values())
    weight = next(iter(layers.values()))
    with torch.no_grad():
        weight[::2] *= 0.01
        next(p for name, p in model.named_parameters() if "stem" in name and p.ndim == 4).mul_(0)  # does not count
    after = bench.filters(context)
    share = 100 * len(weight[::2]) / every_filter
    assert [float(after[key]) for key in ("below_half", "below_tenth", "lost")] == pytest.approx([share] * 3)
    assert float(after["quantiles"][0]) == pytest.approx(float(weight.detach()[::2].flatten(1).norm(dim=1).min()))


# -- files -------------------------------------------------------------------------------------------------------------


def test_rows_of_a_run_take_the_place_of_those_it_had(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = [{"run": "b", "seed": 0, "step": 0}, {"run": "b", "seed": 0, "finished": True}]  # before there were keys
    path.write_text("".join(json.dumps(row) + "\n" for row in old))

    def rows(label: str, *steps: int) -> list[dict[str, Any]]:
        last = {"run": label, "seed": 0, "finished": True, "key": "k"}
        return [{"run": label, "seed": 0, "step": step} for step in steps] + [last]

    bench.put(path, rows("b", 1, 2), ["a", "b"])
    assert bench.read(path) == rows("b", 1, 2)
    bench.put(path, rows("a", 7), ["a", "b"])
    assert bench.read(path) == rows("a", 7) + rows("b", 1, 2)
    bench.put(path, rows("b", 3), ["a", "b"])
    assert bench.read(path) == rows("a", 7) + rows("b", 3)


# -- cost --------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(10, 1000), min_size=2, max_size=30), st.floats(-5, 5), st.integers(1, 20), st.integers(20, 200)
)
def test_the_cost_of_a_recording_is_spread_over_the_interval(
    without: list[float], extra: float, block: int, every: int
) -> None:
    """The same milliseconds more in every block with a recording: that is the cost, whatever the blocks took."""
    found = bench.added(without, [ms + extra for ms in without], block, every)
    expected = 100 * extra / (every * statistics.median(without) / block)
    assert found["added_percent"] == pytest.approx(expected, abs=1e-9)
    assert found["added_percent_mean"] == pytest.approx(expected, abs=1e-9)
    assert found["added_percent_95"] == pytest.approx([expected, expected], abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_the_interval_is_around_the_median_and_within_the_values(values: list[float]) -> None:
    low, high = bench.bootstrap(values, repeats=400)
    assert min(values) - 1e-9 <= low <= statistics.median(values) + 1e-9
    assert statistics.median(values) - 1e-9 <= high <= max(values) + 1e-9


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    draws = torch.randn(200, 40, dtype=torch.float64)
    covered = [low <= 0 <= high for low, high in (bench.bootstrap(row.tolist(), 300) for row in draws)]
    assert 0.88 < statistics.fmean(covered) <= 1


def test_turns_are_taken_in_both_orders() -> None:
    asked: list[bool] = []

    def block(recording: bool) -> bool:
        asked.append(recording)
        return recording

    assert [bench.take_turns(block, first) for first in (False, True)] == [(False, True)] * 2
    assert asked == [False, True, True, False]


# -- pictures ----------------------------------------------------------------------------------------------------------


def vgg_rows(epochs: int, lr: float, diverged: bool = False, run: str = "none", seed: int = 0) -> list[dict[str, Any]]:
    known = None if diverged else 1.0
    scan = {"loss": known, "losses": [known] * 8, "changes": [known] * 8, "beta": known}
    first = {"loss": 2.0, "losses": [2.0] * 8, "changes": [3.0] * 8, "beta": 4.0}
    summary = {
        "finished": True,
        "key": "k",
        "epochs": epochs,
        "diverged": diverged,
        "test_accuracy": 61.25,
        "lr": lr,
        "batch": 128,
        "data": "cifar10",
        "measured_every": 100,
        "steps_per_epoch": 391,
    }
    key = {"run": run, "seed": seed}
    return [{**key, "step": 0, "landscape": first}, {**key, "step": 100, "landscape": scan}, {**key, **summary}]


def test_the_caption_says_what_the_rows_say() -> None:
    rows = vgg_rows(15, 0.1) + vgg_rows(1, 0.1, diverged=True, run="ENorm") + vgg_rows(12, 0.05, run="ENorm, lr 0.05")
    name, figure = bench.draw_vgg(rows)
    assert name == "vgg_landscape"
    assert "VGG-13 on CIFAR-10, batch 128, 12 or 15 epochs, one run each." in texts(figure)
    assert "Every 100 steps" in texts(figure)
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles == ["none\nlr 0.1: 61.2 %", "ENorm\nlr 0.1: diverged in epoch 1", "ENorm\nlr 0.05: 61.2 %"]
    _, figure = bench.draw_vgg(rows[:3] + vgg_rows(15, 0.1, seed=1))
    assert "15 epochs, 2 runs each, of which the first is shown" in texts(figure)


def test_the_title_claims_only_what_the_numbers_bear_out() -> None:
    shrinks = {"BatchNorm, weight decay 5e-4": 0.4, "BatchNorm, no decay": 1.2, "MSR, LUMA 5e-4": 1.1}
    assert bench.filters_title(shrinks).startswith("Weight decay shrinks")
    assert bench.filters_title(dict.fromkeys(shrinks, 1.0)).startswith("Lengths of filters")
    assert bench.filters_title(shrinks | {"BatchNorm, no decay": 0.5}).startswith("Lengths of filters")
    assert bench.filters_title(shrinks | {"MSR, LUMA 5e-4": 2.0}).startswith("Lengths of filters")


def test_a_single_measurement_before_divergence_is_seen() -> None:
    scans = [(row["step"], row["landscape"]) for row in vgg_rows(1, 0.1, diverged=True)[:2]]
    figure = plot_gradient_scans({"ENorm": scans})
    loss, _, beta = figure.axes
    assert any(len(c.get_segments()) == 1 for c in loss.collections if hasattr(c, "get_segments"))
    assert any(list(line.get_ydata()) == [4.0] for line in beta.lines)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("label", LABELS["vgg"])
def test_a_captured_run_does_not_feel_that_it_is_watched(label: str) -> None:
    run = replace(toy("vgg", label), precision="bfloat16", optim=replace(toy("vgg", label).optim, lr=0.01))
    inputs = Inputs(random_images(torch.device("cuda"), 500), run)
    states = []
    for every in (3, 10**6):  # often, and only at the start
        watched = bench.Watched(run, inputs, bench.landscape_at(0.01), every)
        while not watched.over:
            watched.advance()
        watched.close()
        states.append(watched.training.state_dict())
    a, b = states
    assert a["log"] == b["log"]
    assert all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])
