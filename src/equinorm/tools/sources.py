"""Make the model a user names on the command line, and example inputs for it.

package.module:callable     a class, a function without required arguments, or a module that exists already
path/to/file.py:callable    the same from a file
torchvision:resnet18        timm:convnext_tiny        hf:folder-with-config.json
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UserError, meant
from . import pretrained, transformer
from .checkpoints import first_line

# -- inputs ------------------------------------------------------------------------------------------------------------


LARGEST_INPUT = 1 << 31
"""Numbers in one example input: more are a slip of the pen."""


@dataclass(frozen=True)
class Input:
    """One tensor that `forward` takes: by position, or by name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: that of the model
    name: str | None = None
    below: int | None = None  # integers are drawn from 0 ... below - 1; None: what the model's embeddings allow


def parse_input(text: str) -> Input:
    """`1,3,224,224`, `1,16:int64` or `input_ids=1,16:int64`."""
    name, equals, rest = text.rpartition("=")
    sizes, colon, kind = rest.partition(":")
    dtype = getattr(torch, kind, None) if colon else None
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        if (
            any(n < 1 for n in shape)
            or (equals and not name.isidentifier())
            or (colon and not isinstance(dtype, torch.dtype))
        ):
            raise ValueError
    except ValueError:
        raise UserError(
            f"cannot read --input {text!r}: write a shape like 1,3,224,224, with a dtype 1,16:int64, or with the name "
            "of the argument input_ids=1,16:int64"
        ) from None
    if math.prod(shape) > LARGEST_INPUT:
        raise UserError(f"--input {text} asks for {math.prod(shape):.1e} numbers: give a smaller example")
    return Input(shape, dtype, name or None)


