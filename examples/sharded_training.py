"""A decoder that no process holds whole: sharded by FSDP2, trained with ENorm in every step, saved and resumed.

The model is made and traced on the meta device, sharded, and only then given weights. It learns this file, byte by
byte. Every 20 steps all processes save their parts in FOLDER; started again, in another number too, they go on from the
last whole checkpoint there. The batch of a step is the same however many share it, and so is the loss.

    torchrun --nproc-per-node 2 examples/sharded_training.py FOLDER [STEPS]        prints the loss every 10 steps
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

import equinorm

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 4, 48, 16


class Block(nn.Module):
    """Attention and a layer of ReLUs, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.places.weight[: symbols.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def draw_(model: nn.Module) -> None:
    """Weights from a seed, each process its part of the same ones, a tensor at a time."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            whole = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
        else:
            whole = torch.full(weight.shape, 0.0 if name.endswith("bias") else 1.0)
        weight.copy_(distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements))


class Training:
    """Model, optimizer and ENorm, and their checkpoints in a folder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        with torch.device("meta"):
            model = Decoder()
            symmetry = equinorm.trace(model, torch.zeros(1, LENGTH, dtype=torch.int64))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        draw_(model.to_empty(device=device))
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.enorm = equinorm.ENorm(model, self.optimizer, symmetry=symmetry)
        self.enorm.attach()
        self.folder, self.device, self.steps = folder, device, 0
        if saved := sorted(folder.glob("step-*/.metadata")):  # written last: a checkpoint without it is not whole
            self.load(saved[-1].parent)

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state, "enorm": self.enorm.state_dict(), "steps": self.steps}

    def save(self) -> None:
        dcp.save(self.state_dict(), checkpoint_id=self.folder / f"step-{self.steps:06}")

    def load(self, checkpoint: Path) -> None:
        state = self.state_dict()
        dcp.load(state, checkpoint_id=checkpoint)
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.enorm.load_state_dict(state["enorm"])
        self.steps = state["steps"]

    def step(self, text: Tensor) -> float:
        """One step on this process's part of the batch; the loss of all of it."""
        generator = torch.Generator().manual_seed(self.steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
        mine = torch.stack([text[i : i + LENGTH + 1] for i in starts])
        self.optimizer.zero_grad()
        scores = self.model(mine[:, :-1].to(self.device))
        loss = F.cross_entropy(scores.flatten(0, 1), mine[:, 1:].flatten().to(self.device))
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        return float(total)


def main(folder: Path, steps: int = 60, save_every: int = 20) -> list[float]:
    """The losses from where the checkpoint was, or from the start."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    training = Training(folder, device)
    first, losses = dist.get_rank() == 0, []
    if first:
        print(f"{dist.get_world_size()} processes, from step {training.steps}: {training.enorm}")
    while training.steps < steps:
        losses.append(training.step(text))
        imbalance = training.enorm.imbalance()  # all processes ask, since all have a part of the answer
        if first and training.steps % 10 == 0:
            print(f"step {training.steps}: loss {losses[-1]:.3f}, imbalance {imbalance:.3f}")
        if training.steps % save_every == 0:
            training.save()
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60)
    dist.destroy_process_group()
