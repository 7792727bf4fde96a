"""How long `equinorm balance hf:FOLDER --output FOLDER` takes beside a copy of the files, and in how much memory.

    equinorm bench checkpoint               a made-up Llama of 8.6 GB in bfloat16, shards of at most 1 GB (needs 27 GB)

The weights are random, every row and column of them times exp(N(0, 1/2)), so that there is something to balance. The
copy is of the same files to the same disk, flushed; others may use the machine meanwhile, so it is made before and
after, and the mean counts. Memory is the highest resident set of the process that balances, mapped files included. What
it may take is stated before: two shards, the solver's sums for the largest part of the network, and the program itself,
which is what the process had taken when it had traced the model and read no weight.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from ...errors import UserError
from ...files import to_disk, write_text

NAMES = ("llama-8GB",)
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}


@dataclass(frozen=True)
class Cost:
    """One folder, copied and balanced."""

    name: str
    numbers: int  # parameters
    bytes: int
    files: int
    largest_shard: int
    solver_bytes: int  # stated before
    program_bytes: int
    peak_bytes: int
    copies: tuple[float, float]  # seconds of a copy, before and after
    seconds: float
    processor_seconds: float  # that the process had a core, of all its threads
    passes: float  # of the solver over the weights
    scales: int
    imbalance: float
    change: float  # of the outputs on a few layers, relatively
    norm_before: float
    norm_after: float
    load: tuple[float, float]  # processes that wanted a core, over the minute before and after

    @property
    def copy_seconds(self) -> float:
        return sum(self.copies) / len(self.copies)

    @property
    def allowed_bytes(self) -> int:
        return 2 * self.largest_shard + self.solver_bytes + self.program_bytes

    @property
    def allowed_seconds(self) -> float:
        return (3 + self.passes) * self.copy_seconds


def measure(quick: bool = False) -> Cost:
    """Make the folder in the folder for temporary files, copy it, balance it, and remove everything."""
    sizes, shard = (TINY, "200KB") if quick else (SIZES, "1GB")
    with tempfile.TemporaryDirectory(prefix="equinorm-bench-") as name:
        folder = Path(name)
        numbers = make_llama(folder / "llama", sizes, shard)
        files = sorted((folder / "llama").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        if shutil.disk_usage(folder).free < 2.1 * size:
            raise UserError(f"{folder} has no room for two copies of {size / 1e9:.1f} GB: set TMPDIR to another place")
        before, load_before = _copy(files, folder / "copy"), os.getloadavg()[0]
        spent, said = _balance(folder / "llama", folder / "balanced")
        after, load_after = _copy(files, folder / "copy"), os.getloadavg()[0]
    return Cost(
        name="tiny" if quick else NAMES[0],
        numbers=numbers,
        bytes=size,
        files=len(files),
        largest_shard=said["largest_shard"],
        solver_bytes=said["solver_bytes"],
        program_bytes=said["program_bytes"],
        peak_bytes=spent.bytes,
        copies=(before, after),
        seconds=spent.seconds,
        processor_seconds=spent.processor_seconds,
        passes=said["passes"],
        scales=said["num_scales"],
        imbalance=said["imbalance"],
        change=said["verified"]["change"],
        norm_before=said["norm_before"],
        norm_after=said["norm_after"],
        load=(load_before, load_after),
    )


@torch.no_grad()
def make_llama(folder: Path, sizes: dict[str, int], shard: str, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a Llama of random weights file by file, as `save_pretrained` would; returns its number of parameters.

    >>> make_llama(Path("llama"), TINY, "200KB")
    """
    transformers: Any = importlib.import_module("transformers")
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], dtype=dtype)
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).to(dtype).state_dict()
    split = split_torch_state_dict_into_shards(state, max_shard_size=shard)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        save_file({name: _values(name, state[name]) for name in names}, folder / file, metadata={"format": "pt"})
        to_disk(folder / file)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return sum(tensor.numel() for tensor in state.values())


def _values(name: str, like: torch.Tensor) -> torch.Tensor:
    if like.ndim == 1:
        return torch.empty_like(like, device="cpu").uniform_(0.5, 1.5)
    values = torch.empty_like(like, device="cpu").normal_(0, 0.02)
    if "layers" in name:
        for axis in range(2):
            values *= torch.randn([n if a == axis else 1 for a, n in enumerate(like.shape)]).mul_(0.5).exp_().to(values)
    return values


def _copy(files: list[Path], into: Path) -> float:
    """Seconds that a copy takes; it is thrown away."""
    begun = time.monotonic()
    into.mkdir()
    for file in files:
        shutil.copyfile(file, into / file.name)
        to_disk(into / file.name)
    seconds = time.monotonic() - begun
    shutil.rmtree(into)
    return seconds


class Spent(NamedTuple):
    seconds: float
    processor_seconds: float
    bytes: int  # the highest resident set


def _balance(folder: Path, output: Path) -> tuple[Spent, dict[str, Any]]:
    """What the command took, and what it said."""
    command = [sys.executable, "-m", "equinorm.cli", "balance", f"hf:{folder}", "--output", str(output), "--json"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": path}
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise UserError(f"balance ended with {process.returncode}: {err.read().strip()[-500:]}")
        spent = Spent(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
        return spent, json.loads(out.read())


def table_of(costs: list[Cost]) -> Table:
    shown = Table(title="A folder balanced, beside a copy of its files", title_justify="left", show_header=False)
    shown.add_column("what", no_wrap=True)
    for _ in costs:
        shown.add_column(justify="right")
    for what, words in _ROWS:
        shown.add_row(what, *(words(cost) for cost in costs))
    return shown


def _gb(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e3:.0f} kB"


def _verdict(cost: Cost, within: bool) -> str:
    if cost.bytes < cost.program_bytes:
        return "too small to tell: less than the program itself"
    return "within" if within else "MORE THAN ALLOWED"


_ROWS = [
    ("model", lambda x: x.name),
    ("parameters", lambda x: f"{x.numbers:,}"),
    ("weights", lambda x: f"{_gb(x.bytes)} in {x.files} files"),
    ("free scales", lambda x: f"{x.scales:,}"),
    ("largest shard", lambda x: _gb(x.largest_shard)),
    ("the solver needs", lambda x: _gb(x.solver_bytes)),
    ("the program itself", lambda x: _gb(x.program_bytes)),
    ("memory allowed: two shards and these", lambda x: _gb(x.allowed_bytes)),
    ("memory taken at most", lambda x: _gb(x.peak_bytes)),
    ("memory", lambda x: _verdict(x, x.peak_bytes <= x.allowed_bytes)),
    ("a copy, before and after", lambda x: " and ".join(f"{one:.1f} s" for one in x.copies)),
    ("processes at work then, of others too", lambda x: " and ".join(f"{one:.1f}" for one in x.load)),
    ("passes of the solver over the weights", lambda x: f"{x.passes:.1f}"),
    ("time allowed: 3 + passes copies", lambda x: f"{x.allowed_seconds:.1f} s"),
    ("time taken", lambda x: f"{x.seconds:.1f} s, {x.seconds / x.copy_seconds:.1f} copies"),
    ("processor time, of all threads", lambda x: f"{x.processor_seconds:.1f} s"),
    ("time", lambda x: _verdict(x, x.seconds <= x.allowed_seconds)),
    ("norm", lambda x: f"{x.norm_before:.6g} -> {x.norm_after:.6g}"),
    ("largest imbalance", lambda x: f"{x.imbalance:.1e}"),
    ("outputs of a few layers changed by", lambda x: f"{x.change:.1e}"),
]
