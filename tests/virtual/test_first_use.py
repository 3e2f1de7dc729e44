"""Virtual GPUs that look like CUDA, from their start to their first use, and their end."""

import os
import sys

import pytest
import torch

import multigpu
from multigpu.errors import UserError
from multigpu.launch import room
from multigpu.virtual import face, imports
from multigpu.virtual.options import VARIABLE, Options


def test_cuda_is_not_initialized_before_its_first_use():
    """DeviceMesh sets the rank's device itself if CUDA is not initialized yet."""
    with multigpu.gpus(2):
        assert not torch.cuda.is_initialized()
        torch.cuda.manual_seed_all(3)
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        torch.cuda.get_device_properties(0)
        assert not torch.cuda.is_initialized()
        torch.cuda.set_device(1)
        assert torch.cuda.is_initialized()
    with multigpu.gpus(2):
        assert not torch.cuda.is_initialized() and torch.cuda.current_device() == 0
        torch.ones(2).cuda()
        assert torch.cuda.is_initialized()


def test_seeds_before_the_first_use_count():
    with multigpu.gpus(2):
        torch.cuda.manual_seed_all(11)
        state = torch.cuda.get_rng_state(1)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(11)).tolist()
        assert torch.rand(3, device="cuda").tolist() == expected
        assert torch.rand(3, device="cuda:1").tolist() == expected
        torch.cuda.set_rng_state(state, 1)
        assert torch.rand(3, device="cuda:1").tolist() == expected


def test_utilization_is_that_of_the_simulated_time():
    with multigpu.gpus(2):
        assert torch.cuda.utilization(1) == 0
        matrix = torch.ones(1024, 1024, device="cuda")
        torch.cuda._sleep(10**9)
        assert torch.cuda.utilization(0) > 90 and torch.cuda.utilization(1) == 0
        assert torch.cuda.memory_usage(0) == 0 and matrix.is_cuda


def in_fork(action) -> int:
    """The exit code of a fork that runs `action`: 0, or 7 for CUDA's error about forks."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except RuntimeError as error:
            os._exit(
                7 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 8
            )
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_after_the_first_use_gets_cudas_error():
    with multigpu.gpus(2):
        tensor = torch.ones(2, device="cuda")
        for use in (
            lambda: torch.ones(2, device="cuda"),
            lambda: tensor + 1,
            torch.cuda.init,
            lambda: torch.cuda.set_device(1),
        ):
            assert in_fork(use) == 7

        def still_sees() -> None:
            assert torch.cuda.device_count() == 2 and torch.cuda._is_in_bad_fork()
            torch.manual_seed(0)

        assert in_fork(still_sees) == 0


def test_autocast_begins_with_cudas_type():
    with multigpu.gpus(1):
        before = torch.get_autocast_dtype("vgpu")
    torch.set_autocast_dtype("vgpu", torch.bfloat16)
    try:
        with multigpu.gpus(1):
            assert torch.get_autocast_dtype("cuda") == torch.float16
        assert torch.get_autocast_dtype("vgpu") == torch.bfloat16
    finally:
        torch.set_autocast_dtype("vgpu", before)


# ---- right after a program's `import torch` ----


@pytest.fixture
def asked(monkeypatch):
    """The options with which the face is put on; it is not put on really."""
    calls = []
    monkeypatch.setattr(face, "put_on", calls.append)
    monkeypatch.setenv(VARIABLE, Options(gpus=4).to_json())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return calls


def test_without_memory_a_process_ends_with_a_sentence(monkeypatch, capsys, asked):
    monkeypatch.setattr(room, "available_memory", lambda: 100 * 2**20)
    with pytest.raises(SystemExit) as end:
        imports.put_on()
    assert end.value.code == 2 and asked == []
    assert capsys.readouterr().err == (
        "error: the host has 0.1 GiB of memory left, too little for one more process: start "
        "fewer ranks.\n"
    )


def test_what_cannot_be_simulated_ends_the_process_with_its_sentence(
    monkeypatch, capsys, asked
):
    def refuse(options):
        raise UserError("virtual GPUs were tested with torch 2.11 to 2.13.")

    monkeypatch.setattr(face, "put_on", refuse)
    with pytest.raises(SystemExit) as end:
        imports.put_on()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: virtual GPUs were tested with torch 2.11 to 2.13.\n"
    )


def test_torch_that_is_imported_already_gets_virtual_gpus_at_once(asked):
    finders = list(sys.meta_path)
    imports.watch()
    assert asked == [Options(gpus=4)] and sys.meta_path == finders
