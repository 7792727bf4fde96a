"""Streams for runs, given back when a run ends and taken by the next.

Torch hands out 32 streams of a priority in turn. Each that multiplies matrices gets workspaces of cuBLAS, 32 MiB on an
H100 or H200 for the forward and as much for the backward pass, which are kept for good; and memory that was freed on
one stream is not used on another. So runs one after the other would hold more memory with every run, up to 2 GiB.

>>> stream = take(priority=0)
>>> give_back(stream)     # after all work on it
"""

from __future__ import annotations

import torch

__all__ = ["give_back", "take"]

_free: list[torch.cuda.Stream] = []


def take(priority: int) -> torch.cuda.Stream:
    """A stream of the current device that no run uses."""
    device = torch.cuda.current_device()
    for stream in _free:
        if (stream.device.index, stream.priority) == (device, priority):
            _free.remove(stream)
            return stream
    return torch.cuda.Stream(priority=priority)


def give_back(stream: torch.cuda.Stream) -> None:
    """Let others have a stream on which all work is done; a second time changes nothing."""
    if not any(stream is other for other in _free):
        _free.append(stream)
