"""A cluster that a test may break."""

import os

import pytest

from multigpu import classroom
from multigpu.classroom import conf, processes


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """A place for a second cluster, which these tests may break, apart from the session's."""
    folder = tmp_path_factory.mktemp("c")
    (folder / "etc").mkdir()
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setattr(conf, "ROOT_STATE", folder / "state/multigpu/slurm")
    monkeypatch.setattr(conf, "SYSTEM_CONF", folder / "etc/slurm.conf")
    if reason := classroom.unavailable_reason():
        pytest.skip(reason)
    yield folder
    classroom.down()
    assert not processes.daemons() and not processes.job_processes()
