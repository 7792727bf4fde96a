"""Damage checkpoint files at random places, and see what `equinorm balance` does with them.

PYTHONPATH=src:tests python -m support.damage 300 results/checkpoints.txt
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from equinorm import cli
from support.logs import by_name, table, write_log

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
"""


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return net.state_dict()


def _legacy(path: Path) -> None:
    torch.save(state(), path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "safetensors": (".safetensors", lambda path: save_file(state(), path)),
    "pt": (".pt", lambda path: torch.save(state(), path)),
    "pt, nested": (".ckpt", lambda path: torch.save({"epoch": 3, "state_dict": state(), "best": [0.5]}, path)),
    "pt, before torch 1.6": (".pth", _legacy),
}


def flip_bit(data: bytearray, place: int, rng: random.Random) -> None:
    data[place] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, place: int, rng: random.Random) -> None:
    data[place : place + 16] = rng.randbytes(len(data[place : place + 16]))


def cut_off(data: bytearray, place: int, rng: random.Random) -> None:
    del data[place:]


def take_out(data: bytearray, place: int, rng: random.Random) -> None:
    del data[place : place + 1 + rng.randrange(32)]


def put_in(data: bytearray, place: int, rng: random.Random) -> None:
    data[place:place] = rng.randbytes(1 + rng.randrange(32))


def zeros(data: bytearray, place: int, rng: random.Random) -> None:
    data[place : place + 64] = bytes(len(data[place : place + 64]))


DAMAGES = (flip_bit, overwrite, cut_off, take_out, put_in, zeros)


def balance(checkpoint: Path, output: Path) -> tuple[int, str, str]:
    """The exit code, what was printed and what was said on stderr, of one `equinorm balance`."""
    out, err = io.StringIO(), io.StringIO()
    spec = f"{checkpoint.parent / 'damagednet.py'}:net"
    arguments = ["balance", spec, str(checkpoint), "--output", str(output), "--input", "4,5", "--force"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


def run(count: int, folder: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Damage every format `count` times; how each ended, and what was not as it should be."""
    (folder / "damagednet.py").write_text(NET)
    ends: Counter[tuple[str, str]] = Counter()
    faults = []
    for name, (suffix, write) in FORMATS.items():
        whole = folder / f"whole{suffix}"
        write(whole)
        content = whole.read_bytes()
        for seed in range(count):
            rng = random.Random(f"{name} {seed}")
            data, damage = bytearray(content), DAMAGES[seed % len(DAMAGES)]
            damage(data, rng.randrange(len(data)), rng)
            file, output = folder / f"damaged{suffix}", folder / f"out{suffix}"
            file.write_bytes(data)
            what = f"{name}, {damage.__name__}, seed {seed}"
            try:
                code, _, err = balance(file, output)
            except BaseException as error:
                ends[name, "something else raised"] += 1
                faults.append(f"{what}: {type(error).__name__}: {error}")
                continue
            if code == 0 and not err and output.exists():
                ends[name, "still a checkpoint: balanced, and the written file verified"] += 1
            elif code == 1 and err.startswith("equinorm: ") and err.count("\n") == 1 and not output.exists():
                ends[name, "one line of error, nothing written"] += 1
            else:
                ends[name, "something else"] += 1
                faults.append(f"{what}: exit code {code}, {err!r}")
            output.unlink(missing_ok=True)
            if left := [path.name for path in folder.glob(".*.tmp")]:
                faults.append(f"{what}: left {left}")
    return ends, faults


if __name__ == "__main__":
    count, out = int(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        ends, faults = run(count, Path(name))
    title = f"{sum(ends.values())} damaged checkpoints, {count} of each format, given to `equinorm balance`"
    write_log("support.damage", out, table(title, by_name(ends), "not as it should be", faults))
    sys.exit(bool(faults))
