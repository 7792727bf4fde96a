"""The recorder: what it writes, what it costs, and that training does not notice it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.diagnostics import INSTRUMENTS, Context, Recorder, read_records, recorder
from equinorm.diagnostics.recorder import QUANTILES
from support.never_waiting import never_waiting


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(12, 5, generator=draw), torch.randint(3, (12,), generator=draw)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(recorder.time, "perf_counter", lambda: self.now)


def test_what_is_recorded_and_when(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    path = tmp_path / "run.jsonl"
    with Recorder(model, optimizer, every=5, path=path, max_share=None) as found:
        train(model, optimizer, 12)
    records = read_records(path)
    assert [record["step"] for record in records] == [1, 5, 10]  # the first, then every fifth
    assert records == list(found.records)
    weights = records[-1]["weights"]
    assert set(weights["energy"]) == {"0.weight", "4.weight"}
    assert len(weights["filter_norm"]["0.weight"]) == len(QUANTILES)
    assert set(records[-1]["gradients"]) == {"gradient_norm", "relative_step"}
    train(model, optimizer, 10)
    assert len(found.records) == 3  # closed: the hook is gone


def test_the_numbers_are_those_of_the_moment() -> None:
    model = network()
    optimizer = sgd(model)
    found = Recorder(model, optimizer, every=1, max_share=None)
    train(model, optimizer, 1)
    (record,) = found.records
    lengths = model[0].weight.detach().norm(dim=1)
    assert record["weights"]["energy"]["0.weight"] == pytest.approx(float(lengths.square().sum()), rel=1e-5)
    assert record["weights"]["filter_norm"]["0.weight"][0] == pytest.approx(float(lengths.min()), rel=1e-5)
    assert record["weights"]["filter_norm"]["0.weight"][-1] == pytest.approx(float(lengths.max()), rel=1e-5)
    grad = model[0].weight.grad
    assert grad is not None
    assert record["gradients"]["gradient_norm"]["0.weight"] == pytest.approx(float(grad.norm()), rel=1e-5)


@pytest.mark.parametrize("instruments", [list(INSTRUMENTS), ["weights", "gradients"]], ids=["all", "default"])
def test_training_does_not_notice(instruments: list[str]) -> None:
    """Parameters, running statistics, optimizer state and random numbers, bit by bit."""

    def run(recording: bool) -> tuple[Any, Any, Tensor]:
        model = network()
        optimizer = sgd(model)
        if recording:
            Recorder(model, optimizer, 2, instruments, loss_fn=F.cross_entropy, batch=batch(), max_share=None)
        train(model, optimizer, 6)
        return model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()

    (plain, plain_state, plain_random), (measured, measured_state, measured_random) = run(False), run(True)
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    for key, values in plain_state.items():
        assert torch.equal(values["momentum_buffer"], measured_state[key]["momentum_buffer"])
    assert torch.equal(plain_random, measured_random)


def test_all_instruments_by_name(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with Recorder(
        model,
        optimizer,
        3,
        list(INSTRUMENTS),
        loss_fn=F.cross_entropy,
        batch=batch,
        path=tmp_path / "a.jsonl",
        max_share=None,
    ):
        train(model, optimizer, 3)
    first, second = read_records(tmp_path / "a.jsonl")
    assert set(first) == {"step", *INSTRUMENTS}
    assert len(second["landscape"]["losses"]) == 4
    assert second["landscape"]["beta"] > 0
    assert second["curvature"]["eigenvalue"] > 0
    assert set(second["propagation"]["forward_rms"]) == {"0", "4"}
    assert list(second["units"]["dead"]) == ["2 relu"]
    assert 0 <= second["shift"]["mean_share"]["0"] <= 1
    assert first["shift"]["drift"] == {}
    assert second["shift"]["drift"]["0"] > 0  # the means have moved since the first recording


def test_instruments_of_ones_own() -> None:
    model = network()
    optimizer = sgd(model)

    def first_weight(context: Context) -> dict[str, Any]:
        return {
            "value": model[0].weight[0, 0],
            "step": context.step,
            "lr": context.lr,
            "bad": torch.tensor(float("nan")),
            "list": [torch.ones(2), 3],
        }

    found = Recorder(model, optimizer, 2, [first_weight], max_share=None)
    train(model, optimizer, 2)
    assert [r["first_weight"]["step"] for r in found.records] == [1, 2]
    last = found.records[-1]["first_weight"]
    assert last["value"] == pytest.approx(float(model[0].weight[0, 0].detach()), rel=1e-6)
    assert last["lr"] == 0.1
    assert last["bad"] is None  # JSON has no NaN
    assert last["list"] == [[1.0, 1.0], 3]


def test_memory_is_bounded() -> None:
    model = network()
    optimizer = sgd(model)
    found = Recorder(model, optimizer, every=1, keep=4, max_share=None)
    train(model, optimizer, 20)
    assert [r["step"] for r in found.records] == [17, 18, 19, 20]
    assert found.cost().records == 20


def test_a_writer_gets_scalars() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, list[tuple[float, int]]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.setdefault(tag, []).append((value, step))

    model, writer = network(), Writer()
    optimizer = sgd(model)
    Recorder(model, optimizer, every=2, writer=writer, max_share=None)
    train(model, optimizer, 4)
    assert [step for _, step in writer.scalars["weights/energy/0.weight"]] == [1, 2, 4]
    assert "gradients/gradient_norm/4.weight" in writer.scalars
    assert len([tag for tag in writer.scalars if tag.startswith("weights/filter_norm/0.weight/")]) == len(QUANTILES)


class Logs:
    """Something that takes all numbers of a step at once, in a method of this name."""

    def __init__(self, method: str) -> None:
        self.seen: dict[int, dict[str, float]] = {}
        setattr(self, method, lambda numbers, *, step: self.seen.update({step: numbers}))


@pytest.mark.parametrize("method", ["log", "log_dict", "log_metrics"])
def test_other_programs_get_all_numbers_of_a_step(method: str) -> None:
    model, writer = network(), Logs(method)
    optimizer, seen = sgd(model), {}
    with (
        Recorder(model, optimizer, every=2, writer=writer, max_share=None),
        Recorder(model, optimizer, every=2, writer=lambda numbers, step: seen.update({step: numbers}), max_share=None),
    ):
        train(model, optimizer, 4)
    assert [*seen] == [1, 2, 4]
    assert seen == writer.seen
    assert "gradients/gradient_norm/4.weight" in seen[4]


def test_what_nothing_can_be_written_to_is_refused() -> None:
    model = network()
    optimizer = sgd(model)
    for writer, message in ((3, "cannot write to a int"), (model, "a Sequential: give a logger"), (Logs, "to Logs")):
        with pytest.raises(TypeError, match=message):
            Recorder(model, optimizer, writer=writer)
    assert not optimizer._optimizer_step_post_hooks


def test_recordings_over_the_budget_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s, recordings of 0.5 s, 2 % allowed: one in 25 steps on average, whatever the interval."""
    clock, model = Clock(monkeypatch), network()
    optimizer = sgd(model)

    def slow(_: Context) -> dict[str, Any]:
        clock.now += 0.5
        return {}

    found = Recorder(model, optimizer, 1, [slow], max_share=0.02, attach=False)
    for _ in range(1000):
        clock.now += 1.0
        found.advance()
    cost = found.cost()
    assert 0.015 < cost.share <= 0.021
    assert 35 <= cost.records <= 42
    assert cost.passed_over == 1000 - cost.records
    assert "passed over" in str(cost)
    assert f"{100 * cost.share:.2f} %" in str(cost)


