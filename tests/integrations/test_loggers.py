"""The recorder writes to the real loggers, and what it wrote is read back from their files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equinorm.diagnostics import Recorder

TAG = "weights/energy/0.weight"


def record(writer: Any) -> dict[int, float]:
    """Train for five steps; returns what was recorded for one tag."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, every=2, writer=writer, max_share=None) as recorder:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    expected = {entry["step"]: entry["weights"]["energy"]["0.weight"] for entry in recorder.records}
    assert [*expected] == [1, 2, 4]
    return expected


@pytest.mark.shows("TensorBoard", "the recorder's numbers, read back", "tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        expected = record(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars(TAG)} == pytest.approx(expected)


@pytest.mark.shows("wandb", "the recorder's numbers, offline", "wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="tests") as run:
        expected = record(run)
        run.log({"later": 0.0}, step=5)  # a step is complete when another begins
        assert run.summary[TAG] == pytest.approx(expected[4])
    assert list(tmp_path.rglob("run-*.wandb"))


@pytest.mark.shows("MLflow", "the recorder's numbers, read back", "mlflow-skinny")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        expected = record(mlflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, TAG)
    assert {metric.step: metric.value for metric in history} == pytest.approx(expected)


@pytest.mark.shows("accelerate", "the recorder's numbers through accelerator.log", "accelerate", "tensorboard")
def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    expected = record(accelerator)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars(TAG)} == pytest.approx(expected)


@pytest.mark.shows("Lightning", "the recorder's numbers through a logger and through Fabric", "lightning")
def test_lightning(tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    expected = record(logger)
    logger.save()
    assert _column(tmp_path / "lightning_logs") == pytest.approx(expected)
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path / "fabric"))
    expected = record(fabric)
    fabric.logger.save()
    assert _column(tmp_path / "fabric") == pytest.approx(expected)


def _column(folder: Path) -> dict[int, float]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return {int(row["step"]): float(row[TAG]) for row in csv.DictReader(file)}


def test_a_function() -> None:
    seen: dict[int, float] = {}
    expected = record(lambda numbers, step: seen.update({step: numbers[TAG]}))
    assert seen == expected
