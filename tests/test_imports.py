"""Which module may import which: no cycles, nothing of the library from the laboratory, every method in its room.

An import counts where it stands: at the top of a module it runs when the module is imported; inside a function or a
test for `TYPE_CHECKING` it does not, so it can close no cycle, but it is a dependency all the same and counts for who
may know whom. `from .room import name` is an import of `room.name` where that is a module, else of `room`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import equinorm

SOURCE = Path(equinorm.__file__).parent
METHODS = {"enorm", "equilibrium", "msr", "weightnorm", "norms", "normprop"}
"""Rooms of methods, besides every folder that has a `method.py`."""
BUILT_ON = {("normprop", "weightnorm"), ("combinations", "weightnorm"), ("combinations", "norms")}
"""What a method is by definition a case of."""

# What is not as it should be yet. An entry that no longer occurs fails the test: take it out.
CYCLES: set[frozenset[str]] = set()
PRIVATE: set[tuple[str, str]] = set()
KNOWN_METHODS: set[tuple[str, str]] = set()


class Import(NamedTuple):
    """One name that a module imports, or reaches as an attribute of a module that it imports."""

    importer: str
    module: str
    name: str | None
    at_import: bool  # whether it runs when the importer is imported


# -- reading -----------------------------------------------------------------------------------------------------------


def sources(folder: Path = SOURCE, package: str = "equinorm") -> dict[str, str]:
    """The text of every module, by its name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def packages(modules: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in modules}


def imports_of(texts: Mapping[str, str]) -> list[Import]:
    return [found for name, text in texts.items() for found in _imports(name, text, texts)]


