"""Data sets from the Hugging Face hub, through its package `datasets` (the extra `datasets`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...errors import UserError
from .catalogue import CatalogueEntry, Hub
from .formats import Arrays

__all__ = ["available", "download"]


def available() -> bool:
    """Whether the package is installed. (A folder that happens to be called datasets is not it.)"""
    spec = find_spec("datasets")
    return spec is not None and spec.origin is not None


def download(entry: CatalogueEntry, parts: Sequence[str]) -> dict[str, Arrays]:
    """Images and labels of every part, as the readers of the official files give them."""
    try:
        load_dataset = import_module("datasets").load_dataset
        return {part: _arrays(load_dataset(entry.hub.path, entry.hub.config, split=part), entry.hub) for part in parts}
    except Exception as error:  # no net, no such file, a changed column: every version raises its own kind
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{entry.hub.path} could not be downloaded from the Hugging Face hub ({reason})") from error


def _arrays(rows: Any, hub: Hub) -> Arrays:
    pixels = np.stack([np.asarray(picture, dtype=np.uint8) for picture in rows[hub.image]])
    images = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images), np.asarray(rows[hub.label], dtype=np.int64)
