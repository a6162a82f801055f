"""The sender of a request: the host's user, a token, a proxy's user, a session, or a program of this machine.

The first that applies decides; see docs/decisions/0024-access.md. A page of another site can make a browser send a
cookie. So a request with a cookie has to come from a page of this app, and a change needs the token in those pages. A
bearer token is sent by programs, and needs neither.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request

from holdfast.access.rules import (
    ROLES,
    SETTING,
    Session,
    TrustedProxy,
    csrf_text,
    digest_of,
    is_csrf,
    is_secret_of,
    proof_of,
    session_in,
)
from holdfast.access.tokens import AccessTokens
from holdfast.errors import ConfigurationError, StoreReadOnly
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.principals import Principal, Role
from holdfast.web.problems import Problem, too_many
from holdfast.web.rules import (
    TokenGuesses,
    bearer_in,
    is_allowed_host,
    is_of_own_page,
    is_same,
    names_this_machine,
    source_of,
)

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

HostUser = Callable[[Request], "tuple[str, Role | str] | Awaitable[tuple[str, Role | str] | None] | None"]
"""A function of the host that mounts the web app: it returns the name and the role of a request's user, or None."""

CSRF_HEADER = "x-holdfast-csrf"
READING = ("GET", "HEAD", "OPTIONS")
_API_TOKEN = "api_token"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_NOT_KNOWN = "give a token: 'Authorization: Bearer TOKEN' (holdfast access token create), or log in"
_LAST_IS_GONE = (
    "this app had tokens, and has none now. Make one: holdfast access token create; or let programs of this machine in "
    "without: holdfast access open"
)
_OFF = (
    "the web app is off: set api_token (HOLDFAST_API_TOKEN) in the process that serves this app, or make a token: "
    "holdfast access token create"
)


