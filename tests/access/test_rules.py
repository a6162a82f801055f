"""No forged or altered token, cookie or token of a form is taken for a real one; and whom a proxy may name."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.access.rules import (
    ID_BYTES,
    SECRET_BYTES,
    KeyRing,
    Session,
    TrustedProxy,
    cookie_text,
    csrf_text,
    digest_of,
    id_in,
    is_csrf,
    is_secret_of,
    new_id,
    new_key,
    proof_of,
    session_in,
    token_text,
)

NOW = 1_800_000_000.0
KEY, OLD, OTHER = (new_key(bytes([n]) * ID_BYTES, bytes([n]) * SECRET_BYTES, NOW) for n in (1, 2, 3))
RING = KeyRing(keys=(KEY, OLD))
TOKEN = token_text(new_id(b"abcde"), b"s" * SECRET_BYTES)
SESSION = Session(new_id(b"abcde"), new_id(b"fghij"), NOW + 3_600, proof_of(TOKEN))
COOKIE = cookie_text(KEY, "shop", SESSION)
CSRF = csrf_text(KEY, "shop", COOKIE)

ids, secrets = st.binary(min_size=ID_BYTES, max_size=ID_BYTES), st.binary(min_size=32, max_size=32)


def altered(text: str) -> st.SearchStrategy[str]:
    """Texts near a real one: a character changed, removed or added; parts exchanged; another end."""
    places = st.integers(0, len(text) - 1)
    letters = st.sampled_from("abcXYZ0189._-= \0é")
    return st.one_of(
        st.builds(lambda at, letter: text[:at] + letter + text[at + 1 :], places, letters),
        st.builds(lambda at: text[:at] + text[at + 1 :], places),
        st.builds(lambda at, letter: text[:at] + letter + text[at:], places, letters),
        st.builds(lambda at: text[:at].swapcase() + text[at:], st.integers(1, len(text))),
        st.builds(
            lambda order: ".".join(text.split(".")[n] for n in order), st.permutations(range(text.count(".") + 1))
        ),
        st.builds(lambda more: text + more, st.text(min_size=1)),
        st.text(),
    )


@given(ids, secrets)
def test_a_token_is_known_by_its_digest(id: bytes, secret: bytes) -> None:
    text = token_text(new_id(id), secret)
    assert id_in(text) == new_id(id)
    assert is_secret_of(text, digest_of(text))
    assert digest_of(text) not in (digest_of(proof_of(text)), proof_of(text))


@given(altered(TOKEN))
def test_an_altered_token_is_another_one(text: str) -> None:
    assume(text != TOKEN)
    assert not is_secret_of(text, digest_of(TOKEN))
    assert not is_secret_of(proof_of(text), digest_of(proof_of(TOKEN)))


@given(st.floats(0, 3_599), st.sampled_from([KEY, OLD]))
def test_a_cookie_is_good_until_its_end(seconds: float, key: object) -> None:
    cookie = cookie_text(KEY if key is KEY else OLD, "shop", SESSION)
    assert session_in(cookie, RING, "shop", NOW + seconds) == SESSION
    assert session_in(cookie, RING, "shop", NOW + 3_600) is None


@given(altered(COOKIE))
def test_an_altered_cookie_is_none(text: str) -> None:
    assume(text != COOKIE)
    assert session_in(text, RING, "shop", NOW) is None


@given(st.integers(1, 10**11), ids, secrets)
def test_a_cookie_of_another_key_or_app_is_none(end: int, id: bytes, secret: bytes) -> None:
    session = Session(SESSION.token, SESSION.id, float(end) + NOW, SESSION.proof)
    forged = new_key(ID_BYTES * b"\x01", secret, NOW)  # it has the id of a known key
    assume(forged.secret not in (KEY.secret, OLD.secret))
    assert session_in(cookie_text(forged, "shop", session), RING, "shop", NOW) is None
    assert session_in(cookie_text(new_key(id, secret, NOW), "shop", session), RING, "shop", NOW) is None
    assert session_in(cookie_text(KEY, "other", session), RING, "shop", NOW) is None
    assert session_in(cookie_text(KEY, "shop", session), KeyRing(keys=(OTHER,)), "shop", NOW) is None


@given(st.text(max_size=300))
def test_any_text_is_no_cookie_and_no_token(text: str) -> None:
    assert session_in(text, RING, "shop", NOW) is None
    assert id_in(text) is None or text.startswith("hf_")


@given(altered(CSRF), st.text())
def test_an_altered_token_of_a_form_is_none(text: str, subject: str) -> None:
    assume(text != CSRF)
    assume(subject != COOKIE)
    assert is_csrf(CSRF, RING, "shop", COOKIE)
    assert not is_csrf(text, RING, "shop", COOKIE)
    assert not is_csrf(CSRF, RING, "shop", subject)
    assert not is_csrf(CSRF, RING, "other", COOKIE)
    assert not is_csrf(COOKIE.rpartition(".")[2], RING, "shop", COOKIE), "what a cookie has is no token of a form"


# --- proxies


PROXY = TrustedProxy("10.0.0.7,fd00::/64", "X-User", "X-Role", "viewer")


@pytest.mark.parametrize(
    ("address", "headers", "found"),
    [
        ("10.0.0.7", {"x-user": "ann"}, ("ann", "viewer")),
        ("::ffff:10.0.0.7", {"x-user": "ann"}, ("ann", "viewer")),
        ("fd00::9", {"x-user": "ann", "x-role": "Operator"}, ("ann", "operator")),
        ("10.0.0.7", {"x-user": "ann", "x-role": "emperor"}, ("ann", "")),
        ("10.0.0.7", {"x-user": " "}, None),
        ("10.0.0.7", {"x-role": "admin"}, None),
        ("10.0.0.8", {"x-user": "ann"}, None),
        ("fd00:0:0:1::9", {"x-user": "ann"}, None),
        ("127.0.0.1", {"x-user": "ann"}, None),
        ("", {"x-user": "ann"}, None),
        ("testclient", {"x-user": "ann"}, None),
    ],
)
def test_a_header_counts_from_the_proxy_only(address: str, headers: dict[str, str], found: object) -> None:
    assert PROXY.user(address, headers) == found
    assert TrustedProxy("", "X-User", "", "admin").user(address, headers) is None
    assert TrustedProxy("10.0.0.7", "", "X-Role", "admin").user(address, headers) is None


def test_the_source_behind_a_proxy_is_the_last_address_that_is_none() -> None:
    assert PROXY.source("192.0.2.1", ["1.1.1.1"]) == "192.0.2.1", "a client may say anything"
    assert PROXY.source("10.0.0.7", []) == "10.0.0.7"
    assert PROXY.source("10.0.0.7", ["6.6.6.6, 192.0.2.1"]) == "192.0.2.1"
    assert PROXY.source("10.0.0.7", ["6.6.6.6", "192.0.2.1, fd00::1"]) == "192.0.2.1"
