"""The script behind results/cifar10.jsonl still makes the runs of that log."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("cifar10_benchmark", ROOT / "benchmarks" / "cifar10.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_log_holds_the_runs_of_the_script() -> None:
    rows = map(json.loads, (ROOT / "results" / "cifar10.jsonl").read_text().splitlines())
    logged = {(row["name"], row["epochs"]) for row in rows}
    assert logged == {(run.name, run.epochs) for runs in load().GROUPS.values() for run in runs()}


def test_a_run_trains() -> None:
    script = load()
    run = next(run for run in script.fc_runs() if run.name == "fc-11 enorm-1.2 safe biases")
    found = script.train(run, script.toy(torch.device("cpu")), seed=0, epochs=1)
    assert not found["diverged"]
    assert math.isfinite(found["train_loss"][0])
