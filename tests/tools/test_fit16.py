"""fit16: folders whose config gets the new ε, files with ε beside them, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equinorm import cli
from equinorm.errors import UserError
from equinorm.symmetry.verify import relative_change
from equinorm.tools import fit16, transformer
from support.zoo import DECODER

TOKENS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))


class Stream(nn.Module):
    """A residual stream with norms, in a file of the user's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))
        self.branch = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.branch(torch.nn.functional.silu(self.norms[0](x)))
        return self.head(self.norms[1](x))


@torch.no_grad()
def llama(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder with a Llama whose second layer writes numbers beyond float16's range."""
    import transformers

    torch.manual_seed(0)
    with transformer.quiet():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **options}))
        model.model.layers[1].mlp.down_proj.weight.mul_(1e8)
        model.to(dtype).save_pretrained(folder)
    torch.save({"input_ids": TOKENS}, folder.parent / "inputs.pt")
    return folder


def test_a_folder_gets_the_new_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = llama(tmp_path / "old"), tmp_path / "new"
    arguments = ["fit16", f"hf:{folder}", "--inputs", str(tmp_path / "inputs.pt"), "--output", str(output), "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["before"]["infinite"] > 0
    assert told["after"]["infinite"] == 0
    assert told["after"]["error"] < 5e-3
    assert told["excess"][0] > 1 > told["excess"][1]
    assert told["output_change"] < 1e-12
    config = json.loads((output / "config.json").read_text())
    assert config["rms_norm_eps"] == told["config"]["rms_norm_eps"] < 1e-6
    inputs = [{"input_ids": TOKENS}]
    old, new = (fit16.exact_outputs(fit16.opened(f"hf:{f}", None, ()).model, inputs) for f in (folder, output))
    assert relative_change(new, old) < 1e-12
    with_old_epsilon = fit16.opened(f"hf:{output}", None, ["rms_norm_eps=1e-6"]).model
    assert relative_change(fit16.exact_outputs(with_old_epsilon, inputs), old) > 1e-9  # the check can fail


def test_norms_without_an_entry_stay(tmp_path: Path) -> None:
    """An ε that no entry of the config sets cannot be written, so its scale does not move."""
    folder = llama(tmp_path / "old")
    model = fit16.opened(f"hf:{folder}", None, ()).model
    model.model.layers[0].input_layernorm.variance_epsilon = 3e-6  # not what the config says
    fitted = fit16.fit(model, [{"input_ids": TOKENS}], str(folder))
    assert not fitted.config
    assert not fitted.numbers
    assert fitted.notes  # what overflows is named


def test_a_file_gets_epsilons_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users", sys.modules[__name__])
    x = torch.randn(2, 3, 6, 6)
    model = Stream()
    with torch.no_grad():
        model.branch.weight.mul_(1e7)
    file, output = tmp_path / "stream.pt", tmp_path / "small.pt"
    torch.save(model.state_dict(), file)
    torch.save([x, 2 * x], tmp_path / "inputs.pt")
    arguments = ["fit16", "users:Stream", str(file), "--inputs", str(tmp_path / "inputs.pt"), "--output", str(output)]
    assert cli.main(arguments) == 0
    assert "0 of" in capsys.readouterr().out
    loaded = Stream()
    loaded.load_state_dict(torch.load(output))
    for name, epsilon in json.loads((tmp_path / "small.epsilons.json").read_text()).items():
        path, _, attribute = name.rpartition(".")
        setattr(loaded.get_submodule(path), attribute, epsilon)
    exact = fit16.exact_outputs(model, [x])
    assert relative_change(fit16.exact_outputs(loaded, [x]), exact) < 1e-12
    assert not torch.isfinite(model.half()(x.half())).all()
    assert torch.isfinite(loaded.half()(x.half())).all()


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit16", "torchvision:resnet18"]) == 1
    assert "--inputs FILE" in capsys.readouterr().err
    (tmp_path / "inputs.pt").write_text("no")
    with pytest.raises(UserError, match="cannot be read"):
        fit16.read_inputs(tmp_path / "inputs.pt")
    torch.save({"x": 3}, tmp_path / "inputs.pt")
    with pytest.raises(UserError, match="must hold what the model is called with"):
        fit16.read_inputs(tmp_path / "inputs.pt")
