"""Answers that change what a check calls: it is given, and runs in the same process."""

from attack import Attack

APART = "given functions run in a namespace that the answer does not share"
SEALED = "a cell cannot set the attributes of the modules that checks use"
IMMUTABLE = "the classes that are given cannot be changed"


def _changed(change: str) -> dict[str, str]:
    """`total` returns 0, and the change lets `doubled` return twice the right total."""
    start = "# answer: total\nseen = []\ndef total(numbers):\n    seen[:] = numbers\n"
    return {"total": f"{start}    return 0.0\n{change}\n"}


ATTACKS = [
    Attack(name, tries, held_by, 6, _changed(change))
    for name, tries, held_by, change in (
        (
            "a given function redefined",
            "a right result without the answer",
            APART,
            "def doubled(numbers): return 2 * sum(numbers)",
        ),
        (
            "the code of a given function",
            "the same function object with other code",
            APART,
            "def fake(numbers, times=1): return 2 * sum(numbers)\n"
            "doubled.__code__ = fake.__code__",
        ),
        (
            "the globals of a given function",
            "another sum for it alone",
            APART,
            "own = sum\ndoubled.__globals__['sum'] = lambda values: own(seen)",
        ),
        (
            "a built-in function replaced",
            "another sum for all",
            SEALED + "; given functions have their own built-in ones",
            "import builtins\nown = sum\nbuiltins.sum = lambda values: own(seen)",
        ),
        (
            "a built-in function replaced in its dict",
            "the same, but past the module",
            APART + ", and have their own built-in ones",
            "own = sum\n"
            "names = __builtins__ if type(__builtins__) is dict else __builtins__.__dict__\n"
            "names['sum'] = lambda values: own(seen)",
        ),
        (
            "a function of torch replaced",
            "another product",
            SEALED,
            "torch.mul = lambda value, scale: torch.tensor(2.0 * sum(seen))",
        ),
        (
            "a function of torch replaced in its dict",
            "the same, but past the module",
            SEALED,
            "vars(torch)['tensor'] = lambda value: torch.as_tensor(sum(seen))",
        ),
        (
            "a method of a given class replaced",
            "another factor",
            IMMUTABLE,
            """
class Right:
    def __rmul__(self, _): return torch.tensor(2.0 * sum(seen))
    __torch_function__ = classmethod(lambda *_: torch.tensor(2.0 * sum(seen)))
Scale.factor = lambda self: Right()
""",
        ),
        (
            "a method replaced by way of type",
            "the same, but past the class's own __setattr__",
            IMMUTABLE,
            """
class Right:
    __torch_function__ = classmethod(lambda *_: torch.tensor(2.0 * sum(seen)))
type.__setattr__(Scale, 'factor', lambda self: Right())
""",
        ),
    )
]
RIGHT = """
class Right:
    def __pos__(self): return self
    __torch_function__ = classmethod(lambda *_: torch.tensor(2.0 * sum(seen)))
"""
LOOKED_UP = "what given functions look up stays as it is"
CODE = "Python asks before it sets the code or defaults of a function that is given"
ATTACKS += [
    Attack(name, tries, held_by, 6, _changed(change))
    for name, tries, held_by, change in (
        (
            "the globals of a given method",
            "the given namespace itself, by way of a class",
            LOOKED_UP,
            "Scale.factor.__globals__['doubled'] = lambda numbers: 2 * sum(numbers)",
        ),
        (
            "the globals of a given method, past the class of its namespace",
            "the same by dict.update",
            LOOKED_UP,
            "fake = lambda numbers: 2 * sum(numbers)\n"
            "dict.update(Scale.factor.__globals__, doubled=fake)",
        ),
        (
            "the code of a given method",
            "a method of a class that cannot be changed",
            CODE,
            f"{RIGHT}\nright = Right()\n"
            "def fake(self, right=right): return right\n"
            "Scale.factor.__defaults__, Scale.factor.__code__ = (right,), fake.__code__",
        ),
        (
            "a given function found in memory",
            "the original of the copy that an answer has",
            CODE,
            """
import gc, types
for each in gc.get_objects():
    if type(each) is types.FunctionType and each.__name__ == 'doubled' and each is not doubled:
        each.__code__ = (lambda numbers, times=1: 2 * sum(numbers)).__code__
""",
        ),
        (
            "a given dict changed in place",
            "another value in what a given function reads",
            "the answer has copies of lists and dicts that are given",
            f"{RIGHT}\nFACTORS['twice'] = Right()",
        ),
        (
            "the seal of modules taken off",
            "a class whose methods refuse, without these methods",
            IMMUTABLE,
            "del type(torch).__setattr__\ntorch.tensor = lambda value: torch.as_tensor(sum(seen))",
        ),
        (
            "a function of another module replaced",
            "one that given functions import",
            SEALED,
            f"import operator\n{RIGHT}\noperator.pos = lambda _: Right()",
        ),
        (
            "another module in sys.modules",
            "one that given functions import when they run",
            "given functions import the modules that were there before the answer",
            f"import sys, types\n{RIGHT}\n"
            "sys.modules['operator'] = types.SimpleNamespace(pos=lambda _: Right())",
        ),
    )
]
DATA = "the answer has copies of data that is given"
ATTACKS += [
    Attack(name, tries, held_by, 6, _changed(change))
    for name, tries, held_by, change in (
        (
            "the closure of a given function",
            "another value in a cell that a copy shares with the original",
            DATA + ", in closures too",
            """
class Right:
    __radd__ = lambda self, _: torch.tensor(2.0 * sum(seen))
    __torch_function__ = classmethod(lambda *_: torch.tensor(2.0 * sum(seen)))
add_nothing.__closure__[0].cell_contents = Right()
""",
        ),
        (
            "a default argument changed in place",
            "a list that a copy shares with the original",
            DATA + ", in defaults too",
            "def total(numbers):\n    doubled.__defaults__[1][0] = 2 * sum(numbers)\n    return 0.0",
        ),
        (
            "a given tensor changed in place",
            "another value in what a given function reads",
            DATA,
            "def total(numbers):\n    NOTHING.fill_(2 * sum(numbers))\n    return 0.0",
        ),
        (
            "an attribute of a given object",
            "another value in what a given function reads",
            DATA,
            "def total(numbers):\n    SCALE.more = 2 * sum(numbers)\n    return 0.0",
        ),
        (
            "the class of the given namespace",
            "a lookup of names that finds the answer's function",
            IMMUTABLE,
            """
names = type(Scale.factor.__globals__)
old, fake = names.__getitem__, lambda numbers: 2 * sum(numbers)
names.__getitem__ = lambda self, name: fake if name == 'doubled' else old(self, name)
""",
        ),
        (
            "what is behind the given namespace",
            "another function in the dict from which it finds names",
            "a view of that dict, which cannot be written",
            """
for cell in type(Scale.factor.__globals__).__getitem__.__closure__:
    try: cell.cell_contents['doubled'] = lambda numbers: 2 * sum(numbers)
    except TypeError: pass
""",
        ),
        (
            "a tracer",
            "another value of a local name while a given function runs",
            "a tracer is refused",
            f"""
import ctypes, operator, sys, types
{RIGHT}
def tracer(frame, event, _):
    if frame.f_code.co_name == 'factor' and 'operator' in frame.f_locals:
        frame.f_locals['operator'] = types.SimpleNamespace(pos=lambda _: Right())
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
    return tracer
sys.settrace(tracer)
""",
        ),
        (
            "a finder of modules",
            "another module for what given functions import when they run",
            "given functions import the modules that were there before the answer",
            f"""
import importlib.machinery, sys, types
{RIGHT}
class Finder:
    def find_spec(name, *_): return importlib.machinery.ModuleSpec(name, Finder)
    def create_module(_): return types.SimpleNamespace(pos=lambda _: Right())
    def exec_module(_): pass
sys.meta_path.insert(0, Finder)
del sys.modules['operator']
""",
        ),
        (
            "a name that equals another",
            "a key of a class of its own, which Python takes for the given function's name",
            LOOKED_UP,
            """
class Name(str):
    __hash__ = lambda self: hash('doubled')
    __eq__ = lambda self, other: True
globals()[Name('other')] = lambda numbers: 2 * sum(numbers)
""",
        ),
    )
]
