"""A federated run of the laboratory beside the same run in Flower, on the CPU: do both end with the same network?

    pip install flwr
    python scripts/federated_flower.py            # prints the largest difference of any weight, relative to the largest

Four clients with skewed labels (Dirichlet 0.1) on the embedded digits, a ResNet-8, three rounds. Flower's clients get
the common weights, make one pass over their images as the laboratory does, and Flower's FedAvg takes the mean; its
server and its clients are in one process.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import flwr
import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from equinorm.lab.experiments.federated import CLIENTS, artifacts
from equinorm.lab.training.federated import Federation, dirichlet_shares
from equinorm.lab.training.inputs import Inputs, inputs_of
from equinorm.lab.training.parts import build
from equinorm.lab.training.precision import mixed_seed
from equinorm.lab.training.runs import Run
from equinorm.lab.training.training import Training

ROUNDS = 3


def the_run(row: str) -> Run:
    """A row of federated/cifar10 at toy size, without augmentation."""
    (cell,) = (cell for cell in artifacts({})[1].toy().cells if (cell.row, cell.column) == (row, "skewed"))
    run = cell.runs[0]
    data = replace(run.data, padding=0, flip=False, crop=None)
    return replace(run, data=data, batch=8, epochs=ROUNDS, precision="float32")


def prepared(run: Run) -> tuple[Inputs, nn.Module, Federation]:
    inputs = inputs_of(run, None, torch.device("cpu"))
    assert isinstance(inputs, Inputs)
    shares = dirichlet_shares(inputs.train.labels.numpy(), CLIENTS, run.data.dirichlet, run.seed)
    return inputs, build(run, inputs).model, Federation(shares, run.batch)


def weights(model: nn.Module) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in model.state_dict().values()]


class Client(NumPyClient):
    """One of the four."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.inputs, self.model, self.federation = prepared(run)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        run, federation, done = self.run, self.federation, int(config["round"]) - 1
        names = list(self.model.state_dict())
        values = [torch.from_numpy(np.array(value)) for value in parameters]
        self.model.load_state_dict(OrderedDict(zip(names, values, strict=True)))
        self.model.train()
        spec = run.optim
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
        generator = torch.Generator().manual_seed(mixed_seed(run.seed, 1, done))
        order = federation.order(generator, torch.device("cpu")).view(-1, run.batch)
        last = federation.ends[self.number]
        for step in range(last - federation.steps[self.number], last):
            at = done + step / federation.steps_per_round
            optimizer.param_groups[0]["lr"] = spec.schedule.at(at, run.epochs, spec.lr, spec.momentum)[0]
            x, y = self.inputs.batch(order[step])
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            optimizer.step()
        return weights(self.model), len(federation.shares[self.number]), {}


class Proxy(ClientProxy):
    """How Flower's server reaches a client: in this process."""

    def __init__(self, number: int, client: Any) -> None:
        super().__init__(str(number))
        self.client = client

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self.client.fit(ins)

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError


def in_flower(run: Run) -> list[np.ndarray]:
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(weights(prepared(run)[1])),
        on_fit_config_fn=lambda number: {"round": number},
    )
    manager = SimpleClientManager()
    for number in range(CLIENTS):
        manager.register(Proxy(number, Client(run, number).to_client()))
    server = Server(client_manager=manager, strategy=strategy)
    server.set_max_workers(1)  # one client after the other
    server.fit(num_rounds=ROUNDS, timeout=None)
    return parameters_to_ndarrays(server.parameters)


def here(run: Run) -> list[np.ndarray]:
    training = Training(run, inputs_of(run, None, torch.device("cpu")))
    while not training.finished:
        training.step()
    return weights(training.parts.model)


def floats(tensors: list[np.ndarray]) -> np.ndarray:
    """All weights and running statistics in a row, without counters."""
    return np.concatenate([t.ravel() for t in tensors if np.issubdtype(t.dtype, np.floating)])


def main() -> int:
    torch.set_num_threads(1)
    worst = 0.0
    for row in ("BN", "GN"):
        run = the_run(row)
        ours, start, flower = (floats(tensors) for tensors in (here(run), weights(prepared(run)[1]), in_flower(run)))
        difference = float(np.abs(ours - flower).max() / np.abs(ours).max())
        moved = float(np.abs(ours - start).max())
        print(
            f"{row}: after {ROUNDS} rounds of {CLIENTS} clients largest relative difference {difference:.1e}, "
            f"while weights moved by up to {moved:.2f} (torch {torch.__version__}, flwr {flwr.__version__})"
        )
        worst = max(worst, difference)
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
