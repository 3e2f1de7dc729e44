"""The data set, its file format, and its download by many ranks at once."""

import http.server
import json
import threading

import numpy as np
import pytest
import torch
from commands import SUPPORT, torchrun

from multigpu import data
from multigpu.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_digits():
    train, test = data.load(data.fetch(None))
    assert train.tensors[0].shape == (1437, 1, 8, 8) and test.tensors[0].shape == (
        360,
        1,
        8,
        8,
    )
    assert (
        train.tensors[0].dtype == torch.float32
        and train.tensors[0].min() >= 0
        and train.tensors[0].max() == 1
    )
    assert data.num_classes(train, test) == 10
    everything = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797, "no image is in both sets"


def test_the_mnist_form(npz):
    train, test = data.load(npz(35, 7))
    assert (
        train.tensors[0].shape == (35, 1, 8, 8)
        and len(test) == 7
        and data.num_classes(train, test) == 3
    )
    assert train.tensors[0].max() <= 1, "uint8 is scaled"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": np.zeros((35, 64))}, "shape"),
        ({"x_train": np.zeros((0, 8, 8)), "y_train": np.zeros(0, int)}, "shape"),
        ({"y_train": np.zeros(34, int)}, "one per image"),
        ({"y_train": np.full(35, -1)}, "from 0 up"),
        ({"y_train": np.zeros(35)}, "whole numbers"),
        ({"x_test": np.zeros((7, 9, 9), np.uint8)}, "different shapes"),
        ({"x_train": np.full((35, 8, 8), np.nan)}, "not finite"),
        ({"x_train": np.full((35, 8, 8), "a")}, "expected numbers"),
        ({"x_train": np.array([None] * 35)}, "readable"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, npz, change, words):
    np.savez(tmp_path / "bad.npz", **(dict(np.load(npz())) | change))
    with pytest.raises(UserError, match=words):
        data.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a zip at all"])
def test_a_file_that_is_no_npz(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.npz is not a readable"):
        data.load(tmp_path / "bad.npz")


def test_an_npz_without_labels(tmp_path, npz):
    arrays = dict(np.load(npz()))
    del arrays["y_test"]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match="no array y_test"):
        data.load(tmp_path / "bad.npz")


def test_one_download_per_node_for_any_number_of_ranks(tmp_path, npz):
    content = npz().read_bytes()
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/small.npz"
        script = SUPPORT / "library_script.py"
        done = torchrun(3, script, "--data", url, "--out", tmp_path / "out")
        server.shutdown()
    assert done.returncode == 0, done.stdout
    assert requests == ["/small.npz"]
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["world_size"] == 3


def test_two_addresses_with_one_file_name_are_two_files(tmp_path, npz):
    """And neither is mistaken for the digits."""
    one, other = (tmp_path / name / "digits-1.npz" for name in ("a", "b"))
    for path, n in ((one, 35), (other, 36)):
        path.parent.mkdir()
        npz(n).rename(path)
    assert [len(data.load(data.fetch(path.as_uri()))[0]) for path in (one, other)] == [35, 36]
    assert len(data.load(data.fetch(None))[0]) == 1437


def test_a_download_that_breaks_off_leaves_nothing(tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="cannot download"):
            data.fetch(f"http://127.0.0.1:{server.server_port}/half.npz")
        server.shutdown()
    assert list((tmp_path / "cache" / "multigpu").iterdir()) == []
