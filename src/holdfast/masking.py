"""Mask passwords and other secrets before a URL is shown, logged or in an error."""

from __future__ import annotations

import re
import urllib.parse

# Words in the name of a parameter whose value is a secret.
_SECRET_WORDS = re.compile(
    r"passw|passphrase|pwd|token|secret|credential|signature"
    r"|(api|access|private|account)[-_]?key$|authmechanismproperties",
    re.IGNORECASE,
)
# Likewise, in the names of arguments and of their fields.
_SECRET_NAMES = re.compile(
    r"passw|passphrase|(^|_)pwd($|_)|token|secret|credential|authori[sz]ation|(^|_)cookie"
    r"|(api|access|private|encryption|signing)[-_]?key",
    re.IGNORECASE,
)
_PARAMETER_NAME = re.compile(r"(?:^|(?<=[?&;#=\s]))[^=?&;#\s]+(?==)")
# A value runs on to the next "&" or blank: a ";" or "#" that was not encoded must not let half of it through.
_VALUE_END = re.compile(r"[&\s]|$")
# Options of a URL that may be shown. Any other may be a secret: a driver's next version has new options.
_HARMLESS = re.compile(
    r"appname|authmechanism|authsource|compressors|zlibcompressionlevel|directconnection|loadbalanced|replicaset"
    r"|(connect|socket|serverselection|waitqueue|w)?timeoutms|heartbeatfrequencyms|localthresholdms|maxidletimems"
    r"|(max|min)poolsize|maxconnecting|maxstalenessseconds|proxyhost|proxyport|readconcernlevel|readpreference(tags)?"
    r"|retryreads|retrywrites|servermonitoringmode|srvmaxhosts|srvservicename|ssl|tls|tlsinsecure"
    r"|tlsallowinvalid(certificates|hostnames)|tls(ca|certificatekey|crl)file|tlsdisableocspendpointcheck"
    r"|uuidrepresentation|w|journal|fsync|mode|cache",
    re.IGNORECASE,
)
_HARMLESS_VALUE = re.compile(r"[\w.,:/+$~ -]*['\")\]}>;!]*")
_OPTION_NAME = re.compile(r"[\w.%-]+")
_SCHEME = re.compile(r"[^:@=]*[\w+.-]")  # with what stands before it in a text
_USERINFO = re.compile(r"(?P<user>(?:(?!%3a)[^:@/?#\s=&;])*)(?P<password>:[^@/?#]*)?@", re.IGNORECASE)
_HOST = r"(?:[\w.-]+|\[[0-9a-f:.]+(?:%25[\w.-]+)?\]|%2f(?:%2f|[\w.-])*\.sock)(?::\d{1,5})?"
_PLACE = re.compile(
    rf"(?P<hosts>(?:{_HOST}(?:,{_HOST})*)?)(?P<path>(?:/(?:(?!://)[^?#\s])*)?)(?P<query>(?:\?[^#]*)?)(?P<rest>(?:#.*)?)",
    re.IGNORECASE | re.DOTALL,
)
_CLOSING = "'\")]}>,.;:!"  # what a sentence or a repr puts behind a URL


_extra: set[str] = set()  # what settings of apps in this process add


def hide_also(names: str) -> None:
    """Take the values of arguments for secret whose names have one of these words, too; with commas between them."""
    _extra.update(word.strip().lower() for word in names.split(",") if word.strip())


def is_secret_name(name: object) -> bool:
    """Return whether the value of that name is not to be shown."""
    if not isinstance(name, str):
        return False
    return bool(_SECRET_NAMES.search(name)) or any(word in name.lower() for word in _extra)


def mask_url(url: object) -> str:
    """Return the URL with *** for its password and for what may be a secret.

    Takes any text, and in doubt hides too much: in a malformed URL, it is unknown where the password begins and ends.
    """
    text = str(url)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return _mask_text(text)
    if not _SCHEME.fullmatch(scheme):
        return "***"  # the mark may stand in the middle of a password
    if scheme.endswith("sqlite") and rest.startswith("/"):
        path, question, query = rest.partition("?")  # a path, and paths have no passwords
        return f"{scheme}://{path}{question}{_mask_query(query)}"
    bare = rest if "?" in rest else rest.rstrip(_CLOSING)
    web = scheme.lower().endswith(("http", "https"))
    return f"{scheme}://{_mask_rest(bare, web)}{rest[len(bare) :]}"


def _mask_rest(rest: str, web: bool) -> str:
    """Mask what follows the scheme. If it is not user, hosts, path and query, hide it up to the last "@", or wholly."""
    userinfo = _USERINFO.match(rest)
    place = _mask_place(rest[userinfo.end() :] if userinfo else rest, web)
    if place is not None:
        user = "" if userinfo is None else userinfo["user"] + (":***@" if userinfo["password"] else "@")
        return user + place
    before, _, after = rest.rpartition("@")
    place = _mask_place(after, web)
    # With a "?" before it, the "@" may stand in an option, and what follows it be the end of a secret.
    return "***" if not before or "?" in before or "#" in before or place is None else f"***@{place}"


def _mask_place(text: str, web: bool) -> str | None:
    """Return hosts, path and query without what may be a secret; None if the text does not consist of these."""
    place = _PLACE.fullmatch(text)
    if place is None:
        return None
    path, query = _mask_parameters(place["path"]), place["query"]
    if web:  # a link in a message, where "@" and any option are common
        return place["hosts"] + path + _mask_parameters(query + place["rest"])
    options = query[1:].split("&")
    if "@" in path + place["rest"] or any(
        "@" in option for option in options if not option.lower().startswith("appname=")
    ):
        return None  # some services give URLs with appName=@name@; anywhere else it ends a password
    shown = f"?{_mask_query(query[1:])}" if query else ""
    return place["hosts"] + path + shown + ("#***" if place["rest"] else "")


def _mask_query(query: str) -> str:
    """Return the options up to the first that may be a secret. The rest is hidden with it: an "&", and what looks like
    another option, may be part of it.
    """
    shown: list[str] = []
    for option in query.split("&"):
        name, equals, value = option.partition("=")
        harmless = equals and _HARMLESS.fullmatch(urllib.parse.unquote(name))
        if option and not (harmless and _HARMLESS_VALUE.fullmatch(urllib.parse.unquote(value))):
            named = equals and _OPTION_NAME.fullmatch(name)
            return "&".join([*shown, f"{name}=***" if named else "***"])
        shown.append(option)
    return "&".join(shown)


def _mask_text(text: str) -> str:
    """Mask text that is no URL, but may have been meant as one."""
    before, at, after = text.rpartition("@")
    if at and re.search(r":|%3a", before, re.IGNORECASE):
        userinfo = _USERINFO.fullmatch(before + at)
        before = f"{userinfo['user']}:***" if userinfo else "***"
    return _mask_parameters(before + at + after)


def _mask_parameters(text: str) -> str:
    parts, position = [], 0
    while name := _PARAMETER_NAME.search(text, position):
        parts.append(text[position : name.end() + 1])
        position = name.end() + 1
        if _SECRET_WORDS.search(urllib.parse.unquote(name[0])):
            parts.append("***")
            position = _VALUE_END.search(text, position).start()  # type: ignore[union-attr]
    return "".join(parts) + text[position:]
