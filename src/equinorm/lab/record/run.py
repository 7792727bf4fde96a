"""`python -m equinorm.lab.record.run --data DIR --out DIR --minutes M --only choose,settings,batch,second-net,lengths`

The parts that are named, as far as the time goes; what stands in the logs already is not run again. For the record
these are check, ladder, refine and final; for accuracy against batch size choose, settings, batch, second-net, lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from .check import check
from .config import RECORD, Config
from .data import read_cifar10, toy_images
from .log import Log, table
from .plans import final, ladder, refine
from .runner import OutOfTimeError, Runner
from .sizes import batch, choose, lengths, second_net, settings

__all__ = ["PARTS", "main", "record"]

PARTS = ("check", "ladder", "refine", "final", "choose", "settings", "batch", "second-net", "lengths")
RESULTS = Path("results/without-batch-statistics")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; 0 also where single runs failed, which the table shows."""
    options = _options(arguments)
    log = Log(options.out, RESULTS, retry=options.retry)
    run = _runner(log, options.data, options.device, options.toy, options.minutes)
    config = None
    if options.config is not None:
        changes = json.loads(options.config)
        config = Config().but(**{name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()})
    parts: dict[str, Any] = {
        "check": lambda: check(run),
        "ladder": lambda: ladder(run),
        "refine": lambda: refine(run),
        "choose": lambda: choose(run),
        "final": lambda: final(run, config, options.n),
        "settings": lambda: settings(run),
        "batch": lambda: batch(run, options.seeds),
        "second-net": lambda: second_net(run, options.seeds),
        "lengths": lambda: lengths(run, options.seeds),
    }
    for part in options.only:
        run.say(f"-- {part}")
        try:
            parts[part]()
        except OutOfTimeError as error:
            run.say(f"{part}: no time left for {error}")
        except Exception:  # the other parts are to go on
            run.say(f"{part} failed:\n{traceback.format_exc()[-3000:]}")
        run.forget()
    print(table(run.touched))
    return 0


def record(data: Path, out: Path, n: int = 20, toy: bool = False, device: str | None = None) -> str:
    """Train the record's net and its BatchNorm twin in turn, n times each, and say how accurate and how fast."""
    if not toy and not torch.cuda.is_available():
        raise RuntimeError("the record is trained on a GPU, and there is none; --toy shows on a CPU that it runs")
    run = _runner(Log(out), data, device, toy)
    final(run, RECORD.but(mode="captured") if toy else RECORD, n)
    head = "a toy: noise in place of images, and a tiny net\n" if toy else ""
    return f"{head}{table(run.touched)}"


def _runner(log: Log, data: Path, device: str | None, toy: bool, minutes: float = math.inf) -> Runner:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read at the start: a queue for each run side by side
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.benchmark = True
    limits: Any = torch._dynamo.config if hasattr(torch, "_dynamo") else None
    if limits is not None:
        limits.recompile_limit = 64
    images = toy_images(where) if toy else read_cifar10(data, where)
    return Runner(images, log, minutes, toy, data=None if toy else data)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="equinorm.lab.record.run", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="holds cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, default=Path("out/record"), help="where logs are written, and read first")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing that would not end in this time")
    parser.add_argument("--only", type=lambda said: said.split(","), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="200 images of noise and a tiny net, on any machine")
    parser.add_argument("--device", help="cuda if there is one")
    parser.add_argument("--retry", action="store_true", help="run again what failed before")
    parser.add_argument("--config", help="final: changes of the setting as JSON, in place of the ladder's choice")
    parser.add_argument("--n", type=int, default=20, help="final: runs of each net")
    parser.add_argument("--seeds", type=int, default=3, help="batch, second-net, lengths: seeds")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FileNotFoundError, UserError) as error:
        sys.exit(f"equinorm record: {error}")
