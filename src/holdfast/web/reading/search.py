"""The grammar of searches: ``task:charge status:failed since:1h customer:c-17 error:Timeout -queue:mail lost parcel``.

A search is a list of terms, all of which have to hold; of several of one field, such as two statuses, one has to. A
name that is no field is that of an attribute. Quotes keep blanks together: ``customer:"A B"``; a name in quotes is
always that of an attribute. A term without a name is looked for in the texts of an invocation. Pure.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.clock import parse_duration, parse_moment
from holdfast.errors import HoldfastError, UsageError
from holdfast.ids import ALPHABET, LENGTH
from holdfast.model.status import Status

LONGEST, MOST_TERMS = 1000, 40
ATTRIBUTE, TEXT = "attribute", "text"
KINDS = ("task", "workflow", "world")
SHORTEST_ID = 6  # characters of a part of an id
_NEAR = 0.82
_BARE = re.compile(r'[^\s"]+')
_NAME = re.compile(r"[^\W\d][\w.-]*(?=:)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_BLANK = re.compile(r"\s*")


class SearchError(UsageError):
    """A search cannot be read. `at` is the character where, counted from 0."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(f"{message} (at character {at + 1} of the search)")
        self.at = at


class Term(NamedTuple):
    """A condition: of a field, of the attribute `name`, or a text. A `negative` one must not hold."""

    field: str
    value: str
    negative: bool = False
    name: str = ""


Query = tuple[Term, ...]


class _Values(NamedTuple):
    """The values of a field: which are allowed, in words and for completion, and how many of them."""

    doc: str
    check: Callable[[str], str] = lambda text: ""  # what is wrong with a value
    choices: Sequence[str] = ()
    is_single: bool = False
    may_be_negative: bool = True


def _status_problem(text: str) -> str:
    return _not_among(text, [str(status) for status in Status], "status")


def _kind_problem(text: str) -> str:
    return _not_among(text, KINDS, "kind")


def _not_among(text: str, known: Sequence[str], what: str) -> str:
    if text in known:
        return ""
    near = difflib.get_close_matches(text.lower(), known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(known)}"
    return f"there is no {what} '{text[:80]}'; {hint}"


def _time_problem(text: str) -> str:
    try:
        moment_of(text, 1e9)
    except HoldfastError as error:
        return str(error)
    return ""


def _id_problem(text: str) -> str:
    if not SHORTEST_ID <= len(text) <= LENGTH or any(character not in ALPHABET for character in text):
        return f"'{text[:80]}' is no part of an id: write {SHORTEST_ID} characters or more of its beginning or end"
    return ""


FIELDS: Mapping[str, _Values] = {
    "task": _Values("its name, whole or short"),
    "status": _Values("such as failed", _status_problem, [str(status) for status in Status]),
    "queue": _Values("its queue"),
    "since": _Values(
        "submitted since: a time, or how long ago", _time_problem, ("15m", "1h", "24h", "7d"), True, False
    ),
    "until": _Values("submitted before", _time_problem, ("15m", "1h", "24h", "7d"), True, False),
    "error": _Values("the type of its error, or a part of what it says"),
    "key": _Values("its idempotency key", is_single=True),
    "id": _Values("the beginning or the end of its id", _id_problem, is_single=True),
    "parent": _Values("what this invocation has submitted", _id_problem, is_single=True),
    "rerun": _Values("what repeats this invocation", _id_problem, is_single=True),
    "kind": _Values("task, workflow or world", _kind_problem, KINDS, True),
}


def moment_of(text: str, now: float) -> float:
    """Return the moment that a text means: a time, or how long ago. Raises `UsageError`."""
    try:
        return max(0.0, now - parse_duration(text))
    except HoldfastError as no_duration:
        try:
            at = dt.datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"'{text[:80]}' is no time: write 2h for two hours ago, or 2026-11-15T08:00:00Z"
            ) from no_duration
    return parse_moment(at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC), "time")


# --- reading


def parse(text: str) -> Query:
    """Return the terms of a search. Raises `SearchError`."""
    if len(text) > LONGEST:
        raise SearchError(f"a search has up to {LONGEST:,} characters", LONGEST)
    terms: list[Term] = []
    at = _after_blanks(text, 0)
    while at < len(text):
        if len(terms) == MOST_TERMS:
            raise SearchError(f"a search has up to {MOST_TERMS} terms", at)
        term, behind = _term(text, at)
        _check(term, terms, at)
        terms.append(term)
        if behind < len(text) and not text[behind].isspace():
            raise SearchError("a quote is at the beginning and the end of a value, and a blank comes after it", behind)
        at = _after_blanks(text, behind)
    return tuple(terms)


def _after_blanks(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _term(text: str, at: int) -> tuple[Term, int]:
    """Return the term that begins here, and the place behind it."""
    negative = text[at] == "-" and at + 1 < len(text) and not text[at + 1].isspace()
    at += negative
    if text[at] == '"':
        name, behind = _value(text, at)
        if not text.startswith(":", behind):
            return Term(TEXT, name, negative), behind
        value, end = _value(text, behind + 1, name)
        return Term(ATTRIBUTE, value, negative, name), end
    if (named := _NAME.match(text, at)) is None:
        value, behind = _value(text, at)
        return Term(TEXT, value, negative), behind
    name = named[0]
    value, behind = _value(text, named.end() + 1, name)
    if name in FIELDS:
        return Term(name, value, negative), behind
    if near := difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=_NEAR):
        raise SearchError(
            f"there is no field '{name[:80]}'; did you mean {near[0]}:? If it is an attribute, write \"{name[:80]}\":…",
            at,
        )
    return Term(ATTRIBUTE, value, negative, name), behind


