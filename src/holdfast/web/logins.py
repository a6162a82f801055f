"""Logging in and out on a page, with a token. It works without script.

The form has a random text that a cookie has, too: a page of another site knows neither. Logins are limited for each
source. A session is a cookie; see `holdfast.access.rules`.
"""

from __future__ import annotations

import hmac
import os
from contextlib import suppress
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from holdfast.access.audit import DONE, Action, AuditLog
from holdfast.access.rules import ID_BYTES, SETTING, Session, cookie_text, new_id, proof_of
from holdfast.access.tokens import AccessTokens
from holdfast.errors import StoreReadOnly
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.authentication import Authentication, is_https
from holdfast.web.pages.rendering import PageRenderer
from holdfast.web.principals import Principal
from holdfast.web.problems import SAFE_HEADERS, Problem
from holdfast.web.requests import body_of
from holdfast.web.rules import Buckets, source_of

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

LOGIN, LOGOUT = "/login", "/logout"
PATHS = (LOGIN, LOGOUT)
_FORM_COOKIE = "holdfast_form"
_FORM_SECONDS = 3_600
_FORM_LIMIT = 8_192
_RATE, _BURST = 0.1, 10.0  # logins per second for one source, and at once


class Logins:
    """The pages ``/login`` and ``/logout``."""

    def __init__(self, runtime: AppRuntime, authentication: Authentication, pages: PageRenderer) -> None:
        self._runtime, self._authentication, self._pages = runtime, authentication, pages
        self._buckets = Buckets(_RATE, _BURST)

    async def answer(self, request: Request, path: str) -> Response:
        """Answer one of the paths. Raises `Problem`."""
        self._authentication.refuse_host(request)
        if request.method == "POST":
            return await (self._login(request) if path == LOGIN else self._logout(request))
        if path == LOGOUT or request.method not in ("GET", "HEAD"):
            allowed = "POST" if path == LOGOUT else "GET, POST"
            raise Problem(405, "MethodNotAllowed", f"this address takes {allowed}", headers={"allow": allowed})
        return await self._form(request, next_in(request.query_params.get("next", "")))

    async def _form(self, request: Request, next: str, message: str = "", status: int = 200) -> Response:
        secret = request.cookies.get(_FORM_COOKIE, "")
        if len(secret) != 64 or not secret.isalnum():
            secret = os.urandom(32).hex()
        response = await self._pages.login(request, status, csrf=secret, next=next, message=message)
        self._set(request, response, _FORM_COOKIE, secret, _FORM_SECONDS)
        return response

    async def _login(self, request: Request) -> Response:
        source = self._authentication.source(request)
        if wait := self._buckets.take(source_of(source), self._runtime.clock.monotonic()):
            seconds = str(int(wait) + 1)
            raise Problem(
                429, "TooMany", f"too many logins; try again in {seconds} s", headers={"retry-after": seconds}
            )
        given = await form_of(request)
        next = next_in(given.get("next", ""))
        known, sent = request.cookies.get(_FORM_COOKIE, ""), given.get("csrf", "")
        is_ours = bool(known) and hmac.compare_digest(known.encode(), sent.encode("utf-8", "surrogatepass"))
        if not is_ours or not self._authentication.is_of_own_page(request.headers):
            return await self._form(request, next, "The form was too old, or not of this page. Try again.", 403)
        token = given.get("token", "").strip()
        principal = await self._authentication.of_token(token, source)
        if principal is None:
            return await self._form(request, next, "This token is not known, or has expired.", 401)
        try:
            cookie, lasts = await self._session(token)
        except StoreReadOnly:
            raise Problem(403, "StoreReadOnly", "a session needs a key in the store, which is read only here") from None
        await self._record(principal, "session.login")
        response = RedirectResponse(root_of(request) + next, 303, SAFE_HEADERS)
        self._set(request, response, self._authentication.cookie, cookie, lasts)
        self._set(request, response, _FORM_COOKIE, "", 0)
        return response

    async def _session(self, token: str) -> tuple[str, int]:
        """Return the cookie of a new session, and for how long it is good: not longer than its token."""
        engine: Engine = await self._runtime.aready()
        tokens, now = engine.part(AccessTokens), engine.store.now()
        ring = await self._runtime.arun(tokens.ring())
        ends_at, id = now + self._runtime.settings.session_seconds, SETTING
        if (record := tokens.valid(token)) is not None:
            ends_at, id = min(ends_at, record.expires_at), record.id
        session = Session(id, new_id(os.urandom(ID_BYTES)), ends_at, proof_of(token))
        return cookie_text(ring.keys[0], engine.app, session), max(1, int(ends_at - now))

    async def _record(self, principal: Principal, name: str) -> None:
        """Record that a user logs in or out. Raises `StoreError`: then it is refused."""
        engine: Engine = await self._runtime.aready()
        log = engine.part(AuditLog)
        action = Action(principal.name, principal.via, principal.source, name)
        await self._runtime.arun(log.end(await self._runtime.arun(log.begin(action)), DONE))

    async def _logout(self, request: Request) -> Response:
        """End the session, wherever its cookie is. Its form has the token of the session."""
        given, cookie = await form_of(request), request.cookies.get(self._authentication.cookie, "")
        if cookie:
            known = await self._authentication.is_csrf(given.get("csrf", ""), cookie)
            if not known or not self._authentication.is_of_own_page(request.headers):
                raise Problem(403, "Forbidden", "the form is not of this session; load the page again")
        if (session := await self._authentication.session(request)) is not None:
            with suppress(StoreReadOnly):  # then only the browser forgets it
                if (principal := await self._authentication.by_session(request)) is not None:
                    await self._record(principal, "session.logout")
                await self._runtime.arun((await self._authentication.tokens()).end_session(session))
        response = RedirectResponse(f"{root_of(request)}{LOGIN}", 303, SAFE_HEADERS)
        self._set(request, response, self._authentication.cookie, "", 0)
        return response

    def _set(self, request: Request, response: Response, name: str, value: str, seconds: int) -> None:
        cookie: SimpleCookie = SimpleCookie()
        cookie[name] = value
        cookie[name]["path"] = root_of(request) or "/"
        cookie[name]["max-age"] = seconds
        cookie[name]["httponly"] = True
        cookie[name]["samesite"] = "Strict"
        if is_https(request, self._authentication.proxy):
            cookie[name]["secure"] = True
        response.headers.append("set-cookie", cookie[name].OutputString())


def to_login(request: Request, path: str) -> Response:
    """Return the way to the login for a page that needs one, and from there back."""
    query = f"?{request.url.query}" if request.url.query else ""
    next = next_in(path + query)
    where = f"?{urlencode({'next': next})}" if next != "/" else ""
    return RedirectResponse(f"{root_of(request)}{LOGIN}{where}", 303, SAFE_HEADERS)


def next_in(text: str) -> str:
    """Return a path of this app to go to; the first page for anything else. No other site is ever gone to."""
    is_path = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_path and text.isascii() and text.isprintable() and len(text) <= 2_000 else "/"


def root_of(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form, the first value of each. Raises `Problem`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "UsageError", "send the form of the page", path="body")
    body = await body_of(request, _FORM_LIMIT)
    try:
        fields = parse_qs(body.decode(), max_num_fields=10)
    except ValueError:
        raise Problem(400, "UsageError", "the body is no form", path="body") from None
    return {name: values[0] for name, values in fields.items()}
