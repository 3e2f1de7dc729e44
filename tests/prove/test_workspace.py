"""A run sees the folder's files, and what it writes is not seen by others."""

import os
import shutil

from wrong_cases import PROGRAMS

from multigpu.prove import workspace

DDP = (PROGRAMS / "ddp.py").read_text()


def test_small_files_and_checkpoints_are_copies_and_all_else_is_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "SMALL", 100)
    monkeypatch.setattr(workspace, "MOST_IN_FOLDER", 5)
    source = tmp_path / "source"
    for folder in ("package/inner", ".venv", "many"):
        (source / folder).mkdir(parents=True)
    for number in range(6):
        (source / "many" / f"{number}.txt").write_text("x")
    (source / "train.py").write_text("x = 1")
    (source / "package" / "inner" / "module.py").write_text("y = 2")
    (source / "images.dat").write_bytes(bytes(1000))
    (source / "weights.pt").write_bytes(bytes(1000))
    (source / "dangling").symlink_to("nowhere")
    made = workspace.make(source, tmp_path / "made")
    assert (made / "package" / "inner" / "module.py").read_text() == "y = 2"
    links = {path.name for path in made.rglob("*") if path.is_symlink()}
    assert links == {".venv", "many", "images.dat", "dangling"}
    (made / "train.py").write_text("changed")
    (made / "package" / "new.pt").write_text("new")
    assert (source / "train.py").read_text() == "x = 1"
    assert not (source / "package" / "new.pt").exists()


def test_a_copy_below_the_folder_does_not_contain_itself(tmp_path):
    (tmp_path / "train.py").write_text("x = 1")
    made = workspace.make(tmp_path, tmp_path / "temporary" / "run")
    assert os.listdir(made) == ["train.py"]


def test_what_is_around_the_folder_is_found_from_it(tmp_path):
    for name in ("data/x.txt", "code/project/train.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("found")
    made = workspace.make(tmp_path / "code" / "project", tmp_path / "run")
    assert (made / "../../data/x.txt").read_text() == "found"


def test_what_is_deleted_while_it_is_copied_is_left_out(tmp_path, monkeypatch):
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    for name in ("gone.txt", "train.py"):
        (source / name).write_text("x = 1")
    entries = workspace._entries

    def entries_then_deleted(folder):
        found = entries(folder)
        shutil.rmtree(source / "folder", ignore_errors=True)
        (source / "gone.txt").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(workspace, "_entries", entries_then_deleted)
    monkeypatch.setattr(workspace, "_is_copied", lambda entry: True)
    monkeypatch.setattr(workspace, "_is_small_file", lambda entry: True)
    made = workspace.make(source, tmp_path / "made")
    assert [path.name for path in made.rglob("*") if path.is_file()] == ["train.py"]


def test_a_run_does_not_go_on_from_another_runs_checkpoint(proved, tmp_path):
    text = DDP.replace(
        "for epoch in range(EPOCHS):\n",
        "import os\n\n"
        "if os.path.exists('last.pt'):\n    net.load_state_dict(torch.load('last.pt'))\n"
        "for epoch in range(EPOCHS):\n",
    ).replace("        scheduler.step()\n", "        scheduler.step()\n    save()\n")
    text = text.replace(
        "torch.manual_seed(0)\n",
        "def save():\n"
        "    if rank == 0:\n        torch.save(net.state_dict(), 'last.pt')\n\n\n"
        "torch.manual_seed(0)\n",
    )
    proof = proved(text)
    assert proof.verdict == "holds", str(proof)
    assert os.listdir(tmp_path) == ["program.py"]
