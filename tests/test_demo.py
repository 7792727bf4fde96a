"""The demo: its data, its table, and that it writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from equinorm import cli
from equinorm.lab import demo
from equinorm.lab.demo import DEPTHS, METHODS, RATES, Job, Run, best_rate, cell


def finished(lr: float = 0.1, accuracy: float | None = 90.0, diverged_at: int | None = None) -> Run:
    return Run("m", 1, lr, 0, 10, "test", accuracy, diverged_at, 0.1)


def rows(*sets: torch.Tensor) -> list[set[tuple[float, ...]]]:
    return [{tuple(row) for row in images.mul(16).round().tolist()} for images in sets]


def test_the_test_set_is_never_trained_on_nor_tuned_on() -> None:
    train, _, test, _ = demo.digits(validation=False)
    part, _, held_out, _ = demo.digits(validation=True)
    assert [len(x) for x in (train, test, part, held_out)] == [1347, 450, 1077, 270]
    # the smaller training set has a mean of its own: compare images, not their scale
    train, test, part, held_out = (x - x[:, :1] for x in (train, test, part, held_out))  # pixel 0 is always blank
    train, test, part, held_out = (x / x.amax() for x in (train, test, part, held_out))
    for_training, for_testing, for_fitting, for_choosing = rows(train, test, part, held_out)
    assert not for_training & for_testing
    assert not for_choosing & for_testing
    assert not for_fitting & for_choosing
    assert for_fitting | for_choosing == for_training


def test_batches_cover_an_epoch_once() -> None:
    first, second, third = demo.batches(130, 3)
    assert len({*first.tolist(), *second.tolist()}) == 2 * demo.BATCH
    assert len(third) == demo.BATCH


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_methods_are_complete(method: demo.Method) -> None:
    assert len(method.rates) == len(DEPTHS)
    assert set(method.rates) <= set(RATES)
    linear = [layer for layer in method.build(3) if isinstance(layer, nn.Linear)]
    assert len(linear) == 5  # three intermediary layers, the first and the classifier


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
    job = Job(method=0, depth=1, lr=0.1, seed=3, steps=20)
    first, second = demo.run_job(job), demo.run_job(job)
    assert first.accuracy == second.accuracy
    assert first.accuracy is not None
    assert first.accuracy > 50


def test_plain_biases_diverge_where_safe_ones_train() -> None:
    """The claim the demo is there to show, at one learning rate."""
    numbers = {m.name: i for i, m in enumerate(METHODS)}
    runs = [
        demo.run_job(Job(numbers[f"ENorm-1.2, {kind} biases"], depth=15, lr=0.05, seed=0, steps=80))
        for kind in ("plain", "safe")
    ]
    assert runs[0].diverged_at is not None
    assert runs[1].accuracy is not None


def test_demo_writes_table_picture_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "METHODS", (METHODS[0], METHODS[-1]))
    monkeypatch.setattr(demo, "DEPTHS", (1, 15))
    monkeypatch.setattr(demo, "METHODS", tuple(demo.replace(m, rates=(0.2, 0.05)) for m in demo.METHODS))
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "new" / "out"), "--seed", "5"]) == 0
    out = capsys.readouterr().out
    written = {p.name: p for p in (tmp_path / "new" / "out").iterdir()}
    assert set(written) == {"demo.png", "runs.jsonl", "table.txt"}
    assert written["demo.png"].read_bytes().startswith(b"\x89PNG")
    head, *lines = (json.loads(line) for line in written["runs.jsonl"].read_text().splitlines())
    assert {"command", "protocol", "versions", "machine"} <= set(head)
    assert [(r["method"], r["depth"], r["seed"]) for r in lines[:4]] == [
        (m.name, d, 5) for m in demo.METHODS for d in (1, 15)
    ]
    assert lines[3]["diverged_at"] is not None
    assert lines[-1]["energies"]["relative_change"] < 1e-12
    for text in ("baseline", "at step", "never on the test set", "demo.png"):
        assert text in " ".join(out.split())
    assert "baseline" in written["table.txt"].read_text()


def test_energies_are_equal_after_balancing() -> None:
    found = demo.balanced_energies(Job(0, depth=3, lr=0.1, seed=0, steps=5))
    assert found.after["1"] == pytest.approx([found.after["1"][0]] * 5)
    ratios = [b / a for a, b in demo.pairwise(found.after["1.2"])]
    assert ratios == pytest.approx([1.44] * 4)  # energy grows by c² from layer to layer


@pytest.mark.slow
def test_the_quick_demo_in_several_processes(tmp_path: Path) -> None:
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2 + 2 * len(METHODS)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot make the folder" in capsys.readouterr().err
