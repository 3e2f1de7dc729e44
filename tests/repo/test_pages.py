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
        "08",
        "Holds to 1e-06 after 10 epochs",
        "TF_CNN_MultiNode",
        "MultiWorker on 2 replicas equals one device: max difference",
    ),
    (
        "08",
        "with TensorFlow 2.21 and Keras 3.15: `fit` ends with a ValueError",
        "TF_CNN_MultiNode",
        "TensorFlow 2.21.0, Keras 3.15.1, fit: Attempt to convert a value (PerReplica",
    ),
    (
        "08",
        "`OFF` gives every image to every worker",
        "TF_CNN_MultiNode",
        "OFF: worker 0 reads [[0, 1], [2, 3], [4, 5], [6, 7]], worker 1 [[0, 1],",
    ),
    (
        "08",
        "`set_weights` on workers with different seeds leaves them different",
        "TF_CNN_MultiNode",
        "set in the scope: the same weights on both workers: False",
    ),
    (
        "08",
        "`n10` comes before `n2`",
        "TF_CNN_MultiNode",
        "['n10:8888', 'n2:8888']",
    ),
]


@pytest.mark.parametrize(("lesson", "claim", "stem", "printed_text"), FIGURES)
def test_a_figure_on_a_page_is_what_the_notebook_prints(lesson, claim, stem, printed_text):
    (page,) = (ROOT / "lessons").glob(f"{lesson}-*/README.md")
    assert claim in page.read_text() and printed_text in printed(stem)


@pytest.mark.parametrize("lesson", ["08"])
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
