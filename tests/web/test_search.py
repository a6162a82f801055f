"""The grammar of searches: what is written is read back as it was, and a mistake is named with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.status import Status
from holdfast.web.reading.search import (
    ATTRIBUTE,
    FIELDS,
    TEXT,
    SearchError,
    Term,
    being_written,
    formatted,
    moment_of,
    parse,
    suggestions,
    with_terms,
)

VALUES = st.text(min_size=1, max_size=20)
IDS = st.text("0123456789abcdefghjkmnpqrstvwxyz", min_size=6, max_size=26)
TIMES = st.sampled_from(["15m", "1h", "2026-11-15T08:00:00Z", "2026-11-15", "0.5h"])
OF_FIELDS = {
    "status": st.sampled_from([str(each) for each in Status]),
    "since": TIMES,
    "until": TIMES,
    "id": IDS,
    "parent": IDS,
    "rerun": IDS,
    "kind": st.sampled_from(["task", "workflow", "world"]),
}


@st.composite
def queries(draw: st.DrawFn) -> tuple[Term, ...]:
    terms: list[Term] = []
    for _ in range(draw(st.integers(0, 8))):
        field = draw(st.sampled_from([*FIELDS, TEXT, ATTRIBUTE]))
        negative = draw(st.booleans()) and field not in ("since", "until")
        name = draw(VALUES) if field == ATTRIBUTE else ""
        once = (field in FIELDS and FIELDS[field].is_single) or field == ATTRIBUTE
        if once and any(each[0] == field and each.name == name for each in terms):
            continue
        terms.append(Term(field, draw(OF_FIELDS.get(field, VALUES)), negative, name))
    return tuple(terms)


@given(queries())
def test_a_search_is_read_as_it_was_written(query: tuple[Term, ...]) -> None:
    assert parse(formatted(query)) == query


@given(st.one_of(st.text(max_size=60), st.text('ab:-" \\statuidkey19\n', max_size=60)))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    place = 0
    try:
        query = parse(text)
        assert parse(formatted(query)) == query
    except SearchError as error:
        place = error.at
    assert 0 <= place <= len(text)


@given(st.text('ab:-" \\status', max_size=30), st.integers(-1, 31))
def test_completion_replaces_a_part_of_the_text(text: str, at: int) -> None:
    part = being_written(text, at)
    assert 0 <= part.start <= part.end <= len(text)
    assert all(isinstance(each, str) for each in suggestions(part, {"task": ["shop:charge", "a b"]}))


def test_the_words_of_the_grammar() -> None:
    query = parse('task:charge -status:success customer:c-17 "status":open error:"timed out" -queue:mail lost "a b"')
    assert query == (
        Term("task", "charge"),
        Term("status", "success", negative=True),
        Term(ATTRIBUTE, "c-17", name="customer"),
        Term(ATTRIBUTE, "open", name="status"),
        Term("error", "timed out"),
        Term("queue", "mail", negative=True),
        Term(TEXT, "lost"),
        Term(TEXT, "a b"),
    )
    assert with_terms(parse("since:1h lost"), Term("since", "2h")) == (Term(TEXT, "lost"), Term("since", "2h"))


@pytest.mark.parametrize(
    ("text", "says", "at"),
    [
        ("status:fialed", "did you mean 'failed'", 0),
        ("lost staus:failed", "did you mean status:", 5),
        ("status:", "write a value after status:, such as status:registered", 7),
        ('error:"never ends', "has no end", 6),
        ('error:""', "nothing between", 6),
        ('task:"a"b', "a blank comes after it", 8),
        ("since:soon", "no time", 0),
        ("since:1h since:2h", "given twice", 9),
        ("-since:1h", "write until:1h", 0),
        ("id:UPPER-CASE", "no part of an id", 0),
        ("a:1 a:2", "one value", 4),
        ("kind:job", "there is no kind", 0),
        ("x" * 1001, "up to 1,000", 1000),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, says: str, at: int) -> None:
    with pytest.raises(SearchError, match=says) as found:
        parse(text)
    assert found.value.at == at


def test_completion_knows_fields_values_and_tasks() -> None:
    values = {"task": ["shop:charge", "shop:chase"], "queue": ["mail"]}

    def completed(text: str) -> list[str]:
        return suggestions(being_written(text, len(text)), values)

    assert completed("stat") == ["status:"]
    assert completed("lost cha") == ["task:shop:charge", "task:shop:chase"]
    assert completed("status:fa") == ["status:failed"]
    assert completed("-status:succ") == ["-status:success"]
    assert completed("since:") == ["since:15m", "since:1h", "since:24h", "since:7d"]
    assert completed("customer:x") == []


def test_times_are_moments_or_how_long_ago() -> None:
    assert moment_of("1h", 7200.0) == 3600.0
    assert moment_of("1970-01-01T00:01:00Z", 7200.0) == 60.0
    assert moment_of("1970-01-02", 7200.0) == 86_400.0
