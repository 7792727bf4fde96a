"""Runs settings that are not in the log yet, alone or side by side, as long as there is time."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..training.trainer import about
from .config import Config
from .data import Images, Pixels, read_cifar10
from .log import Log, Row, key_of
from .training import Training, together

__all__ = ["OutOfTimeError", "Runner"]

_RATES = (
    "factor",
    "rule",
    "filters_rate",
    "filters_decay",
    "whitening_rate",
    "offsets_rate",
    "gains_rate",
    "head_rate",
    "decay",
    "warmup",
)
"""What may change without another capture."""


def _shared(config: Config) -> Config:
    """What runs have in common that can use one captured net after another."""
    defaults = Config()
    return config.but(**{name: getattr(defaults, name) for name in _RATES})


def _compile(data: Path, config: Config, on: str) -> None:
    """In a process of its own: compile a step, and forget it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    images = read_cifar10(data, torch.device("cuda"))
    images = images.held_out() if on == "held-out" else images
    dtype = getattr(torch, config.dtype)
    Training(config, images, Pixels(images.train, images.train_labels, dtype)).capture()


class OutOfTimeError(Exception):
    """The next run would not end before the deadline."""


class Runner:
    """Everything that runs share: images, the log, and nets that are already captured."""

    def __init__(
        self,
        images: Images,
        log: Log,
        minutes: float = math.inf,
        toy: bool = False,
        verbose: bool = True,
        data: Path | None = None,
    ) -> None:
        """`data` is where the images came from, for processes that need them too."""
        self.data = data
        self.images = {"test": images, "held-out": images.held_out()}
        self.log, self.toy, self.verbose = log, toy, verbose
        self.began = time.monotonic()
        self.deadline = self.began + 60 * minutes
        self.device = images.train.device
        self.about = about(self.device)
        self.touched: list[Row] = []
        """The rows that were asked for, new or known."""
        self._pixels: dict[tuple[str, torch.dtype], Pixels] = {}
        self._captured: dict[tuple[Config, str, int], Training] = {}

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        if self.verbose:
            limited = self.deadline < math.inf
            clock = f"{self.left():5.0f} s left" if limited else f"{time.monotonic() - self.began:5.0f} s"
            print(f"[{clock}] {text}", flush=True)

    def key(self, config: Config, seed: int, on: str) -> str:
        """The name of a run in the log."""
        return key_of(config, seed, on, self._what())

    def adapted(self, config: Config) -> Config:
        """The same at toy size, where that is asked for."""
        if not self.toy:
            return config
        batch = max(2, config.batch // 50)
        epochs = min(config.epochs, 8.0) / 8
        return config.but(widths=(8, 16, 16), groups=4, batch=batch, epochs=epochs, dtype="float32")

    def training(self, config: Config, on: str, lane: int = 0) -> Training:
        """A captured net for this config, up to its rates; `lane` tells apart those that run side by side."""
        key = (_shared(config), on, lane)
        if key not in self._captured:
            images, dtype = self.images[on], getattr(torch, config.dtype)
            if (on, dtype) not in self._pixels:
                self._pixels[on, dtype] = Pixels(images.train, images.train_labels, dtype)
            training = Training(config, images, self._pixels[on, dtype])
            try:
                training.capture()
            except Exception as error:
                if config.mode == "compiled":
                    raise
                self.say(f"{config.norm}, batch {config.batch}: steps cannot be captured, so they are eager: {error!r}")
                training = Training(config.but(mode="eager"), images, self._pixels[on, dtype])
            self._captured[key] = training
        return self._captured[key]

    def compile_ahead(self, configs: Sequence[Config], on: str, processes: int = 12) -> Callable[[], None]:
        """Compile these in processes of their own, which leave what they made in the compiler's cache on disk.

        What is returned waits for them.
        """
        if self.device.type != "cuda" or self.data is None:
            return lambda: None
        began = time.monotonic()
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        futures = [pool.submit(_compile, self.data, config, on) for config in configs]

        def wait() -> None:
            for future in futures:
                if (error := future.exception()) is not None:  # the run itself will tell
                    self.say(f"compiling ahead failed: {error!r}")
            pool.shutdown()
            self.say(f"{len(configs)} settings compiled ahead in {time.monotonic() - began:.0f} s")

        return wait

    def forget(self) -> None:
        """Free the captured nets."""
        self._captured.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- alone ---------------------------------------------------------------------------------------------------------

    def alone(self, part: str, name: str, config: Config, seeds: Sequence[int], on: str = "held-out") -> list[Row]:
        """The rows of these seeds; the missing ones are run one after another, with nothing beside them."""
        config = self.adapted(config)
        keys = [self.key(config, seed, on) for seed in seeds]
        fresh = [seed for seed, key in zip(seeds, keys, strict=True) if self.log.get(key) is None]
        longest = 5.0
        for seed in fresh:
            if self.left() < longest:
                raise OutOfTimeError(f"{part}: {name}")
            row = self._row(part, name, config, seed, on)
            began = time.monotonic()
            try:
                training = self.training(config, on)
                seconds = training.train(seed, config)
                row |= {"seconds": round(seconds, 4), "step_ms": round(1000 * seconds / training.steps, 4), "beside": 0}
                row |= self._measured(training)
            except Exception as error:  # the rest is to go on
                self._failed(row, error)
                self.log.append(row)
                break
            self.log.append(row)
            longest = 1.2 * (time.monotonic() - began)
        rows = self._known(keys)
        if fresh:
            good = [row for row in rows if "accuracy" in row]
            shown = " ".join(f"{row['accuracy']:.2f}" for row in good)
            self.say(f"{part} {name}: {shown} % in {good[-1]['seconds'] if good else float('nan'):.2f} s")
        return [row for row in rows if "failed" not in row]

    # -- side by side --------------------------------------------------------------------------------------------------

    def side_by_side(
        self, part: str, runs: Sequence[tuple[str, Config, int]], on: str, fresh_statistics: bool = False
    ) -> list[Row]:
        """The rows of these (name, config, seed); the missing ones are run together, each on a stream of its own.

        OutOfTimeError, and nothing is written, if they would not end before the deadline.
        """
        runs = [(name, self.adapted(config), seed) for name, config, seed in runs]
        keys = [self.key(config, seed, on) for _, config, seed in runs]
        missing = [run for run, key in zip(runs, keys, strict=True) if self.log.get(key) is None]
        if missing and self.left() < 5.0:
            raise OutOfTimeError(f"{part}: {missing[0][0]}")
        ready: list[tuple[Row, Training]] = []
        lanes: dict[Config, int] = {}
        for name, config, seed in missing:
            row = self._row(part, name, config, seed, on)
            try:
                lane = lanes[_shared(config)] = lanes.get(_shared(config), -1) + 1
                training = self.training(config, on, lane)
                training.reset(seed, config)
                training.prepare()
                ready.append((row, training))
            except Exception as error:
                self._failed(row, error)
                self.log.append(row)
        if ready:
            try:
                seconds = together([training for _, training in ready], self.deadline)
            except TimeoutError as error:
                raise OutOfTimeError(f"{part}: {ready[0][0]['name']} and others: {error}") from None
            for row, training in ready:
                row |= {"seconds_together": round(seconds, 3), "beside": len(ready) - 1}
                row |= self._measured(training, fresh_statistics)
                self.log.append(row)
            shown = ", ".join(f"{row['name']} {row['accuracy']:.2f}" for row, _ in ready)
            self.say(f"{part}: {shown} % in {seconds:.1f} s, {ready[0][1].steps} steps")
        return [row for row in self._known(keys) if "failed" not in row]

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _known(self, keys: Sequence[str]) -> list[Row]:
        """The rows with these keys, which are touched by that."""
        rows = [row for row in map(self.log.get, keys) if row is not None]
        self.touched += rows
        return rows

    def _what(self) -> str:
        return "toy" if self.toy else "cifar10"

    def _row(self, part: str, name: str, config: Config, seed: int, on: str) -> Row:
        row: Row = {"key": self.key(config, seed, on), "part": part, "name": name, "on": on, "seed": seed}
        row |= {"method": config.norm, "batch": config.batch, "epochs": config.epochs, "mode": config.mode}
        return row | {"changes": config.changes(), "config": asdict(config), "images": self._what()} | self.about

    def _measured(self, training: Training, fresh_statistics: bool = False) -> dict[str, Any]:
        out: dict[str, Any] = {
            "accuracy": round(training.accuracy(), 3),
            "accuracy_one_view": round(training.accuracy(views=False), 3),
            "finite": training.finite(),
            "captured": bool(training.graphs),
        }
        if fresh_statistics and training.config.norm in ("batchnorm", "equinorm"):
            training.renew_statistics()
            out["accuracy_fresh_statistics"] = round(training.accuracy(), 3)
        return out

    def _failed(self, row: Row, error: Exception) -> None:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
        row["traceback"] = traceback.format_exc()[-1500:]
        self.say(f"{row['part']} {row['name']} failed: {row['failed'][:300]}")
