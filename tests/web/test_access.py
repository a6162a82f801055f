"""The API answers the token, or programs of this machine; nothing else, on any route."""

from __future__ import annotations

import itertools
import time
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.web.shop import TOKEN, WebShop

from holdfast import App
from holdfast.errors import InvalidSetting
from holdfast.web import web_app
from holdfast.web.api import ROUTES
from holdfast.web.asgi import WebApp
from holdfast.web.rules import (
    Buckets,
    TokenGuesses,
    bearer_in,
    is_allowed_host,
    is_loopback,
    is_of_own_page,
    is_same,
    names_this_machine,
    source_of,
)

PATHS = [(route.method, "/api/v1" + route.path.replace("{id}", "0" * 26)) for route in ROUTES]
PATHS += [("GET", "/api/v1/nothing"), ("PUT", "/api/v1/invocations")]
WRONG = [
    "",
    "Bearer",
    "Bearer ",
    f"Basic {TOKEN}",
    TOKEN,
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN}x",
    f"Bearer x {TOKEN}",
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_route_answers_without_the_token(shop: WebShop, method: str, path: str) -> None:
    with TestClient(web_app(shop.app)) as client:
        for header in WRONG:
            answer = client.request(method, path, headers={"Authorization": header} if header else {})
            assert (answer.status_code, answer.json()["title"]) == (401, "Unauthorised"), header
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert TOKEN not in answer.text
        right = client.request(method, path, headers={"Authorization": f"bearer {TOKEN}"})
        assert right.status_code not in (401, 403)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_without_the_setting_a_mounted_app_answers_nothing(method: str, path: str) -> None:
    with App("memory://") as app, TestClient(web_app(app), base_url="http://127.0.0.1") as client:
        answer = client.request(method, path, headers={"Authorization": "Bearer "})
        assert (answer.status_code, answer.json()["title"]) == (403, "Forbidden")
        assert "set api_token" in answer.json()["detail"]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_on_loopback_host_and_origin_are_checked(method: str, path: str) -> None:
    with App("memory://") as app, TestClient(WebApp(app, is_local=True), base_url="http://localhost:8080") as client:
        for headers in (
            {"Host": "evil.example"},
            {"Host": "127.0.0.1.evil.example"},
            {"Host": "localhost.evil.example:8080"},
            {"Host": ""},
            {"Host": "[::1"},
            {"Host": "localhost:8080@evil.example"},
            {"Host": "192.168.1.7:8080"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://localhost:3000"},
            {"Origin": "http://localhost:8080.evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"X-Forwarded-For": "192.0.2.1"},
            {"Forwarded": "for=192.0.2.1"},
            {"Via": "1.1 proxy"},
        ):
            answer = client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["title"]) == (403, "Forbidden"), headers
        for headers in (
            {},
            {"Host": "127.0.0.1:9"},
            {"Host": "[::1]:8080"},
            {"Origin": "http://localhost:8080"},
            {"Sec-Fetch-Site": "same-origin"},
        ):
            assert client.request(method, path, headers=headers).status_code != 403, headers


def test_a_token_is_asked_for_on_loopback_too(shop: WebShop) -> None:
    with TestClient(WebApp(shop.app, is_local=True), base_url="http://localhost") as client:
        assert client.get("/api/v1/invocations").status_code == 401


def test_a_token_is_compared_whole() -> None:
    """Not by prefix, and not by a comparison that ends at the first difference."""
    assert is_same(TOKEN, TOKEN)
    assert not any(is_same(TOKEN[:end], TOKEN) for end in range(len(TOKEN)))
    assert not is_same(TOKEN + "\0", TOKEN)
    assert not is_same("\udcff", TOKEN)

    long = "x" * 4096
    early, late = "y" + long[1:], long[:-1] + "y"
    times: dict[str, list[float]] = {early: [], late: []}
    for candidate in itertools.islice(itertools.cycle((early, late)), 2000):
        began = time.perf_counter()
        is_same(candidate, long)
        times[candidate].append(time.perf_counter() - began)
    assert 0.8 < median(times[early]) / median(times[late]) < 1.25


@pytest.mark.parametrize(
    "token", ["short", "x" * 15, "with a blank in it", "é" * 20, "tab\tin a long token", "x" * 20 + "\n"]
)
def test_a_bad_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidSetting, match="16 characters or more") as refused:
        App("memory://", api_token=token)
    assert token not in str(refused.value)


def test_the_token_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_TOKEN", TOKEN)
    with App("memory://") as app:
        assert app.settings.api_token == TOKEN
        (row,) = [row for row in app.settings.explain() if row.name == "api_token"]
        assert (row.value, row.shown) == ("***", "***")
        assert TOKEN not in repr(app.settings) + repr(app) + repr(web_app(app))


