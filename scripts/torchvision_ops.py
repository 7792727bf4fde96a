"""Makes `import torchvision` work where PyPI's torchvision, a CUDA build, stands beside a CPU build of torch.

The library of such a torchvision cannot be loaded, and its Python part then asks torch about two operators that nobody
has declared. To declare them is enough: only detection models call them. This is done when torchvision is imported, so
that Python starts as fast as ever, and nothing is done where torch has CUDA or torchvision's library can be loaded.

    python scripts/torchvision_ops.py    # into the environment of this Python, if it has torchvision; the Makefile does
"""

import sys

_DECLARED = []  # operators live as long as the object that declared them


class Finder:
    """Stands before the others in `sys.meta_path`, and finds nothing but torchvision."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                declare(spec.submodule_search_locations or [])
                run(module)

            spec.loader.exec_module = exec_module
        return spec


def declare(folders):
    """Declares what the import of the torchvision in `folders` needs, if its own library does not."""
    from pathlib import Path

    import torch

    if torch.version.cuda is not None or _DECLARED:
        return
    for library in (file for folder in folders for file in Path(folder).glob("_C.*")):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(operators)


def install():
    """Copies this file into the environment, and has Python import it at every start."""
    import sysconfig
    from importlib.machinery import PathFinder
    from pathlib import Path

    packages = Path(sysconfig.get_path("purelib"))
    if PathFinder.find_spec("torchvision") is not None:
        (packages / "torchvision_ops.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        (packages / "torchvision_ops.pth").write_text("import torchvision_ops\n", encoding="utf-8")


if __name__ == "__main__":
    install()
elif Finder not in sys.meta_path:
    sys.meta_path.insert(0, Finder)
