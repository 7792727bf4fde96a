"""The benchmark runs everywhere, says what it measured, and one variant that fails does not take the others with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from equinorm.cli import main
from equinorm.errors import UserError
from equinorm.lab.bench import balance, floors, instruments, kernels, steps, throughput
from equinorm.lab.bench import run as bench_run
from equinorm.lab.bench.llama import Llama
from equinorm.lab.bench.norm_traffic import NormTraffic, count
from equinorm.lab.bench.output import Timing, in_parts
from equinorm.lab.bench.run import run
from equinorm.nn import EquiNormConv2d, SummingReLU

CPU = torch.device("cpu")
TINY = {"layers": 2, "width": 64, "heads": 4, "groups": 2, "hidden": 128, "vocabulary": 100}


def test_what_a_norm_moves_is_counted() -> None:
    """A layer behind the input, one behind a ReLU that leaves its sums; by hand, for one image of 8 x 8."""
    x = torch.rand(2, 3, 8, 8)
    net = nn.Sequential(EquiNormConv2d(3, 4, 3, padding=1), nn.ReLU(), EquiNormConv2d(4, 5, 3, padding=1))
    image, middle, out, weights = 3 * 64, 4 * 64, 5 * 64, 9 * (3 * 4 + 4 * 5)
    today = NormTraffic(image + 3 * middle + 3 * middle + 3 * out, weights, 5 + 6)
    assert count(net, x) == today
    assert today.bytes(batch=10, activation=2, weight=4) == 20 * today.activations + 4 * weights
    net[0].relu_follows = 1.0
    net[1] = SummingReLU()
    assert count(net, x) == NormTraffic(image + 3 * out, weights, 3 + 6)
    assert count(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), x) == NormTraffic(8 * 4 * 36, 0, 4)
    assert count(nn.Conv2d(3, 4, 3), x) is None


@pytest.mark.slow
def test_every_variant_of_a_residual_net_is_timed_against_no_norm_and_bn() -> None:
    rows = steps.measure(steps.networks(CPU, quick=True)["resnet18"], CPU, repeats=2, steps=1)
    assert [row.variant for row in rows][:2] == ["no norm", "BN"]
    assert not [row for row in rows if row.failed]
    by_name = {row.variant: row for row in rows}
    assert by_name["no norm"].adds == 0
    assert by_name["BN"].of_bn == 1
    assert by_name["ENorm"].cycle is not None
    fused = by_name["ENorm, fused with SGD"]
    assert fused.update is not None
    assert fused.moved
    said = "\n".join(steps.sentences(rows))
    for part in ("an ENorm cycle", "the floor is to read and write", "the optimizer's step by itself"):
        assert part in said


def test_a_variant_that_fails_is_named_with_its_error() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    plain = steps.networks(CPU, quick=True)["llama"]
    network = steps.Network("net", (steps.Variant("bad", broken), plain.variants[0]), plain.inputs, image=False)
    rows = steps.measure(network, CPU, repeats=1, steps=1)
    assert {row.variant: row.failed for row in rows} == {"no norm": "", "bad": "ValueError: no such layer"}


def test_the_llama_shape_has_a_billion_parameters_and_scales_to_move() -> None:
    with torch.device("meta"):
        assert 1.0e9 < sum(p.numel() for p in Llama().parameters()) < 1.2e9
    import equinorm

    model = Llama(**TINY)
    tokens = torch.randint(100, (1, 8))
    report = equinorm.balance_(model.double(), tokens)
    assert report.converged
    assert report.num_scales > 2 * 128


@pytest.mark.parametrize("part", ["scaling", "lab"])
def test_a_part_writes_a_table_and_every_number(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ("scaling",) if part == "scaling" else ("FC-19", "WRN-20-96, EquiNorm")
    written = run((part,), tmp_path, device="cpu", only=only, mode="eager", quick=True, repeats=2)
    assert all(path.exists() for path in written)
    content = json.loads((tmp_path / f"bench_{part}_cpu_quick.json").read_text())
    assert content["quick"]
    assert content["rows"]
    assert content["hardware"]
    assert "median" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_keep_every_number_however_narrow_the_terminal(width: int) -> None:
    """They once collapsed to «…»."""
    table = Table(title="numbers", title_justify="left")
    for i in range(9):
        table.add_column(f"column {i}", justify="right", no_wrap=True)
    table.add_row("first", *(f"{i}.0 ({i}.0-{i}.5)" for i in range(1, 9)))
    console = Console(width=width, record=True)
    for part in in_parts(table, width):
        console.print(part)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(f"{i}.0 ({i}.0-{i}.5)" in text for i in range(1, 9))
    assert text.count("numbers") == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_was_measured_before_a_failure_is_kept(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench lab` once lost fifteen networks because the sixteenth ran out of memory."""

    def measure(name: str, *_: Any) -> Iterator[throughput.Speed]:
        if name == "second":
            raise error("no more")
        yield throughput.Speed(name, 1, 2.0, 0.1, 3.0, 4.0, 5.0)

    monkeypatch.setattr(throughput, "CASES", dict.fromkeys(("first", "second", "third"), throughput.CASES["FC-19"]))
    monkeypatch.setattr(throughput, "measure", measure)
    goes_on = error is torch.OutOfMemoryError
    with nullcontext() if goes_on else pytest.raises(error):
        run(("lab",), tmp_path, device="cpu")
    rows = json.loads((tmp_path / "bench_lab_cpu.json").read_text())["rows"]
    assert [row["name"] for row in rows] == (["first", "third"] if goes_on else ["first"])
    assert ("second is left out: no more" in capsys.readouterr().out) is goes_on


