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
from equinorm.lab.record import picture, sizes
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
BATCHES = "docs/without-batch-statistics.md"
METHOD_OF = {name: method for method, name in picture.NAMES.items()}


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


def test_accuracy_against_batch_size_is_what_the_log_says() -> None:
    runs = picture.by_batch(Log(RECORD))
    shown = []
    for label, *cells in rows_of(BATCHES, "| three epochs, test images, n = 3 |"):
        name, _, fresh = label.partition(", ")
        by_size = runs[METHOD_OF[name]]
        assert sorted(by_size) == sorted(sizes.SIZES)
        assert {row["epochs"] for rows in by_size.values() for row in rows} == {3.0}
        for cell, rows in zip(cells, by_size.values(), strict=True):
            assert len({row["seed"] for row in rows}) == len(rows) == 3
            assert_printed(
                cell, mean_and_spread([row["accuracy_fresh_statistics" if fresh else "accuracy"] for row in rows])
            )
        shown += [] if fresh else [METHOD_OF[name]]
    assert sorted(shown) == sorted(picture.NAMES)
    for label, *cells in rows_of(BATCHES, "| unit filters are ahead by, points |"):
        others = runs[METHOD_OF[label.removeprefix("of ")]]
        for cell, size in zip(cells, runs["unit"], strict=True):
            ahead = mean_accuracy(runs["unit"][size]) - mean_accuracy(others[size])
            assert abs(float(cell.replace("\u2212", "-")) - ahead) <= 0.05 + 1e-9


@pytest.mark.parametrize("page", ["docs/faq.md", "docs/unit-filters.md"])
def test_excerpts_are_lines_of_the_table(page: str) -> None:
    whole = {label: cells for label, *cells in rows_of(BATCHES, "| three epochs, test images, n = 3 |")}
    rows = rows_of(page, "| CIFAR-10, three epochs, n = 3 |")
    assert len(rows) >= 3
    for label, *cells in rows:
        assert cells == whole[label][: len(cells)]


def test_what_the_text_says_of_batch_sizes_is_what_the_log_says() -> None:
    text = " ".join((ROOT / BATCHES).read_text(encoding="utf-8").split())
    log = Log(RECORD)
    runs = picture.by_batch(log)
    lost = {name: mean_accuracy(by_size[128]) - mean_accuracy(by_size[2]) for name, by_size in runs.items()}
    assert min(lost, key=lambda name: lost[name]) == "msr"
    anew = [
        abs(mean_accuracy(rows, "accuracy_fresh_statistics") - mean_accuracy(rows))
        for rows in runs["batchnorm"].values()
    ]
    second = {name: mean_accuracy(by_size[128]) for name, by_size in picture.by_batch(log, "batch-resnet20").items()}
    alone = {name: tried(log, "settings", name) for name in ("msr", "ws_agc")}
    gain = {
        name: max(found[32] for found in settings.values()) - best(settings)[1][32] for name, settings in alone.items()
    }
    for words, value in (
        ("Unit filters lose ", lost["unit"]),
        ("which loses ", lost["msr"]),
        ("It is ", mean_accuracy(runs["unit"][128]) - mean_accuracy(runs["msr"][128])),
        ("EquiNorm needs its batch.** It loses ", lost["equinorm"]),
        ("Statistics taken anew after training change it by ", max(anew)),
        ("At 8 the difference is ", mean_accuracy(runs["unit"][8]) - mean_accuracy(runs["groupnorm"][8])),
        ("At 32 alone mean shift rejection gains ", gain["msr"]),
        ("Unit filters had the record's ", sum(len(log.of(part, method="unit")) for part in ("ladder", "refine"))),
        ("At 512 these leave it at ", tried(log, "settings", "msr")[16.0, "sum", 0.1, False][512]),
        ("no noise give scaled WS with AGC ", gain["ws_agc"]),
        ("BatchNorm is ahead of unit filters by ", second["batchnorm"] - second["unit"]),
        ("Unit filters are ahead of GroupNorm by ", second["unit"] - second["groupnorm"]),
    ):
        assert words in text, words
        assert_printed(re.match(r"[\d.]*\d", text.partition(words)[2])[0], [value])  # type: ignore[index]


