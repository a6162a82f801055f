"""Logging in with a token: the page, the cookie, its end; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.web.entrance import API_TOKEN, BASE, PROXY, Entrance, csrf_in, log_in

from holdfast import App
from holdfast.access.audit import AuditFilter, AuditLog
from holdfast.access.tokens import AccessTokens
from holdfast.errors import StoreReadOnly, UsageError
from holdfast.web.asgi import WebApp
from holdfast.web.logins import next_in
from holdfast.web.principals import Role


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    with Entrance() as entrance:
        yield entrance


@pytest.fixture
def client(entrance: Entrance) -> Iterator[TestClient]:
    with entrance.client() as client:
        yield client


def cookies_of(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in answer.headers.get_list("set-cookie"):
        found |= SimpleCookie(line)
    return found


def session_of(answer: Any) -> Any:
    (cookie,) = [each for name, each in cookies_of(answer).items() if name != "holdfast_form"]
    return cookie


def read_again(entrance: Entrance) -> AccessTokens:
    """Let the web app read tokens again, as after 5 s."""
    tokens: AccessTokens = entrance.app.runtime.ready().part(AccessTokens)
    tokens.known = tokens.known._replace(stale_at=float("-inf"))
    return tokens


def test_a_page_leads_to_the_login_and_back(entrance: Entrance, client: TestClient) -> None:
    answer = client.get("/?since=2h")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2F%3Fsince%3D2h")
    answer = log_in(client, entrance.tokens[Role.VIEWER], next="/?since=2h")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?since=2h")
    page = client.get("/")
    assert page.status_code == 200
    assert "the viewer · viewer" in page.text


def test_the_cookie_is_for_this_server_only(entrance: Entrance, client: TestClient) -> None:
    cookie = session_of(log_in(client, entrance.tokens[Role.VIEWER]))
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert 3_000 < int(cookie["max-age"]) <= 3_600, "not longer than its token, which is good for an hour"
    assert not cookie["secure"], "it came by http"
    assert entrance.tokens[Role.VIEWER] not in cookie.value
    with TestClient(WebApp(entrance.app), base_url="https://shop.example", follow_redirects=False) as by_https:
        assert session_of(log_in(by_https, API_TOKEN, origin="https://shop.example"))["secure"]
    with entrance.client("10.0.0.7") as behind_proxy:
        answer = log_in(behind_proxy, API_TOKEN, **{"x-forwarded-proto": "https"})
        assert session_of(answer)["secure"]


def test_a_session_ends_with_its_token(entrance: Entrance, client: TestClient) -> None:
    log_in(client, entrance.tokens[Role.ADMIN])
    assert client.get("/").status_code == 200
    tokens = read_again(entrance)
    entrance.app.runtime.run(tokens.revoke("the admin"))
    assert client.get("/").status_code == 303
    assert client.get("/api/v1").status_code == 401


def test_a_session_ends_by_itself(entrance: Entrance, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(client, API_TOKEN)
    assert client.get("/").status_code == 200
    store = entrance.app.runtime.ready().store
    later = store.now() + 12 * 3_600
    monkeypatch.setattr(store, "now", lambda: later)
    assert client.get("/").status_code == 303


def test_another_api_token_ends_the_sessions_of_the_first(entrance: Entrance) -> None:
    with entrance.client() as client:
        cookie = session_of(log_in(client, API_TOKEN))
        name = next(name for name in cookies_of(log_in(client, API_TOKEN)) if name != "holdfast_form")
        assert client.get("/").status_code == 200
    changed = WebApp(entrance.app)
    object.__setattr__(entrance.app.runtime.settings, "api_token", "another-token-0123456789")
    with TestClient(changed, base_url=BASE, follow_redirects=False, cookies={name: cookie.value}) as client:
        assert client.get("/").status_code == 303


def test_logging_out_takes_a_form_of_the_session(entrance: Entrance, client: TestClient) -> None:
    log_in(client, entrance.tokens[Role.VIEWER])
    csrf = csrf_in(client.get("/").text)
    assert client.get("/logout").status_code == 405
    assert client.post("/logout", data={"csrf": "x"}).status_code == 403
    assert client.post("/logout", data={"csrf": csrf}, headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/").status_code == 200
    answer = client.post("/logout", data={"csrf": csrf}, headers={"origin": BASE})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert client.get("/").status_code == 303
    assert client.post("/logout", data={"csrf": "x"}).status_code == 303, "there is no session any more"
    headers = {"Authorization": f"Bearer {API_TOKEN}"}
    records = client.get("/api/v1/audit?action=session", headers=headers).json()["records"]
    assert [each["action"] for each in records] == ["session.logout", "session.login"]
    assert len({each["who"] for each in records}) == 1


def test_logging_out_ends_the_session_wherever_its_cookie_is(entrance: Entrance, client: TestClient) -> None:
    for token in (entrance.tokens[Role.ADMIN], API_TOKEN):
        cookie = session_of(log_in(client, token))
        copied = {"Cookie": f"{cookie.key}={cookie.value}"}
        with entrance.client(headers=copied) as thief, entrance.client() as same_user:
            log_in(same_user, token)
            assert thief.get("/").status_code == 200
            csrf = csrf_in(client.get("/").text)
            assert client.post("/logout", data={"csrf": csrf}, headers={"origin": BASE}).status_code == 303
            assert thief.get("/").status_code == 303
            assert thief.get("/api/v1").status_code == 401
            read_again(entrance)
            assert thief.get("/api/v1").status_code == 401
            assert same_user.get("/").status_code == 200, "another session of the same token goes on"


def test_a_wrong_token_is_told_of_and_not_repeated(client: TestClient) -> None:
    for token in ("", "canary", API_TOKEN + "x", "hf_aaaaaaaa_" + "A" * 43):
        answer = log_in(client, token)
        assert (answer.status_code, session_free(answer)) == (401, True)
        assert "not known, or has expired" in answer.text
        assert not token or token not in answer.text


def session_free(answer: Any) -> bool:
    return set(cookies_of(answer)) <= {"holdfast_form"}


def test_a_form_of_another_site_is_refused(entrance: Entrance, client: TestClient) -> None:
    token = entrance.tokens[Role.ADMIN]
    client.get("/login")
    answers = [
        client.post("/login", data={"token": token}),
        client.post("/login", data={"token": token, "csrf": "0" * 64}),
        log_in(client, token, origin="http://evil.example"),
        log_in(client, token, **{"sec-fetch-site": "cross-site"}),
    ]
    assert [(answer.status_code, session_free(answer)) for answer in answers] == [(403, True)] * 4
    assert client.post("/login", json={"token": token}).status_code == 415
    assert client.post("/login", data={"token": "x" * 10_000}).status_code == 413
    assert client.put("/login").status_code == 405


def test_logins_are_limited_for_each_source(entrance: Entrance) -> None:
    with entrance.client("192.0.2.9") as client:
        statuses = [log_in(client, "wrong").status_code for _ in range(12)]
        answer = log_in(client, API_TOKEN)
    assert statuses == [401] * 10 + [429] * 2
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)
    with entrance.client("192.0.2.10") as other:
        assert log_in(other, API_TOKEN).status_code == 303


def test_a_login_is_recorded(entrance: Entrance, client: TestClient) -> None:
    log_in(client, "wrong")
    log_in(client, entrance.tokens[Role.OPERATOR])
    log = entrance.app.runtime.ready().part(AuditLog)
    (record,) = entrance.app.runtime.run(log.page(AuditFilter(), 10)).records
    assert (record.who, record.action, record.source) == ("the operator", "session.login", "192.0.2.1")


@given(st.text() | st.builds(lambda text: f"/{text}", st.text()) | st.builds(lambda text: f"//{text}", st.text()))
def test_a_login_leads_nowhere_else(text: str) -> None:
    found = next_in(text)
    assert found.startswith("/")
    assert not found.startswith(("//", "/\\"))
    assert found.isprintable()


@pytest.mark.parametrize("next", ["//evil.example", "https://evil.example", "/\\evil.example", "/\t/evil.example", "x"])
def test_a_login_does_not_lead_to_another_site(entrance: Entrance, client: TestClient, next: str) -> None:
    answer = log_in(client, API_TOKEN, next=next)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


@given(st.data())
def test_no_altered_cookie_is_a_session(data: st.DataObject) -> None:
    with App("memory://", api_token=API_TOKEN) as app, TestClient(WebApp(app), base_url=BASE) as client:
        client.follow_redirects = False
        cookie = session_of(log_in(client, API_TOKEN))
        name = next(name for name in client.cookies if name != "holdfast_form")
        at = data.draw(st.integers(0, len(cookie.value) - 1))
        letter = data.draw(st.sampled_from("abcXYZ0189._-"))
        changed = cookie.value[:at] + letter + cookie.value[at + 1 :]
        client.cookies.set(name, changed, domain="shop.example", path="/")
        answer = client.get("/", headers={"Cookie": f"{name}={changed}"})
        assert answer.status_code == (200 if changed == cookie.value else 303)


def test_where_the_store_is_read_only_tokens_are_good_and_logins_are_not(
    entrance: Entrance, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the role of a monitor on MongoDB, which may only read."""

    async def refuse(*args: Any) -> bool:
        raise StoreReadOnly("this user may only read")

    monkeypatch.setattr(entrance.app.runtime.ready().store, "put_entry", refuse)
    bearer = {"Authorization": f"Bearer {entrance.tokens[Role.VIEWER]}"}
    assert client.get("/api/v1", headers=bearer).status_code == 200
    answer = log_in(client, API_TOKEN)
    assert (answer.status_code, answer.json()["title"]) == (403, "StoreReadOnly")
    with entrance.client("10.0.0.7", headers={"X-User": "ann"}) as behind_proxy:
        assert behind_proxy.get("/").status_code == 200


