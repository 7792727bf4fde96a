"""Augmentation on the device, a batch at a time: bytes in, numbers out.

Nothing here waits for the device or makes a tensor from Python values, so a training step that calls `augment` can be
captured as a CUDA graph (with a generator of one's own, register it: `graph.register_generator_state(generator)`).

    x = augment(images[index], run.data, mean, std, training=True, generator=generator)

Random numbers are drawn first (`draw_placement`), then used by functions without chance (`crop`, `magnify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UserError
from ..training.runs import Data

__all__ = [
    "Placement",
    "augment",
    "centre",
    "crop",
    "draw_lambda",
    "draw_placement",
    "magnify",
    "mix",
    "mixed_loss",
    "normalise",
]

# -- crops, flips, magnification ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placement:
    """For every image of a batch: the corner of its crop in the padded image, whether it is flipped, its magnification.

    Without magnification corners are whole pixels (int64); with it they are positions in the magnified, then padded
    image (float).
    """

    top: Tensor
    left: Tensor
    flip: Tensor  # bool
    scale: Tensor | None = None


def augment(
    x: Tensor,
    data: Data,
    mean: Tensor | Sequence[float],
    std: Tensor | Sequence[float],
    training: bool,
    generator: torch.Generator | None = None,
    *,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A batch of images (uint8, N x C x H x W) as the network gets it, by the fields of `data`.

    In training: magnified by a random factor from `scale`, padded with black, cropped at random, flipped with
    probability 1/2. Otherwise: the centre. Then `normalise`.
    """
    size = _crop_size(x, data)
    if not training:
        x = centre(x, size)
    elif data.scale is not None:
        x = magnify(x, draw_placement(x, data, generator), size, data.padding)
    elif data.flip or data.padding or size != x.shape[2:]:
        x = crop(x, draw_placement(x, data, generator), size, data.padding)
    return normalise(x, data.inputs, mean, std, channels_last=channels_last, dtype=dtype)


def _crop_size(x: Tensor, data: Data) -> tuple[int, int]:
    height, width = x.shape[2:]
    if data.crop is None:
        return height, width
    if data.crop > min(height, width) + 2 * data.padding:
        raise UserError(f"cannot cut {data.crop} x {data.crop} from {height} x {width} padded by {data.padding}")
    return data.crop, data.crop


def draw_placement(x: Tensor, data: Data, generator: torch.Generator | None = None) -> Placement:
    """Where each image of the batch is cropped: every possible place is as likely as any other."""
    height, width = _crop_size(x, data)
    rooms = x.shape[2] + 2 * data.padding - height, x.shape[3] + 2 * data.padding - width
    u = torch.rand((4, len(x)), device=x.device, generator=generator)  # one draw for all
    flip = (u[2] < 0.5) & data.flip
    if data.scale is None:
        # floor(u·k) < k although float32 is coarse: u ≤ 1 - 2⁻²⁴, and k(1 - 2⁻²⁴) is never rounded up to k
        top, left = ((u[i] * (room + 1)).long() for i, room in enumerate(rooms))
        return Placement(top, left, flip)
    low, high = data.scale
    scale = low + (high - low) * u[3]
    # An image that is magnified has more room for its crop; one that became smaller than the crop lies within it.
    grown = ((scale - 1) * x.shape[axis] for axis in (2, 3))
    top, left = (u[i] * (room + more) for i, (room, more) in enumerate(zip(rooms, grown, strict=True)))
    return Placement(top, left, flip, scale)


def crop(x: Tensor, place: Placement, size: tuple[int, int], padding: int) -> Tensor:
    """Pad with zeros, cut out, flip: one gather. Keeps the dtype."""
    x = pad(x, (padding,) * 4)
    width = x.shape[3]
    rows = place.top[:, None] + torch.arange(size[0], device=x.device)
    columns = place.left[:, None] + _columns(place, size[1])
    index = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    return x.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1)).unflatten(2, size)


