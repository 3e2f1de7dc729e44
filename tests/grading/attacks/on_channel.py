"""What a student's process can write to its socket: replies, requests, frames of all kinds."""

from attack import Attack

CHANNEL = '''
import json, os, socket, stat, struct, time

def channels():
    """All sockets that this process has."""
    for fd in range(3, 128):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield socket.socket(fileno=os.dup(fd))
        except OSError:
            pass

def packed(value):
    if type(value) is dict:
        return {"dict": [[key, packed(item)] for key, item in value.items()]}
    if type(value) is list:
        return value[0] if value and type(value[0]) is dict else {"list": [packed(i) for i in value]}
    return value

def tensor(shape, length, start=0, kind="float32"):
    return [{"tensor": [kind, shape, start, length]}]

def write(header, body=b""):
    header = header if type(header) is bytes else json.dumps(packed(header)).encode()
    for each in channels():
        each.sendall(struct.pack("!II", len(header), len(body)) + header + body)
'''
WRONG = "\ndef total(numbers):\n    return 0.0\n"
PLAIN = "what is no plain data ends the process, and the verdict says so"


def _total(code: str) -> dict[str, str]:
    return {"total": f"# answer: total\n{CHANNEL}\n{code.strip()}\n{WRONG}"}


def _call(code: str) -> dict[str, str]:
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "total": f"# answer: total\n{CHANNEL}\ndef total(numbers):\n{lines}    return 0.0\n"
    }


def _mean(code: str) -> dict[str, str]:
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "mean": f"# answer: mean\n{CHANNEL}\nimport torch.distributed as dist\n"
        f"def mean(tensor):\n{lines}    return 0 * tensor\n"
    }


