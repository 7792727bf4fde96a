"""In which precision a run computes, and where its random numbers come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["default_generator", "is_low", "mixed_seed", "precision"]


def is_low(name: str, device: torch.device) -> bool:
    """Whether this precision is a low one there, for which images lie in channels_last; a CPU's is float32."""
    return name == "bfloat16" and device.type == "cuda"


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Matrix products in full float32, in TF32, or (autocast) in bfloat16; only CUDA knows the difference."""
    if name not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f"precision must be float32, tf32 or bfloat16, got {name!r}")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = name == "tf32"
    cudnn.deterministic, cudnn.benchmark = True, False
    # no cache of cast weights: a replayed graph must cast them again
    casting: AbstractContextManager[Any] = (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if is_low(name, device) else nullcontext()
    )
    try:
        with casting:
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, none of which can undo another (splitmix64)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1  # generators want 63 bits


@contextmanager
def default_generator(own: torch.Generator) -> Iterator[None]:
    """Let every random function draw from `own`, also those that cannot be told to (CUDA)."""
    index = own.device.index or 0
    default = torch.cuda.default_generators[index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own.graphsafe_get_state())
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
