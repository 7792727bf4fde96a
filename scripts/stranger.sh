#!/usr/bin/env bash
# The path of somebody who has never seen this repository: clone it, see the demo, balance a model of his own from the
# command line, convert and train it in Python, fold it, and export it.
#
#   scripts/stranger.sh [REPOSITORY] [FOLDER]    # a clone of REPOSITORY (this one) in FOLDER (a temporary one)
#
# PYTHON=... names an interpreter whose environment has everything already; without it the clone makes its own.
set -euo pipefail

repository=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
folder=${2:-$(mktemp -d)}

step() { printf '\n== %s\n' "$*"; }

step "clone"
git clone --quiet "$repository" "$folder/equinorm"
cd "$folder/equinorm"

step "demo"
if [[ -n ${PYTHON:-} ]]; then
    export PYTHONPATH=$PWD/src
    python=$PYTHON
    "$python" -m equinorm.cli demo --quick
else
    make demo
    python=$PWD/.venv/bin/python
fi

mkdir "$folder/mine"
cd "$folder/mine"
cat >mynet.py <<'EOF'
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
EOF

step "what can be rescaled in a model of my own"
"$python" -m equinorm.cli trace mynet.py:net --input 2,1,8,8

step "balance it"
"$python" -m equinorm.cli balance mynet.py:net --input 2,1,8,8 --output balanced.pt

step "what to try"
"$python" -m equinorm.cli diagnose mynet.py:net balanced.pt --input 2,1,8,8 --output diagnosis.html

step "train it without batch statistics, fold it, export it"
cat >train.py <<'EOF'
import torch
from mynet import net
from sklearn.datasets import load_digits

import equinorm

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(digits.target)
torch.manual_seed(0)
model, report = equinorm.convert(net(), "equinorm", x[:64])
print(report.summary)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    for batch in torch.randperm(1400).split(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
model.eval()
accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
print(f"{100 * accuracy:.1f} % of test images (one run)")
assert accuracy > 0.8
plain, report = equinorm.fold(model, x[:2])
torch.testing.assert_close(plain(x), model(x), atol=1e-4, rtol=1e-4)
torch.export.save(torch.export.export(plain, (x[:2],)), "model.pt2")
print(report.summary, "- exported to model.pt2")
EOF
"$python" train.py

step "done, in $folder"
