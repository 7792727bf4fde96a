"""What every test needs before anything else is imported."""

from __future__ import annotations

import os

# Set before any of the model zoos is imported: nothing is ever downloaded by a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Some virtual machines announce AMX and do not have it: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two workers with two threads each are slower on two cores than two with one, and sums come out the same
# everywhere.
torch.set_num_threads(1)

# A torchvision built for CUDA looks these operators up when it is imported, and does not have them beside a
# CPU build of torch. Declaring them is enough: only detection models call them. Beside a CUDA build it brings its own.
if torch.version.cuda is None:
    _TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# Exporting a model takes a second; an example is slow because of that, not because of the test.
settings.register_profile("equinorm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("equinorm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # its keywords hold the ids of parameters too
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
