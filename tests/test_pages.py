"""Do the lessons' pages say the figures that their stored notebooks print? CI compares those with fresh ones, by nbval."""

import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from routes import printed

# lesson, what its page says, the notebook that shows it, what that prints
FIGURES = [
    ("02", "37.25 instead of 28.50", "DataParallel", "pieces' means 37.25, mean of all rows 28.50"),
    ("02", "With PCIe it ends at 1.7", "DataParallel", "65,536: 1.66"),
    ("03", "8.25 ms a step for 6.94", "ModelParallel", "one GPU 6.94 ms, two 8.25 ms"),
    ("03", "Up to 8 of 512 images; 32 are slower than one GPU", "ModelParallel", "8: 1.19, 16: 1.13, 32: 0.96"),
    ("03", "With NVLink 1.19 times. With PCIe they take 2.5 times", "ModelParallel", "V100-16GB, PCIe3: 1: 0.35, 2: 0.38, 4: 0.39, 8: 0.40"),
    ("03", "5.07 ms for 5.43", "Pipeline", "1f1b: 5.07 ms"),
    ("03", "5.07 ms for 5.43", "Pipeline", "gpipe: 5.43 ms"),
    ("03", "233 MiB for 453 on the first rank", "Pipeline", "peak MiB 453,"),
    ("03", "233 MiB for 453 on the first rank", "Pipeline", "peak MiB 233,"),
    ("06", "1.7 times as fast with NVLink", "HybridParallel", "NVLink2: four replicas are 1.7 times as fast"),
    ("06", "4.8 times with PCIe", "HybridParallel", "PCIe3: four replicas are 4.8 times as fast"),
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "said", "stem", "shown"), FIGURES)
def test_a_figure_on_a_page_is_what_the_notebook_prints(lesson, said, stem, shown):
    (page,) = (ROOT / "lessons").glob(f"{lesson}-*/README.md")
    assert said in page.read_text() and shown in printed(f"PT_CNN_{stem}")
