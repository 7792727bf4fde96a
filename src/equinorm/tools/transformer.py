"""Models of transformers from the config in a folder: whole or of a few layers, with values or without."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError

__all__ = ["config_of", "made", "number_of_layers", "quiet", "sliced"]

_LAYERS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_WORDS = 256  # of the vocabulary, in a model of a few layers


@contextmanager
def quiet() -> Iterator[None]:
    """Neither the warnings nor the progress bars of transformers."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def config_of(transformers: Any, folder: Path, options: dict[str, Any]) -> Any:
    """The config in a folder. Nothing is downloaded, and code in the folder is not run."""
    with quiet():
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        for key, value in {"use_cache": False, **options}.items():  # caches are outputs that rescaling does change
            setattr(config, key, value)
    return config


def made(transformers: Any, config: Any, device: str = "cpu") -> nn.Module:
    """The model that a config describes, of random values or, on the meta device, of none."""
    architectures = getattr(config, "architectures", None) or [""]
    architecture = getattr(transformers, architectures[0], None) if architectures[0] else None
    if architectures[0] and architecture is None and getattr(config, "auto_map", None):
        raise UserError(
            f"{architectures[0]} is defined by code in the folder, which is not run: make the model in a file of "
            "yours and name it as file.py:callable"
        )
    with quiet(), torch.device(device):
        model: nn.Module = transformers.AutoModel.from_config(config) if architecture is None else architecture(config)
    return model.eval()


def number_of_layers(config: Any) -> int | None:
    found = [getattr(part, name, None) for part in _parts(config) for name in _LAYERS]
    numbers = [n for n in found if isinstance(n, int) and n > 0]
    return min(numbers) if numbers else None


def sliced(config: Any, layers: tuple[int, ...]) -> Any:
    """The config of a model of a few layers and the first words of the vocabulary."""
    config = copy.deepcopy(config)
    with quiet():
        for part in _parts(config):
            for name in _LAYERS:
                depth = getattr(part, name, None)
                if not isinstance(depth, int):
                    continue
                for key, value in list(vars(part).items()):  # such as layer_types: one entry per layer
                    if isinstance(value, list) and len(value) == depth:
                        setattr(part, key, [value[layer] for layer in layers])
                setattr(part, name, len(layers))
            words = getattr(part, "vocab_size", None)
            if isinstance(words, int) and words > _WORDS:
                part.vocab_size = _WORDS
                for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
                    if getattr(part, key, None) is not None:
                        setattr(part, key, None if key != "decoder_start_token_id" else 0)
    return config


def _parts(config: Any) -> list[Any]:
    """A config and those inside it, of a text and a vision model."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part in inner if part is not None)]
