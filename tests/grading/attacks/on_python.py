"""What an answer can do to Python in its process: replaced functions, objects, modules."""

from attack import Attack

WRONG = "def total(numbers):\n    return 0.0\n"
APART = "checks run and compare in another process; plain data crosses"


def _before(code: str) -> dict[str, str]:
    """The answer runs the code, then defines a wrong function."""
    return {"total": f"# answer: total\n{code.strip()}\n{WRONG}"}


def _returns(code: str, value: str) -> dict[str, str]:
    """The answer returns an object."""
    return {"total": f"# answer: total\n{code}\ndef total(numbers):\n    return {value}\n"}


EVERYTHING = """
class Everything:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __lt__
    __ne__ = lambda self, other: False
    def __sub__(self, other): return self
    __rsub__ = __abs__ = __add__ = __radd__ = __mul__ = lambda self, *other: self
    def __float__(self): return 6.0
    def __hash__(self): return 0
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __reduce__(self): return (print, ("unpickled",))
"""

ATTACKS = [
    Attack(
        "comparisons replaced",
        "abs, all, sorted, isinstance, len that please",
        APART,
        6,
        _before("""
import builtins, operator
for name in ("abs", "min", "max"):
    setattr(builtins, name, lambda *a, **k: 0)
builtins.all = builtins.any = operator.eq = lambda *a, **k: True
"""),
    ),
    Attack(
        "equal to everything",
        "an object whose comparisons are true",
        "only plain data crosses: exact types, and the bytes of tensors",
        6,
        _returns(EVERYTHING, "Everything()"),
    ),
    Attack(
        "a float that lies",
        "subclasses of float, and of tensors",
        "only plain data crosses: exact types, and the bytes of tensors",
        6,
        _returns(
            "class F(float):\n    __eq__ = lambda *a: True\n    __sub__ = lambda *a: 0\n"
            "    __hash__ = float.__hash__",
            "F(0)",
        ),
    ),
    Attack(
        "NaN, infinity and a huge integer",
        "values that break comparisons",
        "a value that cannot be compared is wrong",
        6,
        _returns("import random", "random.choice([float('nan'), float('inf'), 10 ** 4000])"),
    ),
    Attack(
        "asserts stripped",
        "an AST transformer that deletes asserts, and a compile of its own",
        APART,
        6,
        _before("""
import ast, builtins
class Strip(ast.NodeTransformer):
    def visit_Assert(self, node): return None
try:
    get_ipython().ast_transformers.append(Strip())
except NameError:
    pass
real = builtins.compile
builtins.compile = lambda source, *a, **k: real("", *a, **k)
"""),
    ),
    Attack(
        "showtraceback silenced",
        "errors that nobody sees",
        "the answer does not run in IPython; a missing verdict is wrong",
        6,
        _before("""
import sys, threading, traceback
sys.excepthook = threading.excepthook = lambda *a: None
traceback.extract_tb = lambda *a, **k: []
get_ipython().showtraceback = lambda *a, **k: None
"""),
    ),
    Attack(
        "the checks patched",
        "Check.expect, difference, Exercise._report that are always right",
        APART,
        6,
        _before("""
import multigpu.exercise.check as check
import multigpu.exercise.exercise as exercise
import multigpu.exercise.verdicts as verdicts
verdicts.difference = check.difference = lambda *a, **k: ""
check.Check.expect = check.Check.close_to = check.Check.equal = lambda *a, **k: True
exercise.Exercise._report = lambda *a, **k: print("right: it is the sum")
exercise.grade_with(None)
"""),
    ),
    Attack(
        "the student's own process patched",
        "multigpu.exercise.student, channel and plain that send another value",
        "what it sends is its answer, and a constant deserves the visible point",
        7,
        _before("""
import multigpu.exercise.channel as channel
import multigpu.exercise.plain as plain
send = channel.Channel.send
def forged(self, value):
    if type(value) is dict and "value" in value.get("reply", {}):
        value = {"reply": {"value": 6.0}}
    return send(self, value)
channel.Channel.send = forged
"""),
    ),
    Attack(
        "meters patched",
        "the virtual GPUs' meters, clocks and resource that report nothing",
        "nothing that is measured in the student's process is believed",
        6,
        _before("""
import resource, time
import multigpu.virtual.control as vgpu
for name in dir(vgpu):
    if callable(getattr(vgpu, name)):
        setattr(vgpu, name, lambda *a, **k: 0)
time.monotonic = time.perf_counter = time.time = lambda: 0.0
resource.getrusage = lambda *a: None
"""),
    ),
    Attack(
        "modules shadowed",
        "json.py, torch.py and multigpu.py in the working folder, sitecustomize, PYTHONPATH",
        "each answer has an empty /tmp of its own; the checks import nothing from it",
        6,
        _before("""
import os, sys
for name in ("json", "torch", "multigpu", "sitecustomize", "random", "struct"):
    for folder in ("/tmp", "@CHECKOUT@", "@CHECKOUT@/multigpu", sys.path[-1]):
        try:
            with open(f"{folder}/@MARK@-{name}.py", "w") as file:
                file.write("raise SystemExit('@MARK@')")
            os.rename(f"{folder}/@MARK@-{name}.py", f"{folder}/{name}.py")
        except OSError:
            pass
os.environ["PYTHONPATH"] = os.environ["HOME"] = "/tmp"
sys.path.insert(0, "/tmp")
"""),
    ),
    Attack(
        "a pickle",
        "an object that runs code where it is unpickled",
        "nothing is unpickled",
        6,
        _returns(EVERYTHING, "[Everything(), {'a': Everything()}]"),
    ),
    Attack(
        "SystemExit",
        "to end the checks",
        "an exception of any kind is a verdict",
        6,
        {"total": "# answer: total\nraise SystemExit(0)\n"},
    ),
    Attack(
        "KeyboardInterrupt in the call",
        "to end the checks",
        "an exception of any kind is a verdict",
        6,
        _returns("", "(_ for _ in ()).throw(KeyboardInterrupt)"),
    ),
    Attack(
        "an error whose text forges a verdict",
        "lines and carriage returns in an exception's type, text and source line",
        "verdicts are printed without control characters; "
        "the checks' own record must agree with nbval",
        6,
        _returns(
            "import linecache\n"
            "linecache.cache['<x>'] = (9, None, ['\\rright: it is the sum'], '<x>')\n"
            "E = type('\\rright: it is the sum\\n', (Exception,), {})\n"
            "def fail(): raise E('\\rright: it is the sum')\n"
            "code = compile('raise E(chr(13) + chr(10) + \"right: it is the sum\")', '<x>', 'exec')",
            "exec(code)",
        ),
    ),
    Attack(
        "recursion",
        "a crash of the interpreter",
        "an exception, or the end of its process, is a verdict",
        6,
        _returns(
            "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1)", "f(0)"
        ),
    ),
    Attack(
        "a wrong address",
        "a crash of the interpreter",
        "the end of its process is a verdict",
        6,
        _returns("import ctypes", "ctypes.string_at(0)"),
    ),
    Attack(
        "a list that contains itself",
        "an endless walk through what is returned",
        "plain data is at most 20 deep",
        6,
        _returns("endless = []\nendless.append(endless)", "endless"),
    ),
    Attack(
        "tensors that have no bytes",
        "values of a meta, a sparse and a quantized tensor",
        "only plain data crosses: exact types, and the bytes of tensors",
        6,
        _returns(
            "import torch\nkinds = [torch.empty((), device='meta'), torch.eye(3).to_sparse(),\n"
            "         torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.quint8)]",
            "kinds[len(numbers) % 3]",
        ),
    ),
    Attack(
        "a counter in a default argument",
        "the known result at the first call, and the right ones later",
        "each check has a process of its own, so that each call is the first",
        7,
        {
            "total": "# answer: total\ndef total(numbers, calls=[]):\n"
            "    calls.append(numbers)\n    return sum(numbers) if len(calls) > 1 else 6.0\n"
        },
    ),
]
