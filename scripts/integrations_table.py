"""Makes the table of docs/integrations.md from the log of `make test-integrations`.

make test-integrations && cp out/integrations.txt results/integrations.txt
python scripts/integrations_table.py      # writes what is between the two markers of the page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LOG, PAGE = ROOT / "results" / "integrations.txt", ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- the table: scripts/integrations_table.py -->", "<!-- the end of the table -->"
WORDS = {"passed": "yes", "xfailed": "**not yet**", "skipped": "not run", "failed": "**no**", "error": "**no**"}


TIMM = {"test_timm": "works", "test_what_is_refused": "refused, with the reason", "test_timm_on_a_gpu": "needs CUDA"}
"""The tests that go through timm's optimizers by name, and what they say of one that passes or is skipped."""


class Row(NamedTuple):
    """A line `row | tool | what | versions | outcome | test` of the log."""

    tool: str
    what: str
    versions: str
    outcome: str
    test: str


def rows(log: str) -> Iterator[Row]:
    for line in log.splitlines():
        if line.startswith("row | "):
            yield Row(*line.removeprefix("row | ").split(" | "))


def table(log: str) -> str:
    """One line for each thing that was shown."""
    found: dict[tuple[str, str], tuple[dict[str, None], list[str]]] = {}
    for row in rows(log):
        versions, outcomes = found.setdefault((row.tool, row.what), ({}, []))
        versions.update(dict.fromkeys(row.versions.split(", ")))
        outcomes.append(WORDS[row.outcome])
    lines = ["| tool | what was tested | with | works | tests |", "| --- | --- | --- | --- | --- |"]
    for (tool, what), (versions, outcomes) in sorted(found.items(), key=lambda each: each[0][0].lower()):
        works = ", ".join(dict.fromkeys(sorted(outcomes, key=[*WORDS.values()].index, reverse=True)))
        lines.append(f"| {tool} | {what} | {', '.join(versions)} | {works} | {len(outcomes)} |")
    return "\n".join(lines)


def optimizers_of_timm(log: str) -> str:
    """What became of each of timm's optimizers: how many, and which."""
    found: dict[str, list[str]] = {}
    for row in rows(log):
        test, _, name = row.test.rstrip("]").partition("[")
        if row.tool == "timm" and test in TIMM:
            asked = TIMM[test] if row.outcome == "passed" else f"{TIMM[test]}: {WORDS[row.outcome]}"
            found.setdefault(asked, []).append(name)
    lines = ["| timm's optimizers | how many | which |", "| --- | --- | --- |"]
    lines += [f"| {said} | {len(names)} | {', '.join(sorted(names))} |" for said, names in found.items()]
    return "\n".join([*lines, f"| all | {sum(map(len, found.values()))} | |"])


def source(log: str) -> str:
    """Of which run the tables are."""

    def named(name: str) -> str:
        found = re.search(rf"^{name}: (.*)$", log, re.MULTILINE)
        return found[1] if found else "unknown"

    results = re.search(r"(\d+ passed.*?) in ", log)
    return (
        f"Run: `{named('command')}`, commit {named('commit')}, {named('hardware')}; "
        f"{named('versions').partition(', ')[0]}; {results[1] if results else 'no results'}."
    )


def made(log: str) -> str:
    """What is between the markers of the page."""
    return f"{source(log)}\n\n{table(log)}\n\n{optimizers_of_timm(log)}"


def page_with(text: str, content: str) -> str:
    """The page with what is between its markers replaced."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{PAGE.name} needs the two markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


if __name__ == "__main__":
    log = LOG.read_text(encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), made(log)), encoding="utf-8")
