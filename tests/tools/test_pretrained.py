"""Folders of transformers: what `equinorm balance hf:OLD --output NEW` writes, and what is left if it is ended."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import equinorm
from equinorm import cli
from equinorm.criteria import Norm
from equinorm.criteria.exponentials import Exponentials, Quadratic
from equinorm.tools import pretrained, sources
from equinorm.tools.pretrained import Bound, Check, Plan, Pretrained, balanced, factors_when_due, parts, write
from support.grids import with_slow_tests

transformers = pytest.importorskip("transformers")

WORDS = 50
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
    )


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=4))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, activation_function="relu")
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    options = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**options, hidden_act="relu"))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bert": bert,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unbalanced_(model: nn.Module) -> nn.Module:
    """Every matrix with rows and columns of their own sizes."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= torch.randn(weight.shape[-1]).exp() * torch.randn(weight.shape[-2], 1).exp()
    return model.eval()


@cache
def made(name: str, dtype: torch.dtype) -> Any:
    """A model, and a folder that holds it in several files."""
    torch.manual_seed(0)
    model: Any = unbalanced_(MODELS[name]()).to(dtype)
    folder = tempfile.TemporaryDirectory(prefix="equinorm-test-")
    model.save_pretrained(folder.name, max_shard_size="10KB")
    Path(folder.name, "tokenizer.json").write_text('{"words": []}')
    return model, folder


