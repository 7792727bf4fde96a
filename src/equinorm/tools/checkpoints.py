"""Read a checkpoint, hand its values to a model, and write it back with everything else in it as it was.

Tensors of a file are never written into: those that change are replaced by new ones, so that what shared their storage
(another name, an average of weights, an optimizer's state) stays what it was.
"""

from __future__ import annotations

import copy
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..files import replacing

# Where training scripts keep the state dict inside a larger file, in the order in which we look.
_NESTED = ("state_dict", "model_state_dict", "model", "model_state", "network", "net", "module", "weights", "params")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class Checkpoint:
    """The content of a file, and the state dict in it."""

    content: Any  # the whole object of a .pt file, or the tensors of a safetensors file
    tensors: dict[str, Tensor]  # of the state dict; by the model's names after `fit`
    safetensors: bool
    metadata: dict[str, str] | None = None  # of a safetensors file
    others: tuple[str, ...] = ()  # what else a .pt file holds besides the state dict
    nested: Any = None  # the key of `content` under which the state dict is; None where it is all of it
    prefix: str = ""  # what `fit` took off the front of all names

    @property
    def dtypes(self) -> str:
        found = {str(t.dtype).removeprefix("torch.") for t in self.tensors.values() if t.is_floating_point()}
        return ", ".join(sorted(found)) or "no floating-point tensors"

    def with_tensors(self, changed: Mapping[str, Tensor]) -> Checkpoint:
        """The same checkpoint with other tensors under some names of `tensors`; this one stays as it is."""
        state = copy.copy(self.content if self.nested is None else self.content[self.nested])  # with its `_metadata`
        for name, tensor in changed.items():
            state[self.prefix + name] = tensor
        content = state
        if self.nested is not None:
            content = copy.copy(self.content)
            content[self.nested] = state
        return replace(self, content=content, tensors={**self.tensors, **changed})

    def write(self, path: Path, check: Callable[[Checkpoint], None] | None = None) -> None:
        """Write in the format that was read, atomically.

        The file is read back before it gets its name, and must hold what was meant; `check` may raise on what was read.
        """
        try:
            with replacing(path) as temporary:
                if self.safetensors:
                    from safetensors.torch import save_file

                    save_file(self.content, str(temporary), metadata=self.metadata)
                else:
                    torch.save(self.content, temporary)
                written = _read(temporary, self.safetensors)
                _check_same(self, written)
                if check is not None:
                    check(written)
        except (OSError, RuntimeError, ValueError, _safetensors_error()) as error:
            raise UserError(
                f"could not write {path}: {first_line(error)}. What was there before is untouched"
            ) from error


def _check_same(meant: Checkpoint, written: Checkpoint) -> None:
    """The file that was written holds the tensors that were meant, bit for bit."""
    found = {name.removeprefix(meant.prefix): tensor for name, tensor in written.tensors.items()}
    for name, tensor in meant.tensors.items():
        if name not in found or not same_bits(found[name], tensor):
            raise OSError(f"{name} came back from the disk as something else")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, also where these are NaN.

    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, two = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two)


def read(path: Path) -> Checkpoint:
    """Read a safetensors file, or a .pt file by torch's safe unpickler."""
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}")
    return _read(path, is_safetensors(path))


def _read(path: Path, safetensors: bool) -> Checkpoint:
    found = _read_safetensors(path) if safetensors else _read_pickle(path)
    for name, tensor in found.tensors.items():
        because = _unusable(tensor)
        if because is not None:
            raise UserError(f"{path}: {name} {because}")
    return found


def _unusable(tensor: Tensor) -> str | None:
    """Why a tensor of a checkpoint cannot be read as a table of numbers, and what to do."""
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}): save it with .to_dense()"
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
        return f"is a {type(tensor).__name__}, not a plain tensor: save the plain tensor instead"
    if tensor.is_meta:
        return "is on the meta device, so the file has no values for it: save the model after its weights are loaded"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}): give the checkpoint before quantization"
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is an expanded view, many elements in one place of memory: save it with .contiguous()"
    return None


def of_model(model: nn.Module, path: Path) -> Checkpoint:
    """A checkpoint of a model's own state dict, in the format that the name of the file to write asks for."""
    return of_state(model.state_dict(), path)


