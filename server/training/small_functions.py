"""Small Python functions to complete: a signature and a docstring whose examples are computed, not written by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Part:
    """Half of a function: which values it takes (``choose``) or what it makes of them (``reduce``).

    phrase: a choice's may hold ``{argument}`` and a number ``{k}``; a reduction's, ``{values}`` (the choice's phrase).
    """

    name: str
    phrase: str
    apply: Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True)
class _Family:
    argument: str
    annotation: str
    choose: Sequence[_Part]
    reduce: Sequence[_Part]
    example: Callable[[random.Random], Any]


_LEXICON = (
    "apple level river noon open kayak tree under ocean big cat eye garden amber civic stone uncle red ink yellow "
    "engine tiny mum window old radar fish green island sun"
).split()


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


_NUMBERS = _Family(
    "numbers",
    "list[int]",
    choose=(
        _Part("even", "even numbers in {argument}", lambda xs, k: [x for x in xs if x % 2 == 0]),
        _Part("odd", "odd numbers in {argument}", lambda xs, k: [x for x in xs if x % 2]),
        _Part("positive", "positive numbers in {argument}", lambda xs, k: [x for x in xs if x > 0]),
        _Part("negative", "negative numbers in {argument}", lambda xs, k: [x for x in xs if x < 0]),
        _Part("large", "numbers in {argument} that exceed {k}", lambda xs, k: [x for x in xs if x > k]),
        _Part("small", "numbers in {argument} below {k}", lambda xs, k: [x for x in xs if x < k]),
        _Part("divisible", "numbers in {argument} that {k} divides", lambda xs, k: [x for x in xs if x % k == 0]),
        _Part("prime", "primes in {argument}", lambda xs, k: [x for x in xs if _is_prime(x)]),
        _Part("distinct", "different values in {argument}", lambda xs, k: list(dict.fromkeys(xs))),
        _Part("repeated", "values that {argument} holds more than once", lambda xs, k: _repeated(xs)),
        _Part("first", "first {k} entries of {argument}", lambda xs, k: xs[:k]),
        _Part("alternate", "entries of {argument} at even positions", lambda xs, k: xs[::2]),
    ),
    reduce=(
        _Part("sum_of_{}", "Return the sum of the {values}.", lambda xs, k: sum(xs)),
        _Part("count_{}", "How many are there? Count the {values}.", lambda xs, k: len(xs)),
        _Part("largest_{}", "Find the largest of the {values}, or None.", lambda xs, k: max(xs, default=None)),
        _Part("smallest_{}", "Find the smallest of the {values}, or None.", lambda xs, k: min(xs, default=None)),
        _Part("sorted_{}", "Return the {values}, in ascending order.", lambda xs, k: sorted(xs)),
        _Part("reversed_{}", "Return the {values}, last one first.", lambda xs, k: xs[::-1]),
        _Part("squares_of_{}", "Square each of the {values}.", lambda xs, k: [x * x for x in xs]),
        _Part("double_{}", "Double the {values} and return them as a list.", lambda xs, k: [2 * x for x in xs]),
        _Part("has_{}", "Tell whether there are any {values}.", lambda xs, k: bool(xs)),
        _Part("{}_range", "Largest minus smallest of the {values}; 0 without any.", lambda xs, k: _spread(xs)),
        _Part("running_{}", "Running totals over the {values}.", lambda xs, k: list(itertools.accumulate(xs))),
        _Part("average_{}", "Mean of the {values}, 0 if none.", lambda xs, k: round(sum(xs) / max(1, len(xs)), 2)),
    ),
    example=lambda rng: [rng.randint(-9, 24) for _ in range(rng.randint(3, 7))],
)

_WORDS = _Family(
    "text",
    "str",
    choose=(
        _Part(
            "long_words", "words of {argument} with more than {k} letters", lambda t, k: _words(t, lambda w: len(w) > k)
        ),
        _Part(
            "short_words", "words of {argument} with at most {k} letters", lambda t, k: _words(t, lambda w: len(w) <= k)
        ),
        _Part(
            "vowel_words",
            "words of {argument} that begin with a vowel",
            lambda t, k: _words(t, lambda w: w[0] in "aeiou"),
        ),
        _Part("e_words", "words of {argument} that contain the letter e", lambda t, k: _words(t, lambda w: "e" in w)),
        _Part(
            "palindromes", "palindromes among the words of {argument}", lambda t, k: _words(t, lambda w: w == w[::-1])
        ),
        _Part("even_words", "words of {argument} of even length", lambda t, k: _words(t, lambda w: len(w) % 2 == 0)),
        _Part("unique_words", "different words of {argument}", lambda t, k: list(dict.fromkeys(t.split()))),
    ),
    reduce=(
        _Part("count_{}", "Count the {values}.", lambda ws, k: len(ws)),
        _Part("list_{}", "List the {values}.", lambda ws, k: ws),
        _Part("upper_{}", "Join the {values} in upper case.", lambda ws, k: " ".join(ws).upper()),
        _Part("sort_{}", "Sort the {values} by the alphabet.", lambda ws, k: sorted(ws)),
        _Part(
            "longest_{}", "Return the longest of the {values}, '' if none.", lambda ws, k: max(ws, key=len, default="")
        ),
        _Part("lengths_of_{}", "Map the {values} to their lengths.", lambda ws, k: {w: len(w) for w in ws}),
        _Part("initials_of_{}", "Return the initials of the {values}.", lambda ws, k: "".join(w[0] for w in ws)),
        _Part("reverse_{}", "Reverse each of the {values}.", lambda ws, k: [w[::-1] for w in ws]),
        _Part("letters_in_{}", "Total number of letters of the {values}.", lambda ws, k: len("".join(ws))),
    ),
    example=lambda rng: " ".join(rng.sample(_LEXICON, rng.randint(3, 6))),
)

_IN_WORDS = (
    "{phrase}",
    "{phrase}",
    "Given {argument}, do the following.\n    {phrase}",
    "{phrase}\n    The argument stays unchanged.",
)


def _repeated(values: list[int]) -> list[int]:
    return [x for x in dict.fromkeys(values) if values.count(x) > 1]


def _spread(values: list[int]) -> int:
    return max(values) - min(values) if values else 0


def _words(text: str, accepts: Callable[[str], bool]) -> list[str]:
    return [word for word in text.split() if accepts(word)]


def small_functions(count: int, rng: random.Random) -> list[str]:
    """``count`` functions without a body, each a different pair of choice and reduction while there are any."""
    pairs = [
        (family, choose, reduce)
        for family in (_NUMBERS, _WORDS)
        for choose in family.choose
        for reduce in family.reduce
    ]
    rng.shuffle(pairs)
    return [_function(*pair, rng) for pair in itertools.islice(itertools.cycle(pairs), count)]


def _function(family: _Family, choose: _Part, reduce: _Part, rng: random.Random) -> str:
    k = rng.randint(2, 5)
    name = reduce.name.format(choose.name)
    argument = rng.choice((family.argument, "values" if family is _NUMBERS else "sentence"))
    phrase = reduce.phrase.format(values=choose.phrase.format(argument=argument, k=k))
    lines = [rng.choice(_IN_WORDS).format(phrase=phrase, argument=argument)]
    examples = [family.example(rng) for _ in range(rng.randint(1, 3))]
    results = [reduce.apply(choose.apply(example, k), k) for example in examples]
    for example, result in zip(examples, results, strict=True):
        lines += [f">>> {name}({example!r})", repr(result)]
    body = "\n    ".join(lines)
    signature = f"({argument}: {family.annotation}){_returns(results)}" if rng.random() < 0.6 else f"({argument})"
    return f'def {name}{signature}:\n    """{body}\n    """\n'


def _returns(results: Sequence[object]) -> str:
    """The annotation, where the examples leave no doubt about it."""
    kinds = {type(result).__name__ for result in results}
    return f" -> {kinds.pop()}" if len(kinds) == 1 and "NoneType" not in kinds else ""
