"""Where figures and logs lie, as seen from the folder of the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .document import Figure
from .results import Result

__all__ = ["Links"]


class Links:
    """Paths relative to the folder of the report."""

    def __init__(self, out: Path, figures: Mapping[str, Path], logs: Mapping[str, Path]) -> None:
        self._out, self._figures, self._logs = out, figures, logs

    def figure(self, result: Result) -> Figure | None:
        """The SVG file, and the PNG file beside it."""
        path = self._figures.get(result.artifact.name)
        if path is None:
            return None
        svg = self._from_here(path)
        toy = "TOY " if result.toy else ""
        return Figure(f"{toy}{result.artifact.title}", svg, svg.removesuffix(".svg") + ".png")

    def log(self, key: str) -> str | None:
        path = self._logs.get(key)
        return None if path is None else self._from_here(path)

    def folders(self, result: Result) -> list[str]:
        """The folders that hold the runs of an artifact."""
        logs = (self._logs.get(record.run.key) for record in result.records)
        return sorted({self._from_here(path.parent) for path in logs if path is not None})

    def _from_here(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._out)).as_posix()
