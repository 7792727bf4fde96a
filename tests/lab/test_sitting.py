"""A sitting: items in order, runs brought back as they end, faults noted, nothing trained twice, taken over at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equinorm.cli import main as command
from equinorm.lab.experiments import campaign, sitting
from equinorm.lab.experiments.artifacts import all_artifacts
from equinorm.lab.training.store import Store, dumps, parse, unpacked


def sit(tmp_path: Path, *arguments: str, out: str = "out") -> int:
    places = ["--out", str(tmp_path / out), "--store", str(tmp_path / "store"), "--results", str(tmp_path / "results")]
    return sitting.main([*places, "--toy", "--device", "cpu", *arguments])


ITEMS = ("--item", "arpit-recurrent", "--item", "tuning-federated", "--item", "federated")


def test_a_sitting_brings_its_runs_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sit(tmp_path, *ITEMS) == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["left.txt", "log.txt", "runs.jsonl"]
    assert not [line for line in (out / "left.txt").read_text().splitlines()[1:-1] if " - " not in line]
    trained = {record.run.key for record in Store(tmp_path / "store").records()}
    brought = [parse(text, out) for text in unpacked((out / "runs.jsonl").read_text())]
    assert {record.run.key for record in brought} == trained
    assert len(brought) == len(trained)
    assert "federated: " in (out / "log.txt").read_text()

    home = ["campaign", "--toy", "--results", str(tmp_path / "home"), "--merge", str(out / "runs.jsonl")]
    (tmp_path / "home").mkdir()
    capsys.readouterr()
    assert command(home) == 0
    assert f"{len(trained)} new, 0 known, 0 not whole" in capsys.readouterr().out
    assert command(home) == 0
    assert f"0 new, {len(trained)} known" in capsys.readouterr().out
    assert {record.run.key for record in Store(tmp_path / "home").records()} == trained

    # on another day: what is at home is known, trained no more and not brought again
    (tmp_path / "home").rename(tmp_path / "results")
    assert sit(tmp_path, *ITEMS, out="again") == 0
    assert not (tmp_path / "again" / "runs.jsonl").read_text()
    assert "0 runs trained; done." in (tmp_path / "again" / "log.txt").read_text()


def test_the_same_command_brings_what_an_earlier_call_on_the_machine_had(tmp_path: Path) -> None:
    assert sit(tmp_path, "--item", "arpit-recurrent") == 0
    first = sorted(unpacked((tmp_path / "out" / "runs.jsonl").read_text()))
    assert sit(tmp_path, "--item", "arpit-recurrent", out="later") == 0
    assert sorted(unpacked((tmp_path / "later" / "runs.jsonl").read_text())) == first
    assert first


def test_an_item_that_fails_is_noted_and_the_next_one_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = campaign.train_all

    def failing(runs: Any, store: Store, **options: Any) -> Any:
        if any(run.data.clients for run in runs):
            raise RuntimeError("no kernel image")
        return real(runs, store, **options)

    monkeypatch.setattr(sitting, "train_all", failing)
    assert sit(tmp_path, "--item", "tuning-federated", "--item", "tuning-private") == 1
    assert "no kernel image" in (tmp_path / "out" / "faults.txt").read_text()
    assert {record.run.model.name for record in Store(tmp_path / "store").records()} == {"wrn"}


def test_time_that_is_up_ends_a_sitting(tmp_path: Path) -> None:
    assert sit(tmp_path, *ITEMS, "--minutes", "0") == 0
    assert "no time left" in (tmp_path / "out" / "log.txt").read_text()
    assert not (tmp_path / "out" / "runs.jsonl").read_text()


def test_a_torn_end_of_what_was_brought_is_refused_and_the_rest_taken(tmp_path: Path) -> None:
    assert sit(tmp_path, "--item", "arpit-recurrent") == 0
    records = list(Store(tmp_path / "store").records())
    pack = tmp_path / "pack.jsonl"
    pack.write_text("".join(map(dumps, records))[:-20])
    merged = Store(tmp_path / "home").merge(pack)
    assert (len(merged.added), len(merged.damaged)) == (len(records) - 1, 1)
    assert "torn" in next(iter(merged.damaged.values()))


def test_every_artifact_with_runs_of_ours_is_in_the_campaign() -> None:
    """What was added for today's rivals and for training without batch statistics is asked for by the campaign."""
    wanted = {item.artifact for item in campaign.ITEMS}
    groups = ("rivals", "imagenette", "private", "federated", "deep")
    missing = {name for name in all_artifacts() if name.split("/")[0] in groups} - wanted
    assert missing == {"rivals/pathcond-end"}  # the runs of rivals/pathcond again
