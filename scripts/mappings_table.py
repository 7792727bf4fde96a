"""Mappings of every decoder architecture of the installed transformers, beside llm-compressor's registry.

    python scripts/mappings_table.py --out results          # all of them, each in a process of its own
    python scripts/mappings_table.py --out results --log rows.jsonl     # goes on where it was interrupted
    python scripts/mappings_table.py --only LlamaForCausalLM

Every architecture is made tiny (two layers, 32 wide) with random weights. Found are the mappings of
`equinorm.trace(model, x, invariances=True)`. Each is moved by itself in float64. Then each that has the form of other
tools, and each of the registry, is applied as llm-compressor does it, which knows nothing of the trace: random scales
divide the smoothed layer and multiply the balanced ones. A mapping of the registry whose outputs move is refuted.
`llm_compressor_mappings.json` holds the registry's facts with their source.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import re
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equinorm
from equinorm.files import write_text
from equinorm.lab.bench.facts import facts
from equinorm.models.exact import Exact
from equinorm.tools import transformer

REGISTRY = json.loads((Path(__file__).parent / "llm_compressor_mappings.json").read_text())
KEPT = 1e-9
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_dim": 48,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 48,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "moe_k": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "use_cache": False,
    "max_seq_len": 64,
    "state_size": 8,
    "attention_hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "global_head_dim": 8,
    "cross_attention_hidden_size": 32,
    "num_kv_shared_layers": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


def architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    every = {name for each in names for name in (each if isinstance(each, tuple) else (each,))}
    return sorted(every, key=lambda name: (name not in REGISTRY["architectures"], name))


def tiny(name: str) -> nn.Module:
    """The architecture with two narrow layers."""
    import transformers

    model: Any = getattr(transformers, name)
    kind = model.config_class
    with transformer.quiet():
        own = SPECIAL.get(name, {})
        default = kind(**own)
        options = {key: value for key, value in SMALL.items() if has(default, key)}
        try:
            config, small = kind(**{**options, **own}), True
        except Exception:  # what depends on what differs from config to config
            config, small = kind(**own), False
        config = transformer.sliced(config, (0, 1))
        for part in parts_of(config)[small:]:
            shrink_(part)
        torch.manual_seed(0)
        made: nn.Module = model(config).eval()
    if sum(p.numel() for p in made.parameters()) > 3e7:
        raise ValueError("it does not get small")
    return made


SPECIAL: dict[str, dict[str, Any]] = {
    # whose defaults cannot be built
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "DbrxForCausalLM": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
}


def parts_of(config: Any) -> list[Any]:
    """A config and those in it: of text, of images."""
    from transformers import PretrainedConfig

    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for each in inner for part in parts_of(each))]


def shrink_(config: Any) -> None:
    """Small sizes in the place of those that a config has."""
    for key, value in SMALL.items():
        if has(config, key):
            with contextlib.suppress(Exception):  # what a config works out from others cannot be set
                setattr(config, key, value)


def has(config: Any, key: str) -> bool:
    """Whether a config has one number of that name."""
    try:
        getattr(config, key)
    except Exception:  # there is none, or one for each layer
        return False
    return True


# -- as llm-compressor does it -----------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None, float]]:
    """Weights and biases of layers by name, and what is added to a gain; experts that are stacked as linear layers."""
    found: dict[str, tuple[Tensor, Tensor | None, float]] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim <= 2:
            plus = 1.0 if type(module).__name__ in REGISTRY["offset_norms"] else 0.0
            found[name] = weight, getattr(module, "bias", None), plus
        both, down = (getattr(module, leaf, None) for leaf in ("gate_up_proj", "down_proj"))
        if isinstance(both, nn.Parameter) and isinstance(down, nn.Parameter) and both.shape[1] == 2 * down.shape[2]:
            for e in range(len(both)):
                gate, up = both[e].chunk(2)
                found |= {f"{name}.{e}.gate_proj": (gate, None, 0.0), f"{name}.{e}.up_proj": (up, None, 0.0)}
                found[f"{name}.{e}.down_proj"] = down[e], None, 0.0
    return found


@torch.no_grad()
def changed(model: nn.Module, x: Any, before: list[Tensor], smooth: str, balance: list[str], plus: float = 0) -> float:
    """By how much outputs move when random scales divide one layer and multiply the others."""
    twin = copy.deepcopy(model)
    layers = layers_of(twin)
    weight, bias, own_plus = layers[smooth]
    columns = {layers[name][0].shape[-1] for name in balance}
    n = columns.pop()
    if columns or weight.shape[0] < n or (bias is not None and len(bias) != n):
        return float("inf")
    scales = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    for name in balance:
        layers[name][0].mul_(scales)
    if weight.ndim == 1:
        plus = plus or own_plus
        weight.add_(plus).div_(scales).sub_(plus)
    else:
        weight[-n:].div_(scales[:, None])
    if bias is not None:
        bias.div_(scales)
    after = outputs(twin, x)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(after, before, strict=True))


@torch.no_grad()
def outputs(model: nn.Module, x: Any) -> list[Tensor]:
    with Exact():
        found = pytree.tree_leaves(model(**x))
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def resolved(model: nn.Module, smooth: str, balance: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A mapping of patterns, layer by layer; experts one by one where their number is in both."""
    layers = layers_of(model)

    def numbers(name: str) -> list[str]:
        return re.findall(r"\.(\d+)(?=\.|$)", name)

    def matching(pattern: str) -> list[str]:
        return [name for name in layers if re.match(pattern.removeprefix("re:"), name)]

    readers = [name for pattern in balance for name in matching(pattern)]
    for name in matching(smooth):
        own = numbers(name)
        near = [other for other in readers if numbers(other)[: len(own)] == own and other != name]
        parent = name.rpartition(".")[0]
        yield name, [other for other in near if other.startswith(f"{parent}.")] or near


