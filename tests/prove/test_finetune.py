"""lessons/virtual/finetune.py, a Hugging Face model: two ranks equal one GPU."""

import pytest
from commands import ROOT
from proofs import proof

SCRIPT = ROOT / "lessons" / "virtual" / "finetune.py"
ADAPTERS = 'model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))'


def test_adapters_with_fsdp_equal_one_gpu(in_forks, tmp_path):
    assert proof(SCRIPT, tmp_path, "--lora", "--fsdp", gpus=2).verdict == "holds"


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--lora", "--fsdp", "--lora --fsdp --bf16"])
def test_other_ways_equal_one_gpu(in_forks, tmp_path, flags):
    assert proof(SCRIPT, tmp_path, *flags.split(), gpus=2).verdict == "holds"


@pytest.mark.long
def test_adapters_that_each_rank_draws_for_itself_fail(in_forks, tmp_path):
    own = f"torch.manual_seed(rank)\n            {ADAPTERS}"
    wrong = proof(SCRIPT, tmp_path, "--lora", "--fsdp", right=ADAPTERS, wrong=own, gpus=2)
    assert wrong.verdict != "holds" and "lora" in str(wrong), str(wrong)
