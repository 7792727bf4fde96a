"""Read a checkpoint, hand its values to a model, and write it back with everything else in it as it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..files import replacing

# Where training scripts keep the state dict inside a larger file, in the order in which we look.
_NESTED = ("state_dict", "model_state_dict", "model", "model_state", "network", "net", "module", "weights", "params")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class Checkpoint:
    """The content of a file and the state dict in it; change the tensors in place, then `write`."""

    content: Any  # the whole object of a .pt file, or the tensors of a safetensors file
    tensors: dict[str, Tensor]  # the very tensors that `content` holds; by the model's names after `fit`
    safetensors: bool
    metadata: dict[str, str] | None = None  # of a safetensors file
    others: tuple[str, ...] = ()  # what else a .pt file holds besides the state dict

    @property
    def dtypes(self) -> str:
        found = {str(t.dtype).removeprefix("torch.") for t in self.tensors.values() if t.is_floating_point()}
        return ", ".join(sorted(found)) or "no floating-point tensors"

    def write(self, path: Path) -> None:
        """Write in the format that was read, atomically."""
        try:
            with replacing(path) as temporary:
                if self.safetensors:
                    from safetensors.torch import save_file

                    save_file(self.content, str(temporary), metadata=self.metadata)
                else:
                    torch.save(self.content, temporary)
        except (OSError, RuntimeError, _safetensors_error()) as error:
            raise UserError(
                f"could not write {path}: {first_line(error)}. What was there before is untouched"
            ) from error


def read(path: Path) -> Checkpoint:
    """Read a safetensors file, or a .pt file by torch's safe unpickler."""
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}")
    return _read_safetensors(path) if is_safetensors(path) else _read_pickle(path)


def of_model(model: nn.Module, path: Path) -> Checkpoint:
    """A checkpoint of a model's own state dict, in the format that the name of the file to write asks for."""
    state = model.state_dict()
    if not is_safetensors(path):
        return Checkpoint(state, dict(state), safetensors=False)
    # safetensors does not store a tensor under two names, and copies do not share memory
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    return Checkpoint(copies, copies, safetensors=True, metadata={"format": "pt"})


def is_safetensors(path: Path) -> bool:
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{path.name}: expected a name that ends in one of {', '.join(_SUFFIXES)}")
    return path.suffix == ".safetensors"


def _read_safetensors(path: Path) -> Checkpoint:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UserError("safetensors is not installed: pip install safetensors") from error
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
    except (OSError, _safetensors_error()) as error:
        raise UserError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
    return Checkpoint(tensors, tensors, safetensors=True, metadata=metadata)


def _read_pickle(path: Path) -> Checkpoint:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} cannot be read safely: it holds Python objects (a whole model?) or is damaged. If you trust it, "
            "load it in Python and save model.state_dict() instead"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a readable torch checkpoint: {first_line(error)}") from error
    if _is_state_dict(content):
        return Checkpoint(content, _tensors(content), safetensors=False)
    if isinstance(content, Mapping):
        for key in _NESTED:
            if _is_state_dict(content.get(key)):
                others = tuple(str(name) for name in content if name != key)
                return Checkpoint(content, _tensors(content[key]), safetensors=False, others=others)
        held = ", ".join(repr(key) for key in list(content)[:6])
        raise UserError(f"{path} holds {held}, but no state dict under {', '.join(_NESTED[:4])}, ...")
    raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, Tensor) for item in value.values())
        and not any(isinstance(item, Mapping) for item in value.values())
    )


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _safetensors_error() -> type[Exception]:
    try:
        from safetensors import SafetensorError
    except ImportError:
        return OSError
    error: type[Exception] = SafetensorError
    return error


# -- between a checkpoint and a model ----------------------------------------------------------------------------------


def fit(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Strip what wrappers put before every name (`module.`), and refuse what are not the model's names or shapes."""
    own = model.state_dict(keep_vars=True)
    given = checkpoint.tensors = _without_prefix(checkpoint.tensors, own)
    # of a tensor with several names one is enough; the count of batches does not matter to anybody here
    present = {_place(own[name]) for name in given if name in own and isinstance(own[name], Tensor)}
    missing = [
        name
        for name, value in own.items()
        if isinstance(value, Tensor)
        and name not in given
        and _place(value) not in present
        and not name.endswith("num_batches_tracked")
    ]
    unexpected = [name for name in given if name not in own]
    if missing or unexpected:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has unexpected {_some(unexpected)}"] * bool(unexpected)
        raise UserError(
            f"the checkpoint does not fit {type(model).__name__}: it {' and '.join(parts)}. "
            "Is it for another architecture, or does the model need --model-args?"
        )
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise UserError(
                f"the checkpoint does not fit {type(model).__name__}: {name} has shape {tuple(value.shape)} in "
                f"the file and {tuple(own[name].shape)} in the model. Does the model need --model-args?"
            )


def _without_prefix(tensors: dict[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop the first part of all names while it is common to them and none of them is the model's as it stands."""
    while tensors and not any(name in own for name in tensors):
        first = {name.partition(".")[0] for name in tensors}
        if len(first) > 1 or any("." not in name for name in tensors):
            break
        tensors = {name.partition(".")[2]: value for name, value in tensors.items()}
    return tensors


@torch.no_grad()
def adopt(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Give the model the checkpoint's values and dtypes, so that rounding and range are those of the file."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in checkpoint.tensors.items():
        if name in own:
            if value.dtype not in _DTYPES:
                raise UserError(f"{name} has dtype {value.dtype} in the checkpoint, which cannot be rescaled")
            own[name].data = own[name].data.to(value.dtype)
    model.load_state_dict(checkpoint.tensors, strict=False)


@torch.no_grad()
def give_back(model: nn.Module, names: Iterable[str], checkpoint: Checkpoint) -> None:
    """Copy parameters of the model into the checkpoint, under every name they have there; the rest stays."""
    own = dict(model.named_parameters(remove_duplicate=False))
    changed = {_place(own[name]) for name in names}
    for name, value in checkpoint.tensors.items():
        if name in own and _place(own[name]) in changed:
            value.copy_(own[name])


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr() or id(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