def fitting(inputs: Sequence[Input], model: nn.Module) -> tuple[Input, ...]:
    """The same inputs for a model of the same kind with fewer words."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(words, int):
        return tuple(inputs)
    return tuple(replace(i, below=min(i.below, words)) if i.below is not None else i for i in inputs)


def without_values(inputs: Any) -> Any:
    """The same inputs on the meta device."""
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)


def example_inputs(inputs: Sequence[Input], model: nn.Module, seed: int = 0) -> Any:
    """Random tensors for the arguments of `forward`: a tuple, or a dict where the arguments are named."""
    if len({i.name is None for i in inputs}) > 1:
        raise UserError("give a name to every --input (name=shape) or to none")
    generator = torch.Generator().manual_seed(seed)
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    default = floats[0] if floats else torch.float32
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def draw(i: Input) -> Tensor:
        dtype = i.dtype or default
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(i.shape, generator=generator).to(dtype)
        below = 2 if dtype == torch.bool else i.below or min(tables, default=2)
        return torch.randint(below, i.shape, generator=generator).to(dtype)

    if inputs and inputs[0].name is not None:
        return {str(i.name): draw(i) for i in inputs}
    return tuple(draw(i) for i in inputs)


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Source:
    """A model in evaluation mode, the inputs it is known to take, and the checkpoint that lies beside it."""

    model: nn.Module
    inputs: tuple[Input, ...] = ()
    checkpoint: Path | None = None
    folder: pretrained.Pretrained | None = None  # where weights are in several files, or under other names


def load(spec: str, arguments: Iterable[str] = ()) -> Source:
    """The model that a user has named, built with `key=value` arguments; nothing is ever downloaded."""
    kind, colon, name = spec.partition(":")
    if not colon or not kind or not name:
        raise UserError(
            f"cannot read the model {spec!r}: write module:callable, file.py:callable, torchvision:NAME, timm:NAME or "
            f"hf:FOLDER{_suggestion(spec)}"
        )
    options = dict(option(text) for text in arguments)
    source = _KINDS.get(kind, partial(_from_python, kind))(name, options)
    source.model.eval()
    return source


def _suggestion(spec: str) -> str:
    """What a name without its kind may have meant; nothing that takes long is imported for it."""
    if Path(spec).is_dir():
        return f". Did you mean hf:{spec}?"
    if spec.endswith(".py"):
        return f". Did you mean {spec}:NAME, with the name of a class or function in it?"
    if spec and spec.replace("_", "").isalnum():
        return f". Did you mean torchvision:{spec} or timm:{spec}?"
    return ""


def copied(model: nn.Module, spec: str, arguments: Iterable[str] = ()) -> nn.Module:
    """A second model like one that was just loaded."""
    try:
        return copy.deepcopy(model)
    except Exception:  # what the user's model holds may not be copied: it is made again
        made = load(spec, arguments).model
        floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
        return made.to(floats[0]) if floats else made


def option(text: str, flag: str = "--model-args") -> tuple[str, Any]:
    """A name and a value from "key=value".

    >>> option("width=3")
    ('width', 3)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UserError(f"cannot read {flag} {text!r}: write key=value")
    plain = {"true": True, "false": False, "none": None}
    if value.lower() in plain:
        return key, plain[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _from_python(module: str, attribute: str, options: dict[str, Any]) -> Source:
    found = _attribute(_imported(module), module, attribute)
    if isinstance(found, nn.Module):
        if options:
            raise UserError(f"{module}:{attribute} is a model already and takes no --model-args")
        return Source(found)
    if not callable(found):
        raise UserError(
            f"{module}:{attribute} is a {type(found).__name__}, neither a model nor something that makes one"
        )
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise UserError(f"{module}:{attribute}: {error}. Give arguments with --model-args key=value") from None
    except ValueError:
        pass  # no signature to check
    model = _guarded(lambda: found(**options), f"{module}:{attribute}")
    if not isinstance(model, nn.Module):
        raise UserError(f"{module}:{attribute} returned a {type(model).__name__}, not a torch.nn.Module")
    return Source(model)


def _imported(module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise UserError(f"no such file: {module}")
        if str(path.parent.resolve()) not in sys.path:
            sys.path.insert(0, str(path.parent.resolve()))  # so that it can import its neighbours, as a script can
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        _guarded(partial(spec.loader.exec_module, made), module)
        return made
    try:
        return _guarded(partial(importlib.import_module, module), module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise UserError(
                f"there is no module {module!r} here or among the installed packages. Models are written "
                "module:callable or file.py:callable; torchvision:, timm: and hf: are short for those libraries"
            ) from None
        raise UserError(f"importing {module} failed: {error}") from error


def _guarded(action: Callable[[], Any], what: str) -> Any:
    """Run the user's code; what goes wrong there is told in one line, with the place."""
    try:
        return action()
    except (ModuleNotFoundError, UserError):
        raise
    except (Exception, SystemExit) as error:  # a file of the user's may end the program
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise UserError(f"{what} failed with {type(error).__name__}: {first_line(error)}{place}") from error


def _attribute(found: Any, module: str, attribute: str) -> Any:
    try:
        return attrgetter(attribute)(found)
    except AttributeError:
        public = (name for name in dir(found) if not name.startswith("_"))
        raise UserError(f"{module} has no {attribute!r}{meant(attribute, public)}") from None


def _library(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{name} is not installed: pip install {name}, or name your own model as module:callable")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's deprecations
            return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{name} is installed but cannot be imported: {first_line(error)}") from error


# torch.library forgets a declaration together with the object that made it
_declared: list[torch.library.Library] = []


def _torchvision() -> Any:
    """torchvision, also where it lacks its compiled operators (a CUDA build beside a CPU build of torch).

    Its import looks up two of them, which only detection models call; declaring them is enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        return _library("torchvision")
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise UserError(f"torchvision is installed but cannot be imported: {first_line(error)}") from error
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # the half of it that was imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return _library("torchvision")


def _from_torchvision(name: str, options: dict[str, Any]) -> Source:
    models = _torchvision().models
    if name not in models.list_models():
        raise UserError(f"torchvision has no model {name!r}{meant(name, models.list_models())}")
    if options.get("weights") is not None or options.get("weights_backbone") is not None:
        raise UserError("weights are not downloaded: save them as a file and give it as CHECKPOINT")
    inner = {"weights_backbone": None} if "weights_backbone" in _names(models.get_model_builder(name)) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults that will change
        model = _guarded(lambda: models.get_model(name, **{"weights": None, **inner, **options}), f"torchvision:{name}")
    size = getattr(model, "image_size", None)
    shape: tuple[int, ...] = (1, 3, size, size) if isinstance(size, int) else (1, 3, 224, 224)
    try:
        weights = models.get_model_weights(name).DEFAULT
        crop = weights.transforms().crop_size
        if isinstance(size, int):
            pass  # a transformer's size is fixed when it is built, whatever its best weights were made for
        elif len(crop) == 2:  # a video: frames, height, width
            shape = (1, 3, weights.meta.get("min_temporal_size", 16), *crop)
        else:
            shape = (1, 3, crop[0], crop[0])
    except (AttributeError, ValueError):
        pass  # no weights, or none that say how large an image is
    return Source(model, (Input(shape),))


def _names(function: Callable[..., Any]) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _from_timm(name: str, options: dict[str, Any]) -> Source:
    if importlib.util.find_spec("torchvision") is not None:
        _torchvision()  # timm imports it
    timm = _library("timm")
    if not timm.is_model(name):
        raise UserError(f"timm has no model {name!r}{meant(name, timm.list_models())}")
    if options.get("pretrained"):
        raise UserError("weights are not downloaded: save them as a file and give it as CHECKPOINT")
    model = _guarded(lambda: timm.create_model(name, **{"pretrained": False, **options}), f"timm:{name}")
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    channels, height, width = config.get("input_size", (3, 224, 224))
    size = options.get("img_size", (height, width))
    height, width = size if isinstance(size, tuple | list) else (size, size)
    return Source(model, (Input((1, options.get("in_chans", channels), height, width)),))


def _from_transformers(folder: str, options: dict[str, Any]) -> Source:
    path, transformers, config = _transformer(folder, options)
    model = _guarded(lambda: transformer.made(transformers, config), f"hf:{folder}")
    weights = path / pretrained.SINGLE
    if not weights.is_file() and not (path / pretrained.INDEX).is_file():
        return Source(model, _transformer_inputs(model))
    held = pretrained.Pretrained.read(path)
    if held.index is None and set(held.tensors) <= set(model.state_dict()):
        return Source(model, _transformer_inputs(model), weights)
    return Source(model, _transformer_inputs(model), folder=held)


def _transformer(folder: str, options: dict[str, Any]) -> tuple[Path, Any, Any]:
    path = Path(folder).expanduser()
    if not (path / pretrained.CONFIG).is_file():
        raise UserError(
            f"{folder} is not a folder with a config.json. Nothing is downloaded: save the model there first"
        )
    transformers = _library("transformers")
    return path, transformers, _guarded(lambda: transformer.config_of(transformers, path, options), f"hf:{folder}")


@dataclass(frozen=True, eq=False)
class Empty:
    """A model of transformers on the meta device, and how to make small ones of its kind."""

    model: nn.Module
    inputs: tuple[Input, ...]
    choices: list[list[tuple[int, ...]]]  # of layers, the best first; one model for each tuple
    make: Callable[[tuple[int, ...]], nn.Module]  # with these layers, with values


def empty_transformer(folder: str, arguments: Iterable[str] = (), most: int = 1 << 30) -> Empty:
    """The model of a folder on the meta device. Small ones take at most so many bytes in float32, as far as possible.

    >>> made = empty_transformer("llama")
    """
    _, transformers, config = _transformer(folder, dict(option(text) for text in arguments))
    model = _guarded(lambda: transformer.made(transformers, config, "meta"), f"hf:{folder}")

    def make(layers: tuple[int, ...]) -> nn.Module:
        chosen = transformer.sliced(config, layers) if layers else config
        made: nn.Module = _guarded(lambda: transformer.made(transformers, chosen), f"a part of hf:{folder}")
        return made

    size, layers = 4 * sum(p.numel() for p in model.parameters()), transformer.number_of_layers(config)
    whole: list[tuple[int, ...]] = [()]
    if layers is None or layers <= 2:
        return Empty(model, _transformer_inputs(model), [whole] if size <= most else [], make)
    ends: list[tuple[int, ...]] = [(0, layers - 1)] if 2 * size <= most * layers else [(0,), (layers - 1,)]
    choices: list[list[tuple[int, ...]]] = [ends, [(0, 1)], [(0,)], *([whole] if size <= most else [])]
    return Empty(model, _transformer_inputs(model), choices, make)


def _transformer_inputs(model: nn.Module) -> tuple[Input, ...]:
    config: Any = model.config
    main = getattr(model, "main_input_name", "")
    if main == "input_ids":
        below = config.get_text_config().vocab_size
        names = ["input_ids", "decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else ["input_ids"]
        return tuple(Input((1, 16), torch.int64, name, below) for name in names)
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return (Input((1, getattr(vision, "num_channels", 3), height, width), name="pixel_values"),)
    return ()


_KINDS: dict[str, Callable[[str, dict[str, Any]], Source]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "hf": _from_transformers,
}
