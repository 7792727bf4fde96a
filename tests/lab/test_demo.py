"""The demo: its data, its table, and that it writes what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from equinorm import cli
from equinorm.equilibrium.layers import EquiNormConv2d
from equinorm.lab.experiments import demo
from equinorm.lab.experiments.demo import DEEP, FAMILIES, METHODS, RATES, RESIDUAL, STUDIES, Job, Run, best_rate, cell
from equinorm.msr import ScaledKernel
from equinorm.weightnorm import ScaledWeightNorm, WeightNorm


def finished(lr: float = 0.1, accuracy: float | None = 90.0, diverged_at: int | None = None) -> Run:
    return Run("fully connected", "m", 1, lr, 0, 10, "test", accuracy, diverged_at, 0.1)


def rows(*sets: torch.Tensor) -> list[set[tuple[float, ...]]]:
    return [{tuple(row) for row in images.mul(16).round().flatten(1).tolist()} for images in sets]


def test_the_test_set_is_never_trained_on_nor_tuned_on() -> None:
    train, _, test, _ = demo.digits(validation=False)
    part, _, held_out, _ = demo.digits(validation=True)
    assert [len(x) for x in (train, test, part, held_out)] == [1347, 450, 1077, 270]
    for_training, for_testing, for_fitting, for_choosing = rows(train, test, part, held_out)
    assert not for_training & for_testing
    assert not for_choosing & for_testing
    assert not for_fitting & for_choosing
    assert for_fitting | for_choosing == for_training


def test_batches_cover_an_epoch_once() -> None:
    first, second, third = demo.batches(130, 3)
    assert len({*first.tolist(), *second.tolist()}) == 2 * demo.BATCH
    assert len(third) == demo.BATCH


def test_inputs() -> None:
    train, _, test, _ = demo.digits(validation=False)
    vectors = demo.standardized(train, train)
    assert vectors.shape == (1347, 64)
    assert vectors.mean().item() == pytest.approx(0, abs=1e-6)
    assert vectors.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    # the test images are scaled as those to train on are
    torch.testing.assert_close(demo.standardized(test, train)[0] - vectors[0], (test[0] - train[0]).flatten().float()
                               / train.std(correction=0).float())  # fmt: skip
    images = demo.pixels(test, train)
    assert images.shape == (450, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.net)
def test_methods_are_complete(study: demo.Study) -> None:
    for method in study.methods:
        assert len(method.rates) == len(study.depths)
        assert set(method.rates) <= set(RATES)
    assert len({method.name for method in study.methods}) == len(study.methods)
    assert len({method.colour for method in study.methods}) == len(study.methods)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_deep_nets(method: demo.Method) -> None:
    linear = [layer for layer in method.build(3, torch.zeros(2, 64)) if isinstance(layer, nn.Linear)]
    assert len(linear) == 5  # three intermediary layers, the first and the classifier


KINDS = {
    "no normalization": nn.Conv2d,
    "BatchNorm": nn.BatchNorm2d,
    "ENorm": nn.Conv2d,
    "EquiNorm": EquiNormConv2d,
    "mean shift rejection": ScaledKernel,
    "weight norm": WeightNorm,
    "scaled weight norm": ScaledWeightNorm,
}


@pytest.mark.parametrize("method", FAMILIES, ids=lambda m: m.name)
def test_families(method: demo.Method) -> None:
    torch.manual_seed(0)
    images = demo.pixels(*[demo.digits(validation=False)[0]] * 2)
    model = method.build(5, images)
    assert any(isinstance(module, KINDS[method.name]) for module in model.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) is (method.name == "BatchNorm")
    if method.name == "weight norm":  # data-dependent: unit variance behind the first layer
        assert model[0](images[:256]).var((0, 2, 3), correction=0).detach().tolist() == pytest.approx(
            [1.0] * 16, rel=1e-3
        )


@pytest.mark.parametrize("method", FAMILIES, ids=lambda m: m.name)
def test_every_family_trains(method: demo.Method) -> None:
    """In 40 steps, from chance to three of four."""
    run = demo.run_job(Job(RESIDUAL.net, method.name, 5, RESIDUAL.rate(method, 9), seed=0, steps=40))
    assert run.accuracy is not None
    assert run.accuracy > 75


def test_cells() -> None:
    assert cell([finished(accuracy=a) for a in (91.0, 95.5, 93.0)]) == "93.0\n91.0-95.5"
    assert cell([finished()]) == "90.0"
    lost = finished(accuracy=None, diverged_at=31)
    assert cell([lost, finished(accuracy=None, diverged_at=24)]) == "diverged\nat step 24"
    assert cell([finished(), lost]) == "diverged\nat step 31\n1 of 2"


def test_best_rate() -> None:
    runs = [finished(0.1, 90.0), finished(0.2, 95.0), finished(0.2, None, 3), finished(0.05, 90.0)]
    assert best_rate(runs) == 0.05  # a diverged run counts as 0, and the smaller rate wins a tie


def test_a_run_repeats_itself() -> None:
    job = Job(DEEP.net, "baseline", depth=1, lr=0.1, seed=3, steps=20)
    first, second = demo.run_job(job), demo.run_job(job)
    assert first.accuracy == second.accuracy
    assert first.accuracy is not None
    assert first.accuracy > 50


def test_plain_biases_diverge_where_safe_ones_train() -> None:
    """The claim the demo is there to show, at one learning rate."""
    runs = [
        demo.run_job(Job(DEEP.net, f"ENorm-1.2, {kind} biases", depth=15, lr=0.05, seed=0, steps=80))
        for kind in ("plain", "safe")
    ]
    assert runs[0].diverged_at is not None
    assert runs[1].accuracy is not None


def test_demo_writes_table_picture_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = replace(DEEP, methods=(METHODS[0], METHODS[-1]))
    residual = replace(RESIDUAL, methods=FAMILIES[3:5], steps=30)
    monkeypatch.setattr(demo, "STUDIES", (deep, residual))
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "new" / "out"), "--seed", "5"]) == 0
    out = capsys.readouterr().out
    written = {p.name: p for p in (tmp_path / "new" / "out").iterdir()}
    assert set(written) == {"demo.png", "runs.jsonl", "table.txt"}
    assert written["demo.png"].read_bytes().startswith(b"\x89PNG")
    head, *lines = (json.loads(line) for line in written["runs.jsonl"].read_text().splitlines())
    assert {"command", "protocol", "versions", "machine"} <= set(head)
    assert [(r["net"], r["method"], r["depth"], r["seed"]) for r in lines[:-1]] == [
        *((DEEP.net, m.name, d, 5) for m in deep.methods for d in (1, 15)),
        *((RESIDUAL.net, m.name, 9, 5) for m in residual.methods),
    ]
    assert lines[3]["diverged_at"] is not None
    assert lines[-1]["energies"]["relative_change"] < 1e-12
    for text in (
        "baseline",
        "at step",
        "EquiNorm",
        '"msr", then MeanShiftRejection',
        "never on the test set",
        "demo.png",
    ):
        assert text in " ".join(out.split())
    assert "baseline" in written["table.txt"].read_text()


def test_energies_are_equal_after_balancing() -> None:
    found = demo.balanced_energies(Job(DEEP.net, "baseline", depth=3, lr=0.1, seed=0, steps=5))
    assert found.after["1"] == pytest.approx([found.after["1"][0]] * 5)
    ratios = [b / a for a, b in demo.pairwise(found.after["1.2"])]
    assert ratios == pytest.approx([1.44] * 4)  # energy grows by c² from layer to layer


@pytest.mark.slow
def test_the_quick_demo_in_several_processes(tmp_path: Path) -> None:
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2 + 2 * len(METHODS) + len(FAMILIES)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot make the folder" in capsys.readouterr().err
