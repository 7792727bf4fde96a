"""Scale variables and the relations between them: a weighted union-find over integer labels.

Every label l stands for a positive scale s_l. Relations are linear in the logarithms,

    log s_l = weight[l] · log s_parent[l],

so that a power (ReLU²), a reciprocal (k = 1/q in attention) and a plain merge (a residual sum) are the same operation
with another weight. All functions take whole tensors of labels; none loops over them in Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

FROZEN = 0  # the label of everything that must keep its scale: s = 1
ZERO = -1  # the label of a structural zero, which fits any scale

_EXACT = 1e-9  # two exponents closer than this are the same exponent


class Scales:
    """Weighted union-find in which whole components can be frozen, each with the reason (a graph node's index)."""

    def __init__(self) -> None:
        self.size = 1
        self._parent = torch.zeros(1024, dtype=torch.int64)
        self._weight = torch.ones(1024, dtype=torch.float64)
        self._frozen = torch.zeros(1024, dtype=torch.bool)
        self._why = torch.full((1024,), -1, dtype=torch.int64)
        self._birth = torch.full((1024,), -1, dtype=torch.int64)
        self._frozen[FROZEN] = True

    # -- making labels ---------------------------------------------------------------------------------------------

    def fresh(self, count: int, birth: int) -> Tensor:
        """`count` new labels, each a scale of its own, opened by graph node `birth`."""
        start, stop = self.size, self.size + count
        while stop > len(self._parent):
            for name in ("_parent", "_weight", "_frozen", "_why", "_birth"):
                old = getattr(self, name)
                setattr(self, name, torch.cat([old, torch.zeros_like(old)]))
        new = torch.arange(start, stop)
        self._parent[start:stop] = new
        self._weight[start:stop] = 1.0
        self._frozen[start:stop] = False
        self._why[start:stop] = -1
        self._birth[start:stop] = birth
        self.size = stop
        return new

    def power(self, labels: Tensor, exponent: float) -> Tensor:
        """Labels of the scales s**exponent."""
        if abs(exponent - 1.0) < _EXACT:
            return labels
        if abs(exponent) < _EXACT:
            return torch.full_like(labels, FROZEN)
        unique, inverse = labels.unique(return_inverse=True)
        return self._linked(unique, torch.full(unique.shape, exponent, dtype=torch.float64))[inverse]

    def _linked(self, labels: Tensor, exponents: Tensor) -> Tensor:
        """New labels with log s = exponent · log s[label]; frozen and zero labels stay what they are."""
        roots, weights = self.find(labels)
        free = (labels > FROZEN) & ~self._frozen[roots]
        out = torch.where(labels == ZERO, ZERO, FROZEN)
        new = self.fresh(int(free.sum()), birth=0)
        self._parent[new] = roots[free]
        self._weight[new] = weights[free] * exponents[free]
        out[free] = new
        return out

    # -- reading them ----------------------------------------------------------------------------------------------

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The root of every label and the exponent that leads there (zero labels read as the frozen root)."""
        labels = labels.clamp_min(FROZEN)
        roots, weights = self._parent[labels], self._weight[labels]
        above = self._parent[roots]
        if torch.equal(above, roots):  # the usual case: every label is a root, or hangs on one
            return roots, weights
        while not torch.equal(above, roots):
            weights = weights * self._weight[roots]
            roots, above = above, self._parent[above]
        # path compression: the next look-up takes one step
        self._parent[labels] = roots
        self._weight[labels] = weights
        return roots, weights

    def is_frozen(self, labels: Tensor) -> Tensor:
        """True where a label is frozen (a structural zero is not)."""
        return (labels != ZERO) & self._frozen[self.find(labels)[0]]

    def reason(self, labels: Tensor) -> Tensor:
        """Index of the graph node that froze each label, -1 where it is free or was a constant from the start."""
        return self._why[self.find(labels)[0]]

    def birth(self, roots: Tensor) -> Tensor:
        """Index of the graph node that opened each root."""
        return self._birth[roots]

    # -- relating them ---------------------------------------------------------------------------------------------

    def freeze(self, labels: Tensor, why: int) -> None:
        """Fix these scales at 1, and with them everything merged with them."""
        roots = self.find(labels[labels > FROZEN])[0].unique()
        roots = roots[~self._frozen[roots]]
        self._frozen[roots] = True
        self._why[roots] = why

    def merge(self, a: Tensor, b: Tensor, why: int, exponent: float = 1.0) -> None:
        """Demand s_a = s_b ** exponent, element by element; structural zeros demand nothing.

        A relation that contradicts an earlier one (x = -x) leaves only s = 1.
        """
        a, b = (t.reshape(-1) for t in torch.broadcast_tensors(a, b))
        known = (a != ZERO) & (b != ZERO) & ((a != b) | (exponent != 1.0))
        a, b = a[known], b[known]
        if len(a) > 1:
            # a pair as one number: torch sorts those much faster than rows
            many = self.size
            pairs = (a * many + b).unique()
            a, b = pairs // many, pairs % many
        while len(a):
            root_a, weight_a = self.find(a)
            root_b, weight_b = self.find(b)
            weight_b = weight_b * exponent
            frozen_a, frozen_b = self._frozen[root_a], self._frozen[root_b]
            # freezing spreads and takes its reason along; the constant label has none, so the present op is it
            for source, target, spread in (
                (root_a, root_b, frozen_a & ~frozen_b),
                (root_b, root_a, frozen_b & ~frozen_a),
            ):
                self._why[target[spread]] = torch.where(self._why[source] < 0, why, self._why[source])[spread]
                self._frozen[target[spread]] = True
            same = root_a == root_b
            clash = same & ~frozen_a & ((weight_a - weight_b).abs() > _EXACT)
            self._frozen[root_a[clash]] = True
            self._why[root_a[clash]] = why
            # what is not settled goes round again: a root frozen just now must still pass it on
            open_ = ~same & ~(self._frozen[root_a] & self._frozen[root_b])
            a, b, root_a, weight_a, root_b, weight_b = (x[open_] for x in (a, b, root_a, weight_a, root_b, weight_b))
            hook = ~self._frozen[root_a] & ~self._frozen[root_b]
            root_a, weight_a, root_b, weight_b = (x[hook] for x in (root_a, weight_a, root_b, weight_b))
            if not len(root_a):
                continue
            # hook the later root under the earlier one: no cycles, and a component keeps its first label as its root
            later = root_a > root_b
            high, low = torch.where(later, root_a, root_b), torch.where(later, root_b, root_a)
            ratio = torch.where(later, weight_b / weight_a, weight_a / weight_b)
            chosen, position = high.unique(return_inverse=True)
            first = torch.full_like(chosen, len(high)).scatter_reduce_(0, position, torch.arange(len(high)), "amin")
            self._parent[chosen] = low[first]
            self._weight[chosen] = ratio[first]

    def product(self, a: Tensor, b: Tensor, why: int) -> Tensor:
        """Labels of an elementwise product x·y. Where both factors are free and unrelated the left one is frozen."""
        a, b = torch.broadcast_tensors(a, b)
        root_a, weight_a = self.find(a)
        root_b, weight_b = self.find(b)
        frozen_a, frozen_b = self._frozen[root_a], self._frozen[root_b]
        related = ~frozen_a & ~frozen_b & (root_a == root_b)
        unrelated = ~frozen_a & ~frozen_b & (root_a != root_b)
        out = torch.where(frozen_b, a, b)
        if related.any():
            total = (weight_a + weight_b)[related]
            linked = self._linked(root_a[related], total)
            out = out.clone()
            out[related] = torch.where(total.abs() < _EXACT, FROZEN, linked)
        # a structural zero times anything is a structural zero
        nothing = (a == ZERO) | (b == ZERO)
        out = torch.where(nothing, ZERO, out)
        self.freeze(a[unrelated & ~nothing], why)
        return out
