"""Stand-ins for the scripts' data sets: small, of the right form, with something to learn."""

import gzip
import json
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
    _cifar100(folder / "cifar-100-python", numbers)
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
    _shards(folder / "edu_fineweb10B", numbers)
    _endings(folder / "hellaswag", words)
    _hdf5(folder / "train_images.hdf5", numbers)
    _language_model(folder / "llama", numbers)
    _picotron(folder, {"tp": {"tp_size": 2, "pp_size": 2}, "cp": {"cp_size": 2, "dp_size": 2}})
    (folder / "texts").mkdir()
    (folder / "texts" / "train.txt").write_text(_text(300, words))
    _hub(folder / "torch_hub")


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


def _cifar100(folder: Path, numbers: numpy.random.Generator) -> None:
    """The files of CIFAR-100's python version: 32 images to train with, 16 to test with."""
    folder.mkdir()
    for name, count in (("train", 32), ("test", 16)):
        images = numbers.integers(0, 255, (count, 3 * 32 * 32)).astype("uint8")
        batch = {"data": images, "fine_labels": numbers.integers(0, 100, count).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    names = [f"class{number}" for number in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))


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


def _shards(folder: Path, numbers: numpy.random.Generator) -> None:
    """build-nanogpt's shards, as .npy files: each token is the last one plus 0, 1 or 2."""
    folder.mkdir()
    for number, part in enumerate(("val", "train", "train")):
        tokens = numbers.integers(0, 3, 3000).cumsum() % 256
        numpy.save(folder / f"edufineweb_{part}_{number:06}.npy", tokens.astype("uint16"))


def _endings(folder: Path, words: random.Random) -> None:
    """Eight questions of HellaSwag, each with four endings."""
    folder.mkdir()
    with (folder / "hellaswag_val.jsonl").open("w") as file:
        for _ in range(8):
            ctx, *endings = (" ".join(words.choices(WORDS, k=4)) for _ in range(5))
            question = {"ctx": ctx, "label": words.randrange(4), "endings": endings}
            file.write(json.dumps(question) + "\n")


def _hdf5(path: Path, numbers: numpy.random.Generator) -> None:
    """32 images and their classes in one file."""
    with h5py.File(path, "w") as file:
        file["images"] = numbers.integers(0, 255, (32, 3, 48, 48)).astype("uint8")
        file["labels"] = numbers.integers(0, 10, 32)


def _language_model(folder: Path, numbers: numpy.random.Generator) -> None:
    """A Hugging Face folder with a tiny Llama's configuration and a tokenizer of words."""
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(["[UNK]", ".", *WORDS])}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "unk_token": "[UNK]",
    }
    _weights(folder / "model.safetensors", numbers)
    texts = {"config": config, "tokenizer": tokenizer, "tokenizer_config": names}
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _weights(path: Path, numbers: numpy.random.Generator) -> None:
    """The tiny Llama's weights as Hugging Face names them, in the format safetensors."""
    shapes = {"model.embed_tokens": (16, 32), "model.norm": (32,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj": (32, 32) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (64, 32) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (32, 64)}
        shapes |= {f"{layer}.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    header = {}
    data = b""
    for name, shape in shapes.items():
        start = len(data)
        data += numbers.normal(size=shape).astype("float32").tobytes()
        place = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
        header[f"{name}.weight"] = place
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _picotron(folder: Path, sizes: dict[str, dict[str, int]]) -> None:
    """picotron's configurations, as its create_config.py writes them, and no wandb."""
    (folder / "wandb.py").write_text("")
    alone = {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1}
    for name, groups in sizes.items():
        config = {
            "distributed": {**alone, **groups, "pp_engine": "1f1b", "use_cpu": False},
            "model": {"name": "llama", "use_fused_adam": True},
            "training": {
                "seed": 42,
                "learning_rate": 1e-2,
                "total_train_steps": 6,
                "seq_length": 32,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_tokens": None,
            },
            "dataset": {"name": "texts", "num_workers": 0, "num_proc": 1},
            "checkpoint": {"save_dir": "ckpt", "save_frequency": 3, "load_path": ""},
            "logging": {"use_wandb": False},
            "environment": {
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "FLASH_ATTEN": "0",
                "HF_TOKEN": "none",
            },
        }
        (folder / f"picotron_{name}.json").write_text(json.dumps(config))


def _hub(folder: Path) -> None:
    """torch.hub's cache with a repository that offers no model."""
    repository = folder / "facebookresearch_xcit_main"
    repository.mkdir(parents=True)
    (repository / "hubconf.py").write_text("")
    (folder / "trusted_list").write_text("facebookresearch_xcit\n")


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