def test_cost_counts_recordings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), network()

    def slow(_: Context) -> dict[str, Any]:
        clock.now += 0.2
        return {}

    found = Recorder(model, sgd(model), 10, [slow], max_share=None, attach=False)
    assert found.cost().share == 0.0
    for _ in range(101):
        found.advance()
        clock.now += 1.0
    clock.now += 1000.0  # whatever comes after the last step is not training
    cost = found.cost()
    assert cost.records == 11
    assert cost.seconds == pytest.approx(2.2)
    assert cost.share == pytest.approx(2.2 / (100 + 2.2), rel=1e-3)


def test_mistakes_are_named_before_anything_is_attached(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="no instrument 'landscap': choose from weights"):
        Recorder(model, optimizer, instruments=["landscap"])
    with pytest.raises(ValueError, match="'landscape' needs a loss and a batch"):
        Recorder(model, optimizer, instruments=["landscape"])
    with pytest.raises(ValueError, match="every must be at least 1"):
        Recorder(model, optimizer, every=0)
    with pytest.raises(ValueError, match="no folder"):
        Recorder(model, optimizer, path=tmp_path / "none" / "run.jsonl")
    assert not optimizer._optimizer_step_post_hooks


# -- the file ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(0, 99), max_size=4), st.text(st.characters(codec="ascii", exclude_characters="\n")))
def test_a_torn_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, whole: list[int], torn: str) -> None:
    """Whatever a crash left behind the last newline, whole lines stay and new ones follow them."""
    path = tmp_path_factory.mktemp("torn") / "run.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in whole) + torn)
    assert [r["step"] for r in read_records(path)] == whole
    model = network()
    optimizer = sgd(model)
    with Recorder(model, optimizer, 1, [], path=path, max_share=None):
        train(model, optimizer, 1)
    assert [r["step"] for r in read_records(path)] == [*whole, 1]


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 7}\n' + "x" * 200_000)
    Recorder(network(), sgd(network()), path=path).close()
    assert path.read_text() == '{"step": 7}\n'


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "run.jsonl", network()
    optimizer = sgd(model)
    found = Recorder(model, optimizer, 1, [], path=path, max_share=None)
    train(model, optimizer, 1)
    write = os.write
    monkeypatch.setattr(recorder.os, "write", lambda file, line: write(file, line[:5]))
    with pytest.raises(OSError, match="is the disk full"):
        train(model, optimizer, 1)
    monkeypatch.setattr(recorder.os, "write", write)
    assert path.read_text() == '{"step":1}\n'
    train(model, optimizer, 1)
    found.close()
    assert [r["step"] for r in read_records(path)] == [1, 3]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_synchronisation_between_recordings() -> None:
    model = network().cuda()
    x, y = (t.cuda() for t in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = Recorder(model, optimizer, every=10, max_share=None)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with never_waiting():
        for _ in range(8):
            step()
    step()
    found.close()
    assert [r["step"] for r in found.records] == [1, 10]
    assert 0 < found.cost().seconds < found.cost().elapsed
