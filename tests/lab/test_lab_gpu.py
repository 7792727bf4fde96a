"""Training on CUDA: captured steps, several runs side by side, resumed bitwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equinorm.lab.bench.throughput import random_images
from equinorm.lab.training import streams, trainer
from equinorm.lab.training.inputs import Inputs
from equinorm.lab.training.runs import Data, Method, Model, Optim, Run
from equinorm.lab.training.schedules import Linear, Quadratic, SuperConvergence
from equinorm.lab.training.store import Store
from equinorm.lab.training.trainer import train_all
from equinorm.lab.training.training import Training
from support.never_waiting import never_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FC = Run(Data("cifar10"), Model("fc", {"hidden": 5, "width": 64, "norm": "none", "bias": True}), epochs=2, batch=128)
CONV = replace(
    FC,
    data=Data("cifar10", padding=4, flip=True),
    model=Model("resnet_cifar", {"depth": 8, "width": 8}),
    optim=Optim(0.1, momentum=0.9, schedule=SuperConvergence()),
    precision="bfloat16",
)
RUNS = {
    "fc": FC,
    "enorm": replace(FC, method=Method("enorm", {"c": 1.2})),
    "implicit": replace(FC, method=Method("implicit_enorm")),
    "path": replace(FC, method=Method("path_sgd"), optim=Optim(0.005)),
    "adam": replace(FC, method=Method("enorm"), optim=Optim(0.001, schedule=Linear(hold=0.5), name="adam")),
    "batchnorm": replace(CONV, record=("fresh_statistics",)),
    "mixup": replace(CONV, data=replace(CONV.data, mixup=2.0, manifold=True)),
    "binary loss": replace(CONV, data=replace(CONV.data, mixup=2.0, manifold=True), loss="binary"),
    "equinorm": replace(
        CONV,
        model=Model("resnet_cifar", {"depth": 8, "width": 8, "norm": "equinorm"}),
        record=("fresh_statistics",),
    ),
    "zero gains, norms on skips, slow offsets": replace(
        CONV,
        model=Model("resnet_cifar", {"depth": 14, "width": 16, "skips": "A+norm", "zero_last": True}),
        optim=replace(CONV.optim, bias_rate=0.1),
    ),
    "activation first": replace(CONV, model=Model("resnet_cifar", {"depth": 8, "width": 8, "preact": True})),
    "msr": replace(
        CONV,
        model=Model("resnet_cifar", {"depth": 14, "width": 16, "norm": "msr", "noise": 0.1}),
        method=Method("msr"),
        optim=replace(CONV.optim, norm_rate=0.1),
        record=("filters",),
    ),
    "crops": replace(
        CONV,
        data=Data("cifar10", crop=28, flip=True),
        model=Model("cifar_nv", {"width": 8, "norm": "none", "final_norm": "batchnorm"}),
        method=Method("enorm", {"c": 1.2}),
        optim=Optim(0.05, momentum=0.9, schedule=Quadratic()),
    ),
    "dropout": replace(CONV, model=Model("convpool_cnn_c", {"width": 8}), optim=Optim(0.01)),
}


@pytest.fixture(scope="module")
def images() -> object:
    return random_images(torch.device("cuda"), 2000)


def drive(training: Training, steps: int = -1) -> Training:
    while not training.finished and steps != 0:
        training.step()
        steps -= 1
    while training.ahead:
        training.collect(wait=True)
    return training


@pytest.mark.parametrize("name", RUNS)
def test_a_captured_run_is_repeatable_and_resumes_bitwise(name: str, images: object) -> None:
    run = RUNS[name]
    data = Inputs(images, run)
    whole = drive(Training(run, data))
    torch.rand(5, device="cuda")
    state = drive(Training(run, data), whole.steps_per_epoch + 3).state_dict()
    resumed = drive(Training(run, data, state))
    assert whole.log == resumed.log
    a, b = whole.state_dict()["tensors"], resumed.state_dict()["tensors"]
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert all(torch.isfinite(tensor).all() for tensor in a.values())


@pytest.mark.parametrize("name", ["enorm", "batchnorm"])
def test_captured_steps_are_the_steps_of_the_eager_loop(name: str, images: object) -> None:
    """With a momentum that changes every epoch too, for which graphs are captured anew in the memory of others."""
    run = replace(RUNS[name], precision="float32", optim=replace(RUNS[name].optim, lr=0.01), epochs=3)
    run = replace(run, data=replace(run.data, padding=0, flip=False))
    data = Inputs(images, run)
    captured, eager = Training(run, data), Training(run, data)
    eager.captured = False
    drive(captured)
    drive(eager)
    for p, q in zip(captured.parts.model.parameters(), eager.parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_changing_momentum_leaves_no_memory_behind(images: object) -> None:
    run = replace(RUNS["mixup"], epochs=12)
    training = Training(run, Inputs(images, run))
    drive(training, 4 * training.steps_per_epoch)
    before = torch.cuda.memory_reserved()
    drive(training)
    assert torch.cuda.memory_reserved() <= 1.1 * before


def test_what_finished_runs_have_left_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: object
) -> None:
    monkeypatch.setattr("equinorm.lab.data.prepare", lambda *_: images)
    monkeypatch.setattr(trainer, "FULL", 0.0)
    held: list[int] = []
    runs = [replace(RUNS["enorm"], seed=seed) for seed in range(6)]
    train_all(runs, Store(tmp_path), side_by_side=1, on_record=lambda _: held.append(torch.cuda.memory_reserved()))
    assert max(held[2:]) <= 1.1 * held[1], f"reserved after each run, in MB: {[one >> 20 for one in held]}"


def test_runs_one_after_the_other_have_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: object
) -> None:
    """Guards what made the test above fail in a process of its own: workspaces of cuBLAS for every new stream."""
    monkeypatch.setattr("equinorm.lab.data.prepare", lambda *_: images)
    monkeypatch.setattr(streams, "_free", [])
    taken: list[torch.cuda.Stream] = []
    monkeypatch.setattr(streams, "take", lambda priority, take=streams.take: taken.append(take(priority)) or taken[-1])
    runs = [replace(RUNS["fc"], seed=seed) for seed in range(3)]
    train_all(runs, Store(tmp_path), side_by_side=1)
    assert [stream.cuda_stream for stream in taken] == [taken[0].cuda_stream] * 3


def test_steps_never_make_the_host_wait(images: object) -> None:
    """Also where an epoch ends and filters are measured."""
    run = replace(RUNS["msr"], record=("filters", "energy"), epochs=3, optim=Optim(0.1, momentum=0.9))
    training = Training(run, Inputs(images, run))
    drive(training, training.steps_per_epoch)
    with never_waiting():
        while not training.finished:
            training.step()
    assert len(drive(training).log) == 3


def test_a_run_is_busy_until_its_turns_are_done(images: object) -> None:
    training = Training(RUNS["fc"], Inputs(images, RUNS["fc"]))
    torch.cuda.synchronize()
    assert not training.busy
    with torch.cuda.stream(training.stream):
        torch.cuda._sleep(1_000_000_000)
    training.turn(2, lambda: False)
    assert not training.busy
    training.turn(2, lambda: False)
    assert training.busy
    training.close()
    assert not training.busy


def test_side_by_side_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: object) -> None:
    monkeypatch.setattr("equinorm.lab.data.prepare", lambda *_: images)
    runs = [replace(run, seed=seed) for run in (RUNS["enorm"], RUNS["mixup"], RUNS["msr"]) for seed in range(2)]
    one, six = Store(tmp_path / "one"), Store(tmp_path / "six")
    train_all(runs, one, side_by_side=1)
    train_all(runs, six, side_by_side=6)
    for run in runs:
        assert one.get(run).epochs == six.get(run).epochs
