"""The pages of the first edition have the figures that their stored notebooks print.

Second editions have markers instead: test_figures.py. nbval compares the stored notebooks with
new runs.
"""

import re
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from routes import printed

# lesson, a text of its page, the notebook that shows it, what the notebook prints
FIGURES = [
    (
        "07",
        "A last batch of 29 becomes 15 and 14",
        "TF_CNN_MultiGPU",
        "batch 22 [15, 14]",
    ),
    (
        "07",
        "0.0001 from the serial run's after one epoch",
        "TF_CNN_MultiGPU",
        "Keras's mean: 0.0001 from it",
    ),
    (
        "07",
        "a mirrored variable are 0.01 apart",
        "TF_CNN_CustomLoop",
        "a mirrored variable are 0.01 apart",
    ),
    (
        "07",
        "without, twice as long",
        "TF_CNN_MultiGPU",
        "forbidden 2 times, default 1 times",
    ),
    (
        "07",
        "an AssertionError without a text",
        "TF_CNN_MultiGPU",
        "AssertionError with the text ''",
    ),
    (
        "07",
        "Holds to 1e-06 after 10 epochs",
        "TF_CNN_MultiGPU",
        "equals one device: max difference",
    ),
    (
        "07",
        "the losses are 1.2 away within an epoch",
        "TF_CNN_CustomLoop",
        "1 / own shard: 1.2 away",
    ),
    (
        "07",
        "| 3 | 2.30883 | 2.30883 |",
        "TF_CNN_CustomLoop",
        "step 3: PyTorch 2.30883, TensorFlow 2.30883",
    ),
    (
        "07",
        "| all 230 | | within 1e-5 |",
        "TF_CNN_CustomLoop",
        "all 230 losses within 1e-5: True",
    ),
]


@pytest.mark.parametrize(("lesson", "claim", "stem", "printed_text"), FIGURES)
def test_a_figure_on_a_page_is_what_the_notebook_prints(lesson, claim, stem, printed_text):
    (page,) = (ROOT / "lessons").glob(f"{lesson}-*/README.md")
    assert claim in page.read_text() and printed_text in printed(stem)


@pytest.mark.parametrize("lesson", ["07"])
def test_the_proofs_hold_to_what_the_page_says(lesson):
    """The page says 1e-06; the last digits differ between machines."""
    (page,) = (ROOT / "lessons").glob(f"{lesson}-*/README.md")
    text = page.read_text()
    assert "Holds to 1e-06 after 10 epochs" in text
    proofs = []
    for stem in set(re.findall(r"notebooks/(\w+)\.ipynb", text)):
        proofs += re.findall(
            r"equals? one .*max difference (\S+), limit 1e-05: holds", printed(stem)
        )
    assert proofs and max(map(float, proofs)) < 1e-6
