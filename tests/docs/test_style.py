"""The pages are written for readers that are tired: short sentences, short lines, subjects that are nouns."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import PAPERS, ROOT, name_of, prose_of
from tests.support.source import TOGETHER, files, tree_of

pytestmark = TOGETHER

WIDTH = 120
TOO_LONG = 30  # words
# Subjects that a reader has to guess. Each is forbidden everywhere, or where a sentence begins.
NEVER = r"\b(?:somebody|nobody|whoever|whosoever)\b"
WHO = r"who|whose|one (?:that|who)|those (?:that|who)"
NEVER_FIRST = rf"(?:{WHO}|what (?:is|was|has|had|are|were|can|cannot|may|must))"
MADE = re.compile(r"<!-- (?:Made|What follows is made) by .*", re.DOTALL)  # from here on, the words are the code's


ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def sentences_of(page: Path, ends: str = ".!?") -> Iterator[tuple[int, str]]:
    """Yield the sentences of a page with their lines: of paragraphs, of items, of the cells of tables."""
    text = re.sub(r"^#.*$", "", MADE.sub("", prose_of(page)), flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*(?:\n[^`\n]*)?`", lambda code: "CODE" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraph: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip() or line.startswith("|") or ITEM.match(line):
            parts = re.split(rf"(?<=[{ends}])\s+|\s*\|\s*", " ".join(paragraph))
            yield from ((number - len(paragraph), part) for part in parts if part.strip())
            paragraph = []
        if line.strip():
            paragraph.append(ITEM.sub("", line).strip())


@pytest.mark.parametrize("page", [*PAPERS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_lines_fit(page: Path) -> None:
    """Rows of tables cannot be broken."""
    long = [
        f"{number}: {line}"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) >= WIDTH and not line.startswith("|")
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    long = [f"{line}: {text}" for line, text in sentences_of(page) if len(text.split()) >= TOO_LONG]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_subjects_are_nouns(page: Path) -> None:
    vague = [
        f"{line}: {text}"
        for line, text in sentences_of(page, ".!?:")
        if re.search(NEVER, text, re.IGNORECASE) or re.match(NEVER_FIRST, re.sub(r"^\W+", "", text), re.IGNORECASE)
    ]
    assert not vague, "\n".join(vague)


def prose_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and the comments of a module with their lines."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def test_docstrings_and_comments_name_their_subjects() -> None:
    first = rf"(?:^|[.!?]\s+)(?:{WHO})\b"
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:100]}"
        for path, source in files().items()
        for line, text in prose_of_code(source)
        if re.search(NEVER, text, re.IGNORECASE) or re.search(first, text, re.IGNORECASE)
    ]
    assert not vague, "\n".join(vague)


def test_docstrings_and_comments_use_the_words_of_the_field() -> None:
    """They say show, report, return and notify, and again, restart and reconnect."""
    words = re.compile(r"\b(?:tell|tells|telling|told|anew|heed|heeds)\b", re.IGNORECASE)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:100]}"
        for path, source in files().items()
        for line, text in prose_of_code(source)
        if words.search(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_sentences_of_docstrings_are_short() -> None:
    """Trees and tables are not made of sentences, nor are lists of options with a colon or a semicolon in between."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(sentence.split())}"
        for path, source in files().items()
        for line, text in prose_of_code(source)
        for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*] ", text)
        if len(sentence.split()) > TOO_LONG and not re.search("[├└│]|::$", sentence)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_docstring_has_two_subjects_to_guess() -> None:
    vague = re.compile(rf"\b(?:who|whoever|someone|anybody|everybody|{WHO.partition('|whose|')[2]})\b", re.IGNORECASE)
    wrong = [
        f"{path.relative_to(ROOT)}: {' '.join(text.split())[:100]}"
        for path, source in files().items()
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and len(vague.findall(text := ast.get_docstring(node) or "")) > 1
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """They do not begin with an article, a pronoun, a preposition, or what is raised."""
    never = {"A", "An", "The", "As", "From", "For", "On", "What", "Where", "Who", "Whose", "This", "It", "Raises"}
    wrong = []
    for path, source in files().items():
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test_"):
                words = (ast.get_docstring(node) or "Return").split()
                if words[0] in never:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {' '.join(words[:12])}")
    assert not wrong, "\n".join(wrong)