class Authentication:
    """Find the principal of requests. `is_local`: the server listens on a loopback address, and is our own."""

    def __init__(self, runtime: AppRuntime, *, is_local: bool, user: HostUser | None = None) -> None:
        self._runtime, self._is_local, self._user = runtime, is_local, user
        settings = runtime.settings
        self.proxy = TrustedProxy(
            settings.proxy_address, settings.proxy_user_header, settings.proxy_role_header, settings.proxy_role
        )
        self._guesses = TokenGuesses()
        self.cookie = f"holdfast_{digest_of(runtime.name)[:8]}"

    async def principal(self, request: Request, *, is_page: bool = False) -> Principal:
        """Return the sender of a request. Raises `Problem`: 401 if it is not known, 403 if it must not ask so."""
        self.refuse_host(request)
        found = await self._by_host(request) or await self._by_token(request) or self._by_proxy(request)
        found = found or await self.by_session(request)
        if found is None:
            return await self._local(request, self._count_wrong(request))
        if found.via in ("token", _API_TOKEN):
            return found
        return await self._from_own_page(request, found, is_page=is_page)

    def source(self, request: Request) -> str:
        """Return the address that a request comes from."""
        address = request.client.host if request.client else ""
        return self.proxy.source(address, request.headers.getlist("x-forwarded-for"))

    def refuse_host(self, request: Request) -> None:
        """Raise `Problem` for a Host that is not among the allowed ones."""
        host, allowed = request.headers.get("host", ""), self._runtime.settings.allowed_hosts
        if allowed and not is_allowed_host(host, allowed) and not (self._is_local and names_this_machine(host)):
            raise _forbidden("the Host header names no server of this app: see the setting allowed_hosts")

    def is_of_own_page(self, headers: Mapping[str, str]) -> bool:
        return is_of_own_page(headers, self._runtime.settings.allowed_hosts)

    async def tokens(self) -> AccessTokens:
        """Return the known tokens, read within the last seconds."""
        engine: Engine = await self._runtime.aready()
        tokens = engine.part(AccessTokens)
        if not tokens.is_fresh:
            await self._runtime.arun(tokens.refresh())
        return tokens

    async def is_set_up(self) -> bool:
        """Return whether any authentication is configured, so that not every program of this machine has access."""
        if self._runtime.settings.api_token or self.proxy.is_set or self._user is not None:
            return True
        return (await self.tokens()).known.is_closed

    # --- the ways

    async def _by_host(self, request: Request) -> Principal | None:
        if self._user is None:
            return None
        if inspect.iscoroutinefunction(self._user):
            found = await self._user(request)
        else:
            found = await asyncio.to_thread(self._user, request)
            if inspect.isawaitable(found):
                found = await found
        if found is None:
            return None
        name, role = found
        if not isinstance(role, Role):
            if str(role).lower() not in ROLES:
                raise ConfigurationError(f"user= of the web app returns the role {role!r}; roles: {', '.join(ROLES)}")
            role = Role[str(role).upper()]
        return Principal(str(name), role, "host", self.source(request))

    async def _by_token(self, request: Request) -> Principal | None:
        bearer, source = bearer_in(request.headers), self.source(request)
        if not bearer:
            return None
        key, digest = source_of(source), digest_of(bearer)
        found = await self.of_token(
            bearer, source, has_guesses=self._guesses.may_compare(key, digest, self._runtime.clock.monotonic())
        )
        if found is not None:
            self._guesses.was_right(key, digest)
        return found

    def _count_wrong(self, request: Request) -> float:
        """Count the token of a request without another proof of its sender. Return the seconds after which its source
        may try again; 0 for now.
        """
        if not bearer_in(request.headers):
            return 0.0
        return self._guesses.was_wrong(source_of(self.source(request)), self._runtime.clock.monotonic())

    async def of_token(self, given: str, source: str, *, has_guesses: bool = True) -> Principal | None:
        """Return the principal of a token; None if it is not valid. Without guesses, it is not compared with the
        setting; a token of the store has 256 random bits, which cannot be guessed.
        """
        token = self._runtime.settings.api_token
        if token and has_guesses and is_same(given, token):
            return Principal(_API_TOKEN, Role.ADMIN, _API_TOKEN, source)
        if not given.startswith("hf_"):
            return None
        tokens = await self.tokens()
        record = tokens.valid(given)
        if record is None and tokens.may_be_new:
            await self._runtime.arun(tokens.refresh(again=True))
            record = tokens.valid(given)
        if record is None:
            return None
        if tokens.is_use_due(record):
            await self._runtime.arun(tokens.note_use(record))
        return Principal(record.name, Role[record.role.upper()], "token", source)

    def _by_proxy(self, request: Request) -> Principal | None:
        address = request.client.host if request.client else ""
        found = self.proxy.user(address, request.headers)
        if found is None:
            return None
        name, role = found
        if self.proxy.is_named_twice(request.headers.getlist):
            raise _forbidden("the headers of the proxy come twice: it has to remove what its clients send")
        if not role:
            raise _forbidden(f"the proxy names a role that is none; roles: {', '.join(ROLES)}")
        return Principal(name, Role[role.upper()], "proxy", self.source(request))

    async def session(self, request: Request) -> Session | None:
        """Return the session of the cookie, if it has not ended; its token may be gone."""
        cookie = request.cookies.get(self.cookie, "")
        if not cookie:
            return None
        tokens = await self.tokens()
        engine: Engine = await self._runtime.aready()
        session = session_in(cookie, tokens.known.ring, engine.app, engine.store.now())
        if session is None:
            return None
        is_ended = tokens.known.sessions.get(session.id)
        if is_ended is None:
            is_ended = await self._runtime.arun(tokens.is_ended(session.id))
        return None if is_ended else session

    async def by_session(self, request: Request) -> Principal | None:
        """Return the principal of the cookie; None without one, or if the session or its token has ended."""
        session = await self.session(request)
        if session is None:
            return None
        if session.token == SETTING:
            token = self._runtime.settings.api_token
            if not token or not is_secret_of(session.proof, digest_of(proof_of(token))):
                return None
            return Principal(_API_TOKEN, Role.ADMIN, "login", self.source(request))
        record = (await self.tokens()).of_session(session.token, session.proof)
        if record is None:
            return None
        return Principal(record.name, Role[record.role.upper()], "login", self.source(request))

    async def _local(self, request: Request, wait: float) -> Principal:
        """Return the principal of a program of this machine, where nothing else is set up. Raises `Problem`; with
        `wait`, that too many wrong tokens came from there.
        """
        if await self.is_set_up():
            if wait:
                raise too_many("too many wrong tokens came from your address", math.ceil(wait))
            is_last_gone = self._is_local and self._user is None and not (await self.tokens()).known.tokens
            raise _unknown(_LAST_IS_GONE if is_last_gone and not self._runtime.settings.api_token else _NOT_KNOWN)
        if not self._is_local:
            raise _forbidden(_OFF)
        host = request.headers.get("host", "")
        allowed = self._runtime.settings.allowed_hosts
        if not names_this_machine(host) and not (allowed != "*" and is_allowed_host(host, allowed)):
            raise _forbidden("the Host header does not name this machine: use http://127.0.0.1 or http://localhost")
        if not self.is_of_own_page(request.headers):
            raise _forbidden("the request comes from a page of another site: make a token, and send it")
        if any(name in request.headers for name in _OF_PROXIES):
            raise _forbidden("the request comes through a proxy, from anywhere: make a token, and send it")
        return Principal("local", Role.ADMIN, "local", self.source(request))

    # --- what a browser sends by itself

    async def _from_own_page(self, request: Request, found: Principal, *, is_page: bool) -> Principal:
        """Return the principal with the token for changes. Raises `Problem` for a request of another site's page. A
        page may be linked from elsewhere.
        """
        is_change = request.method not in READING
        if (is_change or not is_page) and not self.is_of_own_page(request.headers):
            raise _forbidden("the request comes from a page of another site")
        subject = request.cookies[self.cookie] if found.via == "login" else f"{found.via} {found.name}"
        is_program = found.via == "host" and bearer_in(request.headers) is not None
        if is_change and not is_program:
            given = request.headers.get(CSRF_HEADER, "")
            if not given or not await self.is_csrf(given, subject):
                raise _forbidden(f"the request lacks the token of its session, {CSRF_HEADER}: load the page again")
        return found._replace(csrf=await self.csrf(subject) if is_page else "")

    async def csrf(self, subject: str) -> str:
        """Return the token that pages of a session send with a change; empty, if this user of the store may not
        write.
        """
        engine: Engine = await self._runtime.aready()
        tokens = await self.tokens()
        try:
            ring = tokens.known.ring if tokens.known.ring.keys else await self._runtime.arun(tokens.ring())
        except StoreReadOnly:
            return ""
        return csrf_text(ring.keys[0], engine.app, subject) if ring.keys else ""

    async def is_csrf(self, given: str, subject: str) -> bool:
        engine: Engine = await self._runtime.aready()
        return is_csrf(given, (await self.tokens()).known.ring, engine.app, subject)


def is_https(request: Request, proxy: TrustedProxy) -> bool:
    """Return whether the browser came by https, to this server or to the proxy before it."""
    if request.url.scheme == "https":
        return True
    address = request.client.host if request.client else ""
    return proxy.is_at(address) and request.headers.get("x-forwarded-proto", "").strip().lower() == "https"


def _unknown(why: str) -> Problem:
    return Problem(401, "Unauthorised", why, headers={"www-authenticate": 'Bearer realm="holdfast"'})


def _forbidden(why: str) -> Problem:
    return Problem(403, "Forbidden", why)
