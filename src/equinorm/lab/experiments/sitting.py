"""A sitting of the campaign on a machine that is lost afterwards, with torch, numpy and Pillow alone.

    PYTHONPATH=src python -m equinorm.lab.experiments.sitting --data data --out "$OUT" --minutes 9.5 --sitting 28

It takes the items of the campaign in order, those of `--item` or all, trains what neither `--results` nor an earlier
call on this machine has, and stops in time: after `--minutes` what is in progress is saved below `--store`, and
the same command goes on with it; what could not be finished in `--sitting` minutes is not begun. An item that
fails is noted, and the next one follows. Below `--out` are then at most four files:

    runs.jsonl      every run that has ended on this machine, one record after the other, written as each ends
    log.txt         what was said
    left.txt        the list of the campaign: done, and minutes left
    faults.txt      items that failed, with the reason; there only if one did

At home `equinorm campaign --merge runs.jsonl` takes the runs over, `--choose` adopts what tunings decided.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...errors import UserError
from ..training.store import Record, Store, dumps
from ..training.trainer import Outcome, train_all
from .campaign import Item, named, standing, table, work

__all__ = ["Sitter", "main"]


@dataclass
class Sitter:
    """What a sitting writes to and how long it may take."""

    out: Path
    store: Store
    minutes: float = math.inf
    sitting: float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of `work`: toy, data_dir, device, side_by_side
    faults: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def sit(self, items: Sequence[Item], known: set[str]) -> None:
        """Item after item until time is up. `known`: keys of runs that need not be brought back."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "runs.jsonl").open("w", encoding="utf-8") as runs, (self.out / "log.txt").open("a") as log:
            for record in self.store.records():  # of earlier calls on this machine
                if record.run.key not in known:
                    _append(runs, record)
            for item in items:
                gone = (time.monotonic() - self._began) / 60
                if gone >= self.minutes:
                    self.say(log, f"{item.name}: no time left")
                    break
                self._work(item, gone, runs, log)
            self.say(log, f"{(time.monotonic() - self._began) / 60:.1f} minutes")
        left = table(standing(self.store, items, toy=self.options.get("toy", False)))
        (self.out / "left.txt").write_text(f"{left}\n", encoding="utf-8")
        if self.faults:
            (self.out / "faults.txt").write_text("\n".join(self.faults), encoding="utf-8")

    def _work(self, item: Item, gone: float, runs: TextIO, log: TextIO) -> None:
        def train(todo: Any, store: Store, **options: Any) -> Outcome:
            return train_all(todo, store, on_record=lambda record: self._ended(record, runs, log), **options)

        try:
            done = work(
                self.store,
                [item],
                minutes=self.minutes - gone,
                sitting=None if self.sitting is None else self.sitting - gone,
                train=train,
                say=lambda text: self.say(log, text),
                **self.options,
            )
        except UserError as error:  # data that is not there: other items may have theirs
            self._failed(item, str(error), log)
        except Exception:
            self._failed(item, traceback.format_exc()[-4000:], log)
        else:
            self.say(log, f"{item.name}: {done.sentence()}")
            if done.interrupted:
                raise KeyboardInterrupt

    def _ended(self, record: Record, runs: TextIO, log: TextIO) -> None:
        _append(runs, record)
        accuracy = record.final.get("test_accuracy", math.nan)
        self.say(
            log, f"  {record.run.label or record.run.key}, seed {record.run.seed}: {record.status}, {accuracy:.2f} %"
        )

    def _failed(self, item: Item, why: str, log: TextIO) -> None:
        self.faults.append(f"{item.name}:\n{why}\n")
        self.say(log, f"{item.name} failed: {why.strip().splitlines()[-1]}")

    def say(self, log: TextIO, text: str) -> None:
        """To the log and to the screen, at once."""
        line = f"[{(time.monotonic() - self._began) / 60:5.1f} min] {text}"
        print(line, flush=True)
        log.write(f"{line}\n")
        log.flush()


def _append(runs: TextIO, record: Record) -> None:
    runs.write(dumps(record))
    runs.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 unless an item failed."""
    options = _options(arguments)
    store = Store(options.store)
    known: set[str] = set()
    if (options.results / "runs").is_dir():
        merged = store.merge(options.results)
        known = {*merged.added, *merged.present}
    sitter = Sitter(options.out, store, options.minutes, options.sitting)
    sitter.options = {
        "toy": options.toy,
        "data_dir": options.data,
        "device": options.device,
        "side_by_side": options.side_by_side,
    }
    sitter.sit(named(options.item), known)
    return 1 if sitter.faults else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="equinorm.lab.experiments.sitting", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="where data sets lie (EQUINORM_DATA, or ./data)")
    parser.add_argument("--out", type=Path, default=Path("out/brought"), help="what is to be brought home")
    parser.add_argument("--store", type=Path, default=Path("out/sitting"), help="stays on this machine between calls")
    parser.add_argument("--results", type=Path, default=Path("results"), help="what is known already")
    parser.add_argument("--minutes", type=float, default=math.inf, help="save what is in progress and stop")
    parser.add_argument("--sitting", type=float, help="until this machine is lost: only what fits is begun")
    parser.add_argument("--item", action="append", default=[], help="only this item, artifact or paper; several")
    parser.add_argument("--device")
    parser.add_argument("--side-by-side", type=int)
    parser.add_argument("--toy", action="store_true", help="the embedded digits and tiny nets, on any machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
