"""What stored results rest on stays what it is: every run's key, and the weights that every kind of run starts from.

`frozen.json` holds them; `python tests/lab/test_frozen.py` writes it anew, for a change that means to change them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equinorm.lab import nets as models
from equinorm.lab.experiments.artifacts import all_artifacts
from equinorm.lab.training.inputs import inputs_of
from equinorm.lab.training.parts import build
from equinorm.lab.training.runs import Run

FROZEN = Path(__file__).with_name("frozen.json")
NORMS = ("none", "weightnorm+batchnorm", "weight_standardization+groupnorm", *models.norm_names()[1:])
STANDS_ALONE = [norm for norm in NORMS if norm != "weight_standardization"]  # which goes with a norm of activations


@cache
def frozen() -> dict[str, Any]:
    held: dict[str, Any] = json.loads(FROZEN.read_text())
    return held


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Names, shapes, dtypes and every bit of a state dict."""
    found = hashlib.sha256()
    for name, tensor in state.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def state_sums(state: Mapping[str, Tensor]) -> list[float]:
    """Numbers that tell of every tensor in a state dict, where bits depend on the machine: its norm and its mean."""
    exact = [tensor.detach().double() for tensor in state.values()]
    return [number for x in exact for number in (float(x.norm()), float(x.mean()))]


# -- keys --------------------------------------------------------------------------------------------------------------


def keys() -> dict[str, str]:
    return {name: digest(run.key for run in artifact.runs()) for name, artifact in all_artifacts().items()}


@pytest.mark.parametrize("name", frozen()["keys"] if FROZEN.exists() else [])
def test_the_runs_of_an_artifact_keep_their_keys(name: str) -> None:
    assert digest(run.key for run in all_artifacts()[name].runs()) == frozen()["keys"][name]


# -- models as they are built ------------------------------------------------------------------------------------------


def built(name: str, norm: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    shape = (1, 8, 8) if name == "fc" else (3, 32, 32)
    return models.build(name, classes=10, in_shape=shape, norm=norm, **{**models.toy(name), **options})


def starts() -> dict[str, str]:
    found = {}
    for name in models.names():
        for norm in STANDS_ALONE:
            try:
                found[f"{name} {norm}"] = state_digest(built(name, norm).state_dict())
            except ValueError as error:  # noqa: PERF203
                found[f"{name} {norm}"] = f"refused: {error}"
    return found


@pytest.mark.parametrize("name", models.names())
def test_models_start_from_the_same_weights(name: str) -> None:
    for start, expected in frozen()["starts"].items():
        model, norm = start.split(" ")
        if model == name and not expected.startswith("refused"):
            assert state_digest(built(model, norm).state_dict()) == expected, start


# -- runs, whose start may be computed from data -----------------------------------------------------------------------


@cache
def kinds() -> dict[str, Run]:
    """One run at toy size of every model with its options and method."""
    found: dict[str, Run] = {}
    for artifact in all_artifacts().values():
        for run in artifact.toy().runs():
            plain = run.to_dict()
            kind = digest([json.dumps([plain["model"], plain["method"]["name"]], sort_keys=True)])
            found.setdefault(f"{run.model.name} {run.method.name} {kind}", replace(run, seed=3))
    return found


def start_of(run: Run) -> dict[str, Tensor]:
    inputs = inputs_of(run, Path("data"), torch.device("cpu"))
    return build(run, inputs).model.state_dict()


def run_starts() -> dict[str, list[float]]:
    return {kind: state_sums(start_of(run)) for kind, run in kinds().items()}


@pytest.mark.parametrize("kind", kinds())
def test_a_run_starts_from_its_seed(kind: str) -> None:
    """ConvPool-CNN-C once started from other weights in every process: dropout drew from the global generator while
    the start was computed from data."""
    torch.manual_seed(len(kind))
    first = state_sums(start_of(kinds()[kind]))
    torch.manual_seed(len(kind) + 1)
    torch.testing.assert_close(torch.tensor(state_sums(start_of(kinds()[kind]))), torch.tensor(first), rtol=0, atol=0)
    if kind in frozen()["run_starts"]:
        torch.testing.assert_close(
            torch.tensor(first), torch.tensor(frozen()["run_starts"][kind]), rtol=1e-6, atol=1e-6
        )


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({"keys": keys(), "starts": starts(), "run_starts": run_starts()}, indent=1) + "\n")
