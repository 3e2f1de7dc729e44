"""The pictures of lesson 10's comparison."""

import pytest

from multigpu.comparison import bytes_picture


def rows(device: str) -> dict[str, dict]:
    """On CUDA the kernel counts only what does not go through NCCL."""
    counted = {"cpu": (8000, 2000), "cuda": (120, 120)}[device]
    names = ("ddp", "bagua:bytegrad")
    return {
        name: {"device": device, "bytes_counted": seen, "bytes_predicted": expected}
        for name, seen, expected in zip(names, counted, (8000, 2000), strict=True)
    }


@pytest.mark.parametrize(("device", "source"), [("cpu", "counted"), ("cuda", "predicted")])
def test_the_bars_of_bytes_are_what_the_strategies_send(device, source):
    (axes,) = bytes_picture(rows(device)).axes
    assert [bar.get_width() for bar in axes.patches] == [8.0, 2.0]
    assert source in axes.get_xlabel()
    assert "4.0 times" in axes.get_title()


@pytest.mark.parametrize("name", ["bagua:async", "bagua:qadam"])
def test_only_async_has_bytes_per_round(name):
    some = rows("cpu") | {name: rows("cpu")["ddp"]}
    (axes,) = bytes_picture(some).axes
    assert ("round" in axes.get_xlabel()) == (name == "bagua:async")


def test_the_bars_of_strategies_that_send_the_same_say_so():
    same = {
        name: {"device": "cpu", "bytes_counted": size}
        for name, size in {"dp": 0, "ddp": 8000, "horovod": 8400}.items()
    }
    (axes,) = bytes_picture(same).axes
    assert "2 of 3" in axes.get_title() and "5%" in axes.get_title()
