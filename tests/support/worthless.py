"""Answers without any work, made from a solution: no check may give points for one."""

import ast
from collections.abc import Callable, Iterator

from multigpu.grading.solution import Question, Solution, without_solution

Function = ast.FunctionDef
ZEROS = """
import functools

def _zeros(value):
    import torch
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeros(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_zeros(each) for each in value)
    return type(value)() if isinstance(value, (bool, int, float, str)) else value

def _zeroed(function):
    return functools.wraps(function)(lambda *all, **more: _zeros(function(*all, **more)))
"""
# The given function as it would be if the answer were the right one.
REDEFINED = """
import types
_right, _own = dict(globals()), {name}
def {name}(*all, **more):
    made = types.FunctionType(_own.__code__, _right, "", _own.__defaults__, _own.__closure__)
    return made(*all, **more)
"""


def answers(solution: Solution, question: Question) -> Iterator[tuple[str, str]]:
    """(name, text) of each answer: what it does, and the answer cell."""
    source = question.answer
    head = source.partition("\n")[0]
    functions = [each for each in ast.walk(ast.parse(source)) if _counts(each)]
    if not functions:
        names = sorted(_assigned(without_solution(source)))
        for value in ("True", "''", "[]", "{}", "float('nan')", "float('inf')"):
            yield value, "\n".join([head, *(f"{name} = {value}" for name in names)])
        return

    def every(line: Callable[[list[str]], str], before: str = "") -> str:
        return f"{head}\n{before}\n{_with_bodies(source, line)}"

    yield "the cell as it was given", f"{without_solution(source)}\npass\n"
    for value in ("[]", "{}", "''", "True", "-1", "float('nan')", "float('inf')"):
        yield f"always {value}", every(lambda _, value=value: f"return {value}")
    nothing = _with_bodies(source, lambda _: "pass")
    yield "pass", f"{head}\n{nothing}"
    for place in range(max(len(_parameters(each)) for each in functions)):
        yield (
            f"argument {place}",
            every(lambda names, at=place: f"return {names[at] if at < len(names) else None}"),
        )
    if any(map(_returns, functions)):
        yield "zeros of the right shape", f"{head}\n{ZEROS}\n{_zeroed(source)}"
    for name in _given(solution):
        yield (
            f"the given {name}",
            every(lambda names, given=name: f"return {given}({', '.join(names)})"),
        )
        yield f"{name} redefined", f"{source}\n{REDEFINED.format(name=name)}\n{nothing}"


def _counts(node: ast.AST) -> bool:
    """Whether it is a function or a method; an __init__ only prepares for the others."""
    return isinstance(node, Function) and node.name != "__init__"


def _parameters(function: Function) -> list[str]:
    return [each.arg for each in function.args.args if each.arg != "self"]


def _with_bodies(source: str, line: Callable[[list[str]], str]) -> str:
    """The cell with one line in place of what each function and method does."""
    tree = ast.parse(source)
    for node in _outermost(tree):
        node.body = ast.parse(f"def _():\n    {line(_parameters(node))}").body[0].body
    return ast.unparse(tree)


def _zeroed(source: str) -> str:
    """The cell with zeros of the right shape for all that a function or method returns."""
    tree = ast.parse(source)
    for node in _outermost(tree):
        if _returns(node):
            node.decorator_list.append(ast.Name("_zeroed"))
    return ast.unparse(tree)


def _outermost(tree: ast.AST) -> Iterator[Function]:
    """The functions and methods that are in no other function."""
    for node in ast.iter_child_nodes(tree):
        if _counts(node):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _outermost(node)


def _returns(function: Function) -> bool:
    """Whether it returns a value; one that does not has done its work when it returns."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return any(node.value is not None for node in found)


def _assigned(source: str) -> set[str]:
    """The variables that a released answer cell gives a value."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {name.id for node in found for name in node.targets if isinstance(name, ast.Name)}


def _given(solution: Solution) -> list[str]:
    """The functions of the cells that are given."""
    found = []
    for source in solution.sources("given"):
        body = ast.parse(source).body
        found += [
            each.name
            for each in body
            if isinstance(each, Function) and not each.decorator_list
        ]
    return found


def submissions(solution: Solution) -> dict[tuple[str, str], dict[str, str]]:
    """Answers of a notebook by (question, name): a worthless one, and no other."""
    return {
        (question.name, name): {question.name: text}
        for question in solution.questions
        for name, text in answers(solution, question)
    }
