"""Folders as transformers' `save_pretrained` writes them, balanced without ever being in memory as a whole.

    folder = Pretrained.read(Path("llama"))                       # headers only
    model = sources.empty_transformer(folder.path)                # on the meta device
    bound = Bound(folder, model)                                  # which tensors of the files are which parameters
    plan = balanced(bound, equinorm.trace(model, inputs))         # one pass over the weights, part by part
    write(bound, plan, Path("llama-balanced"))                    # shard by shard, each read back and compared

In memory are never more than two shards, the sums that the solver needs for one part of the network, and the program
itself. Parts are sets of scales that no weight links: where a residual stream is frozen (every transformer with norms
whose ε stays), half a layer.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ..balance import counting, optimum
from ..criteria import Norm
from ..criteria.criterion import Counts
from ..criteria.norm import layouts
from ..errors import UserError
from ..files import appearing, write_text
from ..models.sharding import ALONE
from ..symmetry import ScaledParameter, Symmetry, Term
from ..symmetry.capture import PLAIN_DTYPES
from . import verify
from .checkpoints import Checkpoint, first_line, same_bits

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".npz",
)
"""Files that hold weights from before balancing: they are not copied."""
OPEN_AT_ONCE = 2
CHUNK = 1 << 24  # elements that are rescaled at once, in float32

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in one of the files, without its values."""

    file: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, eq=False)
class Pretrained:
    """What lies in a folder: the config, and where every tensor is."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    metadata: dict[str, dict[str, str] | None]  # of every file with weights
    index: dict[str, Any] | None  # None where all is in one file

    @classmethod
    def read(cls, path: Path) -> Pretrained:
        """Read the config, the index and the headers of the files; no weight is looked at."""
        config = _json(path / CONFIG)
        if "quantization_config" in config:
            how = (config["quantization_config"] or {}).get("quant_method", "its config says so")
            raise UserError(f"{path} is quantized ({how}): give the checkpoint before quantization")
        index = _json(path / INDEX) if (path / INDEX).is_file() else None
        files = {SINGLE} if index is None else _files_of(index, path)
        tensors: dict[str, Stored] = {}
        metadata = {}
        for file in sorted(files):
            if not (path / file).is_file():
                raise UserError(f"{path} has no {file}" + ("" if index is None else f", which {INDEX} speaks of"))
            with _opened(path / file) as content:
                metadata[file] = content.metadata()
                for name in content.keys():  # noqa: SIM118
                    part = content.get_slice(name)
                    if part.get_dtype() not in _DTYPES:
                        raise UserError(f"{path / file}: {name} has dtype {part.get_dtype()}, which is not known here")
                    tensors[name] = Stored(file, torch.Size(part.get_shape()), _DTYPES[part.get_dtype()])
        if index is not None and (torn := sorted(set(index["weight_map"]) ^ set(tensors))):
            raise UserError(f"{path}: {INDEX} and the files do not agree about {', '.join(torn[:3])}")
        return cls(path, config, tensors, metadata, index)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def shards(self) -> dict[str, list[str]]:
        """The names of the tensors in every file."""
        found: dict[str, list[str]] = {file: [] for file in self.metadata}
        for name, stored in self.tensors.items():
            found[stored.file].append(name)
        return found

    @property
    def largest_shard(self) -> int:
        return max(sum(self.tensors[name].nbytes for name in names) for names in self.shards.values())

    @property
    def dtypes(self) -> str:
        return ", ".join(sorted({str(stored.dtype).removeprefix("torch.") for stored in self.tensors.values()}))

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that gives a tensor by its name, with at most two files open at once."""
        with ExitStack() as stack:
            opened: dict[str, tuple[Any, ExitStack]] = {}

            def get(name: str) -> Tensor:
                file = self.tensors[name].file
                if file not in opened:
                    if len(opened) == OPEN_AT_ONCE:
                        opened.pop(next(iter(opened)))[1].close()
                    inner = stack.enter_context(ExitStack())
                    opened[file] = inner.enter_context(_opened(self.path / file)), inner
                try:
                    tensor: Tensor = opened[file][0].get_tensor(name)
                except Exception as error:
                    _unreadable(self.path / file, error)
                return tensor

            yield get
            opened.clear()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds a {type(found).__name__}, not an object")
    return found


