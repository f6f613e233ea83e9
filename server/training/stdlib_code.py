"""Real Python to ask about: functions, classes and modules of the standard library, read and never imported."""

from __future__ import annotations

import ast
import random
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.bench.datasets import EDITED_FUNCTIONS

_SKIPPED = frozenset(
    "test tests idlelib lib2to3 site-packages dist-packages turtledemo ensurepip pydoc_data encodings distutils "
    "lib-dynload __pycache__ tkinter".split()
)
# What the ``edits`` benchmark asks about is never trained on.
_MEASURED = frozenset(f"{module}.{function}" for module, function, _ in EDITED_FUNCTIONS)

_LONGEST_CODE = 900  # characters, about 250 tokens
_SHORTEST_DOCSTRING = 30  # characters
_FEWEST_BODY_LINES = 3  # of a function to ask about; shorter ones only delegate or raise


@dataclass(frozen=True, slots=True)
class StandardFunction:
    """A public function, or a method within the first line of its class.

    owner: its class, empty for a function. stub: signature and docstring. code: all of it. bare: without its docstring.
    parameters: without self and cls.
    body_lines: those below the docstring.
    """

    module: str
    owner: str
    name: str
    stub: str
    code: str
    bare: str
    parameters: tuple[str, ...]
    body_lines: int


@dataclass(frozen=True, slots=True)
class StandardLibrary:
    """topics: (dotted name of a module or class, its docstring)."""

    functions: Sequence[StandardFunction]
    topics: Sequence[tuple[str, str]]


def read_standard_library(root: Path | None = None) -> StandardLibrary:
    """Everything documented, in the order of the files' names; files that cannot be read are passed over."""
    root = root or Path(sysconfig.get_path("stdlib"))
    functions: list[StandardFunction] = []
    topics: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).with_suffix("")
        if _SKIPPED.intersection(relative.parts):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        module = ".".join(part for part in relative.parts if part != "__init__")
        functions += _functions(module, tree, text.splitlines())
        topics += _topics(module, tree)
    return StandardLibrary(functions, topics)


def _functions(module: str, tree: ast.Module, lines: Sequence[str]) -> Iterator[StandardFunction]:
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        if owner.startswith("_"):
            continue
        for member in members:
            if isinstance(member, ast.FunctionDef) and f"{module}.{member.name}" not in _MEASURED:
                function = _function(module, owner, member, lines)
                if function is not None:
                    yield function


