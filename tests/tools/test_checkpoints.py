"""Checkpoints: names that share storage, tensors that cannot be rescaled, damaged files, places that are none."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equinorm import cli
from equinorm.errors import UserError
from equinorm.tools import checkpoints
from support import damage

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())
"""
INPUT = ["--input", "2,4"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "sharednets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("sharednets", None)


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 4), "b": (4, 4), "c": (3, 4)}
    made = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["b.weight"] *= 5
    biases = {f"{name}.bias": torch.randn(shape[0], generator=generator) for name, shape in shapes.items()}
    return made | biases


def outputs(tensors: dict[str, Tensor]) -> Tensor:
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = {name: tensor.double() for name, tensor in tensors.items()}
    for name in "ab":
        x = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).relu()
    return x @ w["c.weight"].T + w["c.bias"]


def balance(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["balance", "sharednets:Net", *arguments, *INPUT]) == code
    out, err = capsys.readouterr()
    if code:
        assert err.startswith("equinorm: ")
        assert err.count("\n") == 1
        return err
    assert err == ""
    return out


def same_function(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    torch.testing.assert_close(outputs(after), outputs(before), rtol=1e-5, atol=1e-5)


# --- names that share storage ---


def test_one_storage_under_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: the second name was written over the first, and the check had looked at the model only."""
    tensors = state()
    tensors["b.weight"] = tensors["a.weight"]
    torch.save(tensors, "in.pt")
    balance(capsys, "in.pt", "--output", "out.pt")
    found = torch.load("out.pt", weights_only=True)
    same_function(tensors, found)
    assert found["a.weight"].data_ptr() != found["b.weight"].data_ptr()


def test_views_that_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    tensors = state() | {"a.weight": whole[:4], "b.weight": whole[2:], "c.weight": whole.view(-1)[1:13].view(3, 4)}
    torch.save(tensors, "in.pt")
    balance(capsys, "in.pt", "--output", "out.pt")
    same_function(tensors, torch.load("out.pt", weights_only=True))


def test_what_else_lies_in_that_storage_stays(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = state()
    average = dict(tensors)
    torch.save({"model": tensors, "average": average, "again": tensors}, "in.pt")
    balance(capsys, "in.pt", "--output", "out.pt")
    found = torch.load("out.pt", weights_only=True)
    same_function(tensors, found["model"])
    assert not torch.equal(found["model"]["a.weight"], tensors["a.weight"])
    for kept in ("average", "again"):
        assert all(torch.equal(found[kept][name], tensors[name]) for name in tensors)


def test_layouts_and_parameters_stay_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = state()
    tensors["a.weight"] = tensors["a.weight"].T.contiguous().T
    tensors["b.weight"] = nn.Parameter(tensors["b.weight"], requires_grad=False)
    torch.save(tensors, "in.pt")
    balance(capsys, "in.pt", "--output", "out.pt")
    found = torch.load("out.pt", weights_only=True)
    assert found["a.weight"].stride() == (1, 4)
    assert isinstance(found["b.weight"], nn.Parameter)
    assert not found["b.weight"].requires_grad
    same_function(tensors, found)


# --- tensors that cannot be read ---


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.ones(1, 4).expand(4, 4), "a.weight is an expanded view"),
        (lambda: torch.eye(4).to_sparse(), "a.weight is sparse (torch.sparse_coo)"),
        (lambda: torch.empty(4, 4, device="meta"), "a.weight is on the meta device"),
        (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "a.weight is quantized"),
        (lambda: torch.ones(4, 4, dtype=torch.complex64), "a.weight has dtype torch.complex64"),
        (lambda: torch.ones(4, 4, dtype=torch.int64), "a.weight has dtype torch.int64"),
        (lambda: torch.full((4, 4), float("nan")), "not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's, about quantized and sparse tensors
def test_tensors_that_cannot_be_rescaled(
    capsys: pytest.CaptureFixture[str], tensor: Callable[[], Tensor], message: str
) -> None:
    torch.save(state() | {"a.weight": tensor()}, "in.pt")
    assert message in balance(capsys, "in.pt", "--output", "out.pt", code=1)
    assert not Path("out.pt").exists()


# --- the written file is verified ---


def test_a_file_that_is_written_wrong_is_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded into a fresh model is the file, not what was meant to be in it."""
    torch.save(state(), "in.pt")
    right = checkpoints.give_back

    def wrong(*arguments: Any) -> checkpoints.Checkpoint:
        made = right(*arguments)
        made.tensors["a.weight"].mul_(1.1)
        return made

    monkeypatch.setattr(checkpoints, "give_back", wrong)
    assert "with the written file the outputs change" in balance(capsys, "in.pt", "--output", "out.pt", code=1)
    assert sorted(os.listdir()) == ["in.pt", "sharednets.py"]


def test_a_disk_that_returns_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(content: Any, path: Path) -> None:
        right(content | {"a.bias": content["a.bias"] + 1}, path)

    right = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(UserError, match=r"a\.bias came back from the disk as something else"):
        checkpoints.Checkpoint(state(), state(), safetensors=False).write(Path("out.pt"))
    assert os.listdir() == ["sharednets.py"]


# --- damaged files ---


def check_damaged(count: int, folder: Path) -> None:
    ends, faults = damage.run(count, folder)
    assert not faults, ends
    assert len(ends) >= 5  # some damage leaves a checkpoint


def test_damaged_files(tmp_path: Path) -> None:
    check_damaged(12, tmp_path)


@pytest.mark.slow
def test_hundreds_of_damaged_files(tmp_path: Path) -> None:
    check_damaged(180, tmp_path)


def test_a_file_without_checksums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), "in.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    found = checkpoints.read(Path("in.pt"))
    assert torch.equal(found.tensors["a.weight"], state()["a.weight"])


