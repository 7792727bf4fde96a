"""Random nets whose residual stream leaves float16's range, before and after `equinorm fit16`.

    python scripts/fit16_table.py --out results

Every net has random weights, and one layer that writes into the stream inflated until activations overflow, as in the
reports: a T5 decoder (transformers #37226), a Llama, a Gemma (1 + w, norms behind the branches, tied embeddings; vllm
#13232), the decoder of a diffusion VAE (diffusers #9097). Language models are saved as folders, written anew by
`fit16`, and loaded again; in float64, so that what is seen is the rescaling and not the rounding of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equinorm.files import write_text
from equinorm.lab.bench.facts import facts
from equinorm.symmetry.verify import relative_change
from equinorm.tools import fit16, transformer

SEEDS = range(3)
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# -- the nets ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
    return model


@torch.no_grad()
def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.normal_(0, 0.3)
    gain = model.model.layers[1].post_feedforward_layernorm.weight
    gain.add_(1).mul_(1e5).sub_(1)
    return model


@torch.no_grad()
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    for block in model.decoder.block[1:]:
        block.layer[2].DenseReluDense.wo.weight.mul_(1e5)
    return model


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels, eps=1e-6), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out, eps=1e-6), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(2).mT
        h = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return x + self.out(h).mT.reshape(x.shape)


class VAEDecoder(nn.Module):
    """Latents to images, as the decoders of latent diffusion are built."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 32, 3, padding=1)
        self.mid = nn.Sequential(ResidualBlock(32, 32), Attention(32), ResidualBlock(32, 32))
        self.up = nn.ModuleList([ResidualBlock(32, 32), ResidualBlock(32, 16)])
        self.upsample = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)])
        self.norm, self.conv_out = nn.GroupNorm(8, 16, eps=1e-6), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for block, conv in zip(self.up, self.upsample, strict=True):
            x = conv(F.interpolate(block(x), scale_factor=2.0))
        return self.conv_out(F.silu(self.norm(x)))


@torch.no_grad()
def vae() -> nn.Module:
    model = VAEDecoder()
    model.up[0].conv2.weight.mul_(1e6)
    return model


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 300, (4, 16))}


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "T5": (t5, lambda: tokens() | {"decoder_input_ids": torch.randint(3, 300, (4, 8))}),
    "Llama": (llama, tokens),
    "Gemma 2": (gemma, tokens),
    "diffusion VAE": (vae, lambda: torch.randn(2, 4, 8, 8)),
}

# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    build, draw = NETS[name]
    with transformer.quiet(), tempfile.TemporaryDirectory() as place:
        model, inputs = build().double().eval(), [draw(), draw()]
        folder = f"{place}/old" if hasattr(model, "config") else None
        if folder is not None:
            model.save_pretrained(folder)
            model = fit16.opened(f"hf:{folder}", None, ()).model
        exact = fit16.exact_outputs(model, inputs)
        before = fit16.state_in(model, inputs, torch.float16, exact)
        fitted = fit16.fit(model, inputs, folder)
        moved = fitted.moved()
        if folder is not None:
            fit16.write_folder(folder, (), fitted, inputs, Path(place) / "new")
            moved = fit16.opened(f"hf:{place}/new", None, ()).model
    after = fit16.state_in(moved, inputs, torch.float16, exact)
    single = fit16.state_in(model, inputs, torch.float32, exact)
    return {
        "net": name,
        "seed": seed,
        "numbers": before.numbers,
        "infinite_before": before.infinite,
        "error_before": before.error,
        "infinite_after": after.infinite,
        "error_after": after.error,
        "error_float32": single.error,
        "change_float64": relative_change(fit16.exact_outputs(moved, inputs), exact),
        "excess": fitted.excess,
        "config": fitted.config,
        "epsilons": len(fitted.numbers),
        "notes": fitted.notes,
    }


def table_of(rows: list[dict[str, Any]]) -> str:
    head = f"{'net':14} {'infinite before':>22} {'after':>6} {'error before':>13} {'error after':>22} {'float64':>9}"
    lines = [f"float16, median (least-most) of {len(SEEDS)} random nets", head]
    for name in dict.fromkeys(row["net"] for row in rows):
        some = [row for row in rows if row["net"] == name]
        shares = [row["infinite_before"] / row["numbers"] for row in some]
        errors = [row["error_after"] for row in some]
        worst = [row["error_before"] for row in some]
        finite = [error for error in worst if math.isfinite(error)]
        lines.append(
            f"{name:14} {statistics.median(shares):8.1%} ({min(shares):.1%}-{max(shares):.1%})"
            f" {max(row['infinite_after'] for row in some):6}"
            f" {f'{statistics.median(finite):.1e}' if len(finite) == len(some) else 'no numbers':>13}"
            f" {statistics.median(errors):.1e} ({min(errors):.1e}-{max(errors):.1e})"
            f" {max(row['change_float64'] for row in some):9.0e}"
        )
    lines += ["", "infinite: activations, of all that modules put out (after: the most of any net); error: of the"]
    lines += ["outputs, relatively, against float64; float64: the largest change of the function, ε carried"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where fit16.txt and fit16.json are written")
    parser.add_argument("--only", action="append", default=[], choices=list(NETS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    about, rows = facts(torch.device("cpu")), []
    for name in given.only or NETS:
        for seed in SEEDS:
            rows.append(measured(name, seed))
            print(rows[-1], flush=True)
    text = table_of(rows)
    print(text)
    if given.out is not None:
        head = "".join(f"{key}: {value}\n" for key, value in about.items())
        write_text(given.out / "fit16.txt", f"{head}\n{text}\n")
        write_text(given.out / "fit16.json", json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
