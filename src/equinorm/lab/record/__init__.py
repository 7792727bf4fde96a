"""CIFAR-10 without batch statistics: to 94 % in seconds, and at any batch size.

`config` says what a run is, `net` what it trains, `optimizer` and `training` how; `plans` what is run for the
record, `sizes` for accuracy against batch size; `run` is the command.

>>> from equinorm.lab.record import main; main(["--data", "data", "--minutes", "10", "--only", "final"])
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m equinorm.lab.record.run` from Python."""
    from .run import main as run  # torch's compiler is imported only where it is needed

    return run(arguments)