def saved(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of a model whose weights are in the folder `old`."""
    model, folder = made(name, dtype)
    shutil.copytree(folder.name, "old")
    return copy.deepcopy(model)


def logits(model: Any) -> Tensor:
    tokens = torch.arange(2 * 9).view(2, 9) % WORDS
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["balance", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def weights(folder: str | Path) -> dict[str, Tensor]:
    return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


# -- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_new_folder_loads_with_the_same_outputs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(name)
    code, said, error = run(capsys, "hf:old", "--output", "new")
    assert code == 0, error
    assert "each read back" in said
    assert "largest relative change" in said
    again = type(model).from_pretrained("new", local_files_only=True).eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-3, atol=1e-3 * float(logits(model).abs().max()))
    old, new = weights("old"), weights("new")
    assert old.keys() == new.keys()
    moved = [key for key in old if not torch.equal(old[key], new[key])]
    assert len(moved) > len(old) / 4
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        if Path("old", file).exists():
            assert Path("new", file).read_bytes() == Path("old", file).read_bytes()
    index = json.loads(Path("new", pretrained.INDEX).read_text())
    assert {key: Path("new", file).name for key, file in index["weight_map"].items()} == index["weight_map"]
    assert len(set(index["weight_map"].values())) > 2
    assert sorted(os.listdir("new")) == sorted(os.listdir("old"))


@pytest.mark.parametrize("c", ["1.1", pytest.param("1", marks=pytest.mark.slow)])
def test_the_optimum_is_that_of_the_whole_model_in_memory(c: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved("llama", dtype=torch.float64)
    code, said, error = run(capsys, "hf:old", "--output", "new", "--c", c, "--json")
    assert code == 0, error
    found = json.loads(said)
    report = equinorm.balance_(model, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, c=float(c))
    assert found["converged"]
    assert found["criterion"] == f"Norm(p=2.0, c={float(c)})"
    for key in ("norm_before", "norm_after", "value_before", "value_after"):
        assert found[key] == pytest.approx(getattr(report, key), rel=1e-9)
    new = weights("new")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(new[key], value, rtol=1e-6, atol=1e-12)


def test_half_precision_stays_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", dtype=torch.bfloat16)
    assert run(capsys, "hf:old", "--output", "new")[0] == 0
    assert {value.dtype for value in weights("new").values()} == {torch.bfloat16}


def test_files_of_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    model = saved("llama")
    assert run(capsys, "hf:old", "--output", "new", "--shard-size", "1MB")[0] == 0
    assert [path.name for path in Path("new").glob("*.safetensors*")] == [pretrained.SINGLE]
    again = type(model).from_pretrained("new", local_files_only=True).eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-3, atol=1e-3)
    code, _, error = run(capsys, "hf:old", "--output", "other", "--shard-size", "much")
    assert (code, os.path.exists("other")) == (1, False)
    assert "--shard-size much" in error


def test_weights_from_before_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama")
    torch.save({}, "old/pytorch_model.bin")
    Path("old/.cache").mkdir()
    code, said, _ = run(capsys, "hf:old", "--output", "new")
    assert code == 0
    assert "left out, since they hold weights from before: pytorch_model.bin" in said
    assert not os.path.exists("new/pytorch_model.bin")


def test_without_an_output_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama")
    before = {path.name: path.read_bytes() for path in Path("old").iterdir()}
    code, said, _ = run(capsys, "hf:old")
    assert code == 0
    assert "nothing written" in said
    assert {path.name: path.read_bytes() for path in Path("old").iterdir()} == before
    assert os.listdir() == ["old"]


# -- what norms absorb ---------------------------------------------------------------------------------------------


def test_the_config_gets_what_follows_the_weights() -> None:
    """ε is not among the weights: what a plan says of the config is written with them (`equinorm fit16`)."""
    saved("llama")
    config = json.loads(Path("old/config.json").read_text())
    Path("old/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))  # large enough to matter
    with sources_quiet():
        bound = Bound(Pretrained.read(Path("old")), sources.empty_transformer("old").model)
    tokens = torch.empty(1, 4, dtype=torch.int64, device="meta")
    symmetry = equinorm.trace(bound.model, {"input_ids": tokens}, invariances=True)
    factors = factors_when_due(symmetry, 2.0 * symmetry.absorbed.double())
    plan = Plan(factors, set(), 2.0, {"rms_norm_eps": 0.1 * math.exp(4.0)})
    write(bound, plan, Path("new"), lambda old, new: Check())
    old, new = (llama().from_pretrained(folder, local_files_only=True).eval() for folder in ("old", "new"))
    assert not torch.equal(old.model.embed_tokens.weight, new.model.embed_tokens.weight)
    torch.testing.assert_close(logits(new), logits(old), rtol=1e-4, atol=1e-4)
    new.model.norm.variance_epsilon = old.model.norm.variance_epsilon
    assert not torch.allclose(logits(new), logits(old), rtol=1e-2, atol=1e-2)
    assert balanced(bound, symmetry).config == {}


# -- what is refused -----------------------------------------------------------------------------------------------


def without_a_shard(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def with_a_torn_index(folder: Path) -> None:
    index = json.loads((folder / pretrained.INDEX).read_text())
    index["weight_map"].pop("model.norm.weight")
    (folder / pretrained.INDEX).write_text(json.dumps(index))


def leaving_the_folder(folder: Path) -> None:
    index = json.loads((folder / pretrained.INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../../secret.safetensors"
    (folder / pretrained.INDEX).write_text(json.dumps(index))


def cut_short(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))


def of_another_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 12
    (folder / "config.json").write_text(json.dumps(config))


def with_integers(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        found = load_file(path)
        changed = {k: v.to(torch.int8) if "up_proj" in k else v for k, v in found.items()}
        save_file(changed, path, metadata={"format": "pt"})


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (without_a_shard, "which model.safetensors.index.json speaks of"),
    (with_a_torn_index, "do not agree about model.norm.weight"),
    (leaving_the_folder, "not the name of a safetensors file there"),
    (cut_short, "is not a readable safetensors file"),
    (quantized, "is quantized (bitsandbytes)"),
    (of_another_model, "does not fit LlamaForCausalLM"),
    (with_integers, "which cannot be rescaled"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=lambda x: getattr(x, "__name__", ""))
def test_what_cannot_be_balanced_is_refused(
    damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("llama")
    damage(Path("old"))
    code, _, error = run(capsys, "hf:old", "--output", "new")
    assert code == 1
    assert message in error
    assert os.listdir() == ["old"]


def test_a_folder_that_is_there_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama")
    Path("new").mkdir()
    Path("new/mine.txt").write_text("keep me")
    code, _, error = run(capsys, "hf:old", "--output", "new", "--force")
    assert code == 1
    assert "new" in error
    assert os.listdir("new") == ["mine.txt"]


def test_outputs_that_change_are_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check on a few layers of what was written sees a weight that was rescaled by something else."""
    saved("llama")
    whole = pretrained.rescaled

    def wrong(tensor: Tensor, factor: Tensor, *rest: Any) -> Tensor:
        return whole(tensor, factor * (1.5 if factor.ndim == 2 else 1.0), *rest)

    monkeypatch.setattr(pretrained, "rescaled", wrong)
    code, _, error = run(capsys, "hf:old", "--output", "new")
    assert code == 1
    assert "so nothing was written" in error
    assert os.listdir() == ["old"]


def test_a_disk_that_returns_something_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama")

    def damaged(tensors: dict[str, Tensor], path: str, metadata: Any) -> None:
        first = next(iter(tensors))
        save_file({**tensors, first: tensors[first] + 1}, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", damaged)
    code, _, error = run(capsys, "hf:old", "--output", "new")
    assert code == 1
    assert "came back from the disk as something else" in error
    assert os.listdir() == ["old"]


# -- when it is ended before its time ------------------------------------------------------------------------------


def prepared() -> tuple[Bound, Plan]:
    """A folder, and what is going to be written."""
    saved("llama")
    with sources_quiet():
        empty = sources.empty_transformer("old")
        bound = Bound(Pretrained.read(Path("old")), empty.model)
    tokens = torch.empty(1, 4, dtype=torch.int64, device="meta")
    return bound, balanced(bound, equinorm.trace(empty.model, {"input_ids": tokens}))


class sources_quiet(warnings.catch_warnings):  # noqa: N801
    """Without what transformers has to say."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        return found


def in_a_copy_of_this_process(function: Callable[[], None]) -> int:
    """Run a function in a fork; its exit code, or minus the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: there is one, and it goes on
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            function()
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def ended_at(moment: int, how: str) -> None:
    """End this process at its n-th dealing with a file in the folder where it is; there is no way back."""
    here, seen = os.getcwd(), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event.partition(".")[0] not in ("open", "os", "shutil", "tempfile"):
            return
        if not any(
            isinstance(x, str | bytes | Path) and here in os.fsdecode(x) and "new" in os.fsdecode(x) for x in arguments
        ):
            return
        seen += 1
        if seen == moment:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

    sys.addaudithook(hook)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


STEP = 1 if with_slow_tests() else 3
"""From one moment that is tried to the next."""


def moments(bound: Bound, plan: Plan, how: str) -> Iterator[tuple[int, int]]:
    """Moments at which writing was ended, and how; until one is too late."""
    for moment in range(1, 1000, STEP):

        def work(moment: int = moment) -> None:
            ended_at(moment, how)
            write(bound, plan, Path("new"), lambda old, new: Check())

        code = in_a_copy_of_this_process(work)
        yield moment, code
        if code == 0:
            return


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_ended_at_any_moment_there_is_nothing_or_a_whole_folder(how: str) -> None:
    bound, plan = prepared()
    write(bound, plan, Path("whole"), lambda old, new: Check())
    whole = contents(Path("whole"))
    codes = []
    for moment, code in moments(bound, plan, how):
        codes.append(code)
        assert code in (0, -signal.SIGKILL if how == "killed" else 130), moment
        if Path("new").exists():
            assert contents(Path("new")) == whole, moment
            shutil.rmtree("new")
        if how == "interrupted":
            assert set(os.listdir()) == {"old", "whole"}, moment
    assert codes.count(0) == 1
    assert STEP * len(codes) > 3 * len(whole)
    # what a killed process left behind is gone with the next that writes there
    assert set(os.listdir()) == {"old", "whole"}


def test_killed_in_the_middle_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, plan = prepared()

    def half(tensors: dict[str, Tensor], path: str, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", half)
        code = in_a_copy_of_this_process(lambda: write(bound, plan, Path("new"), lambda old, new: Check()) and None)
    assert code == -signal.SIGKILL
    assert not Path("new").exists()
    assert len(list(Path().glob(".new.*.tmp"))) == 1
    write(bound, plan, Path("new"), lambda old, new: Check())
    assert set(os.listdir()) == {"old", "new"}


@pytest.mark.slow
def test_the_command_is_killed_at_random_moments() -> None:
    saved("llama")
    command = [sys.executable, "-m", "equinorm.cli", "balance", "hf:old", "--output", "new"]
    begun = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - begun
    whole = contents(Path("new"))
    draw = random.Random(0)
    for _ in range(10):
        shutil.rmtree("new", ignore_errors=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 1.0) * seconds)
        process.kill()
        process.wait()
        if Path("new").exists():
            assert contents(Path("new")) == whole
    shutil.rmtree("new", ignore_errors=True)
    subprocess.run(command, check=True, capture_output=True)
    assert set(os.listdir()) == {"old", "new"}


# -- what is counted -----------------------------------------------------------------------------------------------


def test_passes_over_the_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point, quadratic and product of the solver reads all sums once; parts count by their size."""
    calls = 0

    def counted(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*arguments)

        return call

    for owner, name in ((Exponentials, "at"), (Quadratic, "__init__"), (Quadratic, "times"), (Quadratic, "between")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    symmetry = equinorm.trace(unbalanced_(model), torch.zeros(2, 4))
    calls = 0
    problem = Norm().problem(symmetry, lambda w: w.multiplicative)
    problem.solve(1e-8, None)
    assert problem.passes == calls > 3


def test_the_sums_of_a_part_are_given_back_with_it() -> None:
    """Without waiting for the collector of cycles: the next part needs the memory."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    symmetry = equinorm.trace(unbalanced_(model), torch.zeros(2, 4))
    gc.collect()
    gc.disable()
    try:
        problem = Norm().problem(symmetry, lambda w: w.multiplicative)
        problem.solve(1e-8, None)
        sums = weakref.ref(problem.objective.matrices[0])
        del problem
        assert sums() is None
    finally:
        gc.enable()


def test_factors_are_made_one_at_a_time() -> None:
    """All at once they take more memory than the folder: one of 8 GB was killed at 16."""
    _, plan = prepared()
    alive: list[weakref.ref[Tensor]] = []
    for name in plan.factors:
        factor = plan.factors[name]()
        alive.append(weakref.ref(factor))
        del factor
        assert alive[-1]() is None
    assert len(alive) > 10


def test_parts_hold_what_norms_absorb() -> None:
    """Of scales that a norm absorbs the norm of the weights has no minimum: each part knows its own."""
    with sources_quiet():
        model = unbalanced_(llama().double())
    tokens = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    symmetry = equinorm.trace(model, tokens, invariances=True)
    assert symmetry.absorbed.any()
    found = parts(symmetry)
    absorbed = torch.zeros_like(symmetry.absorbed)
    for part in found:
        absorbed[part.variables] = part.absorbed
    assert torch.equal(absorbed, symmetry.absorbed)
