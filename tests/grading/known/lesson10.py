"""Known answers to lesson 10's exercises: see tests/support/known.py."""

from known import Known, changed

BYTES_GUESS = ("100,000 numbers on 4 ranks",)
GUESS = "# answer: guess_bytes\nguess_bytes = "

GUESSES = [
    Known("guess: the formula", "guess_bytes", GUESS + "8 * 100_000 * 3 / 4"),
    Known("guess: the vector once", "guess_bytes", GUESS + "400_000", BYTES_GUESS),
    Known("guess: numbers, not bytes", "guess_bytes", GUESS + "150_000", BYTES_GUESS),
]

# ---- ring_allreduce -------------------------------------------------------------------------

TWO = "2 ranks"
FOUR = "4 ranks"
TEN = "10 numbers on 4 ranks"
BYTES = "the bytes"
OTHER_LENGTHS = "other lengths and ranks"
SUMS = (TWO, FOUR, TEN, OTHER_LENGTHS)
EVERY_RING = (TWO, FOUR, TEN, BYTES, OTHER_LENGTHS)

# Padded to equal chunks; two phases; irecv first.
RING = """# answer: ring_allreduce
def ring_allreduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    size = -(-len(tensor) // n)
    rows = torch.zeros(n * size)
    rows[: len(tensor)] = tensor
    rows = rows.view(n, size)
    buffer = torch.zeros(size)
    for hop in range(n - 1):
        work = dist.irecv(buffer, left)
        dist.send(rows[(rank - hop) % n], right)
        work.wait()
        rows[(rank - hop - 1) % n] += buffer
    for hop in range(n - 1):
        work = dist.irecv(buffer, left)
        dist.send(rows[(rank + 1 - hop) % n], right)
        work.wait()
        rows[(rank - hop) % n] = buffer
    return rows.flatten()[: len(tensor)]
"""
# No ring: each chunk goes to its owner, which sends the sum to all ranks.
OWNERS = """# answer: ring_allreduce
def ring_allreduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [part.clone() for part in tensor.tensor_split(n)]
    others = [other for other in range(n) if other != rank]
    sends = [dist.isend(parts[other], other) for other in others]
    for other in others:
        got = torch.empty_like(parts[rank])
        dist.recv(got, other)
        parts[rank] += got
    for send in sends:
        send.wait()
    for other in others:
        dist.isend(parts[rank], other)
    for other in others:
        dist.recv(parts[other], other)
    return torch.cat(parts)
"""
LESSON = """# answer: ring_allreduce
def ring_allreduce(vector):
    rank = dist.get_rank()
    n = dist.get_world_size()
    chunks = list(vector.view(n, -1))
    for hop in range(2 * (n - 1)):
        out = (rank - hop) % n
        into = (rank - hop - 1) % n
        received = torch.empty_like(chunks[into])
        sending = dist.isend(chunks[out], (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        chunks[into] = chunks[into] + received if hop < n - 1 else received
    return torch.cat(chunks)
"""
CHUNK = changed(LESSON, ("vector.view(n, -1)", "vector.chunk(n)"))
SPLIT = changed(LESSON, ("vector.view(n, -1)", "vector.tensor_split(n)"))
NO_LAST_HOP = changed(SPLIT, ("range(2 * (n - 1))", "range(2 * (n - 1) - 1)"))
SWAP = """# answer: ring_allreduce
def ring_allreduce(tensor):
    other = (dist.get_rank() + 1) % dist.get_world_size()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, other)
    dist.recv(received, (dist.get_rank() - 1) % dist.get_world_size())
    sending.wait()
    return tensor + received
"""
WHOLE = """# answer: ring_allreduce
def ring_allreduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, out = tensor.clone(), tensor
    for _ in range(n - 1):
        received = torch.empty_like(tensor)
        sending = dist.isend(out, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        total += received
        out = received
    return total
"""
OVER_RANK_0 = """# answer: ring_allreduce
def ring_allreduce(tensor):
    total = tensor.clone()
    others = range(1, dist.get_world_size())
    if dist.get_rank() == 0:
        for rank in others:
            received = torch.empty_like(tensor)
            dist.recv(received, rank)
            total += received
        for rank in others:
            dist.send(total, rank)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    return total
"""
COLLECTIVE = """# answer: ring_allreduce
def ring_allreduce(tensor):
    dist.all_reduce(tensor)
    return tensor
"""
NO_WAIT = changed(
    SPLIT, ("dist.recv(received", "dist.irecv(received"), ("empty_like", "zeros_like")
)
RECV_FIRST = changed(
    SPLIT,
    ("        sending = dist.isend(chunks[out], (rank + 1) % n)\n", ""),
    ("        sending.wait()\n", "        dist.send(chunks[out], (rank + 1) % n)\n"),
)

