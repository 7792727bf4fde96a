"""The curves of all runs as TensorBoard event files, for those who like to look at them there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ...errors import UserError
from .results import Result, metric_of
from .wording import slug

__all__ = ["export", "require"]


def require() -> None:
    """Say so before anything is written if TensorBoard is not there."""
    if find_spec("tensorboard") is None:
        raise UserError("event files need the package tensorboard: pip install tensorboard")


def export(results: Iterable[Result], folder: Path) -> None:
    """One sub-folder per run, ARTIFACT/METHOD, COLUMN/seed N, in place of an earlier export."""
    require()
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ".gitignore").write_text("*\n")
    for result in results:
        for number in result.numbers:
            for record in number.records:
                setting = _name(f"{number.cell.row}, {number.cell.column}")
                place = folder / slug(result.artifact.name) / setting / f"seed {record.run.seed}"
                with SummaryWriter(str(place)) as writer:
                    for i, epoch in enumerate(record.epochs, start=1):
                        step = metric_of(epoch, "epoch")
                        for metric in epoch:
                            value = metric_of(epoch, metric)
                            if value is not None and metric != "epoch":
                                writer.add_scalar(metric, value, i if step is None else round(step))


def _name(text: str) -> str:
    return re.sub(r"[^\w.,+= -]", "_", text)