def test_a_network_that_cannot_be_built_is_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> tuple[nn.Module, torch.Tensor]:
        raise UserError("torchvision is not installed")

    small = lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))  # noqa: E731
    monkeypatch.setattr(balance, "NETWORKS", {"resnet": missing, "small": small})
    monkeypatch.setattr(floors, "NETWORKS", {"tiny": floors.FloorNetwork(lambda device: small(), {"cpu": 1e9})})
    run(("balance",), tmp_path, repeats=2)
    assert "resnet is left out: torchvision is not installed" in capsys.readouterr().out
    assert [row["network"] for row in json.loads((tmp_path / "bench_balance.json").read_text())["rows"]] == ["small"]
    said = (tmp_path / "bench_floors_cpu.txt").read_text()
    assert "1e+09 reached" in said
    (row,) = json.loads((tmp_path / "bench_floors_cpu.json").read_text())["rows"]
    assert (row["network"], row["scales"], len(row["trace"]), row["converged"]) == ("tiny", 8, 2, True)


def test_floors_are_measured_without_packages_that_draw(tmp_path: Path) -> None:
    """The machine with a GPU may have nothing but torch."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'tyro', 'torchvision', 'timm', 'transformers']))\n"
        "from equinorm.lab.bench import floors\n"
        "import torch\n"
        "small = lambda device: (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),"
        " torch.zeros(1, 4))\n"
        "floors.NETWORKS = {'tiny': floors.FloorNetwork(small, {'cpu': 1e-9})}\n"
        f"floors.main(['--device', 'cpu', '--repeats', '1', '--output', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert "1e-09 MISSED" in done.stdout
    assert (tmp_path / "bench_floors_cpu.txt").read_text().startswith("command: ")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "steps",
        "--only",
        "llama",
        "--quick",
        "--device",
        "cpu",
        "--mode",
        "eager",
        "--repeats",
        "1",
        "--output",
        str(tmp_path),
    ]
    assert main(command) == 0
    assert "RMSNorm + ENorm" in capsys.readouterr().out
    assert (tmp_path / "bench_steps_llama_eager_cpu_quick.txt").read_text().startswith("command: ")


def test_parts_that_run_when_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, list[str]] = {}
    monkeypatch.setattr(kernels, "main", lambda arguments: given.update(kernels=arguments))
    monkeypatch.setattr(instruments, "main", lambda arguments: given.update(instruments=arguments))
    monkeypatch.setattr(bench_run, "PARTS", {})
    run((), tmp_path, device="cpu")
    assert not given
    run(("kernels", "instruments"), tmp_path, device="cpu", only=("FC-19", "cost"), quick=True)
    assert given["kernels"] == ["--toy", "--rounds", "7", "--only", "FC-19"]
    assert given["instruments"][-2:] == ["--only", "cost"]
    assert instruments.parse(given["instruments"]).toy
    with pytest.raises(UserError, match="needs a CUDA device"):
        run(("kernels",), tmp_path, device="cpu")


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no part 'speed' here; it has 'steps', 'scaling', 'balance', 'lab'"):
        run(("speed",), tmp_path)


def test_a_timing_is_a_median_with_the_middle_half() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.5, 2.5, 3)
    assert str(Timing.of([0.5])) == "0.500 (0.500-0.500)"


@pytest.mark.parametrize(
    ("asked", "what"), [({"only": ("resnet19",)}, "network or run"), ({"variants": ("XN",)}, "variant")]
)
def test_an_unknown_name_is_refused_before_anything_is_measured(tmp_path: Path, asked: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"bench has no {what} .* here; it has '"):
        run(("steps",), tmp_path, device="cpu", quick=True, **asked)
    assert not list(tmp_path.iterdir())


# -- many processes, and folders larger than memory --------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_sent_and_what_a_folder_costs(tmp_path: Path) -> None:
    run(("sharded", "checkpoint"), tmp_path, device="cpu", quick=True, repeats=1)
    sent = json.loads((tmp_path / "bench_sharded_quick.json").read_text())["rows"]
    assert {(row["network"], row["way"]) for row in sent} >= {("llama", "tensor parallel"), ("resnet18", "FSDP2")}
    for row in sent:
        assert (row["cycle_numbers"] > 0) == (row["way"] != "DDP")
        assert row["cycle_numbers"] <= 2 * row["scales"]
        assert row["cycle_kinds"] in ([], ["all_reduce"])
    (folder,) = json.loads((tmp_path / "bench_checkpoint_quick.json").read_text())["rows"]
    assert folder["norm_after"] < folder["norm_before"]
    assert folder["imbalance"] < 1e-8
    assert folder["processor_seconds"] > 0
    assert folder["program_bytes"] <= folder["peak_bytes"]  # a quick folder may fit into what importing torch took