def _value(text: str, at: int, name: str = "") -> tuple[str, int]:
    """Return the value that begins here, in quotes or bare, and the place behind it."""
    if text.startswith('"', at):
        quoted = _QUOTED.match(text, at)
        if quoted is None:
            raise SearchError("the quote that begins here has no end", at)
        if not quoted[1]:
            raise SearchError("there is nothing between the quotes", at)
        return re.sub(r'\\(["\\])', r"\1", quoted[1]), quoted.end()
    bare = _BARE.match(text, at)
    if bare is None:
        raise SearchError(f"write a value after {name}:, such as {name}:{_example(name)}", min(at, len(text)))
    return bare[0], bare.end()


def _example(name: str) -> str:
    choices = FIELDS[name].choices if name in FIELDS else ()
    return choices[0] if choices else "…"


def _check(term: Term, before: Sequence[Term], at: int) -> None:
    if term.field == TEXT:
        return
    if term.field == ATTRIBUTE:
        other = [each for each in before if each.field == ATTRIBUTE and each.name == term.name and not each.negative]
        if other and not term.negative and other[0].value != term.value:
            raise SearchError(f"an attribute has one value, and {term.name}:{other[0].value} is wanted too", at)
        return
    values = FIELDS[term.field]
    if term.negative and not values.may_be_negative:
        other_field = "until" if term.field == "since" else "since"
        raise SearchError(f"-{term.field}: has no meaning; write {other_field}:{term.value}", at)
    if values.is_single and not term.negative and any(_is_same(each, term) for each in before):
        raise SearchError(f"{term.field}: is given twice; give it once", at)
    if problem := values.check(term.value):
        raise SearchError(problem, at)


def _is_same(each: Term, term: Term) -> bool:
    return each.field == term.field and not each.negative


# --- writing


def formatted(query: Query) -> str:
    """Return the text of a search; `parse` makes the same search of it."""
    return " ".join(map(_formatted, query))


def _formatted(term: Term) -> str:
    sign = "-" if term.negative else ""
    if term.field == TEXT:
        bare = _BARE.fullmatch(term.value) and not term.value.startswith("-") and not _NAME.match(term.value)
        return sign + (term.value if bare else quoted(term.value))
    value = term.value if _BARE.fullmatch(term.value) else quoted(term.value)
    if term.field != ATTRIBUTE:
        return f"{sign}{term.field}:{value}"
    plain = _NAME.match(f"{term.name}:")
    whole = plain is not None and plain.end() == len(term.name)
    near = term.name in FIELDS or difflib.get_close_matches(term.name.lower(), FIELDS, n=1, cutoff=_NEAR)
    return f"{sign}{term.name if whole and not near else quoted(term.name)}:{value}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def with_terms(query: Query, *wanted: Term) -> Query:
    """Return the search with these terms in place of all others of their fields."""
    replaced = {(term.field, term.name) for term in wanted}
    return (*(term for term in query if (term.field, term.name) not in replaced), *wanted)


def without(query: Query, *fields: str) -> Query:
    return tuple(term for term in query if term.field not in fields)


def values_of(query: Query, field: str, *, negative: bool = False) -> list[str]:
    return [term.value for term in query if term.field == field and term.negative == negative]


# --- completion


class Completion(NamedTuple):
    """The part of a search that is being written: from `start` to `end`; a field, or a value of one."""

    start: int
    end: int
    field: str  # empty: a name, or a text
    begun: str
    sign: str = ""


def being_written(text: str, at: int) -> Completion:
    """Return what is being written at a place of a search. It need not be readable as a whole."""
    at = max(0, min(at, len(text)))
    start, is_open = 0, False
    for place, character in enumerate(text[:at]):
        if character == '"':
            is_open = not is_open
        elif character.isspace() and not is_open:
            start = place + 1
    end = at if is_open else next((place for place in range(at, len(text)) if text[place].isspace()), len(text))
    token = text[start:at]
    sign = "-" if token.startswith("-") else ""
    field, colon, value = token.removeprefix("-").partition(":")
    if not colon:
        return Completion(start, end, "", field.lstrip('"'), sign)
    return Completion(start, end, field if field in FIELDS else ATTRIBUTE, value.strip('"'), sign)


def suggestions(part: Completion, values: Mapping[str, Sequence[str]], most: int = 12) -> list[str]:
    """Return what could stand there: names of fields, values of them, tasks and queues that are known. `values` are
    those of fields that the grammar does not know.
    """
    begun = part.begun.lower()
    known = {name: list(values.get(name, ())) or list(each.choices) for name, each in FIELDS.items()}
    if part.field:
        found = [f"{part.field}:{_written(each)}" for each in _matching(known.get(part.field, []), begun)]
    else:
        found = [f"{name}:" for name in FIELDS if name.startswith(begun)]
        if begun:
            among = [(name, each) for name in ("task", "status", "queue") for each in _matching(known[name], begun)]
            found += [f"{name}:{_written(each)}" for name, each in among]
    return [f"{part.sign}{each}" for each in found[:most]]


def _matching(values: Sequence[str], begun: str) -> list[str]:
    first = [each for each in values if each.lower().startswith(begun)]
    return first + [each for each in values if begun in each.lower() and each not in first]


def _written(value: str) -> str:
    return value if _BARE.fullmatch(value) else quoted(value)
