"""Figures have whole epochs, a legend in the bars' order, and totals at the bars' ends."""

import pytest

from multigpu import plots


@pytest.mark.parametrize("epochs", [1, 2, 10])
def test_an_epoch_is_a_whole_number(epochs):
    figure = plots.by_epoch(
        range(1, epochs + 1), {"loss": [1.0] * epochs, "accuracy": [0.5] * epochs}, "title"
    )
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == int(tick) and 1 <= tick <= epochs for tick in ticks), (
            ticks
        )
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]


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


def test_totals_are_at_the_bars_ends():
    figure = plots.stacked_bars(BARS, "MiB", "title", totals=True)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert (shown[3], shown[-1]) == ("100", "21") and {"96", "20"} < set(shown), shown


def test_a_dashed_curve_leaves_the_one_below_visible():
    figure = plots.lines(
        [1, 2], {"below": [1.0, 2.0], "above": [1.0, 2.0]}, "x", "y", "title", dashed="above"
    )
    below, above, _ = figure.axes[0].lines
    assert not below.is_dashed()
    assert above.is_dashed() and above.get_markerfacecolor() == "none"
