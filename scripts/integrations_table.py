"""Makes the table of docs/integrations.md from the log of `make test-integrations`.

make test-integrations && cp out/integrations.txt results/integrations.txt
python scripts/integrations_table.py      # writes the table between the two markers of the page
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
LOG, PAGE = ROOT / "results" / "integrations.txt", ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- the table: scripts/integrations_table.py -->", "<!-- the end of the table -->"
WORDS = {"passed": "yes", "xfailed": "**not yet**", "skipped": "not run", "failed": "**no**", "error": "**no**"}


def table(log: str) -> str:
    """One line for each thing that was shown, from the lines `row | tool | what | versions | outcome | test`."""
    rows: dict[tuple[str, str], tuple[dict[str, None], list[str]]] = {}
    for line in log.splitlines():
        if line.startswith("row | "):
            _, tool, what, versions, outcome, _ = line.split(" | ")
            found = rows.setdefault((tool, what), ({}, []))
            found[0].update(dict.fromkeys(versions.split(", ")))
            found[1].append(WORDS[outcome])
    lines = ["| tool | what was tested | with | works | tests |", "| --- | --- | --- | --- | --- |"]
    for (tool, what), (versions, outcomes) in sorted(rows.items(), key=lambda row: row[0][0].lower()):
        works = ", ".join(dict.fromkeys(sorted(outcomes, key=[*WORDS.values()].index, reverse=True)))
        lines.append(f"| {tool} | {what} | {', '.join(versions)} | {works} | {len(outcomes)} |")
    return "\n".join(lines)


def page_with(text: str, table: str) -> str:
    """The page with its table replaced."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{PAGE.name} needs the two markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    made = page_with(PAGE.read_text(encoding="utf-8"), table(LOG.read_text(encoding="utf-8")))
    PAGE.write_text(made, encoding="utf-8")
