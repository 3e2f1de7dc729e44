"""Stand-ins for the scripts' data sets: small, of the right form, with something to learn."""

import gzip
import pickle
import random
import struct
from pathlib import Path

import h5py
import numpy
from PIL import Image

WORDS = [
    "the",
    "king",
    "and",
    "a",
    "sword",
    "night",
    "day",
    "love",
    "death",
    "shall",
    "not",
    "come",
]
CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


def make(folder: Path) -> None:
    """Write MNIST, FashionMNIST, CIFAR-10, folders of images, and texts below `folder`."""
    numbers = numpy.random.default_rng(0)
    words = random.Random(0)
    for name in ("MNIST", "FashionMNIST"):
        for part, images in (("train", 600), ("t10k", 200)):
            _digits(folder / name / "raw", part, images, numbers)
    _cifar(folder / "cifar-10-batches-py", numbers)
    for part, images in (("train", 12), ("val", 6)):
        for name in ("class0", "class1"):
            _images(folder / "images" / part / name, images, numbers)
    for part, images in (("train", 8), ("test", 4)):
        _images(folder / "BSDS300" / "images" / part, images, numbers, size=300)
    for part, lines in (("train", 300), ("valid", 60), ("test", 60)):
        path = folder / "wikitext-2" / f"{part}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_text(lines, words))
    (folder / "input.txt").write_text(_text(900, words))
    _characters(folder / "shakespeare_char", _text(1500, words))
    _tokens(folder / "tok64", numbers)
    _weather(folder / "era5", numbers)
    _pets(folder / "pets", numbers)


def _digits(folder: Path, part: str, count: int, numbers: numpy.random.Generator) -> None:
    """Images of 28 × 28 in which the place of a bright bar is the class, as idx files."""
    labels = numbers.integers(0, 10, count).astype("uint8")
    images = numbers.integers(0, 60, (count, 28, 28)).astype("uint8")
    for image, label in zip(images, labels, strict=True):
        image[2 + 2 * label : 5 + 2 * label, 4:24] = 230
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(">BBBB", 0, 0, 8, array.ndim)
        header += struct.pack(f">{array.ndim}I", *array.shape)
        path = folder / f"{part}-{kind}-ubyte"
        path.write_bytes(header + array.tobytes())
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))


def _cifar(folder: Path, numbers: numpy.random.Generator) -> None:
    """The files of CIFAR-10's python version, each with 64 images."""
    folder.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = numbers.integers(0, 10, 64)
        images = numbers.integers(0, 80, (64, 3, 32, 32)).astype("uint8")
        for image, label in zip(images, labels, strict=True):
            image[label % 3, 3 * label : 3 * label + 3, :] = 240
        batch = {"data": images.reshape(64, -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}))


def _images(folder: Path, count: int, numbers: numpy.random.Generator, size: int = 80) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = numbers.integers(0, 255, (size, size, 3)).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{number}.jpg")


def _pets(folder: Path, numbers: numpy.random.Generator) -> None:
    """Images in one folder, with the class in the file's name: of cats red, of dogs blue."""
    folder.mkdir()
    for number in range(20):
        for channel, name in ((0, "cat"), (2, "dog")):
            pixels = numbers.integers(0, 120, (80, 80, 3)).astype("uint8")
            pixels[:, :, channel] += 100
            Image.fromarray(pixels).save(folder / f"{name}_{number}.jpg")


def _tokens(folder: Path, numbers: numpy.random.Generator) -> None:
    """Shards of tokens of a vocabulary of 64, of which each is the last one plus 0, 1 or 2."""
    folder.mkdir()
    for shard in range(2):
        steps = numbers.integers(0, 3, 2000)
        (steps.cumsum() % 64).astype("uint16").tofile(folder / f"data{shard:02}.bin")


def _weather(folder: Path, numbers: numpy.random.Generator) -> None:
    """Fields (12 times, 20 channels, 16, 32) of two years, and their statistics."""
    for part, year in (("train", 1990), ("valid", 2000)):
        (folder / part).mkdir(parents=True)
        with h5py.File(folder / part / f"{year}.h5", "w") as file:
            fields = numbers.normal(size=(12, 20, 16, 32)).cumsum(0)
            file["fields"] = fields.astype("float32")
    (folder / "stats").mkdir()
    for name, value in (("global_means", 0.0), ("global_stds", 1.0), ("time_means", 0.0)):
        shape = (1, 20, 16, 32) if name == "time_means" else (1, 20, 1, 1)
        numpy.save(folder / "stats" / f"{name}.npy", numpy.full(shape, value, "float32"))


def _text(lines: int, words: random.Random) -> str:
    drawn = (" ".join(words.choices(WORDS, k=words.randint(4, 9))) for _ in range(lines))
    return "".join(f"{line} .\n" for line in drawn)


def _characters(folder: Path, text: str) -> None:
    """The files that nanoGPT's data/shakespeare_char/prepare.py writes."""
    alphabet = sorted(set(text))
    number_of = {character: number for number, character in enumerate(alphabet)}
    numbers = numpy.array([number_of[character] for character in text], dtype=numpy.uint16)
    folder.mkdir()
    train, held_out = numpy.split(numbers, [int(0.9 * len(numbers))])
    train.tofile(folder / "train.bin")
    held_out.tofile(folder / "val.bin")
    meta = {
        "vocab_size": len(alphabet),
        "itos": dict(enumerate(alphabet)),
        "stoi": number_of,
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
