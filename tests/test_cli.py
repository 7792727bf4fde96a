"""The command line, as a user meets it: what it prints, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import equinorm
from equinorm import cli
from equinorm.tools import checkpoints, sources, verify

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
        self.hidden, self.last = nn.Linear(width, 5), nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.last(self.hidden(x).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(11, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens)).relu()))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, *, left, right):
        return self.b(self.a(left + right).relu())


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def factory(width):
    return Net(width)


def broken():
    raise RuntimeError("no weights today")


def wrong():
    return "a string"


made, number = Net(4), 3
single = nn.Linear(3, 2)
"""
IMAGE = ["--input", "2,3,8,8"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's folder with a file of models in it."""
    (tmp_path / "usernets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("usernets", None)


def model(name: str = "Net", **options: Any) -> nn.Module:
    made = sources.load(f"usernets:{name}", [f"{k}={v}" for k, v in options.items()]).model
    with torch.no_grad():  # far from balance, and statistics that matter
        for i, p in enumerate(made.parameters()):
            p.mul_(3.0 ** (i % 3 - 1))
        for buffer in made.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return made


def succeeds(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Run a command that must fail with one line on stderr; returns that line."""
    assert cli.main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("equinorm: ")
    assert err.count("\n") == 1
    return err


def outputs(state: dict[str, Tensor], example: Any, name: str = "Net") -> Tensor:
    made = model(name).double()
    made.load_state_dict(state, strict=False)
    with torch.no_grad():
        result: Tensor = made(example)
    return result


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]


# --- trace ---


def test_trace_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    out = succeeds(capsys, "trace", "usernets:Net", *IMAGE)
    expected = equinorm.trace(model(), torch.zeros(2, 3, 8, 8)).explain()
    assert out == f"{expected}\n"
    assert "11 free scales" in out


def test_trace_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(succeeds(capsys, "trace", "usernets:Net", *IMAGE, "--json"))
    assert found["num_scales"] == 11
    assert {"parameter", "axis", "free", "because"} <= set(found["rows"][0])


@pytest.mark.parametrize(
    ("spec", "options", "scales"),
    [
        ("usernets:Net", [], 11),
        ("usernets:Net", ["--model-args", "width=3"], 8),
        ("usernets:made", [], 9),
        ("usernets:factory", ["--model-args", "width=2"], 7),
        ("./usernets.py:Net", [], 11),
        ("usernets:Net", ["--keep", "hidden.*"], 0),
        ("usernets:Net", ["--dtype", "bfloat16"], 11),
    ],
)
def test_ways_to_name_a_model(capsys: pytest.CaptureFixture[str], spec: str, options: list[str], scales: int) -> None:
    found = json.loads(succeeds(capsys, "trace", spec, *IMAGE, *options, "--json"))
    assert found["num_scales"] == scales


def test_integer_and_named_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "10 free scales" in succeeds(capsys, "trace", "usernets:Tied", "--input", "2,5:int64")
    inputs = ["--input", "left=2,3", "--input", "right=2,3"]
    assert "4 free scales" in succeeds(capsys, "trace", "usernets:Named", *inputs)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["usernets:Net"], "Give the shape of its input"),
        (["usernets:Net", "--input", "2,4,8,8"], "expected input[2, 4, 8, 8] to have 3 channels"),
        (
            ["usernets:Branching", "--model-args", "in_features=3", "--model-args", "out_features=3", "--input", "2,3"],
            "decides something by the values of a tensor",
        ),
        (["usernets:Net", "--input", "2,x"], "cannot read --input '2,x'"),
        (["usernets:Net", "--input", "2,3:int63"], "cannot read --input"),
        (["usernets:Named", "--input", "left=2,3", "--input", "2,3"], "give a name to every --input"),
        (["usernets:Net", *IMAGE, "--keep", "head.*"], "keep='head.*' matches no module and no parameter"),
        (["usernets:Net", *IMAGE, "--model-args", "width"], "write key=value"),
        (["usernets:Net", *IMAGE, "--model-args", "depth=2"], "unexpected keyword argument 'depth'"),
        (["usernets:factory", *IMAGE], "missing a required argument: 'width'"),
        (["usernets:broken", *IMAGE], "failed with RuntimeError: no weights today at "),
        (["usernets:wrong", *IMAGE], "returned a str, not a torch.nn.Module"),
        (["usernets:made", *IMAGE, "--model-args", "width=2"], "is a model already"),
        (["usernets:number", *IMAGE], "is a int, neither a model nor something that makes one"),
        (["usernets:Nett", *IMAGE], "did you mean Net?"),
        (["nowhere:Net", *IMAGE], "there is no module 'nowhere'"),
        (["nowhere.py:Net", *IMAGE], "no such file"),
        (["Net", *IMAGE], "write module:callable"),
        (["hf:.", *IMAGE], "config.json"),
        (["usernets:Net", "missing.pt", *IMAGE], "no such checkpoint: missing.pt"),
        (["usernets:Net", "usernets.py", *IMAGE], "expected a name that ends in one of .safetensors, .pt"),
    ],
)
def test_errors_say_what_to_do(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in fails(capsys, "trace", *arguments)


def test_unknown_names_in_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    assert "did you mean resnet18" in fails(capsys, "trace", "torchvision:resnet19")
    assert "nothing" not in fails(capsys, "trace", "torchvision:resnet18", "--model-args", "weights=DEFAULT")


def test_a_library_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "timm is not installed: pip install timm" in fails(capsys, "trace", "timm:resnet18")


def test_nothing_to_rescale(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to rescale" in fails(capsys, "balance", "usernets:single", "--input", "2,3")


@pytest.mark.parametrize(("option", "message"), [("--p=0", "p must be"), ("--parameters=x.*", "matches no parameter")])
def test_bad_options_of_balance(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    assert message in fails(capsys, "balance", "usernets:Net", *IMAGE, option)


def test_unreadable_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    Path("noise.pt").write_bytes(b"no checkpoint at all")
    Path("noise.safetensors").write_bytes(b"no checkpoint at all")
    torch.save({"epoch": 3, "loss": [1.0]}, "nothing.pt")
    torch.save([1, 2], "list.pt")
    torch.save(model(), "pickled.pt")
    for file, message in {
        "noise.pt": "noise.pt",
        "noise.safetensors": "is not a readable safetensors file",
        "nothing.pt": "holds 'epoch', 'loss', but no state dict",
        "list.pt": "holds a list, not a state dict",
        "pickled.pt": "save model.state_dict() instead",
    }.items():
        assert message in fails(capsys, "balance", "usernets:Net", file, *IMAGE)


def test_a_checkpoint_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    state = model().state_dict()
    torch.save({k: v for k, v in state.items() if not k.startswith("last")} | {"extra": torch.ones(1)}, "a.pt")
    error = fails(capsys, "balance", "usernets:Net", "a.pt", *IMAGE)
    assert "lacks last.weight, last.bias and has unexpected extra" in error
    torch.save(model(width=7).state_dict(), "b.pt")
    assert "conv.weight has shape (7, 3, 3, 3) in the file and (6, 3, 3, 3)" in fails(
        capsys, "balance", "usernets:Net", "b.pt", *IMAGE
    )
    save_file({k: v.to(torch.float8_e4m3fn) if v.is_floating_point() else v for k, v in state.items()}, "c.safetensors")
    assert "cannot be rescaled" in fails(capsys, "balance", "usernets:Net", "c.safetensors", *IMAGE)


# --- balance ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_balance_safetensors(capsys: pytest.CaptureFixture[str], dtype: torch.dtype) -> None:
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model().state_dict().items()}
    save_file(state, "in.safetensors", metadata={"format": "pt", "author": "me"})
    out = succeeds(capsys, "balance", "usernets:Net", "in.safetensors", "--output", "out.safetensors", *IMAGE)
    for text in ("in.safetensors", "11 free scales", "at the optimum", "largest relative change", "written: out"):
        assert text in out
    found = load_file("out.safetensors")
    with safe_open("out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "me"}
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in state.items()}
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    before, after = outputs(state, x), outputs(found, x)
    assert (after - before).abs().max() / before.abs().max() < 64 * torch.finfo(dtype).eps
    for name in ("conv.weight", "conv.bias", "last.bias", "norm.running_mean", "norm.num_batches_tracked"):
        assert torch.equal(found[name], state[name])  # what does not move is not rounded either
    weights = [name for name in found if name.endswith("weight")]
    assert sum(found[n].double().square().sum() for n in weights) < sum(
        state[n].double().square().sum() for n in weights
    )
    assert leftovers(Path()) == []


def test_balance_keeps_everything_else_in_a_pt_file(capsys: pytest.CaptureFixture[str]) -> None:
    state = model().state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"epoch": 7, "model": wrapped, "optimizer": {"lr": 0.1}}, "in.pt")
    out = succeeds(capsys, "balance", "usernets:Net", "in.pt", "--output", "out.pth", *IMAGE)
    assert "kept as they were: optimizer" in out
    found = torch.load("out.pth", weights_only=True)
    assert list(found) == ["epoch", "model", "optimizer"]
    assert (found["epoch"], found["optimizer"]) == (7, {"lr": 0.1})
    assert list(found["model"]) == list(wrapped)
    assert not torch.equal(found["model"]["module.hidden.weight"], wrapped["module.hidden.weight"])
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    plain = {name.removeprefix("module."): value for name, value in found["model"].items()}
    torch.testing.assert_close(outputs(plain, x), outputs(state, x), rtol=1e-6, atol=1e-6)


def test_a_bare_state_dict_keeps_its_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model().state_dict(), "in.pt")
    succeeds(capsys, "balance", "usernets:Net", "in.pt", "--output", "out.pt", *IMAGE)
    before, after = (torch.load(name, weights_only=True) for name in ("in.pt", "out.pt"))
    assert list(before) == list(after)
    assert before._metadata == after._metadata


@pytest.mark.parametrize("both", [True, False])
def test_tied_weights(capsys: pytest.CaptureFixture[str], both: bool) -> None:
    """A file may hold a tied tensor under one of its names or under all of them."""
    state = {name: value.clone() for name, value in model("Tied").state_dict().items()}
    if not both:
        del state["head.weight"]
    save_file(state, "in.safetensors")
    arguments = ["in.safetensors", "--output", "out.safetensors", "--input", "2,5:int64"]
    succeeds(capsys, "balance", "usernets:Tied", *arguments)
    found = load_file("out.safetensors")
    assert set(found) == set(state)
    if both:
        assert torch.equal(found["head.weight"], found["embed.weight"])
    tokens = torch.randint(11, (2, 5))
    torch.testing.assert_close(outputs(found, tokens, "Tied"), outputs(state, tokens, "Tied"), rtol=1e-5, atol=1e-6)


def test_balance_json(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model().state_dict(), "in.pt")
    arguments = ["balance", "usernets:Net", "in.pt", "--output", "out.pt", *IMAGE, "--json", "--c", "1.1", "--p", "1"]
    found = json.loads(succeeds(capsys, *arguments))
    assert (found["checkpoint"], found["output"], found["num_scales"]) == ("in.pt", "out.pt", 11)
    assert found["converged"]
    assert found["verified"]["relative_change"] < found["verified"]["tolerance"] == 1e-6


def test_a_method_is_put_on_and_folded_off(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model().state_dict(), "in.pt")
    said = succeeds(capsys, "convert", "usernets:Net", "weightnorm", "in.pt", "--output", "wn.pt", *IMAGE)
    assert 'equinorm.convert(model, "weightnorm", example_inputs)' in said
    said = succeeds(capsys, "fold", "usernets:Net", "weightnorm", "wn.pt", "--output", "out.safetensors", *IMAGE)
    assert "written: out.safetensors" in said
    images, plain = torch.rand(2, 3, 8, 8), model().eval()
    found = checkpoints.read(Path("out.safetensors"))
    checkpoints.fit(found, plain)
    checkpoints.adopt(found, plain)
    trained, _ = equinorm.convert(model(), "weightnorm", images)
    trained.load_state_dict(torch.load("wn.pt"))
    torch.testing.assert_close(plain(images), trained.eval()(images), rtol=1e-4, atol=1e-5)
    assert "nothing written" in succeeds(capsys, "convert", "usernets:Net", "groupnorm", *IMAGE, "--option", "groups=1")


def test_convert_and_fold_refuse_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean batchnorm" in fails(capsys, "convert", "usernets:Net", "batchn", *IMAGE)
    assert "it has groups, eps" in fails(capsys, "convert", "usernets:Net", "groupnorm", *IMAGE, "--option", "group=2")
    assert "write key=value" in fails(capsys, "convert", "usernets:Net", "groupnorm", *IMAGE, "--option", "groups")
    torch.save(model().state_dict(), "in.pt")
    assert "in.pt" in fails(capsys, "convert", "usernets:Net", "bn", "in.pt", "--output", "in.pt", *IMAGE)
    fails(capsys, "fold", "usernets:Net", "weightnorm", "in.pt", *IMAGE)


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "mean shift rejection" in succeeds(capsys, "methods")
    assert "groups" in succeeds(capsys, "methods", "GroupNorm")
    assert {"name", "options"} <= set(json.loads(succeeds(capsys, "methods", "--json"))["methods"][0])
    assert "unknown method" in fails(capsys, "methods", "nothing")


def test_a_name_without_its_kind_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean torchvision:resnet18" in fails(capsys, "trace", "resnet18")
    assert "usernets.py:NAME" in fails(capsys, "trace", "usernets.py")


def test_without_an_output_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model().state_dict(), "in.pt")
    before = Path("in.pt").read_bytes()
    assert "nothing written" in succeeds(capsys, "balance", "usernets:Net", "in.pt", *IMAGE)
    assert Path("in.pt").read_bytes() == before


@pytest.mark.parametrize("name", ["new.pt", "new.safetensors"])
def test_random_weights_can_be_written(capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = succeeds(capsys, "balance", "usernets:Net", "--output", name, *IMAGE)
    assert "random weights" in out
    checkpoints.fit(checkpoints.read(Path(name)), model())


def test_overwriting_has_to_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model().state_dict(), "in.pt")
    before = Path("in.pt").read_bytes()
    arguments = ["balance", "usernets:Net", "in.pt", "--output", "in.pt", *IMAGE]
    assert "in.pt exists: give another name, or --force" in fails(capsys, *arguments)
    assert Path("in.pt").read_bytes() == before
    Path("in.pt").chmod(0o640)
    succeeds(capsys, *arguments, "--force")
    assert Path("in.pt").read_bytes() != before
    assert Path("in.pt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.safetensors", "in the format of in.pt"),
        ("out.onnx", "expected a name that ends in"),
        ("no/such/out.pt", "there is no folder no/such"),
        ("folder.pt", "is a folder"),
    ],
)
def test_outputs_that_cannot_be_written(capsys: pytest.CaptureFixture[str], output: str, message: str) -> None:
    Path("folder.pt").mkdir()
    torch.save(model().state_dict(), "in.pt")
    assert message in fails(capsys, "balance", "usernets:Net", "in.pt", "--output", output, *IMAGE)


def test_changed_outputs_are_not_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "relative_change", lambda before, after: 2e-6)
    error = fails(capsys, "balance", "usernets:Net", "--output", "out.pt", *IMAGE)
    assert "the outputs changed by 2.0e-06" in error
    assert not Path("out.pt").exists()


def test_models_that_refuse_float64_are_compared_in_float32() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.float())

    found, dtype = verify.outputs(Stubborn(), [(torch.ones(1, 3),)])
    assert (len(found), dtype) == (1, torch.float32)


def test_relative_change() -> None:
    x = torch.tensor([1.0, -4.0])
    assert verify.relative_change([x], [x + torch.tensor([0.0, 1.0])]) == 0.25
    assert verify.relative_change([x, torch.zeros(2)], [x, torch.tensor([0.0, 1.0])]) == 1.0
    assert verify.relative_change([x], [x * float("nan")]) == float("inf")


# --- files are whole or not there ---


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, failure: BaseException
) -> None:
    state = model().state_dict()
    if name.endswith(".pt"):
        torch.save(state, name)
    else:
        save_file(state, name)
    before = Path(name).read_bytes()

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    code = 1 if isinstance(failure, OSError) else 130
    error = fails(capsys, "balance", "usernets:Net", name, "--output", name, "--force", *IMAGE, code=code)
    assert ("No space left" if code == 1 else "interrupted") in error
    assert Path(name).read_bytes() == before
    assert leftovers(Path()) == []


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
def test_a_full_disk(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files makes the writers of torch and safetensors fail half-way, as a full disk does."""
    state = checkpoints.of_model(model(width=200), Path(name))
    state.write(Path(name))
    before = Path(name).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        line = fails(
            capsys, "balance", "usernets:Net", name, "--model-args", "width=200", "--output", name, "--force", *IMAGE
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert line.startswith(f"equinorm: could not write {name}")
    assert Path(name).read_bytes() == before
    assert leftovers(Path()) == []


# --- models of other libraries ---


def test_torchvision_without_its_operators() -> None:
    """A process where nobody declares them (as ours are): torchvision's import fails first, and then succeeds."""
    pytest.importorskip("torchvision")
    bare = "import sys; sys.meta_path = [f for f in sys.meta_path if f.__module__ != 'torchvision_ops']"
    program = f"{bare}; from equinorm.cli import main; main()"
    command = [sys.executable, "-c", program, "trace", "torchvision:resnet18", "--input", "1,3,32,32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["num_scales"] == 2_880


@pytest.mark.parametrize(
    ("spec", "options", "shape"),
    [
        ("torchvision:alexnet", [], (1, 3, 224, 224)),
        ("torchvision:r3d_18", [], (1, 3, 16, 112, 112)),
        ("torchvision:vit_b_16", ["image_size=64"], (1, 3, 64, 64)),
        ("torchvision:lraspp_mobilenet_v3_large", [], (1, 3, 224, 224)),
        ("timm:lcnet_050", ["in_chans=1"], (1, 1, 224, 224)),
        ("timm:deit_tiny_patch16_224", ["img_size=64", "depth=1"], (1, 3, 64, 64)),
    ],
)
def test_guessed_inputs(spec: str, options: list[str], shape: tuple[int, ...]) -> None:
    pytest.importorskip(spec.partition(":")[0])
    source = sources.load(spec, options)
    assert [i.shape for i in source.inputs] == [shape]
    assert not source.model.training


def test_a_transformers_folder(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained("llama")
    capsys.readouterr()
    succeeds(capsys, "balance", "hf:llama", "--output", "llama/model.safetensors", "--force")
    again = transformers.LlamaForCausalLM.from_pretrained("llama", local_files_only=True)
    tokens = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, made(tokens).logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(again.lm_head.weight, made.lm_head.weight)


# --- the command itself ---


def test_help_without_torch() -> None:
    """The command line itself must not need torch to print its help."""
    program = (
        "import sys, types; package = types.ModuleType('equinorm'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['equinorm'] = package\n"
        "from equinorm import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    folder = str(Path(cli.__file__).parent)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("trace", "balance", "demo"):
        assert command in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert succeeds(capsys, "--version").strip()


def test_a_reader_that_closes_the_pipe() -> None:
    command = f"{sys.executable} -m equinorm.cli trace usernets:Net --input 1,3,8,8 | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""


# -- diagnose ----------------------------------------------------------------------------------------------------------


def test_diagnose_writes_a_page_and_says_what_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    out = succeeds(capsys, "diagnose", "usernets:Net", *IMAGE, "--output", str(page))
    assert f"written: {page}" in out
    text = page.read_text()
    assert "usernets:Net" in text
    assert "<svg" in text
    assert "exists" in fails(capsys, "diagnose", "usernets:Net", *IMAGE, "--output", str(page))
    found = json.loads(succeeds(capsys, "diagnose", "usernets:Net", *IMAGE, "--output", str(page), "--force", "--json"))
    assert found["page"] == str(page)
    assert all(item["advice"] for item in found["advice"])