def test_guesses_of_tokens_are_bounded_for_each_source(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(entrance.app.runtime.clock, "monotonic", lambda: now)
    web = WebApp(entrance.app)

    def asked(token: str, source: str = "192.0.2.1", proxy: bool = False, **headers: str) -> Any:
        named = {"X-Forwarded-For": source} if proxy else {}
        client = TestClient(web, base_url=BASE, client=(PROXY if proxy else source, 1))
        return client.get("/api/v1", headers={"Authorization": f"Bearer {token}"} | named | headers)

    assert asked(API_TOKEN, "192.0.2.2").status_code == 200
    for source in ("192.0.2.1", "192.0.2.2"):
        assert [asked(f"guess {number}", source).status_code for number in range(3)] == [401] * 3
        statuses = [asked(f"guess-{number}", source).status_code for number in range(32)]
        assert statuses == [401] * 30 + [429] * 2
        refused = asked("hf_aaaaaaaa_" + "A" * 43, source)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert asked(entrance.tokens[Role.VIEWER], source).status_code == 200, "a token of the store is no guess"
    assert asked(API_TOKEN).status_code == 429, "a right guess is not told from a wrong one"
    assert asked(API_TOKEN, "192.0.2.2").status_code == 200, "it was right from there before"
    assert asked("guess", "192.0.2.3").status_code == 401
    assert asked("guess", "192.0.2.1", proxy=True).status_code == 429, "the source is the address behind the proxy"
    assert asked("guess", "192.0.2.4", proxy=True).status_code == 401
    for _ in range(40):  # a proxy may send a token of its own, with its user
        assert asked("of the proxy".replace(" ", "-"), "192.0.2.5", True, **{"X-User": "ann"}).status_code == 200
    assert asked(API_TOKEN, "192.0.2.5", proxy=True).status_code == 200
    now += 2.0
    assert asked(API_TOKEN).status_code == 200


# --- on a loopback address


def test_a_token_closes_a_loopback_address() -> None:
    """Without one, programs of this machine are let in; see tests/web/test_access.py."""
    with App("memory://") as app, TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1:8080") as client:
        client.follow_redirects = False
        assert client.get("/api/v1").status_code == 200
        tokens = app.runtime.ready().part(AccessTokens)
        _, text = app.runtime.run(tokens.create("ci", "viewer", 3_600, "test"))
        tokens.known = tokens.known._replace(stale_at=float("-inf"))
        assert client.get("/api/v1").status_code == 401
        assert client.get("/").status_code == 303
        assert client.get("/api/v1", headers={"Authorization": f"Bearer {text}"}).status_code == 200


@pytest.mark.parametrize("end", ["revoked", "expired and removed"])
def test_an_address_stays_closed_without_its_last_token(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with App("memory://") as app, TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1:8080") as client:
        engine = app.runtime.ready()
        tokens = engine.part(AccessTokens)

        def status() -> int:
            tokens.known = tokens.known._replace(stale_at=float("-inf"))
            return client.get("/api/v1").status_code

        app.runtime.run(tokens.create("ci", "viewer", 3_600, "test"))
        if end == "revoked":
            app.runtime.run(tokens.revoke("ci"))
        else:
            now = engine.store.now() + 60 * 86_400
            monkeypatch.setattr(engine.store, "now", lambda: now)
            app.runtime.run(engine.store.remove_expired(engine.app, now, 10))
        assert status() == 401
        assert app.runtime.run(tokens.list()) == []
        said = client.get("/api/v1").json()["detail"]
        assert ("holdfast access token create" in said, "holdfast access open" in said) == (True, True)
        app.runtime.run(tokens.open())
        assert status() == 200
        app.runtime.run(tokens.create("ci", "viewer", 3_600, "test"))
        assert status() == 401
        with pytest.raises(UsageError, match="there are tokens: ci"):
            app.runtime.run(tokens.open())
        assert status() == 401


def test_a_key_of_sessions_alone_closes_nothing() -> None:
    """Pages of a host's users need one, too."""
    with App("memory://") as app, TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1:8080") as client:
        assert app.runtime.run(app.runtime.ready().part(AccessTokens).ring()).keys
        assert client.get("/api/v1").status_code == 200


def test_a_proxy_on_this_machine_has_to_name_its_user() -> None:
    settings = {"proxy_address": "127.0.0.1", "proxy_user_header": "X-User", "proxy_role": "operator"}
    with App("memory://", **settings) as app:
        web = WebApp(app, is_local=True)
        with TestClient(web, base_url="http://127.0.0.1:8080", client=("127.0.0.1", 1)) as client:
            assert client.get("/api/v1").status_code == 401
            assert client.get("/api/v1", headers={"X-User": "ann"}).status_code == 200
            assert client.get("/api/v1/audit", headers={"X-User": "ann"}).status_code == 403
            assert client.get("/api/v1", headers={"X-User": "ann", "X-Forwarded-For": "1.2.3.4"}).status_code == 200


@pytest.mark.parametrize("twice", ["X-User", "X-Role"])
def test_a_header_that_a_client_has_added_to_that_of_the_proxy_is_refused(entrance: Entrance, twice: str) -> None:
    headers = [("X-User", "ann"), ("X-Role", "viewer")]
    with entrance.client("10.0.0.7") as behind_proxy:
        assert behind_proxy.get("/api/v1", headers=headers).status_code == 200
        assert behind_proxy.get("/api/v1", headers=[(twice, "admin"), *headers]).status_code == 403
