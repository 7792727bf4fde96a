"""Training: deterministic, bitwise resumable anywhere, and a run that goes wrong does not take the others with it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from equinorm.errors import UserError
from equinorm.lab.data import mixed_loss, prepare
from equinorm.lab.training.inputs import Inputs, inputs_of
from equinorm.lab.training.losses import LOSSES
from equinorm.lab.training.precision import mixed_seed
from equinorm.lab.training.runs import Data, Method, Model, Optim, Run
from equinorm.lab.training.schedules import Linear, Step, SuperConvergence
from equinorm.lab.training.store import Record, Store
from equinorm.lab.training.together import train_together
from equinorm.lab.training.trainer import Job, JobsInProgress, train, train_all
from equinorm.lab.training.training import Training

DIGITS = Data("digits", train=200)
IMAGES = Data("digits", {"size": 12, "channels": 3}, train=96, flip=True, padding=2)
FC = Model("fc", {"hidden": 3, "width": 16, "init": "he", "norm": "none", "bias": True})
BASE = Run(DIGITS, FC, optim=Optim(0.1, momentum=0.9, weight_decay=1e-3), epochs=2, batch=48)

RUNS = {
    "plain": BASE,
    "batchnorm": replace(BASE, model=Model("fc", {"hidden": 3, "width": 16, "norm": "batchnorm"})),
    "enorm": replace(BASE, method=Method("enorm", {"c": 1.2})),
    "implicit": replace(BASE, method=Method("implicit_enorm", {"decay": 1e-3})),
    "adam": replace(BASE, method=Method("enorm"), optim=Optim(0.003, schedule=Linear(hold=0.5), name="adam")),
    "path": replace(BASE, method=Method("path_sgd"), optim=Optim(0.01)),
    "msr": replace(
        BASE,
        data=IMAGES,
        model=Model("resnet_cifar", {"depth": 8, "width": 4, "norm": "msr", "noise": 0.1}),
        method=Method("msr", {"z": 0.85, "luma": 5e-4}),
        optim=Optim(0.1, momentum=0.9, schedule=Step(), norm_rate=0.1),
        record=("filters", "energy"),
    ),
    "equinorm": replace(
        BASE,
        data=replace(IMAGES, mixup=2.0, manifold=True, inputs="unit"),
        model=Model("resnet_cifar", {"depth": 8, "width": 4, "norm": "equinorm"}),
        optim=Optim(0.1, momentum=0.9, schedule=SuperConvergence()),
        loss="binary",
        record=("fresh_statistics",),
    ),
}


@pytest.fixture(params=list(RUNS))
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


def inputs(run: Run) -> Inputs:
    return Inputs(prepare(run.data.name, run.data, None, torch.device("cpu")), run)


def drive(training: Training, steps: int | None = None) -> Training:
    while not training.finished and steps != 0:
        training.step()
        training.collect()
        steps = None if steps is None else steps - 1
    return training


def weights(training: Training) -> dict[str, torch.Tensor]:
    return training.state_dict()["tensors"]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_seed_gives_one_result_whatever_else_draws_random_numbers(run: Run) -> None:
    data = inputs(run)
    first = drive(Training(run, data))
    torch.rand(7)
    second = drive(Training(run, data))
    other = drive(Training(replace(run, seed=1), data))
    assert equal(weights(first), weights(second))
    assert first.log == second.log
    assert not equal(weights(first), weights(other))


def test_training_leaves_the_random_numbers_of_others_alone(run: Run) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drive(Training(run, inputs(run)), 1)
    assert torch.equal(torch.rand(3), expected)


def test_resuming_after_any_step_is_bitwise(run: Run, tmp_path: Path) -> None:
    data = inputs(run)
    whole = drive(Training(run, data))
    for steps in (1, whole.steps_per_epoch, whole.steps_per_epoch + 1):
        state = drive(Training(run, data), steps).state_dict()
        torch.save(state, tmp_path / "state.pt")
        resumed = drive(Training(run, data, torch.load(tmp_path / "state.pt", weights_only=True)))
        assert equal(weights(whole), weights(resumed))
        assert whole.log == resumed.log


def test_every_image_is_seen_once_an_epoch_and_the_last_batch_is_filled_up() -> None:
    training = Training(replace(BASE, batch=48), inputs(BASE))
    training._fill_tables()
    assert training.steps_per_epoch == 5
    order = training.order.view(-1)
    assert sorted(order[:200].tolist()) == list(range(200))
    assert torch.equal(order[200:], order[:40])


def test_learning_rate_and_momentum_follow_the_schedule() -> None:
    run = RUNS["equinorm"]
    training = Training(run, inputs(run))
    seen = []
    while not training.finished:
        training.step()
        seen.append(
            (training.parts.optimizer.param_groups[0]["lr"], training.parts.optimizer.param_groups[0]["momentum"])
        )
    n = training.steps_per_epoch
    expected = [run.optim.schedule.at(i / n, run.epochs, run.optim.lr, run.optim.momentum) for i in range(2 * n)]
    assert [lr for lr, _ in seen] == [lr for lr, _ in expected]
    assert seen[0][1] == 0.95
    assert seen[n][1] == expected[n][1]


@pytest.mark.parametrize("rates", [{}, {"norm_rate": 0.1}, {"norm_rate": 0.5, "bias_rate": 0.2}])
def test_a_plain_loop_gives_the_same_weights(rates: dict[str, float]) -> None:
    """The slow reference: the same batches, written out with torch alone."""
    run = replace(BASE, optim=Optim(0.1, momentum=0.9, weight_decay=1e-3, schedule=Linear(), **rates))
    data = inputs(run)
    training = Training(run, data)
    twin = Training(run, data).parts.model
    kinds = [[p for name, p in twin.named_parameters() if name.endswith(kind)] for kind in ("weight", "bias")]
    groups = [{"params": kind} for kind in kinds]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False)
    for i in range(training.total_steps):
        training.step()
        epoch, place = divmod(i, training.steps_per_epoch)
        index = training.order[place]
        for group, part in zip(optimizer.param_groups, (1.0, math.prod(rates.values())), strict=True):
            group["lr"] = part * 0.1 * (1 - (epoch + place / training.steps_per_epoch) / 2)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(data.prepared[index]), data.train.labels[index]).backward()
        optimizer.step()
    for a, b in zip(training.parts.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    bad = replace(BASE, optim=Optim(1e12), label="bad")
    store = Store(tmp_path)
    outcome = train_all([bad, BASE], store)
    assert [record.status for record in outcome.trained] == ["diverged", "finished"]
    assert "loss" in outcome.trained[0].final["reason"]
    assert store.get(bad).status == "diverged"
    assert train_all([bad, BASE], store).known == 2


def test_side_by_side_changes_nothing(tmp_path: Path) -> None:
    runs = [replace(BASE, seed=seed) for seed in range(3)]
    one, three = Store(tmp_path / "one"), Store(tmp_path / "three")
    train_all(runs, one)
    train_all(runs, three, side_by_side=3)
    for run in runs:
        assert one.get(run).epochs == three.get(run).epochs


def test_what_runs_side_by_side_took_of_the_device_adds_up(tmp_path: Path) -> None:
    runs = [replace(BASE, seed=seed) for seed in range(3)]
    start = time.monotonic()
    first = train_all(runs, Store(tmp_path / "two"), side_by_side=2).trained
    assert 0 < sum(record.final["device_seconds"] for record in first) <= time.monotonic() - start
    assert all(record.together > 1 for record in first[:2])
    assert train(BASE, Store(tmp_path / "alone")).together == 1
    assert replace(first[0], final={}, about={"side_by_side": 12}).together == 12  # a log of earlier days


class Pretended:
    """A run on a device that has enough to do, or has not."""

    captured, finished, ahead, diverged = True, False, 0, None

    def __init__(self, busy: bool = False, done: int = 0) -> None:
        self.busy, self.done, self.turns = busy, done, 0

    def turn(self, steps: int, stop: object) -> None:
        self.turns += 1

    def collect(self) -> bool:
        return False


def test_time_is_divided_by_what_steps_would_take_alone(tmp_path: Path) -> None:
    progress = JobsInProgress(Store(tmp_path), torch.device("cpu"), 3, None, math.inf, math.inf, None, None)
    heavy, light, idle = (Pretended(done=done) for done in (110, 400, 7))
    paces, charged = (0.03, 0.001, 1.0), (100, 300, 7)
    progress.jobs = [
        Job(BASE, training, None, {}, pace=pace, charged=steps)
        for training, pace, steps in zip((heavy, light, idle), paces, charged, strict=True)
    ]
    progress._charged -= 8.0
    progress._charge()
    assert [round(8.0 - job.lent, 1) for job in progress.jobs] == [6.0, 2.0, 0.0]
    progress._charged -= 9.0
    progress._charge()  # no steps were made: evenly
    assert [round(17.0 - job.lent, 1) for job in progress.jobs] == [9.0, 5.0, 3.0]


def test_the_pace_of_a_run_is_taken_without_changing_it(run: Run, tmp_path: Path) -> None:
    probed = Training(run, inputs(run))
    assert 0 < probed.pace() < 60
    assert 0 < probed.done <= probed.steps_per_epoch
    assert equal(weights(drive(probed)), weights(drive(Training(run, inputs(run)))))
    assert probed.pace() == 0  # nothing left to do
    two = train_all([run, replace(run, seed=7)], Store(tmp_path), side_by_side=2).trained
    assert all(record.final["pace"] > 0 for record in two)


def test_a_run_with_short_steps_does_not_wait_for_one_with_long(tmp_path: Path) -> None:
    long, short = Pretended(busy=True), Pretended(busy=False)
    progress = JobsInProgress(Store(tmp_path), torch.device("cpu"), 2, None, math.inf, math.inf, None, None)
    progress.jobs = [Job(BASE, training, None, {}) for training in (long, short)]
    for _ in range(3):
        progress.advance(lambda: False)
    assert (long.turns, short.turns) == (0, 3)


def test_no_time_left_saves_and_a_second_call_goes_on(tmp_path: Path) -> None:
    store, whole = Store(tmp_path / "a"), Store(tmp_path / "b")
    run = replace(BASE, epochs=8)
    calls = 0
    while store.get(run) is None:
        outcome = train_all([run], store, minutes=0.01 / 60)
        calls += 1
        assert outcome.trained or outcome.unfinished == [run]
    assert calls > 1
    assert store.get(run).epochs == train(run, whole).epochs
    assert not store.checkpoint(run).exists()


@pytest.mark.parametrize("damage", ["cut", "text", "other", "fields", "shape"])
def test_a_damaged_checkpoint_is_set_aside_with_a_word(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    train_all([BASE], store, minutes=0.01 / 60)
    path = store.checkpoint(BASE)
    state = torch.load(path, weights_only=True)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "text":
        path.write_text("no checkpoint")
    elif damage == "other":
        torch.save([1, 2], path)
    elif damage == "fields":
        torch.save({**state, "training": {}}, path)
    else:
        tensors = {name: t[:0] if t.ndim else t for name, t in state["training"]["tensors"].items()}
        torch.save({**state, "training": {**state["training"], "tensors": tensors}}, path)
    with pytest.warns(UserWarning, match=r"is damaged .* the run begins anew"):
        outcome = train_all([BASE], store)
    assert outcome.trained
    assert path.with_name(f"{path.name}.damaged").exists()
    assert not path.exists()


def test_a_run_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock(BASE):
        outcome = train_all([BASE], Store(tmp_path))
    assert outcome.elsewhere == [BASE]
    assert store.get(BASE) is None


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch 500 is larger than the training set of 200"):
        train(replace(BASE, batch=500), Store(tmp_path))


def test_the_binary_loss_is_that_of_mixed_targets(tmp_path: Path) -> None:
    """As in the program of Verma et al.; a network that is sure of itself must not get infinite gradients."""
    logits = torch.tensor([[3.0, -2.0, 0.5], [200.0, -200.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    y, permutation, lam = torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]), 0.3
    target = lam * torch.eye(3)[y] + (1 - lam) * torch.eye(3)[y[permutation]]
    expected = torch.nn.BCELoss()(logits.softmax(1), target)
    with torch.autocast("cpu", torch.bfloat16):
        found = mixed_loss(LOSSES["binary"], logits, y, lam, permutation)
    torch.testing.assert_close(found, expected)
    for value, exact in zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True):
        assert value.isfinite().all()
        torch.testing.assert_close(value, exact)
    with pytest.raises(ValueError, match="loss must be cross_entropy or binary, got 'hinge'"):
        train(replace(BASE, loss="hinge"), Store(tmp_path))


def test_a_field_that_came_later_leaves_the_keys_of_older_runs_alone() -> None:
    plain = BASE.to_dict()
    assert "loss" not in plain
    assert "norm_rate" not in plain["optim"]
    assert replace(BASE, loss="cross_entropy").key == BASE.key
    slow = [replace(BASE, optim=replace(BASE.optim, **rate)) for rate in ({"norm_rate": 0.1}, {"bias_rate": 0.1})]
    for other in (replace(BASE, loss="binary"), *slow):
        assert other.key != BASE.key
        assert Run.from_dict(other.to_dict()) == other


@pytest.mark.parametrize("norm", ["batchnorm", "equinorm"])
def test_fresh_statistics_mend_those_that_training_left(norm: str) -> None:
    """Running statistics that hardly move from where they began serve no evaluation; the weights are good."""
    options = {"depth": 8, "width": 8, "norm": norm, "norm_options": {"momentum": 1e-4}}
    images = Data("digits", {"size": 12, "channels": 3}, inputs="unit")
    run = replace(BASE, data=images, model=Model("resnet_cifar", options), epochs=3)
    without = drive(Training(run, inputs(run)))
    run = replace(run, record=("fresh_statistics",))
    training = drive(Training(run, inputs(run)))
    fresh = training.log[-1].pop("fresh_statistics")
    assert training.log == without.log  # in the last epoch only, and nothing else has changed
    for name, tensor in training.parts.model.state_dict().items():
        assert torch.equal(tensor, without.parts.model.state_dict()[name]), name
    assert fresh["test_accuracy"] > 80 > training.log[-1]["test_accuracy"]
    assert fresh["test_loss"] < training.log[-1]["test_loss"]


def test_fresh_statistics_of_a_network_without_any_change_nothing() -> None:
    run = replace(BASE, record=("fresh_statistics",))
    last = drive(Training(run, inputs(run))).log[-1]
    assert last["fresh_statistics"] == {name: pytest.approx(last[name]) for name in ("test_loss", "test_accuracy")}


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    run = replace(BASE, record=("filters", "colour"))
    with pytest.raises(ValueError, match="record can hold filters, energy, fresh_statistics, got 'colour'"):
        Training(run, inputs(run))


def test_gains_of_mean_shift_rejection_learn_at_the_rate_of_norms() -> None:
    run = RUNS["msr"]
    parts = Training(run, inputs(run)).parts
    rates = {id(p): group["lr"] for group in parts.optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in parts.model.named_parameters()}
    assert {name for name, lr in found.items() if lr == pytest.approx(0.01)} == {
        name for name in found if name.endswith((".g", "bias"))
    }


def test_norms_decay_or_not() -> None:
    for decay_norms, expected in ((True, 1e-3), (False, 0.0)):
        run = replace(BASE, optim=replace(BASE.optim, decay_norms=decay_norms))
        groups = Training(run, inputs(run)).parts.optimizer.param_groups
        decays = {p.ndim: group["weight_decay"] for group in groups for p in group["params"]}
        assert decays == {2: 1e-3, 1: expected}


def test_runs_that_do_not_say_it_do_not_centre_luma() -> None:
    """They were made before the library centred it, and a stored run must stay what it was."""
    for options in ({}, {"centre_luma": False}, {"centre_luma": True}):
        run = replace(RUNS["msr"], method=Method("msr", options))
        assert Training(run, inputs(run)).parts.method.centre_luma is options.get("centre_luma", False)


def test_offsets_can_be_slower_than_gains() -> None:
    model = Model("resnet_cifar", {"depth": 8, "width": 4})
    run = replace(BASE, data=Data("digits", {"channels": 3}), model=model, optim=Optim(0.5, bias_rate=0.1))
    parts = Training(run, inputs(run)).parts
    rates = {id(p): group["lr"] for group in parts.optimizer.param_groups for p in group["params"]}
    for name, p in parts.model.named_parameters():
        assert rates[id(p)] == pytest.approx(0.05 if name.endswith("bias") else 0.5), name


@pytest.mark.parametrize("optim", [Optim(0.01, momentum=0.9), Optim(0.01, norm_rate=0.1), Optim(0.01, bias_rate=0.1)])
def test_path_sgd_refuses_what_it_has_not(optim: Optim, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path_sgd has no momentum and one learning rate"):
        train(replace(RUNS["path"], optim=optim), Store(tmp_path))


def test_an_unknown_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown method 'magic'"):
        train(replace(BASE, method=Method("magic")), Store(tmp_path))


def test_seeds_of_different_purposes_do_not_meet() -> None:
    assert len({mixed_seed(a, b, c) for a in range(10) for b in range(4) for c in range(50)}) == 2000


# -- processes that are stopped ----------------------------------------------------------------------------------------

GRID = [
    replace(BASE, seed=seed, epochs=6, method=method) for seed in range(3) for method in (Method(), Method("enorm"))
]


def _work(folder: str) -> None:
    torch.set_num_threads(1)
    train_all(GRID, Store(folder), checkpoint_seconds=0.02)


def _numbers(store: Store) -> dict[str, list[dict[str, float]]]:
    return {record.run.key: list(record.epochs) for record in store.records()}


def _stopped(folder: Path, after: float, number: int) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_work, args=(str(folder),))
    process.start()
    while number != signal.SIGKILL and not any(Store(folder).checkpoint(run).exists() for run in GRID):
        time.sleep(0.005)  # it has to have begun
    process.join(after)
    if process.is_alive():
        os.kill(process.pid, number)
        process.join()
    return process.exitcode


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_kill_at_twenty_random_moments_loses_and_repeats_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a forked child must not wait for threads it does not have
    whole, store = Store(tmp_path / "whole"), tmp_path / "killed"
    start = time.monotonic()
    train_all(GRID, whole)
    seconds = time.monotonic() - start
    draw = random.Random(0)
    stamps: dict[str, str] = {}
    for _ in range(20):
        _stopped(store, draw.uniform(0.02, seconds / 3), signal.SIGKILL)
        files = {path.name: path.read_text() for path in (store / "runs").rglob("*.jsonl")} if store.exists() else {}
        assert all(files[name] == text for name, text in stamps.items()), "a finished run was lost or trained again"
        stamps = files
    train_all(GRID, Store(store))
    assert _numbers(Store(store)) == _numbers(whole)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_what_is_in_progress(tmp_path: Path, number: int) -> None:
    torch.set_num_threads(1)
    assert _stopped(tmp_path, 0.0, number) == 0
    store = Store(tmp_path)
    done = len(list(store.records()))
    assert done < len(GRID)
    assert sum(store.checkpoint(run).exists() for run in GRID) == 1
    outcome = train_all(GRID, store)
    assert outcome.known == done
    assert len(outcome.trained) == len(GRID) - done


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"there is no device '{name}'"):
        train_all([BASE], Store(tmp_path / "store"), device=name)
    with pytest.raises(UserError, match=f"there is no device '{name}'"):
        train_together(BASE, Store(tmp_path / "store"), device=name)
    assert not (tmp_path / "store").exists()


def test_records_say_where_they_come_from(tmp_path: Path) -> None:
    record = train(BASE, Store(tmp_path))
    assert isinstance(record, Record)
    assert {"command", "versions", "hardware", "commit", "started"} <= record.about.keys()
    text = next((tmp_path / "runs").rglob("*.jsonl")).read_text()
    assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


# -- several processes, and images on disk -----------------------------------------------------------------------------


def _rank(rank: int, world: int, port: int, folder: str, run: Run, minutes: float) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from equinorm.lab.training.launchers import Options, launch

    launch([run], Store(folder), options=Options(device="cpu", minutes=minutes))


def _together(folder: Path, run: Run, minutes: float = 10.0) -> None:
    torch.set_num_threads(1)  # a forked child must not wait for threads it does not have
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # which need not import torch again
    ranks = [context.Process(target=_rank, args=(rank, 2, port, str(folder), run, minutes)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_two_processes_make_the_steps_of_one(tmp_path: Path) -> None:
    run = replace(RUNS["enorm"], epochs=3)
    _together(tmp_path / "two", run)
    two, one = Store(tmp_path / "two").get(run), train(run, Store(tmp_path / "one"))
    assert two.about["processes"] == 2
    for a, b in zip(two.epochs, one.epochs, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
        assert a["test_accuracy"] == pytest.approx(b["test_accuracy"], abs=0.5)


@pytest.fixture
def folder_of_images(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    for split, n in (("train", 24), ("val", 8)):
        for i in range(n):
            path = tmp_path / "data" / "pictures" / split / f"class{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (20, 24, 3), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(path)
    return tmp_path / "data"


def test_images_streamed_from_disk_train_and_resume_bitwise(folder_of_images: Path, tmp_path: Path) -> None:
    data = Data("pictures", crop=16, flip=True)
    model = Model("resnet_cifar", {"depth": 8, "width": 4})
    run = replace(BASE, data=data, model=model, batch=8, method=Method("enorm"))
    device = torch.device("cpu")
    whole = drive(Training(run, inputs_of(run, folder_of_images, device)))
    state = drive(Training(run, inputs_of(run, folder_of_images, device)), 4).state_dict()
    resumed = drive(Training(run, inputs_of(run, folder_of_images, device), state))
    assert equal(weights(whole), weights(resumed))
    assert whole.log == resumed.log
    assert len(whole.log) == 2
