"""Hold predicted scaling efficiencies beside published ones: `python benchmarks/scaling.py`.

The clusters, their sources and the calibration are in lessons/13-scaling/experiments.py. The
GPU's own speed is calibrated on published times of one GPU, which are not among the rows; the
share of the simulated speed that they reach is printed, too. "uncalibrated" is the prediction
with the simulated speed. One null model is linear: an efficiency of 100%. The other one is a
constant: the median of the five published efficiencies, or that of the other four. It writes
benchmarks/scaling.json. Nothing is measured here, so the file is the same on every machine.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

from multigpu.files import write_json

HERE = Path(__file__).parent


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    return mean(abs(predicted - published) for predicted, published in pairs)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "lessons" / "13-scaling"))
    from experiments import ONE_GPU, PUBLISHED, factor, published_rows

    one_gpu = []
    for name, (*_, work) in ONE_GPU.items():
        share = work / factor(name)
        one_gpu.append({"name": name, "share": share})
        print(f"{name:<32} reaches {share:.0%} of the simulated speed")
    simulated = published_rows(PUBLISHED, calibrate=False)
    rows = []
    for name, (published, predicted, cause) in published_rows(PUBLISHED).items():
        row = {
            "name": name,
            "published": published,
            "predicted": predicted,
            "error": predicted - published,
            "null_error": 1 - published,
            "cause": cause,
            "uncalibrated": simulated[name][1],
        }
        rows.append(row)
        print(
            f"{name:<32} published {published:.1%}, predicted {predicted:.1%} "
            f"({row['error']:+.1%}), uncalibrated {row['uncalibrated']:.1%}; {cause}"
        )
    efficiencies = [row["published"] for row in rows]
    middle = median(efficiencies)
    others = [
        median(efficiencies[:number] + efficiencies[number + 1 :])
        for number in range(len(efficiencies))
    ]
    table = {
        "rows": rows,
        "error": mean_error((row["predicted"], row["published"]) for row in rows),
        "uncalibrated_error": mean_error(
            (row["uncalibrated"], row["published"]) for row in rows
        ),
        "null_error": mean_error((1, published) for published in efficiencies),
        "constant": middle,
        "constant_error": mean_error((middle, published) for published in efficiencies),
        "others_error": mean_error(zip(others, efficiencies, strict=True)),
        "one_gpu": one_gpu,
    }
    print(f"mean error, calibrated with one GPU: {table['error']:.1%}")
    print(f"not calibrated: {table['uncalibrated_error']:.1%}")
    print(f"null model, linear: {table['null_error']:.1%}")
    print(f"null model, always {middle:.0%}, their median: {table['constant_error']:.1%}")
    print(f"null model, the median of the other four: {table['others_error']:.1%}")
    print(write_json(HERE / "scaling.json", table))