def _function(module: str, owner: str, node: ast.FunctionDef, lines: Sequence[str]) -> StandardFunction | None:
    docstring = ast.get_docstring(node)
    if node.name.startswith("_") or not docstring or len(docstring) < _SHORTEST_DOCSTRING or len(node.body) < 2:
        return None
    first, second = node.body[:2]
    docstring_end = first.end_lineno or first.lineno
    if first.lineno == node.lineno or second.lineno == docstring_end:  # all on one line
        return None
    head, stub, rest = (
        lines[start - 1 : end]
        for start, end in (
            (node.lineno, first.lineno - 1),
            (node.lineno, docstring_end),
            (docstring_end + 1, node.end_lineno),
        )
    )

    def block(parts: Sequence[str]) -> str:
        text = "\n".join(parts) + "\n"
        return f"class {owner}:\n\n{text}" if owner else text

    return StandardFunction(
        module=module,
        owner=owner,
        name=node.name,
        stub=block(stub),
        code=block([*stub, *rest]),
        bare=block([*head, *rest]),
        parameters=tuple(argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")),
        body_lines=len(rest),
    )


def _topics(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    documented: list[tuple[str, ast.Module | ast.ClassDef]] = [(module, tree)]
    documented += [(f"{module}.{node.name}", node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for name, node in documented:
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) >= 2 * _SHORTEST_DOCSTRING and not name.rpartition(".")[2].startswith("_"):
            yield name, docstring


def _fenced(code: str) -> str:
    return f"```python\n{code}```"


_COMPLETE = (
    "Complete this Python function.\n\n{}",
    "Complete this Python function.\n\n{}",
    "Complete the following function.\n\n{}",
    "Write the body of this function.\n\n{}",
    "Implement this Python function according to its docstring.\n\n{}",
    "Finish this code:\n\n{}",
)

_ABOUT_CODE = (
    "Explain what this function does.\n\n{}",
    "Explain this Python code step by step.\n\n{}",
    "What does this code return, and when can it fail?\n\n{}",
    "Write unit tests for this function.\n\n{}",
    "Review this function and suggest improvements.\n\n{}",
    "Is there a bug in this function? Explain your answer.\n\n{}",
    "Add type hints to this function.\n\n{}",
    "Give an example of how to call this function.\n\n{}",
    "Rewrite this function so that it is easier to read.\n\n{}",
    "Translate this function to JavaScript.\n\n{}",
)

_ABOUT_BARE = (
    "Write a docstring for this function.\n\n{}",
    "Suggest a better name for this function and explain it.\n\n{}",
    "Add comments to this function.\n\n{}",
)

_ABOUT_TOPIC = (
    "Summarise this documentation of `{name}` in plain words.\n\n{text}",
    "This is the docstring of `{name}`. Write a short example that uses it.\n\n{text}",
    "Explain `{name}` from Python's standard library to a beginner. Its documentation says:\n\n{text}",
    "Write three questions and answers about `{name}`.\n\n{text}",
)

_ABOUT_NAME = (
    "What is `{name}` in Python used for?",
    "Show a short example that uses `{name}` in Python.",
    "When would I use `{name}` in a Python program, and what are the alternatives?",
)


def completion_prompt(stub: str, rng: random.Random) -> str:
    return rng.choice(_COMPLETE).format(_fenced(stub))


def completions(library: StandardLibrary, count: int, rng: random.Random) -> list[str]:
    """Signatures with docstrings, to be completed; two thirds of them are functions, not methods."""
    fitting = [f for f in library.functions if len(f.stub) <= _LONGEST_CODE]
    functions = [f.stub for f in fitting if not f.owner]
    methods = [f.stub for f in fitting if f.owner]
    stubs = rng.sample(functions, min(2 * count // 3, len(functions)))
    stubs += rng.sample(methods, min(count - len(stubs), len(methods)))
    return [completion_prompt(stub, rng) for stub in stubs]


def code_questions(library: StandardLibrary, count: int, rng: random.Random) -> list[str]:
    """Questions, tests, docstrings and renames for whole functions."""
    asks: tuple[Callable[[StandardFunction, random.Random], str], ...] = (
        _about_code,
        _about_code,
        _about_bare,
        _rename,
    )
    functions = [f for f in library.functions if len(f.code) <= _LONGEST_CODE and f.body_lines >= _FEWEST_BODY_LINES]
    return [rng.choice(asks)(f, rng) for f in rng.sample(functions, min(count, len(functions)))]


def library_questions(library: StandardLibrary, count: int, rng: random.Random) -> list[str]:
    """Questions about modules and classes, most of them with the docstring in the prompt."""
    topics = [(name, text) for name, text in library.topics if len(text) <= _LONGEST_CODE]
    prompts = []
    for name, text in rng.sample(topics, min(count, len(topics))):
        public = not any(part.startswith("_") for part in name.split("."))
        wordings = _ABOUT_NAME if public and rng.random() < 0.25 else _ABOUT_TOPIC
        prompts.append(rng.choice(wordings).format(name=name, text=text))
    return prompts


def _about_code(function: StandardFunction, rng: random.Random) -> str:
    return rng.choice(_ABOUT_CODE).format(_fenced(function.code))


def _about_bare(function: StandardFunction, rng: random.Random) -> str:
    return rng.choice(_ABOUT_BARE).format(_fenced(function.bare))


def _rename(function: StandardFunction, rng: random.Random) -> str:
    if not function.parameters:
        return _about_code(function, rng)
    old = rng.choice(function.parameters)
    new = rng.choice((f"my_{old}", f"{old}_arg", f"new_{old}", f"given_{old}"))
    wording = rng.choice(
        (
            "In this function, change the parameter `{old}` to `{new}` and show the whole function.\n\n{code}",
            "Rename the argument `{old}` of `{name}` to `{new}`.\n\n{code}",
        )
    )
    return wording.format(old=old, new=new, name=function.name, code=_fenced(function.bare))
