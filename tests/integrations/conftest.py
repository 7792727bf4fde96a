"""Tests with the real libraries: run by `make test-integrations`, and not collected by `make test`.

A test says what it shows with `@pytest.mark.shows(tool, what, packages)`; the rows are printed at the end of a run, and
`scripts/integrations_table.py` makes the table of docs/integrations.md of them.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only what was asked for by name is collected: `pytest tests/integrations`."""
    asked = (Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args)
    return None if any(path.is_relative_to(HERE) for path in asked) else True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows(tool, what, *packages): a row of the table in docs/integrations.md")
    # other people's programs warn of each other all the time
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::equinorm")


_ROWS: dict[str, tuple[str, str, str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("shows")) is not None:
            tool, what, *packages = mark.args
            _ROWS[item.nodeid] = (tool, what, ", ".join(map(_versioned, packages or ["torch"])))


def _packages() -> list[str]:
    """What the extra `integrations` of pyproject.toml asks for, and torch."""
    found = ["torch", *(requires("equinorm") or ())]
    wanted = [line.partition(";")[0] for line in found if line == "torch" or "integrations" in line]
    return [re.split(r"[<>=!~\s\[]", name)[0] for name in wanted]


def _commit() -> str:
    """The commit that is tested, and whether files differ from it."""
    try:
        run = partial(subprocess.run, cwd=HERE, capture_output=True, text=True, check=True)
        changed = run(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
        return run(["git", "rev-parse", "HEAD"]).stdout.strip()[:12] + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versioned(package: str) -> str:
    try:
        return f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return f"{package} (not installed)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("what it was run with")
    terminalreporter.line("command: make test-integrations")
    terminalreporter.line(f"commit: {_commit()}")
    terminalreporter.line(f"hardware: {os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}")
    terminalreporter.line(f"versions: Python {platform.python_version()}, {', '.join(map(_versioned, _packages()))}")
    outcomes: dict[str, str] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, []):
            if outcomes.get(report.nodeid, "passed") == "passed":
                outcomes[report.nodeid] = outcome
    rows = [(row, outcomes[nodeid], nodeid) for nodeid, row in _ROWS.items() if nodeid in outcomes]
    if rows:
        terminalreporter.section("what was tested")
        for (tool, what, versions), outcome, nodeid in rows:
            terminalreporter.line(f"row | {tool} | {what} | {versions} | {outcome} | {nodeid.partition('::')[2]}")
