"""``holdfast monitor``: the pages, the HTTP API and webhooks of an app, until it is asked to stop."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from holdfast.app import App
from holdfast.cli import logs
from holdfast.cli.command import AppArgument, AppOption, NameOption, Needs, UrlOption, app_of, command, opened
from holdfast.cli.output import Output
from holdfast.cli.run import LogOptions
from holdfast.web import missing_extra


@command(Needs.NOTHING)
def monitor(
    out: Output,
    *,
    app: AppArgument = None,
    app_option: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    host: Annotated[str, Option(help="Where to listen; other addresses than loopback need a login.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Where to listen; 0 for a free port.", min=0, max=65535)] = 8080,
    lines: LogOptions,
) -> None:
    """Serve the pages, the HTTP API and webhooks.

    It goes on until SIGINT or SIGTERM. The API is under /api/v1, webhooks are under /hooks. With --url, what needs
    code is not offered. On a loopback address it answers programs of this machine; elsewhere, or once there is a
    token, each request needs one: see holdfast access.
    """
    try:
        from holdfast.web.serving import refuse_open_address, serve
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    app = app_of(app, app_option)
    logs.configure(lines.log_format, lines.log_level)
    with opened(out, Needs.STORE, app=app, url=url, name=name) as chosen:
        assert isinstance(chosen, App)
        refuse_open_address(host, chosen.runtime)
        serve(chosen, host, port, started=lambda address: _show_address(out, address))


def _show_address(out: Output, address: str) -> None:
    out.document({"address": address, "api": f"{address}/api/v1"})
    out.line(f"open {address} (Ctrl-C stops it)")
    out.line(f"the HTTP API is at {address}/api/v1")
