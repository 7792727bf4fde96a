"""Processes that are killed at random moments: files are the old ones or the new ones, and no finished run is lost.

PYTHONPATH=src:tests python -m support.kills 100 results/kills.txt
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from equinorm import cli
from equinorm.lab.training.store import Store
from support.damage import NET, state
from support.logs import by_name, table, write_log

TOY = ["repro2019/figure2", "--toy", "--row", "BN"]


def forked(function: Callable[[], object], seconds: float | None = None) -> int:
    """Run a function in a fork and kill it after so many seconds; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                function()
            os._exit(0)
        os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True)
class Victim:
    """Work that is killed, and how what it leaves is judged: a word on how it ended, and what is wrong."""

    name: str
    work: Callable[[Path], object]
    judge: Callable[[Path], tuple[str, str]]


def balance_in_place(folder: Path) -> None:
    """A checkpoint replaced by its balanced form."""
    spec, file = f"{folder / 'killednet.py'}:net", str(folder / "net.safetensors")
    if cli.main(["balance", spec, file, "--output", file, "--input", "4,5", "--force"]):
        raise RuntimeError("the call failed by itself")


def checkpoint_is_whole(folder: Path) -> tuple[str, str]:
    old, new = state(), load_file(folder / "net.safetensors")
    same = all(torch.equal(value, new[name]) for name, value in old.items())
    x = torch.randn(16, 5)
    outputs = [_outputs(weights, x) for weights in (old, new)]
    wrong = "" if torch.allclose(*outputs, rtol=1e-4, atol=1e-5) else "its outputs have changed"
    return ("the old checkpoint" if same else "the new checkpoint"), wrong


def _outputs(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    names: dict[str, object] = {}
    exec(NET, names)
    net = names["net"]()  # type: ignore[operator]
    net.load_state_dict(weights)
    found: torch.Tensor = net(x).detach()
    return found


def reproduce(folder: Path) -> None:
    """A few toy trainings, one after the other."""
    if cli.main(["reproduce", *TOY, "--results", str(folder / "results")]):
        raise RuntimeError("the call failed by itself")


def runs_are_whole(folder: Path) -> tuple[str, str]:
    """Every record that is there can be read, stays as it is, and the same command does the rest."""
    results = folder / "results"
    before = {path: path.read_bytes() for path in results.rglob("runs/**/*.json")} if results.exists() else {}
    if before and (damaged := Store(results).scan().damaged):
        return "", f"damaged records: {damaged}"
    if forked(lambda: reproduce(folder)):
        return "", "the same command again failed"
    if lost := [path.name for path, content in before.items() if not path.exists() or path.read_bytes() != content]:
        return "", f"finished runs were lost or changed: {lost}"
    return "finished by the same command, no run lost", ""


VICTIMS = (
    Victim("equinorm balance, in place", balance_in_place, checkpoint_is_whole),
    Victim("equinorm reproduce --toy", reproduce, runs_are_whole),
)


def trial(victim: Victim, seconds: float) -> tuple[str, str]:
    """Kill it once after so many seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "killednet.py").write_text(NET)
        save_file(state(), folder / "net.safetensors")
        code = forked(lambda: victim.work(folder), seconds)
        end, wrong = victim.judge(folder)
        if code not in (0, -signal.SIGKILL):
            wrong = wrong or f"exit code {code} before it was killed"
        return f"{'killed' if code else 'too late to kill'}, {end}", wrong


def run(count: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Kill each victim `count` times; how it ended, and what was not as it should be."""
    ends: Counter[tuple[str, str]] = Counter()
    faults = []
    rng = random.Random(0)
    for victim in VICTIMS:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "killednet.py").write_text(NET)
            save_file(state(), Path(name) / "net.safetensors")
            begun = time.monotonic()
            if forked(lambda victim=victim, name=name: victim.work(Path(name))):  # type: ignore[misc]
                raise SystemExit(f"{victim.name} fails without being killed")
            whole = time.monotonic() - begun
        for number in range(count):
            end, wrong = trial(victim, rng.uniform(0, whole))
            ends[victim.name, end] += 1
            if wrong:
                faults.append(f"{victim.name}, kill {number}: {wrong}")
    return ends, faults


if __name__ == "__main__":
    count, out = int(sys.argv[1]), Path(sys.argv[2])
    ends, faults = run(count)
    title = f"{count} kills at random moments of each of {len(VICTIMS)} commands"
    write_log("support.kills", out, table(title, by_name(ends), "not as it should be", faults))
    sys.exit(bool(faults))
