"""Grids on more than one machine: every run finishes, once, also when a machine does not."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equinorm.errors import UserError
from equinorm.lab.training import launchers
from equinorm.lab.training.launchers import Options, launch
from equinorm.lab.training.runs import Data, Model, Optim, Run
from equinorm.lab.training.store import Store

FC = Model("fc", {"hidden": 1, "width": 8, "norm": "none"})
BASE = Run(Data("digits", train=200), FC, optim=Optim(0.1), epochs=4, batch=50)
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


def test_processes_of_this_machine_share_the_store(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread here, since torch's random state is that of all threads; processes: the demo among the slow tests."""
    pool = lambda workers, mp_context, initializer, initargs: ThreadPoolExecutor(1)  # noqa: E731
    monkeypatch.setattr(launchers, "ProcessPoolExecutor", pool)
    store, came_back = Store(tmp_path), []
    relabelled = [replace(run, label=f"number {run.seed}") for run in RUNS]
    outcome = launch(relabelled, store, options=Options(device="cpu", processes=2), on_record=came_back.append)
    assert sorted(record.run.label for record in came_back) == [f"number {seed}" for seed in range(6)]
    assert outcome.trained == came_back
    assert numbers(store) == reference
    with store.lock(replace(BASE, seed=6)):
        outcome = launch([replace(BASE, seed=seed) for seed in (6, 7)], store, options=Options(processes=2))
    assert [run.seed for run in outcome.elsewhere] == [6]


@pytest.mark.filterwarnings("ignore")  # submitit's own
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.slow)])
def test_slurm_jobs_write_to_the_shared_store(cluster: str, tmp_path: Path, reference: dict[str, Any]) -> None:
    """submitit's own executors: in this process, and as processes of their own."""
    pytest.importorskip("submitit")
    store = Store(tmp_path)
    outcome = launch(RUNS[:2], store, "slurm", Options(cluster=cluster, device="cpu"))
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


class PretendedRay:
    """What the launcher uses of Ray, in this process: arguments are pickled, and a task can lose its node."""

    def __init__(self, dies_first: int) -> None:
        self.running, self.dying, self.tries = False, dies_first, 0

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.running = True

    def shutdown(self) -> None:
        self.running = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, *, num_cpus: int, num_gpus: int, max_retries: int) -> Any:
        assert (num_cpus, num_gpus) == (1, 0)

        def task(function: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: (function, pickle.dumps(given), max_retries))

        return task

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference: Any) -> Any:
        function, given, retries = reference
        while True:
            self.tries += 1
            answer = function(*pickle.loads(given))
            if not self.dying:
                return pickle.loads(pickle.dumps(answer))
            assert retries != 0, "the node of a task that is not tried again has died"
            self.dying, retries = self.dying - 1, retries - 1


def test_every_run_comes_back_once_from_tasks_that_lose_their_node(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = PretendedRay(dies_first=2)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    store, came_back = Store(tmp_path), []
    outcome = launch(RUNS, store, "ray", Options(device="cpu"), lambda record: came_back.append(record.run.key))
    assert ray.tries == len(RUNS) + 2
    assert not ray.running
    assert sorted(came_back) == sorted(run.key for run in RUNS)
    assert not outcome.unfinished
    assert numbers(store) == reference


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


@pytest.mark.slow
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