# -- one architecture --------------------------------------------------------------------------------------------------


def measured(name: str) -> dict[str, Any]:
    """What is found in one architecture, and what of the registry holds."""
    row: dict[str, Any] = {}
    try:
        model = tiny(name)
    except Exception as error:
        return row | {"why_not": f"cannot be made tiny: {type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    x = {"input_ids": tokens}
    try:
        start = time.process_time()
        symmetry = equinorm.trace(model, x, invariances=True, verify=False)
        row["trace_seconds"] = round(time.process_time() - start, 2)
    except Exception as error:
        return row | {"why_not": f"cannot be traced: {str(error).splitlines()[0][:90]}"}
    with torch.no_grad():  # offsets and gains that are all alike hide much
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.3 * torch.randn_like(parameter))
    start = time.process_time()
    found = symmetry.mappings()
    row["seconds"] = round(time.process_time() - start, 3)
    row["scales"] = symmetry.num_scales
    row["found"] = len(found)
    row["form"] = sum(not mapping.why_not for mapping in found)
    row["worst"] = max([0.0, *(symmetry.prove(mapping, x) for mapping in found)])
    double = copy.deepcopy(model).double()
    before = outputs(double, x)
    ours, moved = {}, []
    known = layers_of(double)
    for mapping in found:
        for smooth, balance in mapping.entries:
            ours[smooth] = set(balance)
            if all(each in known for each in (smooth, *balance)):
                moved.append(changed(double, x, before, smooth, list(balance), mapping.plus))
    row["applied"], row["applied_worst"] = len(moved), max([0.0, *moved])
    if name in REGISTRY["architectures"]:
        row |= judged(double, x, before, REGISTRY["architectures"][name], ours)
    return row


