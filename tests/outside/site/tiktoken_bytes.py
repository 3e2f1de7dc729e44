"""tiktoken's GPT-2 encoding without a download: one token for each byte."""

import tiktoken


def get_encoding(name):
    """The encoding of bytes, whatever its name."""
    return tiktoken.Encoding(
        name,
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([number]): number for number in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
