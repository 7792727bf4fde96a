"""The site: `make docs` writes it to build/site, offline, and treats warnings as errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import equinorm

project = "equinorm"
author = copyright = "The equinorm authors"
release = version = equinorm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["images"]

html_theme = "furo"
html_title = "equinorm"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "code"  # docstrings put names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "both"
napoleon_use_rtype = False


RESULTS = Path(__file__).parents[1] / "results"
TO_RESULTS = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+)results/([^)#\s]*)(#[^)\s]*)?\)")


def _lead_to_results(app, page, source) -> None:  # type: ignore[no-untyped-def]
    """The site has the folder of results beside its own pages; its Markdown is one page there."""

    def link(found: re.Match[str]) -> str:
        text, up, file, anchor = found[1], found[2].removeprefix("../"), found[3], found[4] or ""
        if not file or file.endswith(".md"):
            anchor = anchor or (f"#{file.removesuffix('.md')}" if file not in ("", "README.md") else "")
            file = "index.html"
        return f'<a href="{up}results/{file}{anchor}">{text}</a>'

    source[0] = TO_RESULTS.sub(link, source[0])


def _copy_results(app, exception) -> None:  # type: ignore[no-untyped-def]
    if exception is None and app.builder.format == "html":
        shutil.copytree(RESULTS, Path(app.outdir) / "results", dirs_exist_ok=True)


def _show_examples_as_code(app, what, name, obj, options, lines) -> None:  # type: ignore[no-untyped-def]
    """Docstrings indent an example; reStructuredText wants it announced."""
    shown: list[str] = []
    for number, line in enumerate(lines):
        begins = line.startswith("    ") and number > 1 and not lines[number - 1] and shown
        last = next((text for text in reversed(shown) if text), "")
        if begins and not last.startswith((" ", "..", ":", "-")) and ">>>" not in line:
            shown += [".. code-block:: python", ""]
        shown.append(line if line.startswith(" ") else line.replace("|", "\\|"))  # |x| is a norm, no substitution
    lines[:] = shown


def setup(app) -> None:  # type: ignore[no-untyped-def]
    app.connect("source-read", _lead_to_results)
    app.connect("build-finished", _copy_results)
    app.connect("autodoc-process-docstring", _show_examples_as_code, priority=100)
