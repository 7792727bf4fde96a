"""Parameters that are sharded over processes: DTensors, of FSDP2's `fully_shard` and of tensor parallel.

Each process computes on its own part of every tensor; only sums go over the wire. What a part is, is read off the
placements of the DTensor, so any mesh will do.

>>> part = part_of(weight)             # which rows, columns, ... of the weight are here
>>> processes = processes_of([weight])
>>> processes.sum(local(weight).square().sum() * part.share(processes))     # ‖weight‖²
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ALONE",
    "Part",
    "Processes",
    "is_sharded",
    "local",
    "part_of",
    "placement",
    "processes_of",
    "reshard",
    "sharded_like",
]


# -- a tensor and the part of it that is here --------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory; of a plain tensor all of it."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Part:
    """Which of a tensor's elements this process holds."""

    whole: torch.Size  # the tensor's shape
    shape: torch.Size  # that of the part
    places: tuple[Tensor | None, ...]  # along each axis of the whole: where these are; None: all of them
    shards: int  # different parts that there are

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor of the whole one's number of axes, or more; those of length one stay as they are."""
        for axis, places in enumerate(self.places):
            if places is not None and whole.shape[axis] > 1:
                whole = whole.index_select(axis, places.to(whole.device))
        return whole

    def spread(self, values: Tensor, axis: int) -> Tensor:
        """A part's values in their places along an axis of the whole; 0 in all others."""
        places = self.places[axis]
        if places is None:
            return values
        whole = values.new_zeros([*values.shape[:axis], self.whole[axis], *values.shape[axis + 1 :]])
        return whole.index_copy_(axis, places.to(values.device), values)

    def split_axes(self) -> list[int]:
        """The axes along which this is a part."""
        return [axis for axis, places in enumerate(self.places) if places is not None]

    def share(self, processes: Processes) -> float:
        """By what each process multiplies its part of a sum, so that copies are not counted twice."""
        return self.shards / processes.count


def part_of(tensor: Tensor, name: str = "a tensor") -> Part:
    """The part of a tensor that this process holds; ValueError where it cannot be told."""
    if not is_sharded(tensor):
        return Part(tensor.shape, tensor.shape, (None,) * tensor.ndim, 1)
    dtensor: Any = tensor
    mesh, placements = dtensor.device_mesh, dtensor.placements
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"{name} is sharded over processes that this one is not among: {mesh}")
    # a strided shard was cut last, after what comes later on the mesh (FSDP2 around tensor parallel)
    order = sorted(range(mesh.ndim), key=lambda i: getattr(placements[i], "split_factor", 1) > 1)
    cuts = [(getattr(placements[i], "dim", None), mesh.size(i), here[i]) for i in order]
    places: list[Tensor | None] = []
    for axis, length in enumerate(tensor.shape):
        along: Tensor | None = None
        for dim, count, number in cuts:
            if dim is not None and dim % tensor.ndim == axis and count > 1:
                along = torch.arange(length) if along is None else along
                chunks = along.chunk(count)
                along = chunks[number] if number < len(chunks) else along[:0]
        places.append(along)
    shards = prod(count for dim, count, _ in cuts if dim is not None)
    shape = torch.Size(n if p is None else len(p) for n, p in zip(tensor.shape, places, strict=True))
    if shape != local(tensor).shape:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is placed by {placements} on {mesh} in a way that equinorm does "
            f"not know: this process holds {tuple(local(tensor).shape)} of it, not {tuple(shape)}"
        )
    return Part(tensor.shape, shape, tuple(places), shards)


def placement(tensor: Tensor) -> Hashable:
    """What its part depends on."""
    dtensor: Any = tensor
    where = (dtensor.device_mesh, dtensor.placements) if is_sharded(tensor) else ()
    return (*where, tensor.shape, tensor.device, tensor.dtype)


def sharded_like(part: Tensor, tensor: Tensor) -> Tensor:
    """A part as a tensor that is sharded as another one is; itself if that one is a plain tensor."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    dtensor: Any = tensor
    mesh, placements, shape, stride = dtensor.device_mesh, dtensor.placements, dtensor.shape, dtensor.stride()
    whole: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole


def reshard(model: nn.Module) -> None:
    """Put the shards of `fully_shard` back in their places, where a forward pass without a backward left whole ones."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    if kind is not None:
        for each in model.modules():
            if isinstance(each, kind):
                each.reshard()


# -- sums over processes -----------------------------------------------------------------------------------------------


class Processes:
    """Those that share the work. This class is one process alone, for which a sum is what it is."""

    count = 1

    def sum(self, values: Tensor) -> Tensor:
        """The sums of all processes' values, the same in each to the last bit."""
        return values

    def any(self, flags: Tensor) -> Tensor:
        """Whether a flag is up in some process."""
        return flags

    def largest(self, values: Tensor) -> Tensor:
        return values

    def log_sum(self, logs: Tensor) -> Tensor:
        """The logarithms of the sums of all processes' exponentials."""
        if self.count == 1:
            return logs
        top = self.largest(logs)
        top = top.masked_fill(~torch.isfinite(top), 0.0)
        return self.sum((logs - top).exp()).log() + top

    def gather(self, values: Tensor) -> list[Tensor]:
        """The values of each process."""
        return [values]

    @property
    def first(self) -> bool:
        return True


ALONE = Processes()


class _Group(Processes):
    """The processes of a group of `torch.distributed`."""

    def __init__(self, ranks: Sequence[int], mesh: Any) -> None:
        self.ranks, self.count, self.device = tuple(ranks), len(ranks), torch.device(mesh.device_type)
        self._group = _group(self.ranks, mesh)

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        import torch.distributed as dist

        if not values.numel():
            return values
        sent = values.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(sent, getattr(dist.ReduceOp, how), self._group)
        return sent.to(values.device)

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, "SUM")

    def any(self, flags: Tensor) -> Tensor:
        return self._reduced(flags.to(torch.uint8), "MAX").bool()

    def largest(self, values: Tensor) -> Tensor:
        return self._reduced(values, "MAX")

    def gather(self, values: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        sent = values.detach().to(self.device).contiguous()
        received = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(received, sent, self._group)
        return [each.to(values.device) for each in received]

    @property
    def first(self) -> bool:
        import torch.distributed as dist

        return dist.get_rank() == self.ranks[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self  # a process group is not copied


def _group(ranks: tuple[int, ...], mesh: Any) -> Any:
    import torch.distributed as dist

    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else _new_group(ranks, dist.group.WORLD)


@cache
def _new_group(ranks: tuple[int, ...], _: Any) -> Any:
    """One group for all who ask, as long as the world is the same."""
    import torch.distributed as dist

    return dist.new_group(list(ranks), use_local_synchronization=True)


def processes_of(tensors: Iterable[Tensor]) -> Processes:
    """The processes that hold parts of these tensors: those of the largest mesh, which holds all the others.

    A tensor on a smaller mesh, or without one, is the same on the rest of the largest.
    """
    meshes = {id(mesh): mesh for t in tensors if is_sharded(t) for mesh in [t.device_mesh]}  # type: ignore[attr-defined]
    if not meshes:
        return ALONE
    ranks = {key: tuple(sorted(mesh.mesh.reshape(-1).tolist())) for key, mesh in meshes.items()}
    largest = max(ranks, key=lambda key: len(ranks[key]))
    for some in ranks.values():
        if not set(some) <= set(ranks[largest]):
            raise ValueError(
                f"parameters are sharded over processes {some} and others over {ranks[largest]}, none of which "
                "holds the other: shard all parameters of one model over one mesh, or slices of it"
            )
    return _Group(ranks[largest], meshes[largest])
