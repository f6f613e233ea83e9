"""Prompts with long texts: chapters of Python's language reference, which every interpreter brings along."""

from __future__ import annotations

# Chapters of at least LONG_CHARACTERS in every supported version of Python.
CHAPTERS = (
    "typesseq",
    "formatstrings",
    "compound",
    "string-methods",
    "customization",
    "types",
    "debugger",
    "comparisons",
)
LONG_CHARACTERS = 8000  # about 2000 tokens
SHARED_CHARACTERS = 4000

QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Which terms does this text define? List them.",
    "Explain the first paragraph to a beginner.",
    "Give a short example of what this text describes.",
    "Which mistakes does this text warn of?",
    "Summarize this text in three sentences.",
    "Write a title for this text.",
    "Which part of this text is the hardest to understand, and why?",
    "Write one exam question about this text, with its answer.",
    "What would a programmer of another language find unusual here?",
    "Repeat the first sentence of this text.",
    "Which keywords or symbols occur in this text?",
    "For whom was this text written?",
    "Write a short function that uses what this text describes.",
    "What does this text leave open?",
    "Name three words that describe the style of this text.",
)


def long_context() -> list[str]:
    """A different long text each, and a short answer. Raises ImportError or KeyError where Python lacks the text."""
    return [_asked(_chapter(name, LONG_CHARACTERS), QUESTIONS[5]) for name in CHAPTERS]


def shared_prefix() -> list[str]:
    """One text for all and a question each, so that a prefix cache can answer most of the prompt. Raises as above."""
    text = _chapter("formatstrings", SHARED_CHARACTERS)
    return [_asked(text, question) for question in QUESTIONS]


def _chapter(name: str, characters: int) -> str:
    from pydoc_data.topics import topics  # half a megabyte, which no other command needs

    return topics[name][:characters]


def _asked(text: str, question: str) -> str:
    return f"Here is a part of the reference of the Python language.\n\n{text}\n\n{question}"