@given(st.text())
def test_any_authority_is_judged(text: str) -> None:
    if names_this_machine(text):
        assert text.lower().rsplit(":", 1)[0].endswith(("localhost", "]")) or text.startswith("127.")


@given(st.dictionaries(st.sampled_from(["authorization", "host", "origin", "sec-fetch-site"]), st.text()))
def test_any_headers_are_judged(headers: dict[str, str]) -> None:
    bearer = bearer_in(headers)
    assert bearer is None or not bearer or bearer in headers["authorization"]
    if is_of_own_page(headers):
        assert "origin" not in headers or headers["origin"].lower().endswith(headers.get("host", "").lower())
    assert is_allowed_host(headers.get("host", ""), "*")
    assert not is_allowed_host(headers.get("host", ""), "")


def test_names_of_a_server() -> None:
    allowed = "shop.example, 10.0.0.7,[fd00::7]"
    assert all(
        is_allowed_host(host, allowed) for host in ("SHOP.example", "shop.example:8080", "10.0.0.7", "[fd00::7]:1")
    )
    wrong = ("evil.example", "shop.example.evil.example", "xshop.example", "shop.example@evil.example", "", "10.0.0.70")
    assert not any(is_allowed_host(host, allowed) for host in wrong)
    assert is_of_own_page({"host": "127.0.0.1:8080", "origin": "https://shop.example"}, allowed)
    assert not is_of_own_page({"host": "127.0.0.1:8080", "origin": "https://evil.example"}, allowed)
    assert not is_of_own_page({"host": "127.0.0.1:8080", "origin": "https://evil.example"}, "*")


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "shop.localhost"]))
    others = ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "1", "0x7f.1", "127.1", "::ffff:127.0.0.1.example", ""]
    assert not any(map(is_loopback, others))


# --- rates


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    buckets = Buckets(rate=2.0, burst=3.0)
    assert [buckets.take("a", 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("b", 10.0) == 0.0
    assert buckets.take("a", 10.5) == 0.0
    assert buckets.take("a", 10.5) == 0.5
    assert [buckets.take("a", 100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("a", 50.0) == 0.5  # a clock that was set back gives nothing


def test_what_a_bucket_has_can_be_asked_without_taking() -> None:
    buckets = Buckets(rate=0.5, burst=1.0)
    assert [buckets.wait("a", 0.0) for _ in range(3)] == [0.0] * 3
    assert (buckets.take("a", 0.0), buckets.wait("a", 0.0), buckets.wait("a", 1.0)) == (0.0, 2.0, 1.0)
    assert (buckets.wait("a", 2.0), buckets.take("a", 2.0), buckets.wait("b", 2.0)) == (0.0, 0.0, 0.0)


def test_a_source_with_too_many_wrong_tokens_is_compared_only_with_its_own() -> None:
    guesses = TokenGuesses(rate=1.0, burst=1.0, most=2)
    guesses.was_right("a", "ours")
    assert [guesses.was_wrong("a", 0.0) for _ in range(2)] == [0.0, 1.0]
    assert [guesses.may_compare("a", digest, 0.0) for digest in ("ours", "guess")] == [True, False]
    assert guesses.may_compare("b", "guess", 0.0)
    assert guesses.may_compare("a", "guess", 1.0)
    for source in "bcd":
        guesses.was_right(source, "ours")
    assert not guesses.may_compare("a", "ours", 0.0), "only so many are remembered"


def test_buckets_do_not_grow() -> None:
    buckets = Buckets(rate=1.0, burst=1.0, most=100)
    buckets.take("first", 0.0)
    for number in range(1000):
        assert buckets.take(f"{number}", 0.0) == 0.0
    assert len(buckets) == 100
    assert buckets.take("first", 0.0) == 0.0  # forgotten, so it begins anew


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0.1, 10), st.floats(1, 10))
def test_a_bucket_never_gives_more_than_it_may(steps: list[float], rate: float, burst: float) -> None:
    buckets, now, taken = Buckets(rate, burst), 0.0, 0
    for step in steps:
        now += step
        wait = buckets.take("a", now)
        taken += wait == 0.0
        assert taken <= burst + now * rate + 1e-6
        if wait:
            assert buckets.take("a", now + wait + 1e-6) == 0.0
            now += wait + 1e-6
            taken += 1


def test_a_network_of_ipv6_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:0:1::1")
    assert source_of("::ffff:192.0.2.1") == source_of("192.0.2.1") == "192.0.2.1"
    assert (source_of(None), source_of("a socket")) == ("unknown", "a socket")
