"""What is sent: requests made from the description of the API, and others that no description has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from schemathesis import Case, GenerationMode
from tests.fuzz.client import Sent
from tests.fuzz.target import BASE, ROLES, Headers

from holdfast.web import api
from holdfast.web.pages import table
from holdfast.web.reading.search import FIELDS

_HOST = (b"host", b"127.0.0.1:8090")
_ENDS_THE_RUNNER = ("/drain", "/stop")  # whose work the others look at
AT_ONCE = 6  # requests that are drawn together
Known = Mapping[str, Sequence[str]]
Senders = Mapping[str, Headers]


class Fuzzed(NamedTuple):
    """A request, the role that it is sent with, and the case of the description that it is made of."""

    sent: Sent
    role: str
    case: Case | None = None


# --- from the description


def described(document: dict[str, Any], known: Known, senders: Senders) -> SearchStrategy[list[Fuzzed]]:
    """Return requests for all operations of a description: right ones, and wrong ones. Each case is sent several times,
    with other parts of the path, fields and roles: those are often of records that there are.
    """
    schema = schemathesis.openapi.from_dict(document)
    made = [
        each.as_strategy(generation_mode=mode)
        for each in (found.ok() for found in schema.get_all_operations())
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or each.query or each.body
    ]

    @st.composite
    def drawn(draw: DrawFn) -> list[Fuzzed]:
        case: Case = draw(st.sampled_from(made).flatmap(lambda each: each))
        chance = random.Random(draw(st.integers(0, 2**32)))
        found = []
        for _ in range(AT_ONCE):
            role = chance.choice(_ROLES)
            if (sent := _sent_of(case, senders[role])) is not None:
                found.append(Fuzzed(sent, role, case))
            _point(chance, case, known)
        return found

    return drawn()


def _point(chance: random.Random, case: Case, known: Known) -> None:
    """Let parts of the path and fields of a body name records that there are."""
    for name in case.path_parameters or {}:
        if name in known and chance.random() < 0.8:
            case.path_parameters[name] = chance.choice(known[name])
    if not isinstance(case.body, dict):
        return
    for name, value in case.body.items():
        pool = known["id"] if name in ("ids", "run", "before") else known["name"] if name in ("name", "task") else None
        if name == "preview" and isinstance(value, bool):
            case.body[name] = chance.random() < 0.5
        elif pool and isinstance(value, str):
            case.body[name] = chance.choice(pool)
        elif pool and isinstance(value, list) and value:
            case.body[name] = [chance.choice(pool)]


def _sent_of(case: Case, credentials: Headers) -> Sent | None:
    """Return a case as a request; None if no client can write it."""
    if case.path.endswith(_ENDS_THE_RUNNER):
        case.path_parameters["id"] = "another"
    try:
        given = case.as_transport_kwargs(base_url=BASE)
        known = ("method", "url", "params", "headers", "data", "json", "cookies")
        prepared = requests.Request(**{name: given[name] for name in known if name in given}).prepare()
    except (requests.exceptions.RequestException, ValueError, UnicodeError):
        return None
    url = urlsplit(str(prepared.url))
    target = url.path + (f"?{url.query}" if url.query else "")
    body = prepared.body or b""
    headers = [(_bytes(name), _bytes(value)) for name, value in prepared.headers.items()]
    named = [each for each in headers if each[0].lower() not in (b"authorization", b"cookie", b"host")]
    everything = body if isinstance(body, bytes) else str(body).encode("utf-8", "replace")
    return Sent(str(prepared.method), target.encode("ascii", "replace"), [*named, _HOST, *credentials], everything)


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode("latin-1", "replace")


_ROLES = [*["admin"] * 6, *ROLES]

# --- beside the description

_ENDS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # the last bits of some mean nothing
_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
_VALUES = st.sampled_from(
    [
        "1h",
        "0",
        "-1h",
        "9" * 30 + "d",
        "inf",
        "nan",
        "failed",
        "FAILED",
        "run*",
        "task",
        "world",
        "2026-11-15T08:00:00Z",
        *("0001-01-01", "9999-12-31T23:59:59+14:00", "01m7syd228", "*", '"', '"a b"', "\\", "é", "\u202e", "c-17", "%"),
    ]
)
_TERMS = st.one_of(
    st.builds("{}{}:{}".format, st.sampled_from(["", "-", "--"]), st.sampled_from([*FIELDS, "customer"]), _VALUES),
    st.builds("{}:{}".format, st.sampled_from([*FIELDS]), _TEXT),
    _VALUES,
    _TEXT,
)
SEARCHES = st.lists(_TERMS, max_size=8).map(" ".join)


def cursors(known: Known) -> SearchStrategy[str]:
    """Return cursors of lists: real ones, real ones with a mistake, and others."""
    ids = st.sampled_from(known["id"])

    @st.composite
    def bent(draw: DrawFn) -> str:
        text = list(draw(ids))
        text[draw(st.integers(0, len(text) - 1))] = draw(st.characters(exclude_categories=()))
        return "".join(text)

    events = st.builds("{}.{}".format, st.integers(-2, 10**20), st.integers(-2, 10**20))
    return st.one_of(ids, bent(), events, ids.map(str.upper), ids.map(lambda id: id + "{"), _TEXT)


_LISTS = [route for route in api.ROUTES if route.method == "GET" and {"before", "after", "start"} & route.query.keys()]
_SEARCHED = ["/api/v1/invocations", "/api/v1/invocations/complete", "/api/v1/invocations/count", "/invocations"]
_HEADERS = st.sampled_from([b"authorization", b"cookie", b"host", b"origin", b"accept", b"content-type", b"x-any"]) | (
    st.sampled_from([b"content-length", b"last-event-id", b"idempotency-key", b"if-none-match", b"sec-fetch-site"])
)
_CREDENTIALS = st.one_of(
    st.sampled_from([b"Bearer", b"Bearer ", b"bearer x", b"Basic YTpi", b"holdfast=", b"holdfast=a.b.c; holdfast=x"]),
    st.builds(lambda some: b"Bearer " + some, st.binary(max_size=60)),
    st.builds(lambda some: b"holdfast=" + some, st.binary(max_size=60)),
    st.binary(max_size=60),
)
_BODIES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"{}", b"null", b'{"reason":"\xff"}', b'{"preview":1e400}']),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
        lambda below: st.lists(below, max_size=3) | st.dictionaries(_TEXT, below, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)
_METHODS = st.sampled_from(
    ["GET", "GET", "GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "A"]
)


@st.composite
def _paths(draw: DrawFn, known: Known) -> str:
    """Return the path of a route or a page with some parts, or any other."""
    if not draw(st.integers(0, 5)):
        return (
            "/"
            + draw(st.sampled_from(["", "static/", "hooks/", "api/v1/", "static/../", "hooks/%2e%2e/"]))
            + draw(_TEXT)
        )
    pattern = draw(
        st.sampled_from([*("/api/v1" + route.path for route in api.ROUTES), *(page.path for page in table.PAGES)])
    )
    if pattern.endswith(_ENDS_THE_RUNNER):
        return "/api/v1/runners/another/drain"
    for name in ("id", "name", "step:path", "step"):
        part = draw(st.sampled_from(known[name.partition(":")[0]]) | _TEXT)
        pattern = pattern.replace(f"{{{name}}}", part)
    return pattern


def others(known: Known, senders: Senders) -> SearchStrategy[list[Fuzzed]]:
    """Return requests that ask for searches, cursors, credentials, bodies and paths of every kind."""

    @st.composite
    def searched(draw: DrawFn) -> Fuzzed:
        return _asked(senders, draw(st.sampled_from(_SEARCHED)), [("q", draw(SEARCHES))])

    @st.composite
    def paged(draw: DrawFn) -> Fuzzed:
        route = draw(st.sampled_from(_LISTS))
        path = route.path
        for name in ("id", "name"):
            path = path.replace(f"{{{name}}}", draw(st.sampled_from(known[name])))
        given = [(name, draw(cursors(known))) for name in ("before", "after", "start") if name in route.query]
        return _asked(senders, f"/api/v1{path}", given)

    @st.composite
    def shown(draw: DrawFn) -> Fuzzed:
        page = draw(st.sampled_from(table.PAGES))
        path = page.path
        for name in ("id", "name"):
            path = path.replace(f"{{{name}}}", draw(st.sampled_from(known[name]) | _TEXT))
        names = draw(st.lists(st.sampled_from([*page.query, "any"]), max_size=3))
        values = st.one_of(cursors(known), _VALUES, _TEXT, SEARCHES)
        return _asked(senders, path, [(name, draw(values)) for name in names], (b"accept", b"text/html"))

    @st.composite
    def any_request(draw: DrawFn) -> Fuzzed:
        role = draw(st.sampled_from(_ROLES))
        headers = [*senders[role], *draw(st.lists(st.tuples(_HEADERS, _CREDENTIALS), max_size=2))]
        if draw(st.booleans()):
            headers.append((b"content-type", b"application/json"))
        target = _quoted(draw(_paths(known))).encode() + (
            b"?" + _quoted(draw(_TEXT)).encode() if draw(st.booleans()) else b""
        )
        return Fuzzed(Sent(draw(_METHODS), target, headers, draw(_BODIES)), role)

    @st.composite
    def forged(draw: DrawFn) -> Fuzzed:
        """Return a request whose token or cookie is not quite that of somebody."""
        name, value = draw(st.sampled_from([each[0] for role, each in senders.items() if role != "nobody"]))
        first = value.index(b"=" if name == b"cookie" else b" ") + 1
        place, other = draw(st.integers(first, len(value) - 1)), draw(st.integers(0x21, 0x7E))
        bent = draw(
            st.sampled_from(
                [
                    value[:place] + bytes([other]) + value[place + 1 :],
                    value[:place],
                    value[:place] + bytes([other]) + value[place:],
                ]
            )
        )
        role = "nobody" if bent != value else "viewer"
        target = draw(st.sampled_from(["/api/v1/invocations", "/api/v1/audit", "/api/v1/tokens", "/"]))
        return Fuzzed(Sent("GET", target.encode(), [_HOST, (name, bent)]), role)

    each = st.one_of(searched(), paged(), shown(), any_request(), forged())
    return st.lists(each, min_size=AT_ONCE, max_size=AT_ONCE)


def sweep(known: Known, senders: Senders, start: int) -> Iterator[Fuzzed]:
    """Yield each route and each page once for each role, with records that there are; and a request with what is not
    quite the token or the cookie of each.
    """
    chance = random.Random(start)
    asked = [(each.method, f"/api/v1{each.path}") for each in api.ROUTES]
    asked += [("GET", page.path) for page in table.PAGES]
    for role, credentials in senders.items():
        for method, path in asked:
            for name in ("id", "name", "step:path"):
                chosen = "another" if path.endswith(_ENDS_THE_RUNNER) else chance.choice(known[name.partition(":")[0]])
                path = path.replace(f"{{{name}}}", chosen)
            headers = [_HOST, *credentials, (b"content-type", b"application/json"), (b"accept", b"text/html")]
            yield Fuzzed(Sent(method, _quoted(path).encode(), headers, b"{}"), role)
        for name, value in credentials[:1]:
            for bent in (
                value[:-1],
                value + b"A",
                *(value[:-1] + bytes([each]) for each in _ENDS if each != value[-1]),
            ):
                yield Fuzzed(Sent("GET", b"/api/v1/invocations", [_HOST, (name, bent)]), "nobody")


def _asked(senders: Senders, path: str, query: Sequence[tuple[str, str]], *headers: tuple[bytes, bytes]) -> Fuzzed:
    target = _quoted(path) + "?" + "&".join(f"{name}={_quoted(value, '')}" for name, value in query)
    return Fuzzed(Sent("GET", target.encode(), [_HOST, *senders["admin"], *headers]), "admin")


def _quoted(text: str, safe: str = "/%{}") -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe=safe)
