"""Run pytest on what failed in its last run, alone; of a notebook on all cells, in order."""

import json
import subprocess
import sys

LAST_FAILED = ".pytest_cache/v/cache/lastfailed"
MOST = 10  # more tests and notebooks that fail than these are no race between tests


def main() -> int:
    with open(LAST_FAILED) as file:
        failed = list(json.load(file))
    # A cell needs the cells before it.
    chosen = {name.split("::")[0] if ".ipynb::" in name else name: None for name in failed}
    if len(chosen) > MOST:
        print(f"{len(chosen)} tests failed: they are not run again")
        return 1
    print("running again, alone:", *chosen, sep="\n  ", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *chosen]).returncode


if __name__ == "__main__":
    sys.exit(main())
