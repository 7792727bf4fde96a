"""Tests with the real libraries: run by `make test-integrations`, and not collected by `make test`.

A test says what it shows with `@pytest.mark.shows(tool, what, packages)`; the rows are printed at the end of a run, and
`scripts/integrations_table.py` makes the table of docs/integrations.md of them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
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


def _versioned(package: str) -> str:
    try:
        return f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return f"{package} (not installed)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
