"""Install a wheel into an environment of its own and use it as a stranger would; `make package` runs it.

python scripts/try_wheel.py dist/equinorm-0.1.0-py3-none-any.whl [--with-demo]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BALANCE = """
import torch, equinorm
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
report = equinorm.balance_(model, torch.rand(3, 4))
assert report.converged and report.num_scales == 8, report
print(equinorm.__version__, report)
"""


def check_contents(wheel: Path) -> None:
    """What has to be in it, and what has not."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "equinorm/py.typed" in names
    assert any(name.endswith("entry_points.txt") for name in names)
    strangers = [name for name in names if not name.startswith(("equinorm/", "equinorm-"))]
    assert not strangers, strangers


def main(wheel: Path, with_demo: bool) -> None:
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        run = place / "venv" / "bin"

        def install(what: str) -> None:
            pinned = ["--constraint", ROOT / "constraints.txt"]
            subprocess.run([run / "python", "-m", "pip", "install", "--quiet", *pinned, what], check=True)

        install(str(wheel))
        subprocess.run([run / "python", "-c", BALANCE], check=True, cwd=place)
        subprocess.run([run / "equinorm", "--help"], check=True, cwd=place)
        refused = subprocess.run([run / "equinorm", "demo"], cwd=place, capture_output=True, text=True)
        assert refused.returncode, refused
        assert "equinorm[lab]" in refused.stderr, refused
        if with_demo:
            install(f"{wheel}[lab]")
            subprocess.run([run / "equinorm", "demo", "--quick"], check=True, cwd=place)
    print(f"{wheel.name}: installs, imports, balances")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "--with-demo" in sys.argv)
