"""For tests on a GPU: whatever makes the host wait for the device is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Nothing in here may wait for the device.

    >>> with never_waiting():
    ...     optimizer.step()
    """
    _set("error")
    try:
        yield
    finally:
        _set("default")


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
