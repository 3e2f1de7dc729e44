"""The pages of the first edition have the figures that their stored notebooks print.

Second editions have markers instead: test_figures.py. nbval compares the stored notebooks with
new runs.
"""

import json
import re
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from routes import printed

# lesson, a text of its page, the notebook that shows it, what the notebook prints
FIGURES = [
    (
        "03",
        "8.25 ms a step for 6.94",
        "PT_CNN_ModelParallel",
        "one GPU 6.94 ms, two 8.25 ms",
    ),
    (
        "03",
        "Up to 8 of 512 images; 32 are slower than one GPU",
        "PT_CNN_ModelParallel",
        "8: 1.19, 16: 1.13, 32: 0.96",
    ),
    (
        "03",
        "With NVLink 1.19 times. With PCIe they take 2.5 times",
        "PT_CNN_ModelParallel",
        "V100-16GB, PCIe3: 1: 0.35, 2: 0.38, 4: 0.39, 8: 0.40",
    ),
    (
        "03",
        "5.07 ms for 5.43",
        "PT_CNN_Pipeline",
        "1f1b: 5.07 ms",
    ),
    (
        "03",
        "5.07 ms for 5.43",
        "PT_CNN_Pipeline",
        "gpipe: 5.43 ms",
    ),
    (
        "03",
        "233 MiB for 453 on the first rank",
        "PT_CNN_Pipeline",
        "peak MiB 453,",
    ),
    (
        "03",
        "233 MiB for 453 on the first rank",
        "PT_CNN_Pipeline",
        "peak MiB 233,",
    ),
    (
        "06",
        "1.7 times as fast with NVLink",
        "PT_CNN_HybridParallel",
        "NVLink2: four replicas are 1.7 times as fast",
    ),
    (
        "06",
        "4.8 times with PCIe",
        "PT_CNN_HybridParallel",
        "PCIe3: four replicas are 4.8 times as fast",
    ),
    (
        "06",
        "1698 images/s inside, 1382 across, with 10 Gb/s Ethernet",
        "PT_CNN_HybridParallel",
        "Ethernet10  stages inside nodes      1698 images/s, 15.7",
    ),
    (
        "06",
        "1698 images/s inside, 1382 across, with 10 Gb/s Ethernet",
        "PT_CNN_HybridParallel",
        "Ethernet10  stages across nodes      1382 images/s",
    ),
    (
        "06",
        "3414 images/s on one node; on two nodes 1698 with 10 Gb/s Ethernet, 6292 with HDR200",
        "PT_CNN_HybridParallel",
        "HDR200      stages inside nodes      6292 images/s",
    ),
    (
        "06",
        "3414 images/s on one node; on two nodes 1698 with 10 Gb/s Ethernet, 6292 with HDR200",
        "PT_CNN_HybridParallel",
        "one pipeline, one node   3414 images/s",
    ),
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
    (
        "09",
        "Holds to 1e-06 after 10 epochs",
        "PTL_multiGPU",
        "the Trainer on 2 ranks equals one process: max difference",
    ),
    (
        "09",
        "exactly on one",
        "PTL_multiGPU",
        "by hand and by the Trainer: 0.0 apart",
    ),
    (
        "09",
        "91 statements instead of 129",
        "PTL_multiGPU",
        "all statements                               129  91",
    ),
    (
        "09",
        "24 steps instead of 46",
        "PTL_multiGPU",
        "one device: 46 steps\nrank 0: 24 steps",
    ),
    (
        "09",
        "the ranks' weights are 0.0 apart",
        "PTL_multiGPU",
        "weights: 0.0 apart",
    ),
    (
        "09",
        "the mean of the ranks, 1.39; without, this rank's own, 1.36 and 1.42",
        "PTL_multiGPU",
        "own 1.36, mean 1.39",
    ),
    (
        "09",
        "On one node `LOCAL_RANK` counts",
        "PTL_multiGPU",
        "RANK=2 LOCAL_RANK=2",
    ),
    (
        "09",
        "the same loss, weights within 1e-6",
        "PTL_multiGPU",
        "0.6585 in Lightning, weights within 1e-6: True",
    ),
    (
        "11",
        "1e-8 is 0 and 65520 is infinite in float16",
        "PTL_Precision",
        "65520        is inf",
    ),
    (
        "11",
        "1 + 1/512 is 1 in bfloat16",
        "PTL_Precision",
        "1.00195312   is 1    ",
    ),
    (
        "11",
        "runs: Apex is gone, autocast does it",
        "PTL_Precision",
        "the document says no ; here it runs, and is 16 bit away",
    ),
    (
        "11",
        "an accuracy of 0.11, the scaled one 0.92",
        "PTL_Precision",
        "precision=16, Unscaled: loss 2.46, test accuracy 0.11",
    ),
    (
        "11",
        "1 + 1,000 × 0.001 = 1.00 in bfloat16",
        "PTL_Precision",
        "torch.bfloat16: 1 + 1,000 × 0.001 = 1.00",
    ),
    (
        "11",
        "541 MiB instead of 665 at a batch of 4,096",
        "PTL_Precision",
        "32-true, 4,096: 665; bf16-mixed, 4,096: 541",
    ),
    (
        "11",
        "but 347 instead of 300 at 64",
        "PTL_Precision",
        "32-true, 64: 300; bf16-mixed, 64: 347",
    ),
    (
        "11",
        "From 0.8 times (H100, batch 64",
        "PTL_Precision",
        "H100-80GB, 16-mixed against 32-true: 64: 0.8 ×",
    ),
    (
        "11",
        "to 8.3 times (A100, batch 4,096)",
        "PTL_Precision",
        "1,024: 4.9 ×, 4,096: 8.3 ×",
    ),
    (
        "11",
        "fails at 0.01",
        "PTL_Precision",
        "proof: bf16-true matches fp32, test loss by epoch: max "
        "difference 1.0e-01, limit 5e-03: fails",
    ),
    (
        "10",
        "| 153,128 | 153,704 | yes |",
        "PTL_Strategies",
        "153,128  153,704                   0  within 1e-5",
    ),
    (
        "10",
        "| 153,128 | 157,736 | yes, with lr / n |",
        "PTL_Strategies",
        "153,128  157,736                   0  within 1e-5",
    ),
    (
        "10",
        "| 153,128 | 154,160 | yes |",
        "PTL_Strategies",
        "153,128  154,160                   0  within 1e-5",
    ),
    (
        "10",
        "| 38,298 | 38,730 | no, 6e-03 away |",
        "PTL_Strategies",
        "38,298   38,730                   0        6e-03",
    ),
    (
        "10",
        "| 38,298 | 38,730 | no, 1e-01 from QAdam in one process, 6e-01 from Adam |",
        "PTL_Strategies",
        "38,298   38,730                   0        1e-01",
    ),
    (
        "10",
        "| 76,580 | 76,868 | no, 2e-02 away |",
        "PTL_Strategies",
        "76,580   76,868               2e-02        2e-02",
    ),
    (
        "10",
        "| 153,128 | 153,704 | no, 3e-02 away |",
        "PTL_Strategies",
        "153,128  153,704               3e-02        3e-02",
    ),
    (
        "10",
        "gloo's headers, 576 bytes",
        "PTL_Strategies",
        "gloo's headers: ddp 576",
    ),
    (
        "10",
        "0.091 away after five steps, 0.000 with lr / n",
        "PTL_NodeBatch",
        "horovod         0.091 from ddp\nhorovod, lr / 2 0.000 from ddp",
    ),
    (
        "10",
        "it sums to 2.0 over two replicas",
        "PTL_NodeBatch",
        "sums to 2.0 if each replica computes it",
    ),
    (
        "10",
        "37.25 instead of 28.50",
        "PTL_NodeBatch",
        "mean of the replicas' means 37.25, mean of all rows 28.50",
    ),
    (
        "10",
        "ddp's is 0.003 away, of at most 0.047",
        "PTL_NodeBatch",
        "ddp: 0.003 from the gradient of the nodes' batches",
    ),
    (
        "10",
        "batches to 3e-08",
        "PTL_NodeBatch",
        "ddp2: 0.000 from the gradient of the nodes' batches; max difference 3.0e-08",
    ),
]