# --- places that are none ---


def place(name: str) -> str:
    """Something in the way, made in this folder."""
    path = Path("out.pt")
    if name == "a device":
        os.symlink("/dev/null", path)
    elif name == "a pipe":
        os.mkfifo(path)
    elif name == "a link that leads nowhere":
        os.symlink("nowhere/out.pt", path)
    elif name == "a link to itself":
        os.symlink("out.pt", path)
    elif name == "read-only":
        path.write_bytes(b"precious")
        path.chmod(0o444)
    elif name == "a read-only folder":
        Path("closed").mkdir(mode=0o555)
        return "closed/out.pt"
    elif name == "among devices":
        return "/dev/full.pt"
    elif name == "a name too long":
        return "x" * 300 + ".pt"
    elif name == "a zero byte":
        return "out\0.pt"
    return str(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a device", "out.pt is a device or a pipe"),
        ("a pipe", "out.pt is a device or a pipe"),
        ("a link that leads nowhere", "is a link to "),
        ("a link to itself", "cannot be written"),
        ("read-only", "out.pt is read-only"),
        ("a read-only folder", "no permission to write into"),
        ("among devices", "holds devices and no files"),
        ("a name too long", "cannot be written"),
        ("a zero byte", "cannot be written"),
    ],
)
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_places_that_are_none(capsys: pytest.CaptureFixture[str], name: str, message: str, force: list[str]) -> None:
    torch.save(state(), "in.pt")
    output = place(name)
    error = balance(capsys, "in.pt", "--output", output, *force, code=1)
    if name == "read-only" and not force:
        assert "exists" in error
    else:
        assert message in error
    if name == "read-only":
        assert Path(output).read_bytes() == b"precious"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert not [path for path in os.listdir() if path.endswith(".tmp")]


def test_a_link_to_a_place_that_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), "in.pt")
    os.symlink("real.pt", "out.pt")
    balance(capsys, "in.pt", "--output", "out.pt")
    assert Path("out.pt").is_symlink()
    same_function(state(), torch.load("real.pt", weights_only=True))
