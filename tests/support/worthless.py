"""Answers without any work, made from a solution: no check may give points for one."""

import ast
from collections.abc import Iterator

from multigpu.grading.solution import Question, Solution, without_solution

ZEROS = """
def _zeros(value):
    import torch
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeros(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_zeros(each) for each in value)
    return type(value)() if isinstance(value, (bool, int, float, str)) else value
"""


def answers(solution: Solution, question: Question) -> Iterator[tuple[str, str]]:
    """(name, text) of each answer: what it does, and the answer cell."""
    source = solution.answer(question)
    head = f"# answer: {question.name}"
    if question.needs:
        head += f" (needs {', '.join(question.needs)})"
    body = ast.parse(source).body
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    names = sorted(_assigned(without_solution(source)))
    if not functions:
        for value in ("True", "''", "[]", "{}", "float('nan')", "float('inf')"):
            yield value, "\n".join([head, *(f"{name} = {value}" for name in names)])
        return
    parameters = max(len(each.args.args) for each in functions)
    yield "pass", _each(head, functions, "pass")
    for place in range(parameters):
        chosen = f"return arguments[{place}] if len(arguments) > {place} else None"
        yield f"argument {place}", _each(head, functions, chosen)
    own = "\n".join(
        f"_own_{each.name} = {each.name}\n"
        f"def {each.name}(*arguments, **more):\n"
        f"    return _zeros(_own_{each.name}(*arguments, **more))"
        for each in functions
        if _returns(each)
    )
    if own:
        text = f"{head}\n{source.partition(chr(10))[2]}\n{ZEROS}\n{own}"
        yield "zeros of the right shape", text
    for name in _given(solution):
        calls = f"return {name}(*arguments, **more)"
        yield f"the given {name}", _each(head, functions, calls)
        # The right answer, so that only the guard of given names takes the points.
        same = f"def {name}(*arguments, **more):\n    return _own(*arguments, **more)"
        yield f"{name} redefined", f"{source}\n\n_own = {name}\n{same}\n"


def _each(head: str, functions: list[ast.FunctionDef], line: str) -> str:
    texts = [f"def {each.name}(*arguments, **more):\n    {line}" for each in functions]
    return "\n\n".join([head, *texts]) + "\n"


def _returns(function: ast.FunctionDef) -> bool:
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
        found += [each.name for each in body if isinstance(each, ast.FunctionDef)]
    return found


def submissions(solution: Solution) -> dict[tuple[str, str], dict[str, str]]:
    """Answers of a notebook by (question, name): a worthless one, and no other."""
    return {
        (question.name, name): {question.name: text}
        for question in solution.questions
        for name, text in answers(solution, question)
    }
