"""`--gpu FILE`: one's own GPU in JSON or TOML; `--gpu A,B`: different GPUs in one run."""

import json
from dataclasses import replace

import pytest
from virtual_runs import virtual, write

from multigpu import GPUS
from multigpu.errors import UserError
from multigpu.virtual import gpu_file
from multigpu.virtual.options import Options, check, gpus_of

WHOLE = {
    "name": "my card",
    "memory": "24GiB",
    "bandwidth": "936 GB/s",
    "fp64": "556.25 GFLOP/s",
    "fp32": "35.6TFLOP/s",
    "fp16": 71e12,
    "host": "PCIe4",
    "capability": "8.6",
}


def test_a_file_describes_a_gpu(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(WHOLE))
    same = replace(GPUS["RTX3090"], name="my card", shares=None)
    assert gpu_file.read(str(path)) == same
    path.write_text(json.dumps(WHOLE | {"capability": "7.5"}))
    assert not gpu_file.read(str(path)).bf16


def test_a_file_takes_other_figures_from_a_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "T4"\nname = "half a T4"\nmemory = "8GiB"\n[shares]\nsms = 20\n')
    t4 = GPUS["T4"]
    expected = replace(
        t4, name="half a T4", memory=8 * 2**30, shares=replace(t4.shares, sms=20)
    )
    assert gpus_of(str(path)) == expected
    options = Options(gpus=3, gpu=gpus_of(f"T4,{path},A10"))
    assert options.models() == [t4, expected, GPUS["A10"]]
    assert Options.from_json(options.to_json()) == options
    assert options.seen([1]).models() == [expected]
    assert options.label() == "simulated: 1 × T4 + 1 × half a T4 + 1 × A10, NVLink2"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"memory": "24GB"}, "memory is '24GB': give bytes, or a size such as"),
        ({"bandwidth": "936 GiB/s"}, "bandwidth is '936 GiB/s': give a figure such as"),
        ({"fp16": "71 TB/s"}, "fp16 is '71 TB/s': give a figure such as \"900 GFLOP/s\""),
        ({"fp16": -1}, "fp16 is -1: give a figure"),
        ({"host": "PCIe9"}, "host is 'PCIe9': use one of PCIe3, "),
        ({"capability": 8}, 'capability is 8: give a compute capability such as "8.6"'),
        ({"bf16": "no"}, "bf16 is 'no': give true or false"),
        ({"bandwith": 1}, "there is no field 'bandwith': did you mean 'bandwidth'?"),
        ({"like": "T5"}, "like is 'T5': did you mean 'T4'?"),
        ({"shares": {"sms": 3}}, "shares has no tensor, tf32, .*: give each of them"),
        ({"like": "T4", "shares": {"sms": "x"}}, "shares.sms is 'x': give a number"),
        ({"name": "a,b"}, "name is 'a,b': give a text without commas"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, more, sentence):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(WHOLE | more))
    with pytest.raises(UserError, match=rf"^--gpu .*mine.json: {sentence}"):
        gpu_file.read(str(path))


def test_what_is_no_gpu_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name": "my card"}')
    with pytest.raises(UserError, match=r"there is no memory, bandwidth, .*capability: give"):
        gpus_of(str(path))
    path.write_text("name = 3")
    with pytest.raises(UserError, match=r"is no JSON or TOML file"):
        gpus_of(str(path))
    with pytest.raises(UserError, match=r"none.toml cannot be read \(No such file"):
        gpus_of("none.toml")
    with pytest.raises(UserError, match=r"use one of V100-16GB, .*, or a file"):
        gpus_of("Voodoo")
    with pytest.raises(UserError, match="--gpu names 2 GPUs, but --gpus is 3"):
        check(Options(gpus=3, gpu=gpus_of("T4,A10")))
    with pytest.raises(UserError, match="with --world all GPUs are equal"):
        check(Options(gpus=2, gpu=gpus_of("T4,A10"), world=2))


@pytest.mark.slow
def test_different_gpus_in_one_run(tmp_path):
    (tmp_path / "mine.toml").write_text('like = "A10"\nname = "my card"\nmemory = "1GiB"')
    program = write(
        tmp_path,
        "import torch\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    name = torch.cuda.get_device_name(i)\n"
        "    total = torch.cuda.mem_get_info(i)[1] >> 30\n"
        "    with torch.cuda.device(i):\n"
        "        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)\n"
        "    print(name, torch.cuda.get_device_capability(i), total, bf16)\n"
        "    torch.ones(1, device=i)\n",
    )
    done = virtual(tmp_path, "--gpu", "A100-80GB,T4,mine.toml", program)
    assert done.stdout.startswith(
        "A100-80GB (virtual) (8, 0) 80 True\n"
        "T4 (virtual) (7, 5) 16 False\n"
        "my card (virtual) (8, 6) 1 True\n"
    )
    assert "simulated: 1 × A100-80GB + 1 × T4 + 1 × my card, NVLink2\n" in done.stdout
    done = virtual(tmp_path, "--gpu", "A100-80GB,T4", program, CUDA_VISIBLE_DEVICES=1)
    assert done.stdout.startswith("T4 (virtual) (7, 5) 16 False\n\n")