def _imports(importer: str, text: str, texts: Mapping[str, str]) -> Iterator[Import]:
    root = importer.partition(".")[0]
    inside = importer if importer in packages(texts) else importer.rpartition(".")[0]
    bound: dict[str, str] = {}  # local names that are modules
    tree = ast.parse(text)
    for node, at_import in _statements(tree.body, True):
        if isinstance(node, ast.ImportFrom):
            base = inside.split(".")[: len(inside.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.partition(".")[0] != root:
                continue
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                if inner in texts:
                    bound[alias.asname or alias.name] = inner
                    yield Import(importer, inner, None, at_import)
                else:
                    yield Import(importer, module, alias.name, at_import)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == root:
                    yield Import(importer, alias.name, None, at_import)
                    bound[alias.asname or root] = alias.name if alias.asname else root
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield Import(importer, bound[node.value.id], node.attr, False)


def _statements(body: Iterable[ast.stmt], at_import: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it runs when the module is imported."""
    for statement in body:
        yield statement, at_import
        runs = at_import and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _statements(statement.body, False)
            yield from _statements(statement.orelse, runs)
            continue
        for _, block in ast.iter_fields(statement):
            if isinstance(block, list):
                inner = [part for part in block if isinstance(part, ast.stmt)]
                inner += [
                    part for one in block if isinstance(one, ast.ExceptHandler | ast.match_case) for part in one.body
                ]
                yield from _statements(inner, runs)


def room(module: str) -> str:
    """The folder of the package that a module lies in, or the module itself; in the laboratory, the folder in that."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["lab"] else 1])


# -- the rules ---------------------------------------------------------------------------------------------------------


def cycles(imports: Iterable[Import]) -> set[frozenset[str]]:
    """Groups of modules that import each other when they are imported (strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        if found.at_import and found.module != found.importer:
            graph.setdefault(found.importer, set()).add(found.module)

    @cache
    def reached(module: str) -> frozenset[str]:
        seen, waiting = set(), [module]
        while waiting:
            for following in graph.get(waiting.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return frozenset(seen)

    return {frozenset(b for b in reached(a) if a in reached(b)) for a in graph if a in reached(a)}


def of_the_laboratory(imports: Iterable[Import]) -> set[tuple[str, str]]:
    """What the library imports of the laboratory; the command line may."""
    return {
        (found.importer, found.module)
        for found in imports
        if room(found.module).partition(".")[0] == "lab"
        and room(found.importer).partition(".")[0] not in ("lab", "cli")
    }


def private(imports: Iterable[Import]) -> set[tuple[str, str]]:
    """Names with a leading underscore that cross from one room to another."""
    return {
        (found.importer, f"{found.module}.{found.name}" if found.name else found.module)
        for found in imports
        if room(found.importer) != room(found.module)
        and any(
            part.startswith("_") and not part.startswith("__") for part in (*found.module.split("."), found.name or "")
        )
    }


def known_methods(imports: Iterable[Import], methods: set[str]) -> set[tuple[str, str]]:
    """What a room of a method imports of another's, and what conversion and registry import of any."""
    found = set()
    for one in imports:
        a, b = room(one.importer), room(one.module)
        if b not in methods or a == b or (a, b) in BUILT_ON:
            continue
        if a in methods or (a in ("conversion", "registry") and one.at_import):
            found.add((one.importer, one.module))
    return found


# -- the library -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    found = imports_of(sources())
    assert any(one.importer == "equinorm.cli" and room(one.module) == "lab.experiments" for one in found)
    return found


def test_there_are_no_cycles(imports: list[Import]) -> None:
    assert cycles(imports) == CYCLES


def test_nothing_of_the_library_imports_the_laboratory(imports: list[Import]) -> None:
    assert not of_the_laboratory(imports)


def test_no_private_name_crosses_a_room(imports: list[Import]) -> None:
    assert private(imports) == PRIVATE


def test_methods_do_not_know_each_other(imports: list[Import]) -> None:
    assert known_methods(imports, METHODS | {path.parent.name for path in SOURCE.glob("*/method.py")}) == KNOWN_METHODS


# -- the rules on a small package, where each is broken ----------------------------------------------------------------

PACKAGE = {
    "p": "",
    "p.cli": "def main():\n    from .lab import bench",
    "p.registry": "ROOMS = {'msr': 'p.msr.method'}\ndef load():\n    from .msr import method",
    "p.models": "",
    "p.models.graph": "from ..msr.layers import Noise",
    "p.msr": "",
    "p.msr.layers": "from __future__ import annotations\nimport torch\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from ..models.graph import Graph",
    "p.msr.method": "from . import layers\nlayers._draw",
    "p.normprop": "from ..weightnorm.layers import WeightNorm",
    "p.weightnorm": "",
    "p.weightnorm.layers": "class WeightNorm:\n    from ..models import graph",
    "p.lab": "",
    "p.lab.bench": "from ..msr import layers",
}


def changed(**texts: str) -> list[Import]:
    return imports_of({**PACKAGE, **{f"p.{name.replace('__', '.')}": text for name, text in texts.items()}})


def test_a_package_that_keeps_the_rules() -> None:
    found = changed()
    assert not cycles(found)
    assert not of_the_laboratory(found)
    assert not private(found)
    assert not known_methods(found, METHODS)


def test_a_cycle_is_found() -> None:
    for text in (
        "from ..models import graph",
        "import p.models.graph",
        "try:\n    from ..models.graph import Graph\nexcept ImportError:\n    pass",
        "if True:\n    from ..models.graph import Graph",
    ):
        assert cycles(changed(msr__layers=text)) == {frozenset({"p.models.graph", "p.msr.layers"})}, text
    assert not cycles(changed(msr__layers="def f():\n    from ..models import graph"))


def test_the_laboratory_in_the_library_is_found() -> None:
    for text in ("from ..lab import bench", "def f():\n    with a:\n        from p.lab.bench import run"):
        assert of_the_laboratory(changed(models__graph=text)) == {("p.models.graph", "p.lab.bench")}, text


def test_a_private_name_in_another_room_is_found() -> None:
    assert private(changed(models__graph="from ..msr.layers import _Noise")) == {
        ("p.models.graph", "p.msr.layers._Noise")
    }
    assert private(changed(lab__bench="from ..msr import layers as l\nl._draw()")) == {
        ("p.lab.bench", "p.msr.layers._draw")
    }
    assert not private(changed(models__graph="from ..msr.layers import __version__"))


def test_a_method_that_knows_another_is_found() -> None:
    late = "def f():\n    from ..msr.layers import Noise"
    assert known_methods(changed(weightnorm__layers=late), METHODS) == {("p.weightnorm.layers", "p.msr.layers")}
    assert known_methods(changed(registry="from .msr import method"), METHODS) == {("p.registry", "p.msr.method")}
    assert not known_methods(changed(registry="def f():\n    from .msr import method"), METHODS)
