"""One command behind every table and figure: all recipes at toy size, then the report, as a user would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from equinorm.cli import main
from equinorm.lab.experiments.artifacts import PAPERS, all_artifacts
from equinorm.lab.experiments.reproduce import chosen
from equinorm.lab.training.store import Store

SOME = ("stock2019/table2", "stock2019/tuning-small-batches", "repro2019", "private", "federated", "deep")
"""Recipes that run every time: one of each kind of training. The slow tests run all."""


def reproduced(folder: Path, recipes: Sequence[str]) -> Path:
    assert main(["reproduce", *recipes, "--toy", "--results", str(folder), "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of some recipes at toy size."""
    return reproduced(tmp_path_factory.mktemp("some"), SOME)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every recipe at toy size."""
    return reproduced(tmp_path_factory.mktemp("all"), ["all"])


def check_nothing_is_run_twice(folder: Path, recipes: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {run.key for artifact in chosen(recipes, toy=True) for run in artifact.runs()}
    assert {record.run.key for record in Store(folder).records()} == wanted
    capsys.readouterr()
    assert main(["reproduce", *recipes, "--toy", "--results", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"0 runs trained; {len(wanted)} were in the store." in said
    assert f"`equinorm report --toy --results {folder}` writes" in said


def test_recipes_run_and_nothing_is_run_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_nothing_is_run_twice(folder, SOME, capsys)


@pytest.mark.slow
def test_every_recipe_runs_and_nothing_is_run_twice(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_nothing_is_run_twice(whole, PAPERS, capsys)


def test_a_report_on_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(tmp_path / "results")]) != 0
    assert "there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_report_has_every_artifact(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--toy", "--results", str(whole)]) == 0
    assert (
        f"{len(all_artifacts())} of {len(all_artifacts())} tables and figures have results" in capsys.readouterr().out
    )
    page = (whole / "index.html").read_text()
    for artifact in all_artifacts():
        assert artifact in page
        assert artifact in (whole / f"{artifact.split('/')[0]}.md").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_one_run_of_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "repro2019/figure2", "--toy", "--results", str(folder)]
    assert main([*command, "--row", "BN"]) == 0
    said = capsys.readouterr().out
    assert "finished, test" in said
    assert "A toy" in said
    assert main([*command, "--row", "magic"]) == 1
    assert "Rows: Baseline, BN" in capsys.readouterr().err
    assert main([*command, "--seed", "77"]) == 1
    assert "has the seeds 0" in capsys.readouterr().err


def test_artifacts_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is done, how long it took and the data set, in lines of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["reproduce", "--toy", "--results", str(folder)]) == 0
    listed = capsys.readouterr().out
    lines = listed.partition("\ndone: ")[0].splitlines()  # the folder below can have any name
    assert all(f"  {name.partition('/')[2]} " in listed for name in all_artifacts())
    assert all(f"{paper}/ " in listed for paper in PAPERS)
    assert max(map(len, lines)) <= 80
    (table2,) = (line for line in lines if line.startswith("  table2 "))
    assert table2.split()[1] == "5/5"
    assert "digits" in table2


def test_no_two_artifacts_have_the_same_title() -> None:
    titles = [artifact.title for artifact in all_artifacts().values()]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["repro2020"], "no artifact 'repro2020'; did you mean repro2019"),
        (["ruff2020/tabel1"], "did you mean ruff2020/table1"),
        (["xyz"], "no artifact 'xyz'. There are those of the papers stock2019, defazio2018"),
        (["repro2019", "--row", "Magic"], "there is no row Magic in repro2019/figure2, repro2019/figure3"),
        (["repro2019", "--column", "99"], "there is no column 99"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *arguments, "--toy"]) == 1
    assert says in capsys.readouterr().err


def test_rows_and_columns_can_be_chosen() -> None:
    (artifact,) = chosen(["repro2019/figure2"], rows=["BN"], columns=["1", "3"])
    assert {(cell.row, cell.column) for cell in artifact.cells} == {("BN", "1"), ("BN", "3")}
    assert len(artifact.runs()) == 10
    assert [run.seed for run in artifact.runs()] == sorted(run.seed for run in artifact.runs())


def test_data_that_is_missing_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(tmp_path / "data"), "--results", str(tmp_path / "results")]
    assert main(["train", "repro2019/figure2", *where]) == 1
    said = capsys.readouterr().err
    assert "cifar-10" in said
    assert str(tmp_path / "data") in said
