"""The demo: its data, its rows, its table, and that it writes what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from equinorm import cli
from equinorm.lab.experiments import demo
from equinorm.lab.experiments.demo import DEEP, HELD_OUT, RATES, RESIDUAL, STUDIES, Score, Study, cell
from equinorm.lab.training.inputs import Inputs, inputs_of
from equinorm.lab.training.runs import Run
from equinorm.lab.training.store import Store
from equinorm.lab.training.trainer import train_all

CPU = torch.device("cpu")


def scored(lr: float = 0.1, accuracy: float | None = 90.0, diverged_at: int | None = None) -> Score:
    return Score("fully connected", "m", 1, lr, 0, 10, "test", accuracy, diverged_at, 0.1, "key")


def images(tensor: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tensor.flatten(1).tolist()}


def inputs(run: Run) -> Inputs:
    found = inputs_of(run, None, CPU)
    assert isinstance(found, Inputs)
    return found


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.net)
def test_the_test_set_is_never_trained_on_nor_tuned_on(study: Study) -> None:
    run = study.run(study.rows[0], study.depths[0], seed=0)
    candidate = next(demo.candidates(study, study.rows[0], study.depths[0]))
    whole, part = inputs(run), inputs(candidate.runs[0])
    assert [whole.test_size, len(whole), part.test_size, len(part)] == [450, 1347, HELD_OUT, 1347 - HELD_OUT]
    tested, trained = images(whole.test), images(whole.seen(whole.train.images, training=False))
    chosen, fitted = images(part.test), images(part.seen(part.train.images, training=False))
    assert not trained & tested
    if run.data.inputs == "unit":  # the other's pixels are standardized by the images at hand
        assert not (chosen | fitted) & tested
        assert not chosen & fitted
        assert chosen | fitted == trained


def test_candidates_differ_in_their_rate_and_seed_only() -> None:
    tried = list(demo.candidates(DEEP, DEEP.rows[0], 9))
    assert [candidate.settings["lr"] for candidate in tried] == list(RATES)
    plain = {replace(run, seed=0, optim=replace(run.optim, lr=1.0)).key for one in tried for run in one.runs}
    assert len(plain) == 1
    assert {run.seed for one in tried for run in one.runs} == {1000, 1001}


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.net)
def test_rows_are_complete(study: Study) -> None:
    for row in study.rows:
        assert len(row.rates) == len(study.depths)
        assert set(row.rates) <= set(RATES)
    assert len({row.name for row in study.rows}) == len(study.rows)
    assert len({row.colour for row in study.rows}) == len(study.rows)
    assert len({study.run(row, study.depths[0], 0).key for row in study.rows}) == len(study.rows)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Score]:
    """A few epochs of any row, of 22 steps each, trained once."""
    store = Store(tmp_path_factory.mktemp("short"))

    def score(study: Study, name: str, depth: int, epochs: int, lr: float | None = None) -> Score:
        run = replace(study.run(study.row(name), depth, 0, lr), epochs=epochs)
        train_all([run], store, device=CPU)
        record = store.get(run)
        assert record is not None
        return Score.of(study, replace(record, run=run))

    return score


@pytest.mark.parametrize("name", [row.name for row in RESIDUAL.rows])
def test_every_family_trains(name: str, short: Callable[..., Score]) -> None:
    """From chance to three of four. Scaled weight norm, which starts slowly, has the demo's own length."""
    epochs = 7 if name == "scaled weight norm" else 3
    accuracy = short(RESIDUAL, name, RESIDUAL.depths[0], epochs).accuracy
    assert accuracy is not None
    assert accuracy > 75


def test_plain_biases_diverge_where_safe_ones_train(short: Callable[..., Score]) -> None:
    """The claim the demo is there to show, at one learning rate."""
    plain, safe = (short(DEEP, f"ENorm-1.2, {kind} biases", 15, 4, 0.05) for kind in ("plain", "safe"))
    assert plain.accuracy is None
    assert plain.diverged_at == 44
    assert safe.accuracy is not None
    assert safe.accuracy > 50
    assert (safe.method, safe.depth, safe.lr, safe.steps) == ("ENorm-1.2, safe biases", 15, 0.05, 88)


