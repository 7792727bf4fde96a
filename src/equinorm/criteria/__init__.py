"""What a balanced network is best at: the criteria of `equinorm.balance_(model, x, criterion=...)`.

    Norm            least Lp norm (stock2019); the default
    Range           every unit's largest incoming weight equals its largest outgoing one (Nagel et al. 2019)
    Quantization    least error of weights rounded to a few bits
    Activations     activations and weights share the difficulty of being quantized (SmoothQuant)
    Half            everything inside float16's range
    Path            path-magnitudes as even as possible (PathCond)

A criterion of your own is a subclass of `Criterion` with a `value`, a function of the rescaled tensors.
"""

from .activations import Activations
from .criterion import Criterion
from .half import Half
from .norm import Norm
from .path import Path
from .quantization import Quantization
from .range import Range

__all__ = ["Activations", "Criterion", "Half", "Norm", "Path", "Quantization", "Range"]
