"""A federated run of the laboratory beside the same run in Flower, on the CPU: do both end with the same network?

    pip install 'flwr[simulation]'
    python scripts/federated_flower.py            # prints the largest difference of any weight, relative to the largest

Four clients with skewed labels (Dirichlet 0.1) on the embedded digits, a ResNet-8, three rounds. Flower's clients get the
common weights, make one pass over their images as the laboratory does, and Flower's FedAvg takes the mean.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import flwr
import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
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


class Remembered(FedAvg):
    """FedAvg, whose last mean can be looked at."""

    last: list[np.ndarray]

    def aggregate_fit(self, *arguments: Any) -> Any:
        found = super().aggregate_fit(*arguments)
        self.last = parameters_to_ndarrays(found[0])
        return found


def in_flower(run: Run) -> list[np.ndarray]:
    def client(context: Context) -> Any:
        return Client(run, int(context.node_config["partition-id"])).to_client()

    strategy = Remembered(
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(weights(prepared(run)[1])),
        on_fit_config_fn=lambda number: {"round": number},
    )

    def server(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))

    run_simulation(ServerApp(server_fn=server), ClientApp(client_fn=client), num_supernodes=CLIENTS)
    return strategy.last


def here(run: Run) -> list[np.ndarray]:
    training = Training(run, inputs_of(run, None, torch.device("cpu")))
    while not training.finished:
        training.step()
    return weights(training.parts.model)


def main() -> int:
    torch.set_num_threads(1)
    worst = 0.0
    for row in ("BN", "GN"):
        run = the_run(row)
        pairs = list(zip(here(run), in_flower(run), strict=True))
        pairs = [(a, b) for a, b in pairs if np.issubdtype(a.dtype, np.floating)]
        difference = max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(a).max()) for a, _ in pairs)
        moved = max(float(np.abs(a - b).max()) for a, b in zip(here(run), weights(prepared(run)[1]), strict=True))
        print(f"{row}: after {ROUNDS} rounds of {CLIENTS} clients largest relative difference {difference:.1e}, "
              f"while weights moved by up to {moved:.2f} (torch {torch.__version__}, flwr {flwr.__version__})")  # fmt: skip
        worst = max(worst, difference)
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