def test_cells() -> None:
    assert cell([scored(accuracy=a) for a in (91.0, 95.5, 93.0)]) == "93.0\n91.0-95.5"
    assert cell([scored()]) == "90.0"
    lost = scored(accuracy=None, diverged_at=44)
    assert cell([lost, scored(accuracy=None, diverged_at=22)]) == "diverged\nby step 22"
    assert cell([scored(), lost]) == "diverged\nby step 44\n1 of 2"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[Study, Study]:
    """Two rows of each study, shorter and with two depths."""
    deep = replace(DEEP, rows=(DEEP.rows[0], DEEP.rows[-1]), base=replace(DEEP.base, epochs=4))
    residual = replace(RESIDUAL, rows=RESIDUAL.rows[3:5], base=replace(RESIDUAL.base, epochs=2))
    monkeypatch.setattr(demo, "STUDIES", (deep, residual))
    return deep, residual


def test_the_demo_writes_table_picture_and_runs_and_goes_on_where_it_was(
    small: tuple[Study, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep, residual = small
    out = tmp_path / "new" / "out"
    first = deep.run(deep.rows[0], 1, seed=0)
    train_all([first], Store(out), device=CPU)  # an earlier demo came so far
    assert cli.main(["demo", "--quick", "--output", str(out), "--seed", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert {"demo.png", "runs.jsonl", "table.txt", "runs"} <= {path.name for path in out.iterdir()}
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    head, *lines = (json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines())
    assert {"command", "protocol", "versions", "machine"} <= set(head)
    assert [(r["net"], r["method"], r["depth"], r["seed"]) for r in lines[:-1]] == [
        *((deep.net, row.name, depth, 0) for row in deep.rows for depth in (1, 15)),
        *((residual.net, row.name, 8, 0) for row in residual.rows),
    ]
    assert lines[3]["diverged_at"] is not None
    assert lines[-1]["energies"]["relative_change"] < 1e-12
    for text in (
        "baseline",
        "by step",
        "EquiNorm",
        '"msr", then MeanShiftRejection',
        "never on the test set",
        "demo.png",
        "6 runs, 1 of them trained before",
    ):
        assert text in said
    assert "baseline" in (out / "table.txt").read_text()


def test_tuning_chooses_and_says_what_differs(
    small: tuple[Study, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = replace(small[0], rows=small[0].rows[:1], depths=(1,))
    deep = replace(deep, rows=(replace(deep.rows[0], rates=(0.002,)),))
    monkeypatch.setattr(demo, "STUDIES", (deep,))
    monkeypatch.setattr(demo, "RATES", (0.002, 0.5))
    assert cli.main(["demo", "--tune", "--output", str(tmp_path)]) == 0
    assert "fully connected, baseline: (0.5,) (the demo has (0.002,))" in capsys.readouterr().out
    head, *lines = (json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines())
    assert "held out" in head["protocol"]
    assert [line["lr"] for line in lines] == [0.002, 0.002, 0.5, 0.5]
    assert {line["split"] for line in lines} == {"held_out"}


def test_energies_are_equal_after_balancing() -> None:
    found = demo.balanced_energies(replace(DEEP.run(DEEP.rows[0], 1, 0), epochs=0.25))
    assert found.after["1"] == pytest.approx([found.after["1"][0]] * 3)
    ratios = [b / a for a, b in pairwise(found.after["1.2"])]
    assert ratios == pytest.approx([1.44] * 2)  # energy grows by c² from layer to layer


@pytest.mark.slow
def test_the_quick_demo_in_several_processes(tmp_path: Path) -> None:
    assert cli.main(["demo", "--quick", "--output", str(tmp_path)]) == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2 + 2 * len(DEEP.rows) + len(RESIDUAL.rows)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--output", str(tmp_path / "file" / "out")]) == 1
    assert "cannot make the folder" in capsys.readouterr().err
