"""The server of `dapo view`: its routes, and how it starts."""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import Query
from nicegui import app, ui
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response

from dapo.errors import ConfigError
from dapo.view.groups import GroupFilter
from dapo.view.page import curves, groups, health, prompts, runs, tokens
from dapo.view.page.frame import show_run, show_site
from dapo.view.page.guard import Guard, is_loopback
from dapo.view.runs import ablation_report, run_names
from dapo.view.tokens import FindModel, decoder


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        host = outward_address() if self.host in ("0.0.0.0", "::", "") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def outward_address() -> str:
    """Return an address at which others reach this machine, to print instead of 0.0.0.0."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 53))  # sends nothing: connecting a UDP socket only picks the outgoing interface
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def address(host: str, port: int, token: str | None) -> Address:
    """Return where the server will listen. Port 0 picks a free port; a host that others can reach gets a token."""
    if token is not None and not re.fullmatch(r"[\w-]+", token):
        raise ConfigError("--token: use only letters, digits, - and _, because the token is part of a URL")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # The server sets this option, too: it allows a port whose last connections are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot listen on {host}, port {port} ({reason}); choose another --port") from None
        return Address(host, probe.getsockname()[1], token)


def serve(
    root: Path, where: Address, *, opens: bool, find_model: FindModel, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve the pages until interrupted. The databases in `root` are only read."""
    run_names(root)  # raises here, before the server starts, if the folder cannot be read
    register(root, find_model)
    app.add_middleware(Guard, token=where.token, host=where.host, port=where.port)
    actions = [ready, *([lambda: webbrowser.open(where.url)] if opens else [])]
    # In a thread, because the server listens only after its startup, and opening some browsers blocks.
    app.on_startup(lambda: threading.Thread(target=_when_listening, args=(where, actions), daemon=True).start())
    ui.run(
        host=where.host,
        port=where.port,
        title="dapo",
        favicon="📈",
        dark=None,
        reload=False,
        show=False,
        show_welcome_message=False,
        reconnect_timeout=30.0,
    )


def _when_listening(where: Address, actions: Sequence[Callable[[], object]]) -> None:
    while True:
        try:
            socket.create_connection((where.host, where.port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    for action in actions:
        action()


def register(root: Path, find_model: FindModel) -> None:
    """Register one route per view. Runs are looked up by name only, with `find_run`."""
    decoder_of = partial(decoder, root, find_model)
    here = Path(__file__).parent
    ui.add_css(here / "page.css", shared=True)
    ui.add_head_html(f"<script>{(here / 'page.js').read_text(encoding='utf-8')}</script>", shared=True)

    @ui.page("/")
    def _runs() -> None:
        show_site(lambda: runs.build(root))

    @app.get("/ablation")
    def _ablation() -> Response:
        """Show the report of the ablation as it was last written."""
        report = ablation_report(root)
        return FileResponse(report) if report else PlainTextResponse("there is no ablation here", status_code=404)

    @app.get("/run/{name}")
    def _run(name: str) -> Response:
        return RedirectResponse(f"{quote(name, safe='')}/curves")

    @ui.page("/run/{name}/curves")
    def _curves(name: str, other: Annotated[list[str] | None, Query()] = None) -> None:
        show_run(root, name, "curves", lambda run: curves.build(root, run, other or []))

    @ui.page("/run/{name}/groups")
    def _groups(
        name: str,
        step: int | None = None,
        verdict: str | None = None,
        error: str | None = None,
        prompt: str | None = None,
    ) -> None:
        wanted = GroupFilter(step, step, (verdict,) if verdict else (), prompt_uid=prompt, error=error)
        show_run(root, name, "groups", lambda run: groups.build(run, wanted))

    @ui.page("/run/{name}/groups/{serial}")
    def _group(name: str, serial: int) -> None:
        show_run(root, name, "groups", lambda run: groups.build_one(run, serial))

    @ui.page("/run/{name}/tokens")
    def _any_tokens(name: str) -> None:
        show_run(root, name, "tokens", tokens.build_newest)

    @ui.page("/run/{name}/tokens/{serial}/{sample}")
    def _tokens(name: str, serial: int, sample: int, start: int = 0) -> None:
        show_run(root, name, "tokens", lambda run: tokens.build(run, serial, sample, max(0, start), decoder_of))

    @ui.page("/run/{name}/prompts")
    def _prompts(name: str) -> None:
        show_run(root, name, "prompts", prompts.build)

    @ui.page("/run/{name}/health")
    def _health(name: str) -> None:
        show_run(root, name, "health", health.build)