def _files_of(index: dict[str, Any], path: Path) -> set[str]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{path / INDEX} is damaged: it has no weight_map of names and files")
    for file in set(places.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path / INDEX} speaks of {file!r}, which is not the name of a safetensors file there")
    return set(places.values())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UserError("safetensors is not installed: pip install safetensors") from error
    try:
        file = safe_open(str(path), framework="pt")
    except Exception as error:
        _unreadable(path, error)
    with file as content:
        yield content


def _unreadable(path: Path, error: Exception) -> NoReturn:
    raise UserError(f"{path} is not a readable safetensors file: {first_line(error)}") from error


# -- names in the files and names in the model -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors of the files that together make tensors of the model: mostly one and one, by transformers' own rules."""

    keys: tuple[str, ...]  # in the files
    names: tuple[str, ...]  # in the model
    values: Callable[[Callable[[str], Tensor]], dict[str, Tensor]]  # from the files' to the model's
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # and back


class Bound:
    """A folder, and the model on the meta device that it is for."""

    def __init__(self, folder: Pretrained, model: nn.Module) -> None:
        self.folder, self.model = folder, model
        own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        first = {id(value): name for name, value in reversed(own.items())}
        self._canonical = {name: first[id(value)] for name, value in own.items()}
        self.groups: list[Group] = []
        self.unused: list[str] = []
        for group in _groups(folder, model, set(own)):
            if group.names:
                self.groups.append(group)
            else:
                self.unused += group.keys
        self._group_of: dict[str, Group] = {}
        for group in self.groups:
            for name in group.names:
                self._group_of.setdefault(self._canonical[name], group)
        self._check(own)

    def _check(self, own: Mapping[str, Tensor]) -> None:
        optional = [re.compile(p) for p in getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()]
        missing = [
            name
            for name in own
            if self._canonical[name] not in self._group_of
            and not name.endswith("num_batches_tracked")
            and not any(pattern.search(name) for pattern in optional)
        ]
        if missing:
            raise UserError(
                f"{self.folder.path} does not fit {type(self.model).__name__}: it lacks {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            )
        for group in self.groups:
            empty = group.values(lambda key: self.folder.tensors[key].empty())
            for name, tensor in empty.items():
                if tensor.shape != own[name].shape:
                    raise UserError(
                        f"{self.folder.path} does not fit {type(self.model).__name__}: {name} has shape "
                        f"{tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model"
                    )
            back = group.stored(empty)
            if {key: t.shape for key, t in back.items()} != {key: self.folder.tensors[key].shape for key in group.keys}:
                raise UserError(
                    f"{self.folder.path} keeps {group.keys[0]} in a form that the installed transformers reads but "
                    "does not write. Load and save it with transformers first: from_pretrained, save_pretrained"
                )

    def parameter(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """The values of a parameter of the model."""
        canonical = self._canonical[name]
        found = self._group_of[canonical].values(get)
        return next(tensor for own, tensor in found.items() if self._canonical[own] == canonical)

    def canonical(self, name: str) -> str:
        """The first of the names of a tensor of the model."""
        return self._canonical[name]

    def checkpoint(self) -> Checkpoint:
        """All values by the model's names, in memory, for those who need them so."""
        tensors: dict[str, Tensor] = {}
        with self.folder.reading() as get:
            for group in self.groups:
                tensors |= {name: value.clone() for name, value in group.values(get).items()}
        return Checkpoint(tensors, tensors, safetensors=True)


def _groups(folder: Pretrained, model: nn.Module, own: set[str]) -> Iterator[Group]:
    """Every tensor of the files once. A group without names is of no use to the model."""
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before transformers 5 names were what they are
        for key in folder.tensors:
            yield _plain(key, _with_or_without(getattr(model, "base_model_prefix", ""), key, own))
        return
    transforms = get_model_conversion_mapping(cast(Any, model))
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, shapes = getattr(model, "base_model_prefix", ""), dict.fromkeys(own, True)
    merged: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(folder.tensors, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, shapes)
        if name not in own and key in own:
            name, pattern = loading.rename_source_key(key, [], [], prefix, shapes)
        if name in own and pattern is not None:
            merged.setdefault(name, []).append((key, pattern))
        else:
            yield _plain(key, name if name in own else None)
    for name, members in merged.items():
        yield _converted(folder, model, name, members, by_pattern[members[0][1]])


def _plain(key: str, name: str | None) -> Group:
    if name is None:
        return Group((key,), (), lambda get: {}, lambda values: {})
    return Group((key,), (name,), lambda get: {name: get(key)}, lambda values: {key: values[name]})


def _with_or_without(prefix: str, key: str, own: set[str]) -> str | None:
    """The model's name for a key, where one of the two has the prefix of the base model and the other has not."""
    for name in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
        if name in own:
            return name
    return None


def _converted(folder: Pretrained, model: Any, first: str, members: list[tuple[str, str]], converter: Any) -> Group:
    """A group that one of transformers' converters makes: experts that are stacked, projections that are split."""
    from transformers.core_model_loading import revert_weight_conversion

    def values(get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        made = copy.deepcopy(converter)
        for key, pattern in members:
            made.add_tensor(first, key, pattern, get(key))
        found = made.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        back: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        return back

    names = tuple(values(lambda key: folder.tensors[key].empty()))
    return Group(tuple(key for key, _ in members), names, values, stored)


# -- the optimum, part by part -----------------------------------------------------------------------------------------


class Part(Symmetry):
    """Scales that no weight links with any other: a symmetry of its own, whose tensors are handed to it."""

    def __init__(self, whole: Symmetry, births: set[int], parameters: list[ScaledParameter]) -> None:
        self.variables = torch.isin(whole.birth, torch.tensor(sorted(births))).nonzero().view(-1)
        local = torch.full((whole.num_scales + 1,), len(self.variables))
        local[self.variables] = torch.arange(len(self.variables))
        self.parameters = [_renumbered(w, local) for w in parameters]
        self.birth = whole.birth[self.variables]
        self.num_scales = len(self.variables)
        follow = [replace(c, term=Term(local[c.term.index], c.term.exponent)) for c in whole.carried]
        self.carried = [c for c in follow if bool((c.term.index < self.num_scales).any())]
        self.processes = ALONE
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def solver_bytes(self, p: float, counts: Counts) -> int:
        """What the solver needs for this part: its sums in float64 and once more in float32, and the largest weight
        twice in float64 while it is read."""
        sums = [x.view[0] * x.view[2] * x.view[5] for x in layouts(self, p, 1.0, counts)]
        return 12 * sum(sums) + 16 * max((w.shape.numel() for w in self.parameters), default=0)


def _renumbered(w: ScaledParameter, local: Tensor) -> ScaledParameter:
    def term(t: Term | None) -> Term | None:
        return None if t is None else Term(local[t.index], t.exponent)

    return replace(w, out=term(w.out), into=term(w.into), fan_in=term(w.fan_in))


def parts(symmetry: Symmetry) -> list[Part]:
    """The parts of a symmetry, in the order of the network."""
    leader: dict[int, int] = {}

    def find(birth: int) -> int:
        while leader.setdefault(birth, birth) != birth:
            birth = leader[birth]
        return birth

    births = torch.cat([symmetry.birth, torch.tensor([-1])])
    touched: list[tuple[ScaledParameter, list[int]]] = []
    for w in symmetry.moving:
        found = torch.cat([births[t.index].reshape(-1) for t in (w.out, w.into) if t is not None]).unique()
        of_w = [birth for birth in found.tolist() if birth >= 0]
        touched.append((w, of_w))
        for birth in of_w[1:]:
            a, b = sorted((find(of_w[0]), find(birth)))
            leader[b] = a
    members: dict[int, list[ScaledParameter]] = {}
    for w, of_w in touched:
        members.setdefault(find(of_w[0]), []).append(w)
    whole: dict[int, set[int]] = {}
    for birth in list(leader):
        whole.setdefault(find(birth), set()).add(birth)
    return [Part(symmetry, whole[root], members[root]) for root in sorted(members)]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is going to be written: factors on parameters, and entries of the config."""

    factors: dict[str, Callable[[], Tensor]]
    """By the first name of the parameter; made when its file is written: all of them are as large as the model."""
    counts: set[str]  # parameters that count in the norm
    p: float
    config: dict[str, Any] = field(default_factory=dict)
    """Entries that change with the weights: the ε of norms that absorb the size of what they read (`rms_norm_eps`,
    `layer_norm_eps`). Least-norm criteria hold those scales; `equinorm fit16` moves them."""
    imbalance: float = 0.0
    iterations: int = 0
    converged: bool = True
    num_scales: int = 0
    held: int = 0
    held_in: tuple[str, ...] = ()
    passes: float = 0.0  # of the solver over the weights, on average
    value_before: float = 0.0  # of the criterion, as in `BalanceReport`
    value_after: float = 0.0
    shifts: dict[str, float] = field(default_factory=dict)  # of gains that are stored minus a number: that number


@torch.no_grad()
def balanced(
    bound: Bound,
    symmetry: Symmetry,
    p: float = 2.0,
    c: float = 1.0,
    tol: float = 1e-8,
    parameters: Iterable[str] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Plan:
    """The factors of least Lp norm, by one pass over the weights that move."""
    counts = counting(symmetry, parameters)
    log_scales = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    imbalance, iterations, converged, held, passes, size = 0.0, 0, True, 0, 0.0, 0
    held_in: list[str] = []
    before, after = 0.0, 0.0
    every = parts(symmetry)
    with bound.folder.reading() as get:
        for number, part in enumerate(every):
            say(f"part {number + 1} of {len(every)}")
            part.tensors = {w.name: bound.parameter(w.name, get) for w in part.parameters}
            for name, tensor in part.tensors.items():
                if tensor.dtype not in PLAIN_DTYPES:
                    raise UserError(f"{name} has dtype {tensor.dtype} in the checkpoint, which cannot be rescaled")
            problem = Norm(p, c).problem(part, counts)
            found = optimum(part, problem, tol)
            before += problem.value(torch.zeros(part.num_scales, dtype=torch.float64))
            after += problem.value(found.log_scales)
            log_scales[part.variables] = found.log_scales
            imbalance, iterations = max(imbalance, found.imbalance), iterations + found.iterations
            converged, held = converged and found.converged, held + int(found.still.sum())
            held_in += found.held_in
            numbers = sum(tensor.numel() for tensor in part.tensors.values())
            passes, size = passes + found.passes * numbers, size + numbers
            part.tensors = {}
    return Plan(
        factors={bound.canonical(name): factor for name, factor in factors_when_due(symmetry, log_scales).items()},
        counts={bound.canonical(w.name) for w in symmetry.parameters if counts(w)},
        p=p,
        imbalance=imbalance,
        iterations=iterations,
        converged=converged,
        num_scales=symmetry.num_scales,
        held=held,
        held_in=tuple(held_in),
        passes=passes / max(size, 1),
        value_before=before,
        value_after=after,
    )


def factors_when_due(symmetry: Symmetry, log_scales: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What makes the factor on each parameter that a scale moves, by its name."""
    padded = symmetry.padded(log_scales)
    moved = (w for w in symmetry.moving if any(bool(log.any()) for log in w.logs(padded)))
    return {w.name: partial(w.factor, padded) for w in moved}


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Written:
    """What came of writing."""

    norm_before: float = 0.0
    norm_after: float = 0.0
    shards: int = 0
    left_out: list[str] = field(default_factory=list)  # files with weights from before
    check: Check = field(default_factory=lambda: Check(why_not="it was not asked for"))


@torch.no_grad()
def write(
    bound: Bound,
    plan: Plan,
    output: Path | None,
    check: Callable[[Bound, Bound], Check],
    shard_size: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Written:
    """Write the whole folder, or nothing: shard by shard, each read back and compared; then `check` old and new.

    Without `output` the folder is made, checked, and thrown away.
    """
    folder, done = bound.folder, Written()
    shards, index = _split(folder, shard_size)
    norms = _Norms(plan)
    with _kept_or_thrown_away(output, folder) as temporary:
        for number, (file, keys) in enumerate(shards.items()):
            say(f"shard {number + 1} of {len(shards)}")
            tensors = _rescaled_shard(bound, plan, keys, norms)
            _save(tensors, temporary / file, next(iter(folder.metadata.values())))
            del tensors
        if index is not None:
            write_text(temporary / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        done.left_out = _copy_others(folder, temporary)
        if plan.config:
            write_text(temporary / CONFIG, json.dumps({**folder.config, **plan.config}, indent=2) + "\n")
        say("comparing outputs")
        done.check = check(bound, Bound(Pretrained.read(temporary), bound.model))
        done.check.raise_if_changed()
    done.norm_before, done.norm_after, done.shards = *norms.total(), len(shards)
    return done


@contextmanager
def _kept_or_thrown_away(output: Path | None, folder: Pretrained) -> Iterator[Path]:
    if output is None:
        with tempfile.TemporaryDirectory(prefix="equinorm-") as name:
            _check_room(Path(name), folder)
            yield Path(name)
        return
    _check_room(output.resolve().parent, folder)
    try:
        with appearing(output) as temporary:
            yield temporary
    except (OSError, RuntimeError) as error:
        raise UserError(f"could not write {output}: {first_line(error)}. Nothing is left of it") from error


def _check_room(place: Path, folder: Pretrained) -> None:
    free = shutil.disk_usage(place).free
    if free < 1.01 * folder.nbytes:
        raise UserError(f"{place} has room for {in_bytes(free)}, and {in_bytes(folder.nbytes)} are needed")


def _split(folder: Pretrained, shard_size: str | None) -> tuple[dict[str, list[str]], dict[str, Any] | None]:
    """The names in every file that will be written, and the index: those of the folder, or as the hub's library does
    for another size."""
    if shard_size is None:
        return folder.shards, folder.index
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
    except ImportError as error:
        raise UserError("huggingface_hub is not installed: pip install huggingface_hub") from error
    empty = {name: folder.tensors[name].empty() for shard in folder.shards.values() for name in shard}
    try:
        split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size {shard_size}: {first_line(error)}. Write a size like 5GB or 500MB") from error
    index = {"metadata": {**split.metadata}, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return {file: list(names) for file, names in split.filename_to_tensors.items()}, index


class _Norms:
    """The Lp norm of the parameters that count, before and after, of tensors that pass by."""

    def __init__(self, plan: Plan) -> None:
        self.counts, self.p = plan.counts, plan.p
        self.before, self.after = 0.0, 0.0
        self.seen: set[str] = set()

    def begin(self, name: str) -> bool:
        """Whether a parameter counts and is seen for the first time."""
        if name not in self.counts or name in self.seen:
            return False
        self.seen.add(name)
        return True

    def add(self, before: Tensor, after: Tensor) -> None:
        power = self._power(before)
        self.before += power
        self.after += power if after is before else self._power(after)

    def _power(self, x: Tensor) -> float:
        return float(torch.linalg.vector_norm(x, self.p, dtype=torch.float64)) ** self.p if x.numel() else 0.0

    def total(self) -> tuple[float, float]:
        return float(self.before ** (1 / self.p)), float(self.after ** (1 / self.p))


def _rescaled_shard(bound: Bound, plan: Plan, keys: list[str], norms: _Norms) -> dict[str, Tensor]:
    """The tensors of one file as they will be written, none of them a view of what was read."""
    wanted, made = set(keys), {}
    with bound.folder.reading() as get:
        for group in bound.groups:
            if wanted.isdisjoint(group.keys):
                continue
            values = group.values(get)
            moved = False
            for name, value in values.items():
                canonical = bound.canonical(name)
                factor = plan.factors.get(canonical)
                counts = norms.begin(canonical)
                if factor is not None:
                    shift = plan.shifts.get(canonical, 0.0)
                    values[name], moved = rescaled(value, factor(), norms if counts else None, shift), True
                elif counts:
                    for piece in value.reshape(-1).split(CHUNK):
                        norms.add(piece, piece)
            back = group.stored(values) if moved else {key: get(key) for key in group.keys}
            for key in wanted.intersection(group.keys):
                alone = moved and len(group.keys) == 1
                made[key] = back[key] if alone else back[key].clone(memory_format=torch.contiguous_format)
        for key in wanted.intersection(bound.unused):
            made[key] = get(key).clone()
    return made


def rescaled(tensor: Tensor, factor: Tensor, norms: _Norms | None = None, shift: float = 0.0) -> Tensor:
    """A tensor times a factor that broadcasts to it, rounded once, computed a piece at a time.

    With a shift, tensor + shift is multiplied: a gain that is stored minus 1.

    >>> rescaled(torch.ones(2, dtype=torch.bfloat16), torch.tensor([3.0, 0.5]))
    tensor([3.0000, 0.5000], dtype=torch.bfloat16)
    """
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    exact = torch.float64 if tensor.dtype in (torch.float64, torch.float32) else torch.float32
    factor = factor.to(exact)
    if tensor.ndim == 0 or not tensor.numel():
        return made.copy_(_shifted(tensor.to(exact), factor, shift))
    rows = max(1, CHUNK // (tensor.numel() // len(tensor)))
    for start in range(0, len(tensor), rows):
        piece = tensor[start : start + rows].to(exact)
        by = factor[start : start + rows] if len(factor) > 1 else factor
        new = made[start : start + rows].copy_(_shifted(piece, by, shift))
        if norms is not None:
            norms.add(piece, new)
    return made


def _shifted(x: Tensor, factor: Tensor, shift: float) -> Tensor:
    return (x + shift) * factor - shift if shift else x * factor


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    """Write one file, read it back, and compare every byte."""
    from safetensors.torch import save_file

    save_file(tensors, str(path), metadata=metadata)
    with _opened(path) as content:
        if set(content.keys()) != set(tensors):
            raise OSError(f"{path.name} came back from the disk with other names")
        for name, tensor in tensors.items():
            if not same_bits(content.get_tensor(name), tensor):
                raise OSError(f"{name} came back from the disk as something else")


def _copy_others(folder: Pretrained, into: Path) -> list[str]:
    """Copy config, tokenizer and whatever else is no weights; returns the names of what was left out."""
    left_out = []
    for path in sorted(folder.path.rglob("*")):
        name = path.relative_to(folder.path)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if str(name) in folder.metadata or path.name.endswith(".index.json"):
            continue
        if path.name.endswith(OTHER_WEIGHTS):
            left_out.append(str(name))
            continue
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, into / name)
    return left_out


def in_bytes(n: float) -> str:
    """A number of bytes for people.

    >>> in_bytes(8_619_000_000)
    '8.6 GB'
    """
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB" if n < 10 else f"{n:.0f} GB"


# -- old and new on a few layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """How much the outputs of a model with a few of the layers changed."""

    change: float = 0.0
    accepted: float = 0.0
    what: str = ""  # which layers
    computed_in: str = ""
    why_not: str = ""  # why there was none

    def raise_if_changed(self) -> None:
        if not self.why_not and not self.change <= self.accepted:
            raise UserError(
                f"the outputs of {self.what} changed by {self.change:.1e}, more than the {self.accepted:.0e} that "
                "rounding explains, so nothing was written"
            )

    def __str__(self) -> str:
        if self.why_not:
            return f"outputs: not compared ({self.why_not})"
        return (
            f"outputs: largest relative change {self.change:.1e} on {self.what}, computed in {self.computed_in} "
            f"(accepted up to {self.accepted:.0e})"
        )


def check_slices(
    old: Bound,
    new: Bound,
    make: Callable[[tuple[int, ...]], nn.Module],
    choices: list[list[tuple[int, ...]]],
    examples: Callable[[nn.Module], list[Any]],
) -> Check:
    """Compare old and new on small models: of the first choice of layers that fits, one model per tuple of layers."""
    why_not = "the model has no layers to choose from and is large"
    for choice in choices:
        try:
            checks = [_check_slice(old, new, make(layers), layers, examples) for layers in choice]
        except _NoSliceError as error:
            why_not = str(error)
            continue
        worst = max(checks, key=lambda check: check.change)
        return replace(worst, what=" and on ".join(check.what for check in checks))
    return Check(why_not=why_not)


class _NoSliceError(Exception):
    """Layers that do not make a model of the same kind."""


def _check_slice(
    old: Bound, new: Bound, model: nn.Module, layers: tuple[int, ...], examples: Callable[[nn.Module], list[Any]]
) -> Check:
    small = 8 * sum(p.numel() for p in model.parameters()) <= max(old.folder.largest_shard, 1 << 28)
    found: list[list[Tensor]] = []
    used = torch.float64
    for dtype in (torch.float64, torch.float32) if small else (torch.float32,):
        found, used = [], dtype
        model.to(dtype)
        try:
            for bound in (old, new):
                _fill(model, bound, layers)
                found.append(verify.outputs_in(model, examples(model), dtype))
            break
        except (UserError, _NoSliceError):
            raise
        except Exception as error:  # it is the user's model that runs
            found = []
            reason = first_line(error)
    if not found:
        raise _NoSliceError(f"a model of {_named(layers)} does not run: {reason}")
    least = {stored.dtype for stored in old.folder.tensors.values() if stored.dtype in verify.TOLERANCE}
    accepted = max((verify.TOLERANCE[dtype] for dtype in least), default=1e-6)
    if used == torch.float32:
        accepted = max(accepted, 1e-4)  # the sums themselves are rounded
    return Check(verify.relative_change(*found), accepted, _named(layers), str(used).removeprefix("torch."))


def _named(layers: tuple[int, ...]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else "the whole model"


def _fill(model: nn.Module, bound: Bound, layers: tuple[int, ...]) -> None:
    """Give a model of a few layers the values of these layers; of tables that are shorter there, the first rows."""
    with bound.folder.reading() as get:
        for name, value in model.state_dict(keep_vars=True).items():
            source = re.sub(r"(?<=\.)\d+(?=\.)", lambda m: str(_layer(int(m[0]), layers)), name, count=1)
            try:
                values = bound.parameter(source, get)
            except KeyError:
                raise _NoSliceError(f"{_named(layers)} have no {source}") from None
            values = values[: len(value)] if value.ndim else values
            if values.shape != value.shape:
                raise _NoSliceError(f"{source} has another shape in {_named(layers)}")
            value.detach().copy_(values)


def _layer(number: int, layers: tuple[int, ...]) -> int:
    return layers[number] if number < len(layers) else number