def magnify(x: Tensor, place: Placement, size: tuple[int, int], padding: int) -> Tensor:
    """Magnify each image by its own factor (bilinear, black outside), pad, cut out, flip. Returns float."""
    assert place.scale is not None
    rows = place.top[:, None] + torch.arange(size[0], device=x.device)
    columns = place.left[:, None] + _columns(place, size[1])
    scale = place.scale[:, None]
    # the centre of a pixel lies at its index + 1/2, before and after
    y, z = ((position - padding + 0.5) / scale - 0.5 for position in (rows, columns))
    return _interpolate(_interpolate(x.float(), y, 2), z, 3)


def centre(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle of every image; black around it where `size` is larger."""
    top, left = ((old - new) // 2 for old, new in zip(x.shape[2:], size, strict=True))
    bottom, right = x.shape[2] - size[0] - top, x.shape[3] - size[1] - left
    return pad(x, (-left, -right, -top, -bottom))


def _columns(place: Placement, width: int) -> Tensor:
    """0 … width - 1 for every image, backwards for those that are flipped."""
    forward = torch.arange(width, device=place.flip.device)
    return torch.where(place.flip[:, None], width - 1 - forward, forward)


def _interpolate(x: Tensor, position: Tensor, axis: int) -> Tensor:
    """Values along an axis at fractional positions (N x K, the same for all other axes); 0 outside."""
    size, shape = x.shape[axis], [1, 1, 1, 1]
    shape[0], shape[axis] = position.shape
    below = position.floor()
    above_weight = position - below

    def share(index: Tensor, weight: Tensor) -> Tensor:
        weight = weight * ((index >= 0) & (index < size))
        index = index.clamp(0, size - 1).long().view(shape)
        wanted = list(x.shape)
        wanted[axis] = position.shape[1]
        return x.gather(axis, index.expand(wanted)) * weight.view(shape)

    return share(below, 1 - above_weight) + share(below + 1, above_weight)


def normalise(
    x: Tensor,
    inputs: str,
    mean: Tensor | Sequence[float],
    std: Tensor | Sequence[float],
    *,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Pixels 0 … 255 as inputs of a net: "standard" is minus mean over deviation, "unit" is pixels in [0, 1].

    `mean` and `std` are per channel, for pixels in [0, 1]: tensors on the device of `x` (fastest) or Python numbers.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = x.contiguous(memory_format=layout)  # while pixels are bytes
    if inputs == "unit":
        x = x / 255
    elif inputs != "standard":
        raise UserError(f"inputs are 'standard' or 'unit', not {inputs!r}")
    elif isinstance(mean, Tensor) and isinstance(std, Tensor):
        x = (x - 255 * mean.view(-1, 1, 1)) / (255 * std.view(-1, 1, 1))
    else:
        channels = zip(x.split(1, dim=1), mean, std, strict=True)
        x = torch.cat([(channel - 255 * float(m)) / (255 * float(s)) for channel, m, s in channels], 1)
    return x.to(dtype).contiguous(memory_format=layout)


# -- mixup -------------------------------------------------------------------------------------------------------------


def draw_lambda(alpha: float, generator: torch.Generator) -> float:
    """λ ~ Beta(α, α) (Zhang et al. 2018), by a generator on the CPU; 1, that is no mixture, for α = 0."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return float(np.random.default_rng(seed).beta(alpha, alpha)) if alpha > 0 else 1.0


def mix(x: Tensor, lam: Tensor | float, permutation: Tensor) -> Tensor:
    """λ·x + (1 - λ)·x[permutation]; `lam` may be a number or a tensor of no dimensions that a captured graph reads."""
    other = x[permutation]
    return torch.lerp(other, x, lam.to(x.dtype) if isinstance(lam, Tensor) else lam)


def mixed_loss(
    loss_fn: Callable[[Tensor, Tensor], Tensor], logits: Tensor, y: Tensor, lam: Tensor | float, permutation: Tensor
) -> Tensor:
    """λ·loss(logits, y) + (1 - λ)·loss(logits, y[permutation]): the loss that goes with `mix`.

    For a loss that is linear in the target, as cross-entropies are, this is the loss with the mixed target.
    """
    return lam * loss_fn(logits, y) + (1 - lam) * loss_fn(logits, y[permutation])
