"""Federated averaging: clients' shares of the images, and a run against a plain loop over clients."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.lab.experiments import federated
from equinorm.lab.training.federated import dirichlet_shares
from equinorm.lab.training.inputs import Inputs, inputs_of
from equinorm.lab.training.runs import Run
from equinorm.lab.training.training import Training


@settings(max_examples=40)
@given(st.integers(0, 2**16), st.integers(1, 5), st.sampled_from([0.05, 1.0, 1000.0]), st.integers(20, 200))
def test_every_image_belongs_to_one_client(seed: int, clients: int, alpha: float, n: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, n)
    shares = dirichlet_shares(labels, clients, alpha, seed)
    assert len(shares) == clients
    assert all(len(share) for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(n))
    again = dirichlet_shares(labels, clients, alpha, seed)
    assert all((a == b).all() for a, b in zip(shares, again, strict=True))


def test_a_small_alpha_skews_and_a_large_one_does_not() -> None:
    labels = np.arange(10_000) % 10

    def evenness(alpha: float) -> float:
        shares = dirichlet_shares(labels, 4, alpha, seed=0)
        counts = np.array([np.bincount(labels[share], minlength=10) for share in shares])
        return float((counts.max(0) / counts.sum(0)).mean())

    assert evenness(0.1) > 0.7
    assert evenness(1000.0) < 0.3


@pytest.mark.parametrize("wrong", [(0, 0.1), (4, 0.0)])
def test_wrong_settings_are_refused(wrong: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="one client or more and a positive alpha"):
        dirichlet_shares([0, 1], *wrong, seed=0)


def toy(row: str) -> Run:
    (cell,) = (cell for cell in federated.artifacts({})[1].toy().cells if (cell.row, cell.column) == (row, "skewed"))
    run = cell.runs[0]
    data = replace(run.data, padding=0, flip=False, crop=None)
    return replace(run, data=data, batch=8)


def averaged(networks: list[nn.Module], sizes: list[int]) -> dict[str, Tensor]:
    """FedAvg's mean, weighed by numbers of images."""
    states = [network.state_dict() for network in networks]
    total = sum(sizes)
    return {
        name: sum(state[name] * (size / total) for state, size in zip(states, sizes, strict=True))
        if first.is_floating_point()
        else states[-1][name]
        for name, first in states[0].items()
    }


@pytest.mark.parametrize("row", ["BN", "GN"])
def test_a_run_is_a_loop_over_clients(row: str) -> None:
    """Two rounds, client by client, with copies of the common network and optimizers of their own."""
    run = toy(row)
    inputs = inputs_of(run, None, torch.device("cpu"))
    assert isinstance(inputs, Inputs)
    training = Training(run, inputs)
    assert training.federation is not None
    common = copy.deepcopy(training.parts.model)
    sizes = [len(share) for share in training.federation.shares]
    for round_ in range(2):
        networks, step = [], 0
        training._begin_epoch(fresh=True)
        order = training.order.clone()
        for share, steps in zip(training.federation.shares, training.federation.steps, strict=True):
            client = copy.deepcopy(common).train()
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
            seen = order[step : step + steps].flatten().tolist()
            assert set(seen) == set(share.tolist())
            for index in order[step : step + steps]:
                optimizer.param_groups[0]["lr"] = training.host_rates[step]
                x, y = inputs.batch(index)
                optimizer.zero_grad()
                F.cross_entropy(client(x), y).backward()
                optimizer.step()
                step += 1
            networks.append(client)
        common.load_state_dict(averaged(networks, sizes))
        for _ in range(training.steps_per_epoch):
            training.step()
        assert training.done == (round_ + 1) * training.steps_per_epoch
        for name, tensor in training.parts.model.state_dict().items():
            torch.testing.assert_close(tensor, common.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_was_interrupted_in_a_round_goes_on() -> None:
    run = toy("unit filters")
    inputs = inputs_of(run, None, torch.device("cpu"))
    whole, part = Training(run, inputs), Training(run, inputs)
    for _ in range(7):
        whole.step()
        part.step()
    resumed = Training(run, inputs, part.state_dict())
    while not whole.finished:
        whole.step()
        resumed.step()
    for a, b in zip(whole.parts.model.parameters(), resumed.parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
