"""Figures have whole epochs, a legend in the bars' order, and totals at the bars' ends.

They are readable on white and dark backgrounds, in black and white, and for colour-blind
readers.
"""

import io
import itertools

import pytest
from colours import VISION, contrast, distance
from PIL import Image

from multigpu import plots
from multigpu.scaling.prediction import (
    BETWEEN,
    COPIES,
    INPUT,
    INSIDE,
    LATENCY,
    SMALL,
    STRAGGLERS,
)

WHITE = "#ffffff"
# The backgrounds of GitHub's and of JupyterLab's dark themes.
DARK = ("#0d1117", "#111111")
# Parts that are drawn beside each other.
BESIDE = (
    ("forward", "backward", "update", "quantise", "transfer", "collective"),
    ("forward", "backward", "update", "bucket copies", "collective"),
    ("data", "forward", "backward", "update"),
    ("weights", "gradients", "optimizer", "activations", "16-bit copies"),
    ("data", "compute", "update", "collective", "idle", "files"),
    ("ideal", SMALL, COPIES, LATENCY, INSIDE, BETWEEN, STRAGGLERS, INPUT),
)


def test_text_and_lines_are_readable_on_white_and_on_dark_backgrounds():
    assert contrast(plots.INK, WHITE) >= 4.5
    assert min(contrast(plots.INK, dark) for dark in DARK) >= 4
    for colour in plots.LINES:  # WCAG 2.2, 1.4.11: 3 for what is not text
        assert min(contrast(colour, background) for background in (WHITE, *DARK)) >= 3, colour


@pytest.mark.parametrize("vision", VISION)
def test_colours_beside_each_other_are_different_for_all_readers(vision):
    for parts in BESIDE:
        fills = {plots.PARTS[part].fill for part in parts}
        for one, other in itertools.combinations(fills, 2):
            assert distance(one, other, vision) >= 15, (one, other)
    for one, other in itertools.combinations(plots.LINES, 2):
        assert distance(one, other, vision) >= 10, (one, other)


def drawn_figures():
    axes = plots.schematic(["lane"], "title")
    plots.box(axes, "update", 0, 0, 1, "text")
    plots.arrow(axes, (0, 0), (1, 1))
    return {
        "schematic": axes.figure,
        "shards": plots.shards([[[0, 2], [1, 3]]], "title"),
        "stacked_bars": plots.stacked_bars(BARS, "MiB", "title", totals=True),
        "lines": plots.lines([1, 2], {"a": [1.0, 2.0]}, "x", "y", "title"),
    }


def test_no_text_is_black_or_white_unless_it_is_in_a_box():
    for name, figure in drawn_figures().items():
        on_fills = {look.text for look in plots.PARTS.values()}
        for axes in figure.axes:
            outside = [
                axes.title, axes.xaxis.label, axes.yaxis.label,
                *axes.get_xticklabels(), *axes.get_yticklabels(),
            ]  # fmt: skip
            assert {text.get_color() for text in outside} == {plots.INK}, name
            assert {text.get_color() for text in axes.texts} <= {plots.INK, *on_fills}, name


def test_the_background_is_transparent():
    for name, figure in drawn_figures().items():
        picture = Image.open(io.BytesIO(figure._repr_png_()))
        assert picture.getpixel((0, 0))[3] == 0, name
        axes = figure.axes[0]
        assert axes.get_facecolor()[3] == 0, name


BARS = {
    "a": {"weights": 96.0, "gradients": 2.0, "optimizer": 2.0},
    "b": {"weights": 1.0, "gradients": 20.0},
}


def test_a_legend_has_the_bars_order():
    """The first bar's weights have room for their name, the second's do not."""
    (legend,) = plots.stacked_bars(BARS, "MiB", "title").legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "weights",
        "gradients",
        "optimizer",
    ]


def test_a_part_without_a_look_is_refused():
    with pytest.raises(ValueError, match=r"'stragler'.*stragglers"):
        plots.stacked_bars({"a": {"ideal": 1.0, "stragler": 1.0}}, "ms", "title")


def test_two_parts_that_look_the_same_are_refused_also_in_two_bars():
    bars = {"a": {"forward": 1.0}, "b": {"compute": 1.0}}
    with pytest.raises(ValueError, match="'forward' and 'compute'"):
        plots.stacked_bars(bars, "ms", "title")


def test_axes_above_each_other_share_a_legend_and_the_name_of_the_x_axis():
    figure = plots.figure()
    for row, parts in enumerate((["update", "forward"], ["forward", "bubble"])):
        axes = figure.add_subplot(2, 1, row + 1)
        axes.set(xlabel="ms", title=f"title {row}")
        axes.legend([plots.swatch("update")] * 2, parts)
    plots.share_legend(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "update", "bubble"]
    assert [axes.get_legend() for axes in figure.axes] == [None, None]
    assert [axes.get_xlabel().strip() for axes in figure.axes] == ["", "ms"]
    assert [axes.get_title() for axes in figure.axes] == ["title 0", "title 1"]
