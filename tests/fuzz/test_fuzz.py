"""About a thousand of the requests of ``make fuzz``; and what a store that does not answer gives away."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.cases import SEARCHES
from tests.fuzz.outage import faults_of_outage
from tests.fuzz.running import fuzz
from tests.fuzz.target import FuzzShop

from holdfast.web.reading.search import LONGEST, SearchError, formatted, parse


def test_no_request_shows_a_defect_or_a_secret(tmp_path: Path) -> None:
    with FuzzShop(f"sqlite:///{tmp_path / 'fuzz.db'}") as shop:
        report = fuzz(shop, 1_200, 7)
    assert report.faults == {}
    assert {200, 400, 401, 403, 404, 422} <= {status for status, _ in report.statuses}


def test_a_store_that_does_not_answer_gives_no_password_away() -> None:
    some = ["/api/v1/queues", "/api/v1/config", "/api/v1/doctor", "/api/v1/store/check", "/", "/store"]
    assert faults_of_outage(("GET", path) for path in some) == []


@settings(max_examples=200, deadline=None)
@given(st.one_of(SEARCHES, st.text(max_size=2 * LONGEST)))
def test_a_search_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        found = parse(text)
    except SearchError as error:
        found, place = (), error.at
    else:
        place = 0
        assert all(term.field for term in found)
        written = formatted(found)
        assert len(written) > LONGEST or parse(written) == found
    assert 0 <= place <= len(text)
