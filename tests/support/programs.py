"""Random programs written to break the engine: in-place writes, views, dtypes, aliases, custom ops, lists, masks.

A program is the text of a function of a small net and its input, made line by line: each line is tried on real numbers
first, and kept if it runs. So whatever stands in a program is something a user could have written.

    source = program(seed=7)
    print(source)
    model, x = model_of(source)
"""

from __future__ import annotations

import linecache
import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from support.nets import relative_error

TOLERANCE = 1e-9
ROUNDED = 1e-5  # where a program computes in float32, which is allowed to round otherwise
LARGEST = 1e4  # numbers beyond it would make rounding errors look like faults


class Layers(nn.Module):
    """The net that programs use: linear layers a, g: 6 -> 8, b: 8 -> 8, c: 8 -> 3, a gain p, a buffer and a tensor."""

    table: Tensor

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.a, self.g, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.p = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("table", torch.linspace(-1, 1, 8))
        self.plain = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@torch.library.custom_op("programs::shift_second", mutates_args=("y",))
def shift_second(x: Tensor, y: Tensor) -> None:
    y.mul_(0.5).add_(x.mean())


@torch.library.custom_op("programs::shift_all", mutates_args=("ys",))
def shift_all(ys: list[Tensor], by: float) -> None:
    for y in ys:
        y.add_(by)


