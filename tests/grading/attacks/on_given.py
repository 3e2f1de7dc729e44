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
            "a given function redefined in __main__",
            "the same by way of sys.modules",
            APART,
            "import sys\nsys.modules['__main__'].doubled = lambda numbers: 2 * sum(numbers)",
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
    )
]