def test_chosen_settings_are_what_the_log_says() -> None:
    """The best mean over both sizes, and what the runs on the test set had."""
    log = Log(RECORD)
    rows = rows_of(BATCHES, "| chosen on held-out images, n = 1 |")
    assert sorted(METHOD_OF[label] for label, *_ in rows) == sorted(picture.NAMES)
    for label, n, factor, rule, noise, start, *accuracies in rows:
        method = METHOD_OF[label]
        settings = tried(log, "settings", method)
        assert int(n) == len(settings)
        setting, found = best(settings)
        drawn = {"random": False, "identity": True, "the method's own": setting[3]}[start]
        assert (start == "the method's own") == (method in sizes.OWN_START)
        assert (float(factor), rule.removeprefix("the "), float(noise), drawn) == setting
        assert {setting_of(row) for row in log.of("batch", method=method)} == {setting}
        for cell, size in zip(accuracies, (32, 512), strict=True):
            assert_printed(cell, [found[size]])


def test_the_second_net_is_what_the_log_says() -> None:
    log = Log(RECORD)
    runs = picture.by_batch(log, "batch-resnet20")
    rows = rows_of(BATCHES, "| ResNet-20, batch 128, three epochs |")
    assert sorted(METHOD_OF[label] for label, *_ in rows) == sorted(picture.NAMES)
    for label, accuracy, n, factor, best_at_32, its_factor in rows:
        ((size, mine),) = runs[METHOD_OF[label]].items()
        assert (size, len(mine)) == (128, int(n))
        assert_printed(accuracy, mean_and_spread([row["accuracy"] for row in mine]))
        assert ("not finite" in accuracy) == (not any(row["finite"] for row in mine))
        assert {row["config"]["factor"] for row in mine} == {float(factor)}
        settings = tried(log, "settings-resnet20", METHOD_OF[label])
        assert best(settings)[0] == setting_of(mine[0])
        assert_printed(best_at_32, [max(found[32] for found in settings.values())])
        if its_factor:
            (alone,) = (setting for setting, found in settings.items() if printed(best_at_32, [found[32]]))
            assert float(its_factor) == alone[0]


def test_batches_in_the_readme_are_what_the_log_says() -> None:
    runs = picture.by_batch(Log(RECORD))
    evidence = next(row[-1] for row in rows_of("README.md", "| | use when |") if "unit filters" in row[0])
    (unit, spread), *others = (
        mean_and_spread([row["accuracy"] for row in runs[name][2]]) for name in ("unit", "groupnorm", "batchnorm")
    )
    batch, _, accuracies = evidence.partition(": ")
    assert batch == "batch 2"
    assert_printed(accuracies.removesuffix(" (n = 3)"), [unit, spread, *(accuracy for accuracy, _ in others)])
    lost = re.search(
        r"they lose ([\d.]+) points \(aim: 0.5\), BatchNorm ([\d.]+) \(n = 3\)", (ROOT / "README.md").read_text()
    )
    assert lost is not None
    for number, name in zip(lost.groups(), ("unit", "batchnorm"), strict=True):
        assert_printed(number, [mean_accuracy(runs[name][128]) - mean_accuracy(runs[name][2])])


Setting = tuple[float, str, float, bool]


def setting_of(row: dict[str, Any]) -> Setting:
    factor, rule, noise, dirac = (row["config"][field] for field in ("factor", "rule", "noise", "dirac"))
    return factor, rule, noise, dirac


def tried(log: Log, part: str, method: str) -> dict[Setting, dict[int, float]]:
    """Accuracies on held-out images, by setting and batch size."""
    found: dict[Setting, dict[int, float]] = {}
    for row in log.of(part, method=method, on="held-out"):
        found.setdefault(setting_of(row), {})[row["batch"]] = row["accuracy"]
    return found


def best(settings: dict[Setting, dict[int, float]]) -> tuple[Setting, dict[int, float]]:
    return max(settings.items(), key=lambda item: sum(item[1].values()))


def mean_accuracy(rows: Sequence[dict[str, Any]], field: str = "accuracy") -> float:
    return statistics.mean(row[field] for row in rows)
