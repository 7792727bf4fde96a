"""Other people's models: whatever scales are found, moving all of them at random leaves the outputs alone."""

from __future__ import annotations

import pytest
import torch

import equinorm
from support import zoo
from support.nets import assert_function_kept, randomize_constants, to_double

# These take long, and others of their kind are in every run.
LONG = {
    "alexnet",
    "convnext_tiny",
    "deeplabv3_resnet50",
    "densenet121",
    "efficientnet_v2_s",
    "fcn_resnet50",
    "gmlp_ti16_224",
    "hrnet_w18_small",
    "inception_v3",
    "lraspp_mobilenet_v3_large",
    "mc3_18",
    "mistral",
    "mixtral",  # its experts are those of `test_experts.py`
    "mixer_s32_224",
    "mnasnet0_5",
    "mobilenet_v3_large",
    "mobileone_s0",
    "nf_resnet26",
    "r3d_18",
    "poolformer_s12",
    "qwen2",
    "regnet_x_400mf",
    "res2net50_14w_8s",
    "resmlp_12_224",
    "resnet34",
    "resnet50",
    "resnetv2_50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "swin_t",
    "swin_v2_t",
    "vgg11",
}
ENTRIES = [
    pytest.param(entry, id=f"{family.lower()}-{name}", marks=[pytest.mark.slow] if name in LONG else [])
    for family in ("TORCHVISION", "TIMM", "TRANSFORMERS")
    for name, entry in getattr(zoo, family).items()
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_function_is_kept(entry: zoo.Entry) -> None:
    torch.manual_seed(0)
    model = entry.build().double().eval()
    randomize_constants(model)
    example = to_double(entry.example())
    sym = equinorm.trace(model, example)
    assert sym.num_scales == entry.scales if entry.exact else sym.num_scales >= entry.scales
    assert_function_kept(model, example, sym, tolerance=entry.tolerance, copies=False)
