"""Hold predicted scaling efficiencies beside published ones: `python benchmarks/scaling.py`.

The clusters, their sources and the calibration are in lessons/13-scaling/experiments.py. The
GPU's own speed is calibrated on published times of one GPU, which are not among the rows; the
share of the simulated speed that they reach is printed, too. The null model is linear: an
efficiency of 100%. It writes benchmarks/scaling.json. Nothing is measured here, so the file is
the same on every machine.
"""

import sys
from pathlib import Path

from multigpu.files import write_json

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "lessons" / "13-scaling"))
    from experiments import ONE_GPU, PUBLISHED, factor, published_rows

    one_gpu = []
    for name, (*_, work) in ONE_GPU.items():
        share = work / factor(name)
        one_gpu.append({"name": name, "share": share})
        print(f"{name:<32} reaches {share:.0%} of the simulated speed")
    rows = []
    for name, (published, predicted, cause) in published_rows(PUBLISHED).items():
        row = {
            "name": name,
            "published": published,
            "predicted": predicted,
            "error": predicted - published,
            "null_error": 1 - published,
            "cause": cause,
        }
        rows.append(row)
        print(
            f"{name:<32} published {published:.1%}, predicted {predicted:.1%} "
            f"({row['error']:+.1%}), linear 100% ({row['null_error']:+.1%}); {cause}"
        )
    error = sum(abs(row["error"]) for row in rows) / len(rows)
    null_error = sum(abs(row["null_error"]) for row in rows) / len(rows)
    print(f"mean error: predicted {error:.1%}, linear {null_error:.1%}")
    table = {"rows": rows, "error": error, "null_error": null_error, "one_gpu": one_gpu}
    print(write_json(HERE / "scaling.json", table))