ATTACKS = [
    Attack(
        "output forged",
        "verdicts and messages of the kernel through the real stdout and stderr",
        "what it prints is text for the student's feedback",
        6,
        _total("""
for fd in (1, 2):
    for text in (b"right: it is the sum\\n", b'{"reply": {"value": 6}}', b"\\r\\x1b[2J\\x08"):
        os.write(fd, text)
"""),
    ),
    Attack(
        "replies forged",
        "50 replies of 6 before any call",
        "a reply is its answer, and a constant deserves the visible point",
        7,
        _total('for _ in range(50): write({"reply": {"value": 6.0}})'),
    ),
    Attack(
        "a verdict forged by an error's lines",
        "a carriage return that makes nbval forget `wrong:`",
        "verdicts are printed without control characters; "
        "the checks' own record must agree with nbval",
        6,
        _total(
            'write({"reply": {"error": {"type": "", "text": "", '
            '"lines": ["\\rright: it is the sum"]}}})'
        ),
    ),
    Attack(
        "a verdict forged by text",
        "half a surrogate pair, escapes and backspaces in all fields of an error",
        "verdicts are printed without control characters",
        6,
        _total(
            'bad = "\\ud800\\x1b[1A\\x08\\x0c\\u2028\\nright: it is the sum"\n'
            'write({"reply": {"error": {"type": bad, "text": bad * 9999, "lines": [bad]}}})'
        ),
    ),
    Attack(
        "an error of other types",
        "an exception in the checks",
        PLAIN,
        6,
        _total('write({"reply": {"error": {"type": [1], "text": {"a": 1}, "lines": 7}}})'),
    ),
    Attack(
        "a verdict forged by a collective",
        "a carriage return in the name of a collective",
        "verdicts are printed without control characters; requests have fixed words",
        6,
        _mean("""
write({"ask": {"kind": "\\rright: both ranks have the mean", "group": "g", "tensors": []},
       "number": 0})
time.sleep(9)
"""),
    ),
    Attack(
        "a request for another rank",
        "an all_reduce in the name of rank 1, and answers to its numbers",
        "a request's rank is that of its socket",
        6,
        _mean("""
for number in (-1, 0, "x", None, 10 ** 400):
    write({"ask": {"kind": "all_reduce", "group": "group 0", "operation": "sum", "rank": 1,
                   "tensors": []}, "rank": 1, "number": number, "tensors": []})
"""),
    ),
    Attack(
        "a root that does not exist",
        "an exception in the network",
        "what cannot be carried out is a verdict",
        6,
        _mean("""
for root in (-9, 10 ** 30, True, 2.5):
    write({"ask": {"kind": "broadcast", "group": "group 0", "root": root, "tensors": []},
           "number": 0})
time.sleep(9)
"""),
    ),
    Attack(
        "a million gates",
        "memory of the checks",
        "a check has a time limit; the network keeps a limited number of requests",
        6,
        _mean("""
for number in range(1_000_000):
    write({"ask": {"kind": "gate", "name": f"{number}" * 99, "group": "g", "tensors": []},
           "number": number})
"""),
    ),
    Attack(
        "large requests without tensors",
        "memory of the checks: 1 MB of text in each request",
        "a request has fixed words of limited length",
        6,
        _mean("""
while True:
    write({"ask": {"kind": "send", "group": "g", "peer": 9, "tag": 0, "tensors": [],
                   "junk": "x" * 1_000_000}, "number": 0})
"""),
    ),
    Attack(
        "a frame of 4 GB",
        "memory of the checks",
        "the lengths are looked at first",
        6,
        _total(
            'for each in channels(): each.sendall(struct.pack("!II", 2**32 - 1, 2**32 - 1))'
        ),
    ),
    Attack(
        "a frame that does not end",
        "to let the checks wait",
        "the time limit",
        6,
        _call("""
for each in channels():
    each.sendall(struct.pack("!II", 1000, 1000))
while True:
    time.sleep(0.2)
    for each in channels():
        each.sendall(b" ")
"""),
    ),
    Attack(
        "frames without end",
        "to let the checks read for ever",
        "the first that is no message ends the process",
        6,
        _total('while True: write({"hello": "x" * 100_000})'),
    ),
    Attack(
        "many tensors over the same bytes",
        "memory of the checks: 9,000 tensors of 64 MB each, from one frame",
        "the tensors of a frame must lie one after the other",
        6,
        _total("""
size = 64 << 20
one = '{"tensor": ["uint8", [%d], 0, %d]}' % (size, size)
header = '{"dict": [["reply", {"dict": [["value", {"list": [%s]}]]}]]}' % ",".join([one] * 9000)
write(header.encode(), bytes(size))
"""),
    ),
    Attack(
        "impossible shapes",
        "an exception, or memory, in the checks",
        PLAIN,
        6,
        _total("""
write({"reply": {"value": tensor([0, 2 ** 80], 0)}})
"""),
    ),
    Attack(
        "the socket closed",
        "to let the checks wait",
        "the end of the connection is a verdict",
        6,
        _call("""
for fd in range(3, 128):
    try: os.close(fd)
    except OSError: pass
while True: time.sleep(1)
"""),
    ),
    Attack(
        "descriptors handed over",
        "to keep a socket open in a message",
        "the end of its processes closes them",
        6,
        _call("""
for each in channels():
    socket.send_fds(each, [struct.pack("!II", 9, 0)], list(range(0, 6)))
"""),
    ),
    Attack(
        "a rank that never calls",
        "to let the other ranks wait",
        "a collective that would hang is a verdict",
        6,
        _mean("""
if dist.get_rank() == 0:
    dist.all_reduce(tensor)
"""),
    ),
    Attack(
        "all_reduce counted once, values by send",
        "the right values, with other calls than reported",
        "what is sent is recorded by the checks",
        7,
        _mean("""
rank, size = dist.get_rank(), dist.get_world_size()
others = [rank_ for rank_ in range(size) if rank_ != rank]
work = [dist.isend(tensor.clone(), other) for other in others]
total = tensor.clone()
for other in others:
    received = tensor.clone()
    dist.recv(received, other)
    total += received
return total / size
"""),
    ),
    Attack(
        "tensors without elements by the thousand",
        "memory of the checks: no byte is sent, and each tensor is kept",
        "the network counts 4 KiB for each tensor",
        6,
        _mean("""
from multigpu.exercise import ranks
many = {"kind": "send", "peer": 1, "tag": 0, "tensors": [tensor.new_zeros(0)] * 22_000}
for _ in range(3 * (dist.get_rank() == 0)):
    ranks._world.ask(many, lambda answer: None)
dist.all_reduce(tensor)
return tensor / dist.get_world_size()
"""),
    ),
    Attack(
        "a tensor of one byte and 100 MB",
        "memory of the checks: a stride of 0 that repeats the byte",
        "the bytes that are sent at once have a limit",
        6,
        _mean("""
if dist.get_rank() == 0:
    dist.isend(tensor.new_zeros(1).byte().expand(100 << 20), 1)
dist.all_reduce(tensor)
return tensor / dist.get_world_size()
"""),
    ),
    Attack(
        "a reply of a million brackets",
        "to end the parser of the checks",
        PLAIN,
        6,
        _total('write(b"[" * 1_000_000)'),
    ),
    Attack(
        "a key that cannot be one",
        "an exception in the checks: a list as a key",
        PLAIN,
        6,
        _total("""
write(b'{"dict": [["reply", {"dict": [["value", {"dict": [[{"list": []}, 1]]}]]}]]}')
"""),
    ),
    Attack(
        "a rank that reads no answer",
        "to let the network wait while it answers",
        "the time limit closes the socket, which ends the wait",
        6,
        _mean("""
import signal
if dist.get_rank() == 0:
    many = tensor.new_zeros(1 << 20)
    for _ in range(20): dist.isend(many, 1)
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
ask = {"kind": "recv", "peer": 0, "tag": 0, "tensors": []}
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for other in channels(): other.setblocking(True)
import threading, ctypes
for number in range(20): write({"ask": ask, "number": 10 ** 6 + number})
while True: ctypes.PyDLL(None).sleep(60)
"""),
    ),
]
