"""Plain data: what crosses the border between a student's process and the checks."""

import json

import numpy as np
import pytest
import torch

from multigpu.exercise.plain import DTYPES, MAX_DEPTH, NotPlain, decode, encode

VALUES = [
    None,
    True,
    -7,
    0.1,
    float("inf"),
    "naïve\n\x00",
    [],
    [1, [2, (3, "x")]],
    {"a": 1, 2: [None], (1, 2): "key"},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_with_its_type(value):
    back = decode(*encode(value))

    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_a_tensor_arrives_with_its_dtype_and_shape(name, shape):
    tensor = (torch.randn(shape) * 3).to(DTYPES[name])

    back = decode(*encode(["before", tensor, tensor]))[2]

    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "array",
    [
        torch.tensor(2.5).numpy(),
        np.array([1.5, 2.5], ">f4"),
        np.arange(6.0).reshape(2, 3)[::-1, ::2],
    ],
    ids=["no dimension", "big-endian", "strides"],
)
def test_an_array_of_any_layout_keeps_its_shape_and_values(array):
    back = decode(*encode(array))

    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


def test_a_state_dict_becomes_a_dict():
    state = torch.nn.Linear(2, 1).state_dict()

    back = decode(*encode(state))

    assert type(back) is dict
    assert list(back) == ["weight", "bias"]


class EqualToAll:
    def __eq__(self, other):
        return True


class ListOfLies(list):
    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "value",
    [
        object(),
        EqualToAll(),
        ListOfLies([1]),
        {1},
        b"bytes",
        lambda: 1,
        1j,
        np.array(["a"], object),
        np.datetime64("2026-11-24"),
        np.complex64(1j),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.empty(2**24, 0),
        pytest.param(10**5000, id="a huge integer"),
    ],
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlain, match="plain data"):
        encode(value)


def test_a_shape_without_elements_is_bounded():
    assert decode(*encode(torch.empty(3, 0))).shape == (3, 0)
    assert decode(*encode(torch.empty(0, 2**10))).shape == (0, 2**10)
    header = json.dumps({"tensor": ["float32", [2**24, 0], 0, 0]}).encode()
    with pytest.raises(NotPlain, match="too large"):
        decode(header, b"")


def test_a_list_in_itself_is_refused():
    endless: list = []
    endless.append(endless)

    with pytest.raises(NotPlain, match=str(MAX_DEPTH)):
        encode(endless)


def header(value) -> bytes:
    return json.dumps(value).encode()


def test_tensors_do_not_share_bytes():
    """A frame with many tensors over the same bytes would fill the memory of the checks."""
    tensor = {"tensor": ["float32", [2], 0, 8]}

    with pytest.raises(NotPlain):
        decode(header({"list": [tensor, tensor]}), bytes(8))


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"\xff",
        b"{",
        b"[1]",
        header({"list": 3}),
        header({"list": [], "tuple": []}),
        header({"pickle": ["gASVAAAA"]}),
        header({"dict": [[1]]}),
        header({"dict": [[{"list": []}, 1]]}),
        header({"tensor": ["float32", [2], 0, 4]}),
        header({"tensor": ["float32", [2], 0, 800]}),
        header({"tensor": ["float32", [2], -8, 8]}),
        header({"tensor": ["float32", [-2], 0, 8]}),
        header({"tensor": ["float32", [-1, -2], 0, 8]}),
        header({"tensor": ["float32", [1 << 62, 4], 0, 8]}),
        header({"tensor": ["float32", [True, 2], 0, 8]}),
        header({"tensor": ["float32", [0, 1 << 80], 0, 0]}),
        header({"tensor": ["qint8", [8], 0, 8]}),
        header({"tensor": ["float32", [2]]}),
        header({"tensor": ["float32", "ab", 0, 8]}),
        b'{"list": [' * 5000 + b"]}" * 5000,
        b"1" * 10_000,
    ],
)
def test_what_encode_cannot_have_written_is_refused(forged):
    with pytest.raises(NotPlain):
        decode(forged, bytes(8))
