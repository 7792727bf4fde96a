"""Grids on more than one machine: every run finishes, once, also when a machine does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equinorm.errors import UserError
from equinorm.lab.training.launchers import Options, launch
from equinorm.lab.training.runs import Data, Model, Optim, Run
from equinorm.lab.training.store import Store

FC = Model("fc", {"hidden": 1, "width": 8, "norm": "none"})
BASE = Run(Data("digits", train=200), FC, optim=Optim(0.1), epochs=40, batch=50)
RUNS = [replace(BASE, seed=seed) for seed in range(6)]


def numbers(store: Store) -> dict[str, Any]:
    return {record.run.key: record.epochs for record in store.records()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = Store(tmp_path_factory.mktemp("reference"))
    launch(RUNS, store)
    return numbers(store)


def test_what_the_store_has_is_not_trained_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert len(launch(RUNS[:2], store).trained) == 2
    outcome = launch(RUNS[:3] * 2, store)
    assert outcome.known == 2
    assert [record.run for record in outcome.trained] == RUNS[2:3]


@pytest.mark.filterwarnings("ignore")  # submitit's own
def test_slurm_jobs_write_to_the_shared_store(tmp_path: Path, reference: dict[str, Any]) -> None:
    pytest.importorskip("submitit")
    store = Store(tmp_path)
    outcome = launch(RUNS[:2], store, "slurm", Options(cluster="local", device="cpu"))
    assert len(outcome.trained) == 2
    assert numbers(store) == {run.key: reference[run.key] for run in RUNS[:2]}


def test_without_slurm_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--launcher local"):
        launch(RUNS, Store(tmp_path), "slurm")


@pytest.mark.parametrize(("launcher", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_engine_is_named(
    launcher: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"pip install 'equinorm\[{launcher}\]'"):
        launch(RUNS, Store(tmp_path), launcher)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_of_a_ray_cluster_is_killed_and_every_run_finishes_once(
    cluster: Any, tmp_path: Path, reference: dict[str, Any]
) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    store = Store(tmp_path)
    came_back: list[str] = []
    killed = threading.Event()

    def kill_one(record: Any) -> None:
        came_back.append(record.run.key)
        if not killed.is_set():
            killed.set()
            cluster.remove_node(second, allow_graceful=False)

    outcome = launch(RUNS, store, "ray", Options(address=cluster.address, device="cpu"), kill_one)
    assert killed.is_set()
    assert sorted(came_back) == sorted(run.key for run in RUNS)
    assert not outcome.unfinished
    assert numbers(store) == reference
    assert len(list((tmp_path / "runs").rglob("*.jsonl"))) == len(RUNS)
