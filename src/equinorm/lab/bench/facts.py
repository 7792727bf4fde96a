"""What goes with every measurement, and where it is written. Needs no package that draws."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...files import write_text
from ..training.trainer import about

__all__ = ["facts", "hardware", "save"]


def hardware(device: torch.device) -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    gibibytes = f", {memory[0]:.0f} GiB" if memory else ""
    cpu = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{gibibytes}"
    return f"{torch.cuda.get_device_name(device)}; {cpu}" if device.type == "cuda" else cpu


def facts(device: torch.device) -> dict[str, Any]:
    return about(device) | {
        "hardware": hardware(device),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
    }


def save(out: Path, name: str, text: str, rows: Iterable[Any], about_it: dict[str, Any]) -> list[Path]:
    """Write NAME.txt for readers and NAME.json with every number; of a quick run NAME_quick, and it says so."""
    out.mkdir(parents=True, exist_ok=True)
    if about_it.get("quick"):
        name += "_quick"
    head = "".join(f"{key}: {_words(value)}\n" for key, value in about_it.items())
    write_text(out / f"{name}.txt", f"{head}\n{text}")
    content = {**about_it, "rows": [asdict(row) for row in rows]}
    write_text(out / f"{name}.json", json.dumps(content, indent=1) + "\n")
    return [out / f"{name}.txt", out / f"{name}.json"]


def _words(value: Any) -> str:
    """Versions are read as "torch 2.11.0, python 3.12.3"."""
    if not isinstance(value, dict):
        return f"{value:.1f}" if isinstance(value, float) else str(value)
    return ", ".join(f"{name} {what}" for name, what in value.items() if what is not None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
