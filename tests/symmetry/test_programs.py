"""Random programs (see `support.programs`): whatever is found free in one, moving it does not change what it puts out.

The slow test runs 2,000; `python tests/symmetry/test_programs.py FIRST LAST` runs others, and prints what is wrong with
those that are, as short as it can be.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable

import pytest

from support.programs import Verdict, judge, program, shrunk

EVERY_TIME = 24
SLOW = 2_000


def judged(seeds: Iterable[int], verify: bool = False) -> dict[int, Verdict]:
    return {seed: judge(program(seed), seed, verify) for seed in seeds}


def faults(verdicts: dict[int, Verdict], verify: bool = False) -> list[str]:
    """What is wrong, with the shortest program that shows it."""
    said = []
    for seed, verdict in verdicts.items():
        if not verdict.well:
            text = shrunk(program(seed), lambda t, k=seed, v=verdict: judge(t, k, verify).kind == v.kind)  # type: ignore[misc]
            said.append(f"seed {seed} is {verdict.kind} ({verdict.detail}):\n{text}")
    return said


def test_the_function_is_kept() -> None:
    verdicts = judged(range(EVERY_TIME))
    assert not faults(verdicts)
    assert sum(verdict.scales > 0 for verdict in verdicts.values()) >= EVERY_TIME // 4, "or else they show nothing"


def test_verification_agrees() -> None:
    """Nothing that the rules find right is frozen by the net below them."""
    assert not faults(judged(range(EVERY_TIME, EVERY_TIME + 8), verify=True), verify=True)


def test_a_program_is_the_same_each_time() -> None:
    assert program(7) == program(7)
    assert len({program(seed) for seed in range(10)}) > 8


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(8))
def test_two_thousand_programs(shard: int) -> None:
    assert not faults(judged(range(10_000 + shard, 10_000 + SLOW, 8)))


def main(first: int, last: int) -> None:
    """Run programs and print a summary, as `results/soundness.txt` has it."""
    start, kinds, free = time.monotonic(), Counter[str](), 0
    for seed in range(first, last):
        verdict = judge(program(seed), seed)
        kinds[verdict.kind] += 1
        free += verdict.scales > 0
        if not verdict.well:
            print(*faults({seed: verdict}), sep="\n", flush=True)
    counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common())
    print(f"programs {first} to {last - 1}: {counts}; {free:,} with free scales; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