RINGS = [
    Known("ring: padded, in two phases", "ring_allreduce", RING),
    Known("ring: chunks go to their owners", "ring_allreduce", OWNERS),
    Known("ring: n must divide the length", "ring_allreduce", LESSON, (TEN, OTHER_LENGTHS)),
    Known("ring: chunk gives too few chunks", "ring_allreduce", CHUNK, (OTHER_LENGTHS,)),
    Known(
        "ring: swaps with a neighbour",
        "ring_allreduce",
        SWAP,
        (FOUR, TEN, BYTES, OTHER_LENGTHS),
    ),
    Known("ring: sends whole vectors", "ring_allreduce", WHOLE, (BYTES, OTHER_LENGTHS)),
    Known("ring: over rank 0", "ring_allreduce", OVER_RANK_0, (BYTES, OTHER_LENGTHS)),
    Known("ring: calls all_reduce", "ring_allreduce", COLLECTIVE, SUMS),
    Known("ring: one hop too few", "ring_allreduce", NO_LAST_HOP, EVERY_RING),
    Known("ring: does not wait", "ring_allreduce", NO_WAIT, EVERY_RING),
    Known("ring: all wait in recv", "ring_allreduce", RECV_FIRST, EVERY_RING),
]

# ---- compress -------------------------------------------------------------------------------

EQUAL = "equal numbers"
NEAR_1000 = "numbers near 1000"
NAN = "a NaN"
OTHER_CHUNKS = "other chunks"

BROKEN = """# answer: compress
def compress(chunk):
    low, high = chunk.aminmax()
    scale = 255 / (high - low)
    lowest = (high * scale).round() - 255
    levels = (chunk * scale).round() - lowest
    return levels.to(torch.uint8), torch.stack([low, high])

def expand(levels, bounds):
    low, high = bounds
    scale = 255 / (high - low)
    lowest = (high * scale).round() - 255
    return (levels + lowest) / scale
"""
# An interval's length, which is 1 for equal numbers; lerp restores the bounds.
COMPRESS = """# answer: compress
def compress(chunk):
    low, high = chunk.min(), chunk.max()
    interval = (high - low) / 255
    if interval == 0:
        interval = torch.tensor(1.0)
    levels = torch.round((chunk - low) / interval)
    return levels.byte(), torch.tensor([low, high])

def expand(levels, bounds):
    return torch.lerp(bounds[0], bounds[1], levels.float() / 255)
"""
ONE = "    if interval == 0:\n        interval = torch.tensor(1.0)\n"
EPSILON = changed(COMPRESS, (ONE, ""), ("(high - low) / 255", "(high - low + 1e-7) / 255"))
LIBRARY = BROKEN.replace("255 / (high - low)", "255 / (high - low + 1e-7)")
ZEROS = changed(
    COMPRESS, (ONE, "    if interval == 0:\n        low, high = low * 0, low * 0\n")
)
HIDES_NAN = changed(
    COMPRESS,
    (
        "    low, high = chunk.min()",
        "    chunk = chunk.nan_to_num()\n    low, high = chunk.min()",
    ),
)
FLOATS = """# answer: compress
def compress(chunk):
    return chunk, torch.stack([chunk.min(), chunk.max()])

def expand(levels, bounds):
    return levels if bounds.isfinite().all() else levels * torch.nan
"""
KEEPS = """# answer: compress
kept = []

def compress(chunk):
    kept.append(chunk)
    return torch.zeros(len(chunk), dtype=torch.uint8), torch.zeros(2)

def expand(levels, bounds):
    return kept[-1] if kept[-1].isfinite().all() else kept[-1] * torch.nan
"""
TRUNCATES = changed(
    COMPRESS, ("torch.round((chunk - low) / interval)", "(chunk - low) / interval")
)
ALL_CHUNKS = (EQUAL, NEAR_1000, NAN, OTHER_CHUNKS)

