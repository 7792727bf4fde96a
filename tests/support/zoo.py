"""Models of other people: torchvision's, timm's, and tiny transformers, none of them with downloaded weights.

`scales` is the number of free scales, by hand, or a lower bound where nobody has done the sum. Inputs are as
small as the network allows, and widths are cut where a constructor lets us: what is tested is the structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    scales: int = 1
    exact: bool = False  # the count is worked out by hand, not a lower bound
    tolerance: float = 1e-12


TORCHVISION: dict[str, Entry] = {}
TIMM: dict[str, Entry] = {}
TRANSFORMERS: dict[str, Entry] = {}


def image(size: int = 64, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


# --- torchvision ---


def vision(name: str, size: int = 64, scales: int = 1, exact: bool = False, **options: Any) -> None:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options)

    TORCHVISION[name] = Entry(build, image(size), scales, exact)


# Without norms every hidden channel or unit is free: 64, 192, 384, 256, 256, 4096, 4096.
vision("alexnet", scales=9_344, exact=True)
# 64 + 128 + 2 * 256 + 4 * 512 channels and 2 * 4096 units.
vision("vgg11", size=32, scales=10_944, exact=True)
# One variable per stream channel (64 + 128 + 256 + 512), and one per channel inside each block.
vision("resnet18", scales=960 + 2 * 960, exact=True)
vision("resnet34", size=32, scales=960 + 3 * 64 + 4 * 128 + 6 * 256 + 3 * 512, exact=True)
# Streams 64 (stem), 256, 512, 1024, 2048; two inner norms per block.
vision("resnet50", size=32, scales=3_904 + 2 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512), exact=True)
vision("resnext50_32x4d", size=32, scales=3_904 + 2 * (3 * 128 + 4 * 256 + 6 * 512 + 3 * 1024), exact=True)
# All norms (41,824 channels) but the stem's 64, whose output goes into the first block's norms.
vision("densenet121", scales=41_760, exact=True)
# Only concatenations: all channels of all norms, without the auxiliary heads, which evaluation does not run.
vision("googlenet", scales=7_280, exact=True, init_weights=False)
vision("inception_v3", size=75, scales=17_216, exact=True, init_weights=False)
# ReLU6 freezes all but the linear bottlenecks, merged over the residual sums: one per stream channel.
vision("mobilenet_v2", scales=16 + 24 + 32 + 64 + 96 + 160 + 320, exact=True)
# Streams 224; ReLU blocks 16, 2 * 72, 2 * 88; hidden units of the squeeze-and-excite gates.
vision("mobilenet_v3_small", scales=224 + 16 + 144 + 176 + 8 + 24 + 2 * 64 + 32 + 40 + 72 + 2 * 144, exact=True)
vision("mobilenet_v3_large", scales=500)
vision("mnasnet0_5", scales=1_000)
# SiLU everywhere, in the gates too: the streams. In v2 the first stage ends in a SiLU.
vision("efficientnet_b0", scales=16 + 24 + 40 + 80 + 112 + 192 + 320, exact=True)
vision("efficientnet_v2_s", size=32, scales=48 + 64 + 128 + 160 + 256, exact=True)
vision("regnet_x_400mf", scales=10_000)
vision("regnet_y_400mf", scales=10_288, exact=True)
# Per block the norm and the end of the branch (before its layer scale), 2 * 6,624; the norms between the
# stages, 672, and the last, 768. The streams end in norms and are frozen.
vision("convnext_tiny", size=32, scales=14_688, exact=True)
# No sums at all, only concatenation and shuffling: all channels of all norms.
vision("shufflenet_v2_x0_5", scales=3_976, exact=True)
vision("shufflenet_v2_x1_0", scales=8_090, exact=True)
# 96 (64), and 2 * (144 + 288 + 432 + 576) in the fire modules.
vision("squeezenet1_0", scales=96 + 2_880, exact=True)
vision("squeezenet1_1", scales=64 + 2_880, exact=True)
# Two norms, queries against keys, and values for each block, 4 * 4,416; norms between the stages
# 384 + 768 + 1,536; the last 768.
vision("swin_t", size=64, scales=4 * 4_416 + 2_688 + 768, exact=True)
# Norms at the ends of branches: streams 96 + 192 + 384, values 4,416, the last norm, 12 position MLPs of 512.
vision("swin_v2_t", size=64, scales=672 + 4_416 + 768 + 12 * 512)
# As ResNet-50, with the 512 channels of the head and the 256 of the auxiliary one.
segmentation = {"weights_backbone": None, "aux_loss": True, "num_classes": 4}
vision("fcn_resnet50", size=32, scales=11_456 + 512 + 256, exact=True, **segmentation)
# Five branches of 256, the projection's 256 and the head's 256; the auxiliary head's 256.
vision("deeplabv3_resnet50", size=32, scales=11_456 + 7 * 256 + 256, exact=True, **segmentation)
vision("deeplabv3_mobilenet_v3_large", scales=2_000, **segmentation)
vision("lraspp_mobilenet_v3_large", scales=2_000, weights_backbone=None, num_classes=4)


def _vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5
    )


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(32, 32),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, 128, 1), CNBlockConfig(128, None, 1)], num_classes=5)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12], window_size=[7, 7])


# Per block the norm and the end of the branch (before its layer scale); the norms between the stages, and the last.
# The streams end in norms and are frozen.
TORCHVISION["convnext"] = Entry(_convnext, image(32), scales=2 * (2 * 32 + 64 + 128) + 32 + 64 + 128, exact=True)
# Two norms, queries against keys, and values for each block; norms between the stages, four patches wide; the last.
TORCHVISION["swin"] = Entry(_swin, image(64), scales=4 * 2 * (48 + 96 + 192) + 4 * (48 + 96) + 192, exact=True)
# Two norms, queries and keys, values per block of 32; the last norm.
TORCHVISION["vision_transformer"] = Entry(_vision_transformer, image(32), scales=2 * 128 + 32, exact=True)
TORCHVISION["maxvit"] = Entry(_maxvit, image(32), scales=100)


def video(name: str, scales: int) -> None:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=5)

    def example() -> Tensor:
        return torch.rand(1, 3, 4, 32, 32, generator=torch.Generator().manual_seed(1))

    TORCHVISION[name] = Entry(build, example, scales, exact=True)


video("r3d_18", scales=2_880)
video("mc3_18", scales=2_880)
# 12,675 channels of norms; in each stage three norms meet in the stream: 2 * 960 fewer.
video("r2plus1d_18", scales=12_675 - 2 * 960)

# --- timm ---


def timm_model(
    name: str,
    size: int = 64,
    scales: int = 1,
    exact: bool = False,
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **options)

    TIMM[name] = Entry(build, image(size), scales, exact, tolerance)


# Norms before every convolution: all of their channels, and frozen streams.
timm_model("resnetv2_50", size=32, scales=22_720, exact=True)
# Standardized weights cannot take up the scale of their inputs, so hidden channels are frozen.
timm_model("nf_resnet26", size=32, scales=0, exact=True)
timm_model("nf_regnet_b0")
timm_model("deit_tiny_patch16_224", scales=3 * 4 * 192 + 192, exact=True, img_size=64, depth=3)
# Two norms, queries and keys, values, and two layer scales in each of 3 + 2 blocks; the last norm.
timm_model("cait_xxs24_224", scales=5 * 6 * 192 + 192, exact=True, img_size=64, depth=3)
timm_model("xcit_nano_12_p16_224", img_size=64, depth=3)
timm_model("levit_128s", size=224, depth=(2, 1, 1))
timm_model("coat_lite_tiny", img_size=64, serial_depths=(1, 2, 1, 1))
timm_model("pvt_v2_b0", depths=(2, 1, 1, 1))
# Its linear attention casts to float32, and rounds as that does.
timm_model("efficientvit_b0", tolerance=1e-6, depths=(1, 1, 1, 2))
timm_model("repvgg_a0")
timm_model("ghostnet_100")
timm_model("hrnet_w18_small")
timm_model("convnextv2_atto", depths=(1, 1, 2, 1))
timm_model("mobilevit_xxs")
timm_model("edgenext_xx_small", depths=(1, 1, 2, 1))
timm_model("skresnet18", layers=(2, 1, 1, 1))
timm_model("res2net50_14w_8s", size=32)
timm_model("dla34", size=32)
timm_model("ese_vovnet19b_dw", size=32)
timm_model("mobileone_s0", size=32)
timm_model("lcnet_050")


timm_model("mixer_s32_224", scales=8 * (1 + 512) + 512, exact=True, img_size=64)
timm_model("resmlp_12_224", scales=384 + 12 * (1 + 1 + 384 + 384) + 384, exact=True, img_size=64)
timm_model("gmlp_ti16_224", img_size=64)
timm_model("poolformer_s12", scales=3 * (2 * 64 + 2 * 128 + 6 * 320 + 2 * 512) + 512, exact=True)


def _poolformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer

    return MetaFormer(
        num_classes=5,
        depths=(1, 1, 2, 1),
        dims=(32, 64, 96, 128),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
    )


# Pooling keeps the first norm's scales up to the layer scale; second norm; end of the MLP. Last norm 128.
TIMM["poolformer"] = Entry(_poolformer, image(), scales=3 * (32 + 64 + 2 * 96 + 128) + 128, exact=True)


def _convmixer() -> nn.Module:
    from timm.models.convmixer import ConvMixer

    return ConvMixer(dim=32, depth=3, kernel_size=5, patch_size=4, num_classes=5, act_layer=nn.ReLU)


def mixer(name: str, scales: int = 1, exact: bool = False, **options: Any) -> None:
    """Three blocks; `options` as of `timm.models.mlp_mixer.MlpMixer`, where classes of its module go by their names."""

    def build() -> nn.Module:
        from timm.models import mlp_mixer

        given = {key: getattr(mlp_mixer, value) if isinstance(value, str) else value for key, value in options.items()}
        return mlp_mixer.MlpMixer(5, img_size=64, num_blocks=3, embed_dim=64, **given)

    TIMM[name] = Entry(build, image(64), scales, exact)


# Token mixing shares its weight over the channels: 1 for the norm before it, 64 for the other norm.
mixer("mixer", scales=3 * (1 + 64) + 64, exact=True)
# Affine maps instead of norms, so the stream is free: 64. Per block 1 and 1 around the token mixing (as above), 64
# before the MLP and 64 before its layer scale; 64 behind the last affine map.
resmlp = {"mlp_ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"}
mixer("resmlp", scales=64 + 3 * (1 + 1 + 64 + 64) + 64, exact=True, **resmlp)
mixer("gmlp", mlp_ratio=6, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp")
# The first stream is the stem's norm, the next each block's last norm; a skip ties the depthwise norm to it.
TIMM["convmixer"] = Entry(_convmixer, image(32), scales=4 * 32, exact=True)

# --- transformers ---

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SPECIAL | {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def hugging(
    name: str,
    model: str,
    config: str,
    options: dict[str, Any],
    example: Callable[[], Any] | None = None,
    *,
    scales: int,
) -> None:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    TRANSFORMERS[name] = Entry(build, example or (lambda: {"input_ids": TOKENS}), scales, exact=True)


# Per layer: norm 32 before attention and 32 before the MLP, queries and keys 2 key heads * 4 pairs, values
# 2 * 8, and the up projection's 48; and the last norm's 32, which a tied head freezes.
hugging("llama", "LlamaForCausalLM", "LlamaConfig", DECODER, scales=2 * 136 + 32)
hugging("llama_tied", "LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}, scales=2 * 136)
hugging("mistral", "MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 4}, scales=2 * 136 + 32)
hugging("qwen2", "Qwen2ForCausalLM", "Qwen2Config", DECODER, scales=2 * 136 + 32)
# The norms of queries and keys share their gains over the heads: 4 pairs a layer instead of 8.
hugging("qwen3", "Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}, scales=2 * 132 + 32)
# Gemma's gain is stored minus one, so norms carry nothing: queries and keys, values, up projection.
hugging("gemma", "GemmaForCausalLM", "GemmaConfig", DECODER | {"head_dim": 8}, scales=2 * (8 + 16 + 48))
# The experts are picked by the input, which merges them: one set of 48 up units a layer.
hugging(
    "mixtral",
    "MixtralForCausalLM",
    "MixtralConfig",
    DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    scales=2 * 136 + 32,
)
# Per layer two norms of 32, queries and keys 32, values 32; GELU freezes the MLP and the tied head the last
# norm.
hugging(
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Config",
    {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 32, "use_cache": False} | SPECIAL,
    scales=256,
)
# As GPT-2, with the 48 hidden units of a ReLU MLP.
hugging(
    "opt",
    "OPTForCausalLM",
    "OPTConfig",
    {
        "vocab_size": 50,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
        "use_cache": False,
    },
    scales=2 * (4 * 32 + 48),
)
# Encoder layers: two norms, queries and keys, values, 48 ReLU units; decoder layers three more of 32 for the
# cross attention. The encoder's last norm is an output, the decoder's is frozen by the tied head.
hugging(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": 50,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "use_cache": False,
        "decoder_start_token_id": 0,
    },
    lambda: {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :4]},
    scales=2 * (4 * 32 + 48) + 2 * (7 * 32 + 48),
)
# Norms behind the sums freeze the streams on both sides: queries and keys, values.
hugging(
    "bert",
    "BertModel",
    "BertConfig",
    {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    },
    scales=2 * 64,
)
hugging(
    "vit",
    "ViTForImageClassification",
    "ViTConfig",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    },
    lambda: {"pixel_values": image(32)()},
    scales=2 * 4 * 32 + 32,
)
# As T5 with GELU; both last norms are outputs.
hugging(
    "whisper",
    "WhisperModel",
    "WhisperConfig",
    {
        "vocab_size": 50,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "use_cache": False,
        "decoder_start_token_id": 1,
    }
    | SPECIAL,
    lambda: {
        "input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1)),
        "decoder_input_ids": TOKENS[:, :4],
    },
    scales=2 * 4 * 32 + 2 * 7 * 32,
)
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
}
# Two towers of two layers. The text tower's last norm is an output, the other's is not; the projections are
# outputs too.
hugging(
    "clip",
    "CLIPModel",
    "CLIPConfig",
    {
        "text_config": _TOWER | SPECIAL | {"vocab_size": 50, "max_position_embeddings": 16},
        "vision_config": _TOWER | {"image_size": 32, "patch_size": 8},
        "projection_dim": 16,
    },
    lambda: {"input_ids": TOKENS, "pixel_values": image(32)()},
    scales=2 * 2 * 4 * 32 + 32,
)
