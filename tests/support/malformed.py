"""Malformed calls of the command line: each gets one line that says what is wrong, and an exit code that is not 0.

PYTHONPATH=src:tests python -m support.malformed results/malformed.txt
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equinorm import cli
from support.logs import table, write_log

SECONDS = 120
"""A call that takes longer counts as one that hangs."""

NETS = """
import torch
from torch import nn

number = 3

def net():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

def other():
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

def nothing():
    return nn.Sequential(nn.Linear(5, 3))

def decides():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        def forward(self, x):
            return self.b(self.a(x).relu()) if x.sum() > 0 else self.b(self.a(x))
    return Decides()

def needs(width):
    return nn.Linear(width, 3)

def no_model():
    return 7

def breaks():
    raise RuntimeError("no such luck")

def leaves():
    raise SystemExit(0)
"""

MODEL = "NETS:net"
INPUT = "--input 4,5"

CALLS = f"""
trace | trace NETS | trace NETS: | trace :net | trace NETS:missing {INPUT} | trace NETS:number {INPUT}
trace NETS:no_model {INPUT} | trace NETS:breaks {INPUT} | trace NETS:leaves {INPUT} | trace NETS:needs {INPUT}
trace NETS:needs {INPUT} --model-args width | trace NETS:needs {INPUT} --model-args width=wide
trace missing.py:net {INPUT} | trace no_such_module:net {INPUT} | trace torchvision:no_such_net
trace timm:no_such_net | trace hf:FOLDER/none | trace hf:FOLDER | trace hf: | trace torchvision: | trace timm:
trace ftp:net | trace {MODEL} | trace {MODEL} --input | trace {MODEL} --input 4 | trace {MODEL} --input 4,6
trace {MODEL} --input 4,5,6,7,8,9 | trace {MODEL} --input four | trace {MODEL} --input 4,5:float99
trace {MODEL} --input -4,5 | trace {MODEL} --input=4,-5 | trace {MODEL} --input 4,,5
trace {MODEL} --input 4.5,5 | trace {MODEL} --input y=4,5 | trace {MODEL} --input =4,5
trace {MODEL} --input 99999999999999999999,5 | trace {MODEL} --input 1000000000000,5
trace {MODEL} --input 4,5 --input 4,5 | trace {MODEL} {INPUT} --dtype float7 | trace {MODEL} {INPUT} --dtype
trace {MODEL} {INPUT} --keep | trace {MODEL} {INPUT} --keep no.such.* | trace {MODEL} {INPUT} --model-args a=1
trace {MODEL} {INPUT} --model-args a | trace {MODEL} {INPUT} --no-such-option | trace {MODEL} {INPUT} extra words here
trace {MODEL} FOLDER/none.pt {INPUT} | trace {MODEL} FOLDER {INPUT} | trace {MODEL} FOLDER/empty.pt {INPUT}
trace {MODEL} FOLDER/text.pt {INPUT} | trace {MODEL} FOLDER/text.safetensors {INPUT}
trace {MODEL} FOLDER/other.pt {INPUT} | trace {MODEL} FOLDER/list.pt {INPUT} | trace {MODEL} FOLDER/text.txt {INPUT}
trace NETS:decides {INPUT} | trace {MODEL} /dev/null {INPUT} | trace {MODEL} /dev/full {INPUT}
trace {MODEL} FOLDER/loop.pt {INPUT} | trace {MODEL} FOLDER/dangling.pt {INPUT}
trace {MODEL} FOLDER/secret.pt {INPUT} | balance | balance {MODEL} | balance NETS:nothing {INPUT}
balance {MODEL} {INPUT} --p 0 | balance {MODEL} {INPUT} --p -1 | balance {MODEL} {INPUT} --p nan
balance {MODEL} {INPUT} --p inf | balance {MODEL} {INPUT} --p two | balance {MODEL} {INPUT} --c 0
balance {MODEL} {INPUT} --c nan | balance {MODEL} {INPUT} --c -2 | balance {MODEL} {INPUT} --tol 0
balance {MODEL} {INPUT} --tol -1 | balance {MODEL} {INPUT} --tol nan | balance {MODEL} {INPUT} --parameters no.such
balance {MODEL} {INPUT} --parameters | balance {MODEL} {INPUT} --output | balance {MODEL} {INPUT} --output FOLDER
balance {MODEL} {INPUT} --output FOLDER/none/out.pt | balance {MODEL} {INPUT} --output FOLDER/out.txt
balance {MODEL} {INPUT} --output FOLDER/out | balance {MODEL} {INPUT} --output /dev/full
balance {MODEL} {INPUT} --output /dev/full.pt | balance {MODEL} {INPUT} --output /proc/out.pt
balance {MODEL} {INPUT} --output /sys/out.pt | balance {MODEL} {INPUT} --output FOLDER/good.pt
balance {MODEL} {INPUT} --output FOLDER/loop.pt | balance {MODEL} {INPUT} --output FOLDER/readonly.pt --force
balance {MODEL} {INPUT} --output FOLDER/away.pt
balance {MODEL} FOLDER/good.pt {INPUT} --output FOLDER/out.safetensors | balance {MODEL} FOLDER/other.pt {INPUT}
balance {MODEL} FOLDER/cut.pt {INPUT} | balance {MODEL} FOLDER/meta.pt {INPUT}
balance {MODEL} FOLDER/sparse.pt {INPUT} | balance {MODEL} {INPUT} --shard-size 5GB
balance {MODEL} {INPUT} --shard-size big | balance hf:FOLDER --output FOLDER/new
balance hf:FOLDER/none --output FOLDER/new | balance {MODEL} {INPUT} --output {"a" * 400}.pt
balance {MODEL} {INPUT} --output \0.pt | balance {MODEL} {INPUT} --json=maybe
balance {MODEL} FOLDER/nan.pt {INPUT} --p | balance {MODEL} FOLDER/ints.pt {INPUT} | convert | convert {MODEL}
convert {MODEL} no_such_method {INPUT} | convert {MODEL} weightnorm | convert {MODEL} weightnorm --input 4,6
convert {MODEL} weightnorm {INPUT} --option no_such=1 | convert {MODEL} weightnorm {INPUT} --option x
convert {MODEL} weightnorm {INPUT} --output FOLDER/out.txt | convert {MODEL} weightnorm {INPUT} --keep no.such
convert {MODEL} equinorm {INPUT} --option =3 | convert NETS:breaks weightnorm {INPUT}
convert {MODEL} weightnorm FOLDER/none.pt {INPUT} | convert {MODEL} weightnorm FOLDER/other.pt {INPUT}
convert {MODEL} weightnorm {INPUT} --output FOLDER/good.pt | fold | fold {MODEL} | fold {MODEL} weightnorm
fold {MODEL} weightnorm FOLDER/none.pt {INPUT} | fold {MODEL} no_such FOLDER/good.pt {INPUT}
fold {MODEL} weightnorm FOLDER/good.pt {INPUT} | fold {MODEL} weightnorm FOLDER/text.pt {INPUT}
fold {MODEL} weightnorm FOLDER {INPUT} | methods no_such_method | methods a b | methods --json=3 | diagnose
diagnose {MODEL} | diagnose NETS:missing {INPUT} | diagnose {MODEL} {INPUT} --samples 0
diagnose {MODEL} {INPUT} --samples -1 | diagnose {MODEL} {INPUT} --samples many
diagnose {MODEL} {INPUT} --out FOLDER | diagnose {MODEL} {INPUT} --out FOLDER/none/page.html
diagnose {MODEL} {INPUT} --out /dev/full | diagnose {MODEL} {INPUT} --data FOLDER/none.pt
diagnose {MODEL} {INPUT} --data FOLDER/text.pt | diagnose {MODEL} {INPUT} --data FOLDER/list.pt
diagnose {MODEL} {INPUT} --out FOLDER/text.txt | diagnose {MODEL} {INPUT} --data FOLDER/good.pt --out FOLDER/p.html
compare | compare {MODEL} | compare {MODEL} NETS:other {INPUT} | compare {MODEL} NETS:missing {INPUT}
compare FOLDER/good.pt FOLDER/good.pt {INPUT} | compare FOLDER/good.pt FOLDER/other.pt --model {MODEL} {INPUT}
compare FOLDER/good.pt FOLDER/none.pt --model {MODEL} {INPUT} | compare {MODEL} {MODEL}
compare {MODEL} {MODEL} --input 4,6 | demo --seed x | demo --out | demo --quick=1 | demo --out FOLDER/text.txt --quick
train | train no/such | train repro2019/figure2 --row none --toy | train repro2019/figure2 --column none --toy
train repro2019/figure2 --seed -1 --toy | train repro2019/figure2 --seed x --toy
train repro2019/figure2 --device tpu --toy --results FOLDER/r
train repro2019/figure2 --device cuda:99 --toy --results FOLDER/r
train repro2019/figure2 --device meta --toy --results FOLDER/r
train repro2019/figure2 --results FOLDER/text.txt --toy
train repro2019/figure2 --data-dir FOLDER/none --results FOLDER/r | reproduce no/such
reproduce repro2019/figure2 --side-by-side -1 --toy | reproduce repro2019/figure2 --side-by-side 0 --toy
reproduce repro2019/figure2 --side-by-side x | reproduce repro2019/figure2 --minutes nan --toy
reproduce repro2019/figure2 --minutes -1 --toy | reproduce repro2019/figure2 --minutes soon
reproduce repro2019/figure2 --launcher cloud | reproduce repro2019/figure2 --row none --toy
reproduce repro2019/figure2 --column none --toy | reproduce repro2019/figure2 --device none --toy --results FOLDER/r
reproduce repro2019/figure2 --results FOLDER/text.txt --toy | campaign --item none | campaign --minutes nan
campaign --minutes -5 | campaign --sitting nan | campaign --sitting -3 | campaign --side-by-side -1
campaign --side-by-side 0 | campaign --results FOLDER/text.txt --list | campaign --device none --item none
report no/such | report --results FOLDER/none | report --results FOLDER/text.txt | report --no-such | bench no_such
no_such_command | --no-such-option | "" | trace "" {INPUT} | merge
merge FOLDER/none | merge FOLDER/text.txt | record | record no_such | record --seed x | check | check FOLDER/none
"""


def calls() -> list[list[str]]:
    import shlex

    return [shlex.split(call.strip()) for line in CALLS.strip().splitlines() for call in line.split(" | ")]


def files(folder: Path) -> None:
    """What the calls name."""
    good = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).state_dict()
    (folder / "malformednets.py").write_text(NETS)
    torch.save(good, folder / "good.pt")
    torch.save(other, folder / "other.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({name: t.to("meta") for name, t in good.items()}, folder / "meta.pt")
    torch.save({name: t.to_sparse() for name, t in good.items()}, folder / "sparse.pt")
    torch.save({name: t.long() for name, t in good.items()}, folder / "ints.pt")
    torch.save({name: t * float("nan") for name, t in good.items()}, folder / "nan.pt")
    (folder / "cut.pt").write_bytes((folder / "good.pt").read_bytes()[:900])
    (folder / "empty.pt").write_bytes(b"")
    for name in ("text.pt", "text.safetensors", "text.txt"):
        (folder / name).write_text("no weights\n")
    torch.save(good, folder / "readonly.pt")
    (folder / "readonly.pt").chmod(0o444)
    (folder / "secret.pt").symlink_to(folder / "none" / "secret.pt")
    (folder / "loop.pt").symlink_to(folder / "loop.pt")
    (folder / "dangling.pt").symlink_to(folder / "none.pt")
    (folder / "away.pt").symlink_to(folder / "none" / "away.pt")


class HangsError(Exception):
    """A call took too long."""


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge(call: list[str], folder: Path) -> tuple[str, str]:
    """How a call ended, and what was said."""
    given = [word.replace("NETS", f"{folder}/malformednets.py").replace("FOLDER", str(folder)) for word in call]
    out, err = io.StringIO(), io.StringIO()
    code: Any
    try:
        with _at_most(SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(given)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        return f"RAISED {type(error).__name__}", str(error)
    said = err.getvalue()
    if code == 0:
        return "ACCEPTED", out.getvalue()[:200]
    if "Traceback" in said or "EQUINORM_TRACEBACK" in said:
        return "NOT EXPLAINED", said
    if code == 2:  # the parser's own words, in a frame
        return "refused by the parser", said
    if said.startswith("equinorm: ") and said.count("\n") == 1:
        return "one line of error", said
    return "SAID OTHERWISE", f"exit code {code}: {said}"


def run(folder: Path, some: slice = slice(None)) -> tuple[Counter[str], list[str]]:
    files(folder)
    ends: Counter[str] = Counter()
    faults = []
    for call in calls()[some]:
        end, said = judge(call, folder)
        ends[end] += 1
        if end.isupper() or end.startswith("RAISED"):
            faults.append(f"{end}: equinorm {' '.join(call)}\n        {said.strip()}")
    return ends, faults


if __name__ == "__main__":
    out, here = Path(sys.argv[1]).resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        ends, faults = run(Path(name))
        os.chdir(here)
    title = f"{sum(ends.values())} malformed calls of the command line"
    write_log("support.malformed", out, table(title, ends.items(), "not as it should be", faults))
    sys.exit(bool(faults))