@pytest.mark.parametrize(("lesson", "claim", "stem", "printed_text"), FIGURES)
def test_a_figure_on_a_page_is_what_the_notebook_prints(lesson, claim, stem, printed_text):
    (page,) = (ROOT / "lessons").glob(f"{lesson}-*/README.md")
    assert claim in page.read_text() and printed_text in printed(stem)


@pytest.mark.parametrize("lesson", ["03", "06", "07", "08", "09"])
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


def test_the_pages_have_the_measured_figures():
    trainer = {row["quantity"]: row["median"] for row in benchmark("trainer")["rows"]}
    own = trainer["µs a step above the plain loop, all off"]
    lightning = trainer["Lightning's, all off"]
    page = (ROOT / "lessons" / "09-lightning" / "README.md").read_text()
    assert f"costs {own:.0f} µs above a plain loop, Lightning's {lightning:.0f}" in page
    page = (ROOT / "lessons" / "10-strategies" / "README.md").read_text()
    swap = benchmark("swap")["ms"]
    send_first = swap["a swap, the send posted first"]
    receive_first = swap["a swap, the receive posted first"]
    assert f"{send_first:.0f} ms instead of {receive_first:.0f}" in page
    link = {
        row["strategy"]: row["steps/s relative to ddp"]
        for row in benchmark("link")["rows"]
        if row["weights"] == 2_000_000
    }
    assert f"{link['bytegrad']:.1f} times with 2 million" in page


def benchmark(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