def of_state(state: dict[str, Tensor], path: Path) -> Checkpoint:
    """The same of a state dict."""
    if not is_safetensors(path):
        return Checkpoint(state, dict(state), safetensors=False)
    # safetensors does not store a tensor under two names, and copies do not share memory
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    return Checkpoint(copies, copies, safetensors=True, metadata={"format": "pt"})


def is_safetensors(path: Path) -> bool:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path.name}: expected a name that ends in one of {', '.join(SUFFIXES)}")
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
    except Exception as error:  # a damaged header can make the reader raise anything
        raise UserError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
    return Checkpoint(tensors, tensors, safetensors=True, metadata=metadata)


def _read_pickle(path: Path) -> Checkpoint:
    _check_sums(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about old formats
            content = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(content, nn.Module):
                raise pickle.UnpicklingError("a whole model")
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} cannot be read safely: it holds Python objects (a whole model?) or is damaged. If you trust it, "
            "load it in Python and save model.state_dict() instead"
        ) from error
    except Exception as error:  # in a damaged file the unpickler meets anything
        raise UserError(f"{path} is not a readable torch checkpoint: {first_line(error)}") from error
    if _is_state_dict(content):
        return Checkpoint(content, _tensors(content), safetensors=False)
    if isinstance(content, Mapping):
        for key in _NESTED:
            if _is_state_dict(content.get(key)):
                others = tuple(str(name) for name in content if name != key)
                return Checkpoint(content, _tensors(content[key]), safetensors=False, others=others, nested=key)
        held = ", ".join(repr(key) for key in list(content)[:6])
        raise UserError(f"{path} holds {held}, but no state dict under {', '.join(_NESTED[:4])}, ...")
    raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")


def _check_sums(path: Path) -> None:
    """Refuse a .pt file in which some of the zip's checksums hold and others do not: torch.load looks at none.

    (Where none holds, they were left out on purpose: `torch.serialization.set_crc32_options(False)`.)
    """
    if not zipfile.is_zipfile(path):
        return  # the format before torch 1.6, which has none
    try:
        with zipfile.ZipFile(path) as file:
            entries = [entry for entry in file.infolist() if entry.file_size]
            torn = [entry.filename for entry in entries if not _is_intact(file, entry)]
    except Exception as error:
        raise UserError(f"{path} is not a readable torch checkpoint: {first_line(error)}") from error
    if 0 < len(torn) < len(entries):
        raise UserError(f"{path} is damaged: the checksum of {_some(torn)} does not hold. Copy the file again")


def _is_intact(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with file.open(entry) as content:
            while content.read(1 << 20):
                pass
    except zipfile.BadZipFile:
        return False
    return True


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
    for name, value in own.items():
        if isinstance(value, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise UserError(
                f"{name} of the model is not initialized yet: build it with its sizes, not with lazy layers"
            )
    given = checkpoint.tensors = _without_prefix(checkpoint, own)
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
        if isinstance(own[name], Tensor) and value.shape != own[name].shape:
            raise UserError(
                f"the checkpoint does not fit {type(model).__name__}: {name} has shape {tuple(value.shape)} in "
                f"the file and {tuple(own[name].shape)} in the model. Does the model need --model-args?"
            )


def _without_prefix(checkpoint: Checkpoint, own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop the first part of all names while it is common to them and none of them is the model's as it stands."""
    tensors = checkpoint.tensors
    while tensors and not any(name in own for name in tensors):
        first = {name.partition(".")[0] for name in tensors}
        if len(first) > 1 or any("." not in name for name in tensors):
            break
        checkpoint.prefix += f"{first.pop()}."
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
def give_back(model: nn.Module, names: Iterable[str], checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with these parameters of the model, under every name they have there; the rest stays.

    Names that share storage in the file go on sharing it where they are one parameter of the model, and only there.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    changed = {_place(own[name]) for name in names}
    written: dict[Any, Tensor] = {}  # by the parameter and the place in the file
    new: dict[str, Tensor] = {}
    for name, old in checkpoint.tensors.items():
        if name not in own or (parameter := _place(own[name])) not in changed:
            continue
        key = parameter, _place(old), old.shape, old.stride(), old.dtype
        if key not in written:
            value = torch.empty_like(old, requires_grad=False).copy_(own[name])
            written[key] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        new[name] = written[key]
    return checkpoint.with_tensors(new)


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr() or id(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
