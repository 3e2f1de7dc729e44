"""What happens right after a program's `import torch`, in this process."""

import sys

import pytest

from multigpu.errors import UserError
from multigpu.launch import room
from multigpu.virtual import face, imports
from multigpu.virtual.options import VARIABLE, Options


@pytest.fixture
def asked(monkeypatch):
    """The options with which the face is put on; it is not put on really."""
    calls = []
    monkeypatch.setattr(face, "put_on", calls.append)
    monkeypatch.setenv(VARIABLE, Options(gpus=4).to_json())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return calls


def test_a_process_gets_the_gpus_that_it_sees(monkeypatch, asked):
    imports.put_on()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    imports.put_on()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    imports.put_on()
    assert asked == [Options(gpus=4), Options(gpus=2)]


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
