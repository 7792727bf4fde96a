"""The blocks of docs/integrations.md and docs/quantization.md that need the other programs are run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [(DOCS / page).read_text(encoding="utf-8") for page in ("integrations.md", "quantization.md")]
BLOCKS = [
    code for text in TEXTS for code in re.findall(r"^```python\n(from .*?)^```\n", text, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.split()[1])
def test_snippet(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if code.startswith("from llmcompressor"):  # it wants an older transformers
        pytest.importorskip("llmcompressor")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(code, "example", "exec"), module.__dict__)


def test_there_are_snippets() -> None:
    assert len(BLOCKS) == 11
