"""``python -m tests.support.simulation SEED [SEED…] [--runs] [--shrink] [--trace]``: run seeds, show what is wrong."""

from __future__ import annotations

import argparse
import sys

from tests.support.simulation import Plan, plan_of, shrunk, simulate, trips_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="+", help="a seed, or a range such as 0-99")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest plan that fails alike")
    parser.add_argument("--runs", action="store_true", help="with runs of workflows")
    parser.add_argument("--trace", action="store_true", help="show every message")
    asked = parser.parse_args()
    failed = 0
    for text in asked.seeds:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            failed += not _show((trips_of if asked.runs else plan_of)(seed), shrink=asked.shrink, trace=asked.trace)
    return 1 if failed else 0


def _show(plan: Plan, *, shrink: bool, trace: bool) -> bool:
    run = simulate(plan, keep_trace=trace)
    kinds = {violation.invariant for violation in run.violations}
    if kinds and shrink:
        plan = shrunk(plan, lambda smaller: kinds <= {each.invariant for each in simulate(smaller).violations})
        run = simulate(plan, keep_trace=trace)
        print(plan)
    print(*run.evidence.lines, run, run.trace, sep="\n")
    return not run.violations


if __name__ == "__main__":
    sys.exit(main())
