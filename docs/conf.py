"""The site: `make docs` writes it to build/site, offline, and treats warnings as errors."""

from __future__ import annotations

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
# ../results and the like are files of the repository that the site does not hold; they are offered as they are
suppress_warnings = ["myst.xref_missing"]

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "code"  # docstrings put names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "both"
napoleon_use_rtype = False


def _show_examples_as_code(app, what, name, obj, options, lines) -> None:  # type: ignore[no-untyped-def]
    """Docstrings indent an example; reStructuredText wants it announced."""
    shown: list[str] = []
    for number, line in enumerate(lines):
        begins = line.startswith("    ") and number > 1 and not lines[number - 1] and shown
        last = next((text for text in reversed(shown) if text), "")
        if begins and not last.startswith((" ", "..", ":", "-")) and ">>>" not in line:
            shown += [".. code-block:: python", ""]
        shown.append(line)
    lines[:] = shown


def setup(app) -> None:  # type: ignore[no-untyped-def]
    app.connect("autodoc-process-docstring", _show_examples_as_code, priority=100)
