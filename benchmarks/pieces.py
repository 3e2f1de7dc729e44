"""Compare the curve of PyTorch's model-parallel tutorial with a simulated one.

    python benchmarks/pieces.py

The tutorial ("Single-Machine Model Parallel Best Practices", Shen Li) does not name its GPU.
It trains a ResNet-50 with two of them and divides each batch of 120 images into pieces. Its
text has the seconds of 1, 6 and 10 pieces (4.02, 2.51, 2.43) and of one GPU (3.75). The others
were read from its figure split_size_tradeoff.png, to 0.01 s. The simulated T4s are no guess at
the tutorial's GPU: they show what a slower one changes. It writes pieces.json for
lesson 03.
"""

from pathlib import Path

from vgpu_fidelity import tutorial

from multigpu.files import write_json

BATCH = 120
MACHINES = {
    "V100s, NVLink2": {"gpu": "V100-16GB", "link": "NVLink2"},
    "T4s, PCIe3": {"gpu": "T4", "link": "PCIe3"},
}
ONE_GPU = 3.75
# Images of a piece → seconds.
PUBLISHED = {
    120: 4.02,
    60: 3.13,
    40: 2.86,
    20: 2.51,
    12: 2.43,
    10: 2.49,
    8: 2.63,
    5: 2.95,
    3: 3.75,
    1: 8.25,
}


def main() -> None:
    curves = {"published": {BATCH // size: ONE_GPU / each for size, each in PUBLISHED.items()}}
    seconds = {"published": ONE_GPU}
    for name, machine in MACHINES.items():
        seconds[name] = tutorial("one", **machine).seconds
        curves[name] = {
            BATCH // size: seconds[name] / tutorial("pipeline", split=size, **machine).seconds
            for size in PUBLISHED
        }
        print(name, curves[name], flush=True)
    rounded = {
        name: {pieces: round(faster, 3) for pieces, faster in curve.items()}
        for name, curve in curves.items()
    }
    write_json(
        Path(__file__).with_suffix(".json"),
        {
            "times_as_fast_as_one_gpu": rounded,
            "seconds_of_one_gpu": {name: round(each, 3) for name, each in seconds.items()},
            "description": "by the number of pieces; all but the published ones are simulated",
        },
    )


if __name__ == "__main__":
    main()
