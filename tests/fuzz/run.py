"""Fuzz every file format, public function and command: python tests/fuzz/run.py --cases 100000.

It prints a table of outcomes and the first examples of each bad one, and exits with 1 if there is any.
"""

import argparse
import os
import sys
import time
from pathlib import Path

# A forked process must not inherit a pool of threads. Some libraries read this once, so it comes before `import torch`.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT / "tests")  # not this folder: its modules are imported from the package `fuzz`
try:
    import dgemma  # noqa: F401
except ImportError:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="families to run (all)")
    arguments = parser.parse_args()
    from fuzz import calls, commands, files, harness, requests

    families = [*files.FAMILIES, *calls.FAMILIES, *commands.FAMILIES, *requests.FAMILIES]
    families = [family for family in families if not arguments.only or family.name in arguments.only]
    began = time.monotonic()
    counts = harness.run_families(families, arguments.cases, first_seed=arguments.seed)
    print(counts.table())
    for (family, outcome), examples in sorted(counts.examples.items()):
        print(f"\n{family}: {outcome}")
        print("\n".join(f"  {line}" for line in examples[:5]))
    print(f"\n{time.monotonic() - began:.0f} seconds")
    return int(any(counts.total(outcome) for outcome in harness.BAD))


if __name__ == "__main__":
    sys.exit(main())
