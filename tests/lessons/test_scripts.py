"""What holds for every script in the new form, which has no notebook cells in it."""

import ast
import io
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest
from commands import ROOT

from multigpu.course import LESSONS

SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").glob("*.py"))
    if "\n# %%" not in path.read_text()
]
# Lessons 01 to 06, and 14 on, are PyTorch's: their scripts run wherever torch and sklearn do.
TORCH_ALONE = {
    notebook.stem for lesson in (*LESSONS[:6], *LESSONS[13:]) for notebook in lesson.notebooks
}


def each(scripts: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", scripts, ids=lambda path: path.stem)


@cache
def definitions(path: Path) -> dict[str, str]:
    """The classes and functions at the top level of a script, by name, without comments."""
    return {
        node.name: ast.unparse(node)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


# Lesson 14's GPT chooses attention and checkpointing, lesson 19's is given attention; lesson
# 17's can be a stage of one.
OWN = {
    "Block": ("PT_GPT_Memory", "PT_GPT_ContextExperts"),
    "GPT": ("PT_GPT_Memory", "PT_GPT_ContextExperts", "PT_GPT_Mesh"),
}


@pytest.mark.parametrize("name", ["CNN", "cnn", "read_digits", "read_tokens", "Block", "GPT"])
@each(SCRIPTS)
def test_scripts_that_define_the_model_or_the_data_define_the_same(path, name):
    texts = {
        definitions(script)[name]
        for script in (path, *SCRIPTS)
        if name in definitions(script) and script.stem not in OWN.get(name, ())
    }
    assert len(texts) == 1


@each([path for path in SCRIPTS if path.stem in TORCH_ALONE])
def test_a_script_of_plain_torch_imports_torch_and_scikit_learn_alone(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules <= sys.stdlib_module_names | {"torch", "numpy", "sklearn"}


@each(SCRIPTS)
def test_at_most_a_fifth_of_a_scripts_lines_have_comments(path):
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    assert comments <= len(text.splitlines()) / 5
