"""What the README and the pages in docs/ show is run, and prints what they say it prints."""

from __future__ import annotations

import contextlib
import io
import math
import re
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equinorm.lab.experiments import defazio2018, ruff2020
from equinorm.lab.record import picture
from equinorm.lab.record.log import Log
from equinorm.lab.training.store import Store

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
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


CELL = re.compile(r"^```\{code-cell\}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "name", ["enorm", "explain", "quantize", "without_batch_statistics"]
)  # `make docs` runs all of them
def test_tutorial(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("tutorial")
    for number, cell in enumerate(CELL.findall(text)):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(cell, f"{name}.md, cell {number + 1}", "exec"), module.__dict__)


def test_the_readme_is_short() -> None:
    """A stranger reads 150 lines; blocks that are to be copied have eight at most."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900
    for code in BLOCK.findall(text):
        assert len([line for line in code[0].splitlines() if line]) <= 8


def test_there_are_snippets() -> None:
    assert len(blocks()) >= 8


LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def places(page: Path) -> set[str]:
    """What can follow a # in a link to a page of Markdown: its headings, as GitHub and the site write them, and ids."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "results").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in set(LINK.findall(page.read_text(encoding="utf-8"))):
        path, _, place = target.partition("#")
        if "://" in path:
            continue
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        assert not place or to.suffix != ".md" or place in places(to), target


METHOD_PAGES = ("enorm", "equinorm", "mean-shift-rejection", "unit-filters", "weight-norm")
ORDER = ["How to use", "Suggested settings", "How it works", "When not to", "Cost", "Evidence"]


