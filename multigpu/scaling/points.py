"""Measured points, from the metrics.json of runs, as one picture: `scaling --measured`."""

import json
from pathlib import Path

from multigpu import plots
from multigpu.errors import UserError, pluralize

KEYS = ("scaling", "world_size", "images_per_s")


def gather(folder: Path) -> None:
    """Draw FOLDER/scaling.png from FOLDER/*/metrics.json, and print the speed-ups.

    A run whose metrics.json cannot be read, or lacks one of KEYS, is left out. Of two runs
    with the same number of ranks the last one by name counts. Without a run of one rank there
    is no speed-up, which is printed. Raises UserError if the folder has no run.
    """
    drawn: list[Path] = []
    # Tasks of a job array draw the same folder: one may have ended while this one drew.
    while (paths := sorted(folder.glob("*/metrics.json"))) != drawn:
        drawn = paths
        curves = speed_ups(_runs(paths))
        if curves:
            _draw(curves, folder / "scaling.png")
        else:
            print(f"{folder}: no run with one rank yet, so no speed-up")
    if not drawn:
        raise UserError(
            f"--measured is {folder}, and it has no FOLDER/metrics.json: run "
            f"scripts/PT_CNN_Scaling.py with --out {folder}/1 first."
        )


def speed_ups(runs: list[dict]) -> dict[str, dict[int, float]]:
    """images/s ÷ those of one rank: {"strong" or "weak": {ranks: speed-up}}.

    A kind of scaling without a run of one rank is left out.
    """
    curves = {}
    for kind in ("strong", "weak"):
        of_kind = [run for run in runs if run["scaling"] == kind]
        points = {run["world_size"]: run["images_per_s"] for run in of_kind}
        if 1 in points:
            curves[kind] = {n: points[n] / points[1] for n in sorted(points)}
    return curves


def _runs(paths: list[Path]) -> list[dict]:
    runs = []
    for path in paths:
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            # Perhaps a task of the job array is writing it; that task then draws it.
            print(f"{path} is left out, because it cannot be read: {error}")
            continue
        if isinstance(run, dict) and all(key in run for key in KEYS):
            runs.append(run)
    return runs


def _draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    figure = plots.figure()
    axes = figure.add_subplot()
    for index, (kind, ratios) in enumerate(curves.items()):
        look = plots.curve_look(index)
        axes.plot(list(ratios), list(ratios.values()), label=f"{kind} scaling", **look)
        text = ", ".join(f"{n}: {ratio:.2f}×" for n, ratio in ratios.items())
        print(f"{kind} scaling by ranks: {text}")
    ranks = sorted({n for ratios in curves.values() for n in ratios})
    axes.plot(ranks, ranks, label="linear", color=plots.INK, linestyle=":")
    title = f"{pluralize(max(ranks), 'rank')}: images/s ÷ those of one rank"
    axes.set(xlabel="ranks", ylabel="times as fast, measured", title=title, xticks=ranks)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    print(f"figure: {plots.save(figure, path)}", flush=True)