@torch.library.custom_op("programs::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x + by


@torch.library.custom_op("programs::swap", mutates_args=("x", "y"))
def swap(x: Tensor, y: Tensor) -> Tensor:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return kept.sum()


@shift_second.register_fake
def _(x: Tensor, y: Tensor) -> None:
    return None


@shift_all.register_fake
def _(ys: list[Tensor], by: float) -> None:
    return None


@shifted.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@swap.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(())


# In the lines below H stands for a tensor of shape 4 x 8, V for any floating tensor, K for any constant, I for integers
# or booleans, N for a number, D for a dtype; two of one kind may be the same tensor. The name of a result follows "=>".
HIDDEN = """
m.a(x).relu() => h; m.g(x).relu() => h; m.g(x).sigmoid() => h; m.a(x).abs() => h; F.leaky_relu(m.a(x)) => h
m.b(H).relu() => h; m.b(H) => h; m.a(x) => h; H * m.p => h; H + H => h; H * H => h; F.linear(x, m.a.weight) => h
F.linear(H, m.b.weight, m.p) => h; F.linear(x, m.g.weight.clone()).relu() => h; torch.where(I, H, H) => h
"""
VIEWS = """
V[:, :4] => v; V[:, 4:] => v; V[::2] => v; V[0] => v; V[..., 0] => v; V.t() => v; V.T => v; V.view(-1) => v
V.reshape(-1) => v; V.reshape(2, -1) => v; V.view(2, -1) => v; V.unsqueeze(0) => v; V.squeeze() => v; V.flatten() => v
V.transpose(0, 1) => v; V.permute(1, 0) => v; V.narrow(0, 0, 2) => v; V.select(-1, 1) => v; V.diagonal() => v
V.chunk(2, -1)[1] => v; V.split(3, -1)[0] => v; torch.unsafe_chunk(V, 2, -1)[0] => v; V.unbind(0)[1] => v
torch.unsafe_split(V, 4, -1)[1] => v; V.tensor_split(2, -1)[1] => v; V.hsplit(2)[0] => v; V.unfold(-1, 2, 2) => v
V.expand(2, *V.shape) => v; V.as_strided((2, 3), (3, 1)) => v; torch.einsum("ij->ji", V) => v
torch.einsum("ii->i", V) => v; torch.meshgrid(V, indexing="ij")[0] => v; torch.movedim(V, 0, -1) => v; V.detach() => v
F.dropout(V, 0.5, False) => v; V.type_as(x) => v; V.to(x.dtype) => v; V.contiguous() => v; V.view_as(V) => v
V.real => v; V[None] => v; V[:] => v; V[torch.tensor([1, 0])] => v; V.view(torch.int64) => i; V.swapaxes(0, -1) => v
torch.atleast_2d(V) => v; V.unflatten(-1, (2, -1)) => v; V.broadcast_to((2, *V.shape)) => v
torch.broadcast_tensors(V, V)[0] => v; V.positive() => v; torch.ops.aten.alias(V) => v; V.ravel() => v; V.mT => v
"""
WRITES = """
V.fill_(N); V.add_(N); V.add_(V); V.mul_(V); V.mul_(N); V.copy_(V); V.copy_(K); V.zero_(); V.relu_(); V.abs_()
V.neg_(); V.sigmoid_(); V.clamp_(0.0); V.clamp_(max=0.5); V.sub_(V); V.div_(V.abs() + 1); V.pow_(2); V.sqrt_()
V[0] = N; V[:, 0] = N; V[..., 1:3] = V; V[::2] = V; V[0] = V; V[:, :4] = V; V[I] = N; V[V > 0.3] = N; V[V < 0] = 0.0
V.masked_fill_(I, N); V.masked_fill_(V > 0.2, N); V.index_fill_(0, torch.tensor([0, 1]), N)
V.index_add_(0, torch.tensor([0, 1]), V); V.index_copy_(0, torch.tensor([1]), V); V.index_put_((I,), V)
V.scatter_(0, torch.zeros_like(V, dtype=torch.int64), V); V.scatter_add_(0, torch.zeros_like(V, dtype=torch.int64), V)
V.scatter_(-1, torch.ones(1, 1, dtype=torch.int64), N); V.lerp_(V, 0.3); V.addcmul_(V, V); V.addcdiv_(V, V.exp())
F.relu(V, inplace=True); F.relu6(V, inplace=True); F.leaky_relu(V, 0.1, inplace=True); F.elu(V, inplace=True)
F.hardtanh(V, inplace=True); F.silu(V, inplace=True); F.threshold(V, 0.1, 0.0, inplace=True); F.celu_(V); V.t_()
V.transpose_(0, 1); V.squeeze_(); V.unsqueeze_(0); V.swapaxes_(0, -1); V.tril_(); V.triu_(); V.cumsum_(-1); V.floor_()
V.round_(); V.sign_(); V.exp_(); V.tanh_(); V.fill_diagonal_(N); V.diagonal().fill_(N); V.copysign_(V)
V.masked_scatter_(I, V); V.put_(torch.tensor([0, 3]), V); V.remainder_(0.7); V.renorm_(2, 0, 1.0); V.square_()
V.reciprocal_(); V.clamp_min_(0); V.clamp_max_(V); V.nan_to_num_(); V.hypot_(V); V.fmod_(N); V.rsub_(V); V.sin_()
V.view(-1)[1:3].add_(N); V.t().mul_(V); V.reshape(-1)[::3] = N; V.detach().add_(N); V.flatten()[0].add_(V.sum())
V.bernoulli_(0.5); V.uniform_(); F.dropout(V, 0.5, True, inplace=True); F.alpha_dropout(V, 0.3, True, inplace=True)
V.set_(V); V.resize_as_(V); V.geometric_(0.5); V.addmm_(V, V); V.addmv_(V, V); V.baddbmm_(V, V, V); K.abs_(); K.neg_()
K.relu_(); K.add_(V); K.copy_(V); K[0] = V; K[..., 1:3] = V; K.view(-1).abs_(); K.fill_(N); K.zero_(); K.mul_(N)
K[:4] = V.sum(); K.t()[0] = N; F.dropout(K[:], 0.5, True, inplace=True); K.add_(1); K.index_fill_(0, I, 1)
K.logical_not_(); K.bitwise_not_(); K.ge_(0); K.lt_(V); I.logical_not_(); I.copy_(V); I.fill_(V.sum()); I[0] = V[0]
m.table.copy_(V.mean(0)); m.table.add_(1.0); m.plain.mul_(0.5); m.plain[:4] = 1.0; m.table[:2].fill_(V.sum())
"""
OUT = """
torch.add(V, V, out=V); torch.mul(V, V, out=V); torch.add(V, N, out=V); torch.abs(V, out=V); torch.neg(V, out=V)
torch.matmul(V, V, out=V); torch.cat([V, V], out=V); torch.max(V, 0, out=(V, I)); torch.clamp(V, 0, out=V)
torch.where(I, V, V, out=V); torch.sign(V, out=V); torch.sum(V, 0, out=V); torch.sigmoid(V, out=V)
torch.add(V, V, out=K); torch.stack([V, V], out=V); torch.sort(V, out=(V, I)); torch.index_select(V, 0, I, out=V)
torch.sub(V, K, out=V); torch.gt(V, 0, out=I); torch.gt(V, N, out=K); torch.mean(V, -1, out=V)
torch.cumsum(V, 0, out=V); torch.exp(V, out=K); torch.add(K, K, out=V); torch.ones(4, 1, dtype=x.dtype, out=V)
torch.arange(8, out=K); torch.zeros(8, out=K)
"""
LISTS = """
torch._foreach_add_([V, V], 1.0); torch._foreach_mul_([V], 2.0); torch._foreach_mul_([V, V], [V, V])
torch._foreach_abs_([V, V]); torch._foreach_neg_([V]); torch._foreach_zero_([V]); torch._foreach_copy_([V, V], [V, K])
torch._foreach_sqrt_([V]); torch._foreach_sigmoid_([V, V]); torch._foreach_lerp_([V], [V], 0.5)
torch._foreach_addcmul_([V], [V], [V]); torch._foreach_clamp_min_([V, V], 0.0); torch._foreach_sub_([V], [V])
torch._foreach_mul([V, V], 3.0)[1] => v; torch._foreach_add([V], [V])[0] => v; torch._foreach_maximum_([V], 0.1)
torch._foreach_exp_([V]); torch._foreach_div_([V], [V]); torch._foreach_norm([V, V])[0] => v
torch._foreach_add_([K], 1); torch._foreach_pow_([V], 2); torch._foreach_reciprocal_([V])
torch._foreach_abs([V])[0] => v; torch._foreach_sign_([V])
"""
CUSTOM = """
torch.ops.programs.shift_second(V, V); torch.ops.programs.shift_second(V, K); torch.ops.programs.shift_all([V, V], 0.5)
torch.ops.programs.shifted(V, 0.5) => v; torch.ops.programs.swap(V, V) => v; torch.ops.programs.shift_all([K], 1.0)
torch.ops.programs.shift_all(list(V.unbind(0)), 1.0); torch.ops.programs.shift_second(x, V[..., :2])
"""
CONSTANTS = """
torch.zeros(4, 8, dtype=D) => k; torch.ones(8, dtype=D) => k; torch.zeros(8, dtype=D) => k
-torch.ones(8, dtype=D) => k; torch.zeros_like(V, dtype=D) => k; torch.ones_like(V[0], dtype=D) => k
torch.full_like(V, 0.5, dtype=D) => k; torch.arange(8) => k; torch.eye(8, dtype=D) => k
torch.linspace(-1, 1, 8, dtype=x.dtype) => k; K.view(2, -1) => k; K - 1 => k; K + 1 => k; K * 2 => k; K > 0 => k
K == 0 => k; K.to(D) => k; K.clone() => k; K[:4] => k; K.expand(4, 8) => k; V.new_zeros(4, 8) => k
V.new_full((8,), 0.3) => k; V.new_ones(8, dtype=D) => k; torch.tensor([0.0, 1.0] * 4) => k; torch.tensor(0.0) => k
torch.full((4, 8), N) => k; m.table => k; m.plain => k; torch.empty(4, 8, dtype=D).zero_() => k
torch.zeros(4, 8, dtype=x.dtype) => v; torch.ones(4, 8, dtype=x.dtype) => v; torch.zeros(8, dtype=x.dtype) => v
K.bool() => i; K > 0 => i; V > 0 => i; V > 0.4 => i; V[0] > 0 => i; (V > 0).any(0) => i; V.argmax(0) => i
V.sign() => v; torch.tensor([0, 1]) => i; torch.tensor([True, False] * 4) => i
torch.ones_like(V, dtype=torch.bool) => i; ~I => i; V.isnan() => i; V.long() => i; torch.nonzero(V > 0)[:, 0] => i
torch.ones(8, dtype=torch.bool) => i; V >= V => i
"""
CASTS = """
V.to(D).to(x.dtype) => v; K.to(x.dtype) => v; I.to(x.dtype) => v; V + K => v; V * K => v; V - K => v; V * I => v
V.half().double() => v; V.float().double() => v; V.to(torch.bfloat16).to(x.dtype) => v; V.int().to(x.dtype) => v
V.sum(0, dtype=D).to(x.dtype) => v; torch.complex(V, V).abs() => v; torch.complex(V, V).real => v
V.type(D).double() => v; V.to(torch.float8_e4m3fn).to(x.dtype) => v; V.to(torch.float8_e5m2).to(x.dtype) => v
torch.where(K > 0, V, V) => v; torch.where(I, V, K) => v; V.to(torch.float16).sum().to(x.dtype) => v
V.mean(dtype=torch.float32).double() => v; torch.view_as_real(torch.complex(V, V)) => v; (K.to(x.dtype) + 1) * V => v
(V > K).to(x.dtype) => v; V.byte().double() => v; V.cumsum(0, dtype=torch.int64).to(x.dtype) => v
V.prod(0, dtype=D).to(x.dtype) => v; V.sum(dtype=torch.int32).double() => v
torch.softmax(V, -1, dtype=torch.float32).double() => v; V.char().double() => v
"""
MIXES = """
V + V => v; V - V => v; V * V => v; V / (V.abs() + 1) => v; torch.maximum(V, V) => v; torch.cat([V, V], -1) => v
torch.stack([V, V]) => v; V.sum(-1) => v; V.mean(0) => v; V.max(-1)[0] => v; V.amax(0, keepdim=True) => v; V @ V => v
V.t() @ V => v; V.softmax(-1) => v; V.sort(-1)[0] => v; V.topk(2, -1)[0] => v; V.cumsum(0) => v; V.norm() => v
V.std(-1) => v; V.gather(0, torch.zeros_like(V, dtype=torch.int64)) => v; V.relu() => v; V.abs() => v; -V => v
V.masked_fill(I, 0.0) => v; V.masked_fill(I, N) => v; V[I] => v; V[V > 0] => v; V.masked_select(I).sum() => v
V.roll(1, 0) => v; V.index_select(0, torch.tensor([1, 0])) => v; V.repeat(2, 1) => v; V.repeat_interleave(2, 0) => v
V.flip(0) => v; V.repeat_interleave(torch.tensor([1, 2, 1, 0]), 0) => v; V.sum() * V => v; V.square().sum().sqrt() => v
V.clone() => v; F.pad(V, (1, 1)) => v; F.pad(V, (1, 1), value=1.0) => v; V.clamp(min=0) => v; V.clamp(0, 1) => v
torch.tanh(V) => v; V.index_add(0, torch.tensor([0, 1]), V) => v
V.scatter(0, torch.zeros_like(V, dtype=torch.int64), V) => v; V.tril() => v; torch.einsum("ij,ij->i", V, V) => v
torch.einsum("ij,kj->ik", V, V) => v; torch.einsum("ij,j->i", V, m.p) => v; F.linear(V, m.b.weight) => v
F.linear(V, m.c.weight) => v; F.linear(V, m.b.weight[:4]) => v; V * m.p => v; V + m.p => v
F.layer_norm(V, V.shape[-1:]) => v; V / V.norm() => v; F.normalize(V, dim=-1) => v; V.var(0) => v; V.diff(dim=-1) => v
torch.addmm(V, V, V) => v; torch.outer(V, V) => v; torch.lerp(V, V, 0.3) => v; torch.logsumexp(V, -1) => v
V.prod(-1) => v; m.b(V) => v; m.c(V) => v; m.b.weight.clone() => v; m.b.weight.detach() => v; m.a.weight.t() => v
m.p.exp() => v; V.index_put((torch.tensor([0]),), V) => v; torch.where(V > 0, V, 0.0) => v
torch.where(V > 0, V, N) => v; V * N => v; V + N => v; torch.slice_scatter(V, V, 0, 0, 2) => v
torch.select_scatter(V, V, 0, 1) => v; torch.diagonal_scatter(V, V) => v; V.unique() => v; V[V[:, 0] > 0] => v
V.item() => v; V / V.max().item() => v; V.expand_as(V) => v; V.minimum(K) => v
"""
KINDS = {
    "h": HIDDEN,
    "v": VIEWS,
    "w": WRITES,
    "o": OUT,
    "l": LISTS,
    "u": CUSTOM,
    "k": CONSTANTS,
    "d": CASTS,
    "m": MIXES,
}
OFTEN = {"h": 3, "v": 5, "w": 7, "o": 2, "l": 2, "u": 1, "k": 3, "d": 2, "m": 5}
DTYPES = ["int64", "int32", "uint8", "bool", "float16", "bfloat16", "float32", "float64", "int8"]
NUMBERS = ["0.0", "1.0", "0.5", "-1.0", "2.0", "3.0"]
TEMPLATES = {
    kind: [t.strip() for line in text.strip().splitlines() for t in line.split(";")] for kind, text in KINDS.items()
}


@dataclass
class Draft:
    """A program while it is being written: its lines, and what the names in it stand for."""

    rng: random.Random
    values: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    def named(self, letter: str) -> str:
        """A name for a letter of a template."""
        if letter == "N":
            return self.rng.choice(NUMBERS)
        if letter == "D":
            return f"torch.{self.rng.choice(DTYPES)}"
        tensors = {name: v for name, v in self.values.items() if isinstance(v, Tensor) and name != "x"}
        fits: dict[str, Callable[[str, Tensor], bool]] = {
            "H": lambda name, v: v.shape == (4, 8) and v.dtype == torch.float64,
            "V": lambda name, v: v.dtype == torch.float64 and name[0] in "hvm",
            "K": lambda name, v: name[0] == "k",
            "I": lambda name, v: name[0] == "i",
        }
        found = [name for name, v in tensors.items() if fits[letter](name, v)]
        # what was made last is used most, so that what a line does is seen by later ones
        return self.rng.choice(found[-3:] if self.rng.random() < 0.6 else found)

    def line(self, template: str) -> str | None:
        """A template with names for its letters; None if there is no such tensor yet."""
        text, arrow, result = (part.strip() for part in template.partition("=>"))
        out, previous = [], " "
        for k, letter in enumerate(text):
            following = text[k + 1] if k + 1 < len(text) else " "
            if (
                letter in "HVKIND"
                and not (previous.isalnum() or previous in "._")
                and not (following.isalnum() or following == "_")
            ):
                try:
                    out.append(self.named(letter))
                except IndexError:
                    return None
            else:
                out.append(letter)
            previous = letter
        made = "".join(out)
        return f"{result}{len(self.lines)} = {made}" if arrow else made

    def try_line(self, line: str) -> bool:
        """Add a line if it runs on the present values and leaves tensors of a sensible size."""
        before = dict(self.values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(line, {"torch": torch, "F": F}, self.values)
        except Exception:
            self.values = before
            return False
        made = [v for name, v in self.values.items() if name not in before]
        if any(not isinstance(v, Tensor) or v.numel() == 0 or v.numel() > 512 or v.is_complex() for v in made):
            self.values = before
            return False
        if not all(_is_sensible(v) for v in self.values.values() if isinstance(v, Tensor)):
            return False  # its write cannot be taken back: give up the draft
        self.lines.append(line)
        return True


def _is_sensible(tensor: Tensor) -> bool:
    try:
        return tensor.dtype != torch.float64 or bool((tensor.abs() < LARGEST).all())
    except RuntimeError:  # autograd lets nobody read a view whose base was written to
        return False


def program(seed: int, length: int = 7) -> str:
    """The text of a random program, `def run(m, x): ...`."""
    rng = random.Random(seed)
    while True:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            text = _draft(rng, rng.randint(1, length))
        if text is not None:
            return text


def _draft(rng: random.Random, length: int) -> str | None:
    model = Layers(lambda m, x: x).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    without_gradients = rng.random() < 0.5
    draft = Draft(rng, {"m": model, "x": x})
    with torch.set_grad_enabled(not without_gradients):
        # a few kinds of lines in each program, so that not all of its scales are frozen by the others
        if not all(draft.try_line(line) for line in ("h0 = m.a(x).relu()", "h1 = m.g(x).relu()")):
            return None
        kinds = rng.choices(list(OFTEN), list(OFTEN.values()), k=4)
        for _ in range(6 * length):
            if len(draft.lines) >= length + 2:
                break
            kind = rng.choice(kinds)
            line = draft.line(rng.choice(TEMPLATES[kind]))
            if line is not None:
                draft.try_line(line)
            if not all(_is_sensible(v) for v in draft.values.values() if isinstance(v, Tensor)):
                return None
    hidden = [
        name for name, v in draft.values.items() if isinstance(v, Tensor) and v.shape == (4, 8) and name[0] in "hv"
    ]
    others = [name for name, v in draft.values.items() if isinstance(v, Tensor) and name[0] in "hvki" and v.ndim]
    if not hidden:
        return None
    read = rng.sample(hidden, min(len(hidden), 2))
    also = rng.sample(others, min(len(others), 1)) if rng.random() < 0.4 else []
    results = [f"m.c({name})" for name in read]
    results += [f"(m.g(x).relu() * {name}.to(x.dtype).mean()).sum(-1)" for name in also]
    # as many scales as can be stay free where what a program made is not put out itself
    indent = "        " if without_gradients else "    "
    body = [f"{indent}{line}" for line in draft.lines]
    end = f"{indent}return {', '.join(results)},"
    head = ["def run(m, x):"] + (["    with torch.no_grad():"] if without_gradients else [])
    return "\n".join([*head, *body, end])


def model_of(source: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A net that runs a program, and an input for it."""
    name = f"<program {zlib.crc32(source.encode())}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, name, "exec"), space)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Layers(space["run"]).double(), torch.randn(4, 6, dtype=torch.float64)


@dataclass(frozen=True)
class Verdict:
    """What became of a program: `kept` or `not captured` are well, `changed` and `failed` are faults."""

    kind: str
    scales: int = 0
    detail: str = ""

    @property
    def well(self) -> bool:
        return self.kind in ("kept", "not captured", "not a function")


def judge(source: str, seed: int = 0, verify: bool = False) -> Verdict:
    """Trace a program, move every scale at random, and see whether outputs stay."""
    model, x = model_of(source, seed)
    before = _run(model, x)
    again = _run(model_of(source, seed)[0], x)
    if before is None or again is None or not all(map(torch.equal, before, again)):
        return Verdict("not a function")
    if not all(_is_sensible(t) for t in before):
        return Verdict("not a function")
    model, x = model_of(source, seed)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    try:
        symmetry = equinorm.trace(model, x, verify=None if verify else False)
    except equinorm.TraceError as error:
        return Verdict("not captured", detail=str(error))
    except Exception as error:
        return Verdict("failed", detail=f"{type(error).__name__}: {error}")
    if verify and symmetry.verification.frozen:
        return Verdict("caught", symmetry.num_scales, str(symmetry.verification))
    if any(not torch.equal(t, state[name]) for name, t in model.state_dict().items()):
        return Verdict("failed", detail="the trace changed the state of the model")
    generator = torch.Generator().manual_seed(seed)
    symmetry.rescale_(0.5 * torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64))
    after = _run(model, x)
    if after is None or [t.shape for t in after] != [t.shape for t in before]:
        return Verdict("changed", symmetry.num_scales, "other shapes")
    error = max(relative_error(a, b) for a, b in zip(after, before, strict=True))
    if error > (ROUNDED if "float32" in source or ".float()" in source else TOLERANCE):
        return Verdict("changed", symmetry.num_scales, f"by {error:.1e}")
    return Verdict("kept", symmetry.num_scales, "; ".join(symmetry.explain(summary=True).summary.splitlines()[1:]))


def _run(model: nn.Module, x: Tensor) -> list[Tensor] | None:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return [t.detach().clone() for t in model(x.clone())]
        except Exception:
            return None


def shrunk(source: str, still: Callable[[str], bool]) -> str:
    """The program without the lines that what is wrong with it does not need."""
    lines = source.splitlines()
    again = True
    while again:
        again = False
        for k in reversed(range(1, len(lines) - 1)):
            shorter = "\n".join(lines[:k] + lines[k + 1 :])
            try:
                if still(shorter):
                    lines, again = shorter.splitlines(), True
            except Exception:  # it does not run without this line
                continue
    return "\n".join(lines)