@pytest.mark.parametrize("name", METHOD_PAGES)
def test_pages_of_methods_have_the_same_order(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ORDER


# -- tables whose numbers no command prints ----------------------------------------------------------------------------


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table that begins with `head`, without its two first lines."""
    table = (ROOT / page).read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def epochs_of(artifact: str, row: str, column: str = "") -> list[list[dict[str, Any]]]:
    """The epochs of each run of a row (in one column, if it is named), as they are in the committed logs."""
    everything = [*ruff2020.artifacts(), *defazio2018.artifacts()]
    cells = next(each.cells for each in everything if each.name == artifact)
    store = Store(ROOT / "results")
    records = [store.get(run) for cell in cells if cell.row == row and column in ("", cell.column) for run in cell.runs]
    assert records
    return [list(record.epochs) for record in records if record is not None]


def assert_printed(cell: str, values: Sequence[float]) -> None:
    """The numbers in a cell are these values, rounded to the digits it has."""
    numbers = re.findall(r"\d+(?:\.\d+)?", cell)
    assert len(numbers) == len(values), cell
    for number, value in zip(numbers, values, strict=True):
        assert abs(float(number) - value) <= 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9, (cell, value)


def printed(cell: str, values: Sequence[float]) -> bool:
    """Whether `assert_printed` passes."""
    try:
        assert_printed(cell, values)
    except AssertionError:
        return False
    return True


def mean_and_spread(values: Sequence[float]) -> list[float]:
    return [statistics.mean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]


def test_ruff2020_at_full_length_is_what_the_logs_say() -> None:
    rows = {label: cells for label, *cells in rows_of("docs/mean-shift-rejection.md", "| | n | test, paper ")}
    assert len(rows) == len(ruff2020.ROWS)
    for row in ruff2020.ROWS:
        lr, z, noise = (float(number) for number in re.findall(r"[\d.]+", f"{row.name} 0 0")[:3])
        label = (
            "BatchNorm, lr 0.1"
            if row.name == ruff2020.BN
            else f"lr {lr:g}, z {z:g}" + f", noise {noise:g}" * (noise > 0)
        )
        n, paper, test, training, loss, *lengths = rows[label]
        runs = epochs_of("ruff2020/table1", row.name)
        ends = [epochs[-1] for epochs in runs]
        assert int(n) == len(runs) == row.n
        assert_printed(paper, (row.accuracy, row.spread))
        assert_printed(test, mean_and_spread([end["test_accuracy"] for end in ends]))
        assert_printed(training, [statistics.mean(end["train_accuracy"] for end in ends)])
        assert_printed(loss, [statistics.mean(end["test_loss"] for end in ends)])
        for length, epoch in zip(lengths, (100, 150, 200), strict=True):
            assert_printed(length, [statistics.mean(epochs[epoch - 1]["filters"]["mean"] for epochs in runs)])


def test_what_ruff2020_leaves_open_is_what_the_logs_say() -> None:
    rows = rows_of("docs/mean-shift-rejection.md", "| 60 epochs | test | training | test loss |")
    assert [label for label, *_ in rows] == [row for row in ruff2020.VARIANTS if epochs_of("ruff2020/variants", row)]
    for label, *cells in rows:
        assert_outcome(cells, epochs_of("ruff2020/variants", label))


def test_what_ruff2020_leaves_open_at_full_length_is_what_the_logs_say() -> None:
    rows = rows_of("docs/mean-shift-rejection.md", "| 200 epochs | n | test | training | test loss |")
    tried = [row for row in ruff2020.LONGER if epochs_of("ruff2020/variants-long", row)]
    names = (ruff2020.BEST, *tried, ruff2020.BN)
    for (_, n, *cells), name in zip(rows, names, strict=True):
        runs = epochs_of("ruff2020/variants-long", name)
        assert int(n) == len(runs)
        assert_outcome(cells, runs)


def assert_outcome(cells: Sequence[str], runs: list[list[dict[str, Any]]]) -> None:
    """Test accuracy, training accuracy and test loss at the end, or the word that it diverged."""
    ends = [epochs[-1] for epochs in runs]
    test, *others = cells
    if any(end["test_loss"] is None or math.isnan(end["test_loss"]) for end in ends):
        assert "diverged" in test
        assert not any(others)
        return
    assert_printed(test, mean_and_spread([end["test_accuracy"] for end in ends]))
    for cell, metric in zip(others, ("train_accuracy", "test_loss"), strict=True):
        assert_printed(cell, [statistics.mean(end[metric] for end in ends)])


def test_steps_of_ruff2020_are_limited_where_the_docs_say() -> None:
    """One of two seeds does its first epoch as without a limit, and no more than that; the other not even that."""
    without, limited = (epochs_of("ruff2020/variants", row) for row in (ruff2020.UNCHANGED, ruff2020.LIMITED))
    pairs = (zip(a, b, strict=True) for a, b in zip(without, limited, strict=True))
    same = [[a["train_loss"] == b["train_loss"] for a, b in pair] for pair in pairs]
    assert [sum(epochs) for epochs in same] == [1, 0]
    assert same[0][0]


def test_ruff2020_in_the_readme_is_what_the_logs_say() -> None:
    names = (ruff2020.BN, ruff2020.BEST, ruff2020.Z98, ruff2020.SILENT, ruff2020.CZMI_NOISE, ruff2020.CZMI_04)
    for (_, paper, *ours), name in zip(
        rows_of("docs/reproduction.md", "| | paper (n = 8) | ours | n |"), names, strict=True
    ):
        assert_printed(paper, (ruff2020.PRINTED[name].accuracy, ruff2020.PRINTED[name].spread))
        assert_both_readings(ours, name)


def assert_both_readings(cells: Sequence[str], name: str) -> None:
    """Test accuracy and n in table 1, and with LUMA in the loss where that is something else and was run."""
    for i, artifact in enumerate(("ruff2020/table1", "ruff2020/table1-loss")):
        runs = [] if i and name not in ruff2020.CENTRED_IN_PART else epochs_of(artifact, name)
        test, n = cells[2 * i : 2 * i + 2]
        assert n == (str(len(runs)) if runs else "")
        if runs:
            assert_printed(test, mean_and_spread([epochs[-1]["test_accuracy"] for epochs in runs]))


def test_luma_in_the_loss_is_what_the_logs_say() -> None:
    rows = rows_of("docs/mean-shift-rejection.md", "| 200 epochs | paper | LUMA after centring |")
    for (_, paper, *ours), name in zip(rows, ruff2020.CENTRED_IN_PART, strict=True):
        assert_printed(paper, (ruff2020.PRINTED[name].accuracy, ruff2020.PRINTED[name].spread))
        assert_both_readings(ours, name)


def test_first_steps_on_digits_are_what_the_log_says() -> None:
    log = (ROOT / "results/mean_shift_digits.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(?:e\^g|chain).* n \d+  accuracy (.*?)  largest loss (.*?)  limited (.*)$", log, re.MULTILINE)
    *deep, _, _, chain, after_centring = found
    rows = rows_of("docs/mean-shift-rejection.md", "| | accuracy, % | largest loss (five seeds) |")
    for (label, accuracy, losses, limited), (measured, largest, shares) in zip(rows, deep, strict=True):
        assert_printed(accuracy, [float(number) for number in re.findall(r"[\d.]+", measured)])
        largest = [float(loss) for loss in largest.split()]
        diverged = sum(map(math.isinf, largest))
        ends = [min(largest), *((diverged, len(largest)) if diverged else (max(largest),))]
        assert_printed(losses, ends)
        assert "paper" in label or limited
        if limited:
            ends = [100 * end(map(float, shares.split())) for end in (min, max)]
            assert_printed(limited, ends)
    text = (ROOT / "docs/mean-shift-rejection.md").read_text(encoding="utf-8").partition("**Chains.**")[2]
    for (accuracy, *_), before in ((chain, "1.71: "), (after_centring, "`centre_luma=False` ")):
        assert before + accuracy.strip().replace(" [", " % [") in text


def test_how_batchnorm_starts_is_what_the_logs_say() -> None:
    _, *rows = rows_of("docs/mean-shift-rejection.md", "| BatchNorm | n | test | falls between epochs 110 and 150 |")
    for (_, n, test, fall, length, lost), name in zip(rows, (ruff2020.BN, ruff2020.BN_FIXUP), strict=True):
        runs = epochs_of("ruff2020/deflation", name)
        assert int(n) == len(runs)
        assert_printed(test, mean_and_spread([epochs[-1]["test_accuracy"] for epochs in runs]))
        falls = [epochs[109]["test_accuracy"] - epochs[149]["test_accuracy"] for epochs in runs]
        assert_printed(fall, [statistics.mean(falls)])
        assert_printed(length, [statistics.mean(epochs[99]["filters"]["mean"] for epochs in runs)])
        assert_printed(lost, [statistics.mean(epochs[-1]["filters"]["deflated"] for epochs in runs)])


def test_what_defazio2018_leaves_open_is_what_the_logs_say() -> None:
    rows = rows_of("docs/reproduction.md", "| 30 epochs | BatchNorm | EquiNorm |")
    words = ("as in figure 3", "warm-up", "binary loss", "that loss")
    with_mixup = [next(name for name in defazio2018.VARIANTS if word in name) for word in words]
    less = list(defazio2018.WITH_LESS)[1:]
    names = [
        *(("defazio2018/variants", name) for name in with_mixup),
        *(("defazio2018/variants-mixup", name) for name in less),
    ]
    for (label, *cells), (artifact, name), word in zip(rows, names, (*words, *less), strict=True):
        assert word in label
        for cell, column in zip(cells, ("BN", "EquiNorm"), strict=True):
            if cell:
                ends = [epochs[-1]["test_accuracy"] for epochs in epochs_of(artifact, name, column)]
                assert_printed(cell, mean_and_spread(ends))
                assert f"(n = {len(ends)})" in label or len(ends) == 1


def test_defazio2018_at_full_length_is_what_the_logs_say() -> None:
    rows = rows_of("docs/reproduction.md", "| | paper, % | ours, % | test loss |")
    for (_, _, accuracy, loss, soon), row in zip(rows, ("BN", "EquiNorm", defazio2018.QUARTER), strict=True):
        (epochs,) = epochs_of("defazio2018/figure2", row)
        assert_printed(accuracy, [epochs[-1]["test_accuracy"]])
        assert_printed(loss, [epochs[-1]["test_loss"]])
        first = [next(e["epoch"] for e in epochs if e["test_accuracy"] >= level) for level in (80, 90)]
        assert [int(number) for number in soon.split(", ")] == first


# -- without batch statistics ------------------------------------------------------------------------------------------

RECORD = ROOT / "results" / "without-batch-statistics"


def test_the_record_is_what_the_log_says() -> None:
    finals = list(picture.of_final(Log(RECORD)).values())
    rows = rows_of("docs/without-batch-statistics.md", "| test images, H200, compiled |")
    for (_, epochs, accuracy, n, seconds, step), runs in zip(rows, [finals[0], finals[2], finals[1]], strict=True):
        assert int(epochs) == runs[0]["epochs"]
        assert int(n) == len(runs)
        assert_printed(accuracy, mean_and_spread([run["accuracy"] for run in runs]))
        assert_printed(seconds, [statistics.mean(run["seconds"] for run in runs)])
        assert_printed(step, [statistics.mean(run["step_ms"] for run in runs)])


def test_the_way_to_the_record_is_what_the_log_says() -> None:
    """Lines in any order: a line is known by its accuracy, spread, n and seconds."""
    log = Log(RECORD)
    names = {row["name"]: [] for part in ("ladder", "refine") for row in log.of(part, epochs=16)}
    for part in ("ladder", "refine"):
        for row in log.of(part, epochs=16):
            names[row["name"]].append(row)
    known = [(mean_and_spread([r["accuracy"] for r in rows]), len(rows), rows) for rows in names.values()]
    for _, accuracy, n, seconds in rows_of("docs/without-batch-statistics.md", "| 16 epochs, held-out images |"):
        fits = [rows for values, count, rows in known if count == int(n) and printed(accuracy, values)]
        assert fits, accuracy
        assert_printed(seconds, [statistics.mean(run["seconds"] for run in fits[0])])


def test_chosen_rates_are_what_the_log_says() -> None:
    methods = ("batchnorm", "unit", "equinorm", "groupnorm", "msr", "ws_agc")
    rows = rows_of("docs/without-batch-statistics.md", "| one epoch, n = 1, held-out images |")
    for (_, factor, rule, *accuracies), method in zip(rows, methods, strict=True):
        runs = Log(RECORD).of("choose", method=method)
        best: dict[tuple[float, str], dict[int, float]] = {}
        for run in runs:
            key = run["config"]["factor"], run["config"]["rule"]
            best.setdefault(key, {})[run["batch"]] = run["accuracy"]
        setting = max(best, key=lambda key: sum(best[key].values()))
        assert (float(factor), f"the {rule.removeprefix('the ')}") == (setting[0], f"the {setting[1]}")
        for cell, batch in zip(accuracies, (32, 512), strict=True):
            assert_printed(cell, [best[setting][batch]])
