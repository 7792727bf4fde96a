"""What the README and the pages in docs/ show is run, and prints what they say it prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# a block of Python that starts with an import, and the block of text that follows it directly, if one does
BLOCK = re.compile(r"^```python\n(import .*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks() -> list[pytest.param]:  # type: ignore[valid-type]
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], match[2], id=f"{page.name}:{line}"))
    return found


@pytest.mark.parametrize(("code", "printed"), blocks())
def test_snippet(code: str, printed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # torch looks up the module of a custom op
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "example/net.py", "exec"), module.__dict__)
    if printed is not None:
        assert out.getvalue().splitlines() == printed.splitlines()


def test_there_are_snippets() -> None:
    assert len(blocks()) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