def judged(double: nn.Module, x: Any, before: list[Tensor], registry: Any, ours: dict[str, set[str]]) -> dict[str, Any]:
    kept, also, refuted = 0, 0, {}
    own: set[str] = set()
    for pattern, balance in registry:
        for smooth, readers in resolved(double, pattern, balance):
            if not readers:
                continue
            own.add(smooth)
            change = changed(double, x, before, smooth, readers)
            if change <= KEPT:
                kept += 1
                also += ours.get(smooth) == set(readers)
            else:
                missing = sorted(ours.get(smooth, set()) - set(readers))
                why = f"not balanced: {', '.join(missing)}" if missing else f"outputs move by {change:.1e}"
                refuted[f"{smooth} -> {', '.join(r.rpartition('.')[2] for r in readers[:4])}"] = why
    return {
        "registry_kept": kept,
        "registry_also_ours": also,
        "registry_refuted": refuted,
        "ours_not_in_registry": sum(smooth not in own for smooth in ours),
    }


# -- all of them -------------------------------------------------------------------------------------------------------


def table_of(rows: list[dict[str, Any]]) -> str:
    head = f"{'architecture':40} {'found':>5} {'usable':>6} {'moved':>8} {'applied':>8} {'trace s':>7}  registry"
    lines = [head]
    done = [row for row in rows if "found" in row]
    for row in done:
        beside = ""
        if "registry_kept" in row:
            beside = f"{row['registry_kept']} hold ({row['registry_also_ours']} found), "
            beside += f"{len(row['registry_refuted'])} refuted; {row['ours_not_in_registry']} more found"
        lines.append(
            f"{row['architecture']:40} {row['found']:5} {row['form']:6} {row['worst']:8.0e} "
            f"{row['applied_worst']:8.0e} {row['trace_seconds']:7.2f}  {beside}"
        )
    lines += ["", "found: mappings; usable: those in other tools' form; moved: largest change of outputs when each is"]
    lines += ["moved in float64; applied: the same when applied as llm-compressor does; seconds of processor time"]
    lines += ["", f"refuted in the registry ({REGISTRY['source']}):"]
    for row in done:
        lines += [f"  {row['architecture']}: {key}: {why}" for key, why in row.get("registry_refuted", {}).items()]
    lines += ["", "left out:"]
    lines += [f"  {row['architecture']}: {row['why_not']}" for row in rows if "why_not" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where mappings.txt and mappings.json are written")
    parser.add_argument("--log", type=Path, help="rows as they are measured; what stands there is not measured again")
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    about, rows = begun(given.log)
    for name in given.only or architectures():
        if name in rows:
            continue
        rows[name] = alone(name)
        print(rows[name], flush=True)
        if given.log is not None:
            with given.log.open("a") as log:
                log.write(json.dumps(rows[name]) + "\n")
    text = table_of(list(rows.values()))
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        head = "".join(f"{key}: {value}\n" for key, value in about.items())
        write_text(given.out / "mappings.txt", f"{head}\n{text}\n")
        write_text(given.out / "mappings.json", json.dumps({**about, "rows": list(rows.values())}, indent=1) + "\n")


def begun(log: Path | None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What goes with the measurements, and the rows that a log holds; a log is of one commit."""
    about = facts(torch.device("cpu")) | {"transformers": transformers_version()}
    if log is None or not log.exists():
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(json.dumps(about) + "\n")
        return about, {}
    head, *lines = (json.loads(line) for line in log.read_text().splitlines())
    if head["commit"] != about["commit"]:
        raise SystemExit(f"{log} was begun at {head['commit']}, this is {about['commit']}: begin another one")
    return head, {row["architecture"]: row for row in lines}


def transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


SECONDS = 300
"""Of processor time, for one architecture."""


def alone(name: str) -> dict[str, Any]:
    """In a process of its own, which may end badly or not at all."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        send.send(measured(name))

    process = context.Process(target=work)
    process.start()
    send.close()
    try:
        waits = 10 * SECONDS  # others may use the machine too
        row: dict[str, Any] = receive.recv() if receive.poll(waits) else {"why_not": f"more than {waits} s"}
    except EOFError:
        process.join()
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        row = {"why_not": f"more than {SECONDS} s" if late else "the process ended without a word"}
    process.kill()
    process.join()
    return {"architecture": name, **row}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
