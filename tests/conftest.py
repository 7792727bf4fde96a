"""What every test needs before anything else is imported."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

# Set before any of the model zoos is imported: nothing is ever downloaded by a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Some virtual machines announce AMX and do not have it: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.grids import know_what_is_run

if TYPE_CHECKING:
    from support.ranks import Ranks

# A shell starts what runs in the background deaf to Ctrl-C; tests of interrupts send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two workers with two threads each are slower on two cores than two with one, and sums come out the same
# everywhere.
torch.set_num_threads(1)

# Exporting a model takes a second; an example is slow because of that, not because of the test.
settings.register_profile("equinorm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("equinorm")


def pytest_configure(config: pytest.Config) -> None:
    know_what_is_run(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # its keywords hold the ids of parameters too
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """The collector of garbage leaves alone what is imported by now, and looks less often at what an export makes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The ten slowest files, whichever worker ran their tests."""
    seconds: dict[str, float] = defaultdict(float)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for file in sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]:
            terminalreporter.line(f"{seconds[file]:7.1f} s  {file}")
        terminalreporter.line(f"{sum(seconds.values()):7.1f} s  all {len(seconds)}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2).run(function, *arguments)` runs a function in two processes, which stay for the next test."""
    from support.ranks import Ranks

    pools: dict[int, Ranks] = {}
    yield lambda size: pools.setdefault(size, Ranks(size))
    for pool in pools.values():
        pool.close()