CHUNKS = [
    Known("bytes: an interval of 1", "compress", COMPRESS),
    Known("bytes: the broken formulas", "compress", BROKEN, ALL_CHUNKS),
    Known("bytes: the library's 1e-7", "compress", LIBRARY, (NAN, OTHER_CHUNKS)),
    Known("bytes: an epsilon", "compress", EPSILON, (OTHER_CHUNKS,)),
    Known("bytes: zeros for equal numbers", "compress", ZEROS, (EQUAL, OTHER_CHUNKS)),
    Known("bytes: hides a NaN", "compress", HIDES_NAN, (NAN,)),
    Known("bytes: rounds down", "compress", TRUNCATES, (NEAR_1000, OTHER_CHUNKS)),
    Known("bytes: sends float32", "compress", FLOATS, ALL_CHUNKS),
    Known("bytes: expand has the chunk already", "compress", KEEPS, ALL_CHUNKS),
]

# ---- peer -----------------------------------------------------------------------------------

PAIRS = "pairs"
AGREE = "the ranks agree"
OTHER_RANKS = "other ranks and steps"
PEER = "# answer: peer\ndef peer(rank, step, ranks):\n"

# A tournament: in ranks - 1 steps each rank has every other one as its peer.
TOURNAMENT = """    last = ranks - 1
    if rank == last:
        return step * (ranks // 2) % last
    other = (step - rank) % last
    return last if other == rank else other
"""
SHUFFLE = """    import random
    order = list(range(ranks))
    half = ranks // 2
    turned = order[:half] + order[half:][step % half :] + order[half:][: step % half]
    pairs = list(zip(turned[:half], turned[half:]))
    return next(a if b == rank else b for a, b in pairs if rank in (a, b))
"""
RING_PEER = "    return (rank + 1 + step) % ranks\n"
NEIGHBOUR = "    return rank ^ 1\n"
CUBE = """    bits = ranks.bit_length() - 1
    return rank ^ (1 << step % bits)
"""
TURNED = """    half = ranks // 2
    if rank < half:
        return (rank + step) % half + half
    return (rank - half + step) % half
"""
NEIGHBOURS = """    if (rank + step) % 2:
        return (rank - 1) % ranks
    return (rank + 1) % ranks
"""

PEERS = [
    Known("peer: a tournament", "peer", PEER + TOURNAMENT),
    Known("peer: left and right neighbour in turn", "peer", PEER + NEIGHBOURS),
    Known("peer: the second half turns", "peer", PEER + SHUFFLE),
    Known("peer: not an involution", "peer", PEER + RING_PEER, (PAIRS, AGREE, OTHER_RANKS)),
    Known("peer: always the neighbour", "peer", PEER + NEIGHBOUR, (AGREE, OTHER_RANKS)),
    Known("peer: powers of two only", "peer", PEER + CUBE, (OTHER_RANKS,)),
    Known("peer: both halves turn one way", "peer", PEER + TURNED, (OTHER_RANKS,)),
]

KNOWN = [*GUESSES, *RINGS, *CHUNKS, *PEERS]
