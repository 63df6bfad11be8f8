"""Access control of the page's server, and its answers to everyone else."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from dapo.errors import ConfigError
from dapo.view.page.guard import Guard, is_loopback
from dapo.view.page.server import address, outward_address
from dapo.view.runs import summaries
from tests.view.made import create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent


async def _page(request: object) -> PlainTextResponse:
    return PlainTextResponse("the page")


async def _socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def client(token: str | None, base: str = "http://127.0.0.1:8080") -> TestClient:
    routes = [Route("/{rest:path}", _page, methods=["GET", "POST", "PUT", "DELETE"]), WebSocketRoute("/ws", _socket)]
    app = Starlette(routes=routes)
    app.add_middleware(Guard, token=token, host="127.0.0.1", port=8080)
    return TestClient(app, base_url=base, follow_redirects=False)


@contextmanager
def running(root: Path, *options: str, cwd: Path = ROOT) -> Iterator[str]:
    """Run the real server in its own process, and yield its URL."""
    # Without these variables, because NiceGUI behaves differently when it believes to be inside pytest.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "NICEGUI"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "dapo", "view", str(root), "--no-open", "--port", "0", *options],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stdout.read()
        yield found.group()
    finally:
        process.terminate()
        process.wait(20)


def status(url: str, path: str = "/", **headers: str) -> int:
    return answer(url, path, **headers)[0]


def answer(url: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, "" if response.status == 101 else response.read().decode()
    finally:
        connection.close()


def test_without_a_token_only_host_names_of_this_machine_are_accepted():
    for name in ("127.0.0.1:8080", "localhost:8080", "[::1]:8080"):
        assert client(None).get("/", headers={"host": name}).text == "the page"
    for name in ("evil.example", "127.0.0.1.evil.example:8080", "", "localhost.evil.example", "[", "10.0.0.3:8080"):
        assert client(None).get("/", headers={"host": name}).status_code == 403, name


def test_requests_from_other_origins_are_refused_even_with_the_cookie():
    for token in (None, "secret"):
        asking = client(token)
        asking.cookies.set("dapo_view_8080", "secret")
        assert asking.get("/", headers={"origin": "http://evil.example"}).status_code == 403
        assert asking.get("/", headers={"origin": "null"}).status_code == 403
        assert asking.get("/", headers={"origin": "http://127.0.0.1:8080"}).status_code == 200
        own = {"host": "127.0.0.1:8080", "cookie": "dapo_view_8080=secret"}
        with asking.websocket_connect("/ws", headers={**own, "origin": "http://127.0.0.1:8080"}) as connection:
            assert connection.receive_text() == "hello"
        with (
            pytest.raises(WebSocketDisconnect),
            asking.websocket_connect("/ws", headers={**own, "origin": "http://e.com"}),
        ):
            pass


def test_every_request_and_websocket_needs_the_token():
    asking = client("secret")
    for path in ("/", "/_nicegui/x.js", "/?token=wrong", "/?token=", "/?token=secre", "/?token=s%C3%A9cret"):
        assert asking.get(path).status_code == 403, path
    with pytest.raises(WebSocketDisconnect), asking.websocket_connect("/ws"):
        pass
    with pytest.raises(WebSocketDisconnect), asking.websocket_connect("/ws?token=secret"):
        pass
    welcome = asking.get("/run/a?other=b&token=secret")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/run/a?other=b")
    assert "HttpOnly" in welcome.headers["set-cookie"]
    assert "samesite=strict" in welcome.headers["set-cookie"].lower()
    assert asking.get("/run/a").text == "the page"
    with asking.websocket_connect("/ws", headers={"cookie": "dapo_view_8080=secret"}) as connection:
        assert connection.receive_text() == "hello"
    asking.cookies.clear()
    assert asking.get("/run/a").status_code == 403


def test_the_redirect_that_removes_the_token_stays_on_this_host():
    for path in ("//evil.example/", "/%5Cevil.example/", "/\\evil.example"):
        place = client("secret").get(f"http://127.0.0.1:8080{path}?token=secret").headers.get("location", "/")
        assert re.match(r"/[^/\\]|/$", place), (path, place)


def test_only_reading_methods_are_accepted():
    for method in ("PUT", "DELETE", "POST"):
        assert client(None).request(method, "/").status_code == 405
    assert client(None).post("/_nicegui_ws/socket.io").status_code == 200


def test_response_headers_forbid_content_from_other_hosts():
    headers = client(None).get("/").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"


def test_only_addresses_of_this_machine_are_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.0.0.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


def test_a_host_that_others_can_reach_gets_a_token():
    assert address("127.0.0.1", 0, None).token is None
    first, second = address("0.0.0.0", 0, None), address("0.0.0.0", 0, None)
    assert len(first.token) >= 32 and first.token != second.token
    assert first.url == f"http://{outward_address()}:{first.port}/?token={first.token}"
    assert address("0.0.0.0", 0, "my-own_1").token == "my-own_1"
    assert address("127.0.0.1", 0, "mine").token == "mine"
    for token in ("", "a b", "a&b"):
        with pytest.raises(ConfigError, match="--token"):
            address("0.0.0.0", 0, token)


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            address("127.0.0.1", taken.getsockname()[1], None)


def test_the_real_server_checks_pages_assets_and_websocket(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1)]))
    upgrade = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    with running(tmp_path, "--host", "0.0.0.0", "--token", "secret") as url:
        cookie = f"dapo_view_{url.split(':')[2].split('/')[0]}=secret"
        for each in ("/", "/run/made/curves", "/_nicegui/static/nicegui.css", path):
            assert status(url, each) == 403, each
        assert status(url, path, **upgrade) == 403
        assert status(url, path, Cookie=cookie, Origin="http://evil.example", **upgrade) == 403
        assert status(url, "/?token=secret") == 303
        assert status(url, "/run/made/curves", Cookie=cookie) == 200
        assert status(url, path, Cookie=cookie, **upgrade) == 101


def test_no_name_leads_out_of_the_folder(tmp_path: Path):
    create(tmp_path / "runs", name="inside").close()
    create(tmp_path, name="outside").close()
    (tmp_path / "runs" / "link").mkdir()
    (tmp_path / "runs" / "link" / "run.db").symlink_to(tmp_path / "outside" / "run.db")
    with running(tmp_path / "runs") as url:
        for name, words in (
            ("%2e%2e", "is not the name of a run"),
            ("..%5Coutside", "is not the name of a run"),
            ("a%00b", "is not the name of a run"),
            ("link", "leads out of"),
        ):
            code, text = answer(url, f"/run/{name}/curves")
            assert code == 200 and words in text, name
        for path in ("/run/..%2Foutside/curves", "/run/../outside/curves", "/../../etc/passwd", "/run/inside/groups/x"):
            assert status(url, path) in (404, 422), path


def test_a_missing_folder_is_one_sentence(tmp_path: Path):
    found = subprocess.run(
        [sys.executable, "-m", "dapo", "view", str(tmp_path / "none"), "--no-open", "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 2
    assert "cannot be read" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_folder_of_an_ablation_shows_its_runs_and_its_result(tmp_path: Path):
    create(tmp_path / "runs", name="grpo-s0").close()
    with running(tmp_path / "runs") as url:  # an ordinary folder that happens to be called runs
        assert "/ablation" not in answer(url, "/")[1]
        assert status(url, "/ablation") == 404
    (tmp_path / "ablation.yaml").write_text("arms: {}", encoding="utf-8")
    (tmp_path / "ablation.html").write_text("<p>the result</p>", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "runs"):
        with running(folder) as url:
            assert "/ablation" in answer(url, "/")[1]
            assert answer(url, "/ablation") == (200, "<p>the result</p>")
            assert status(url, "/run/grpo-s0/curves") == 200
    with running(tmp_path, "--token", "secret") as url:
        assert status(url, "/ablation") == 403


def test_the_address_of_a_run_alone_leads_to_its_curves(tmp_path: Path):
    create(tmp_path, name="a b").close()
    with running(tmp_path) as url, urlopen(f"{url.rstrip('/')}/run/a%20b") as page:
        assert (page.status, page.url.split("/", 3)[3]) == (200, "run/a%20b/curves")


def test_an_ablation_that_begins_after_the_server_is_shown(tmp_path: Path):
    with running(tmp_path) as url:
        (tmp_path / "ablation.yaml").write_text("arms: {}", encoding="utf-8")
        assert status(url, "/ablation") == 404
        create(tmp_path / "runs", name="grpo-s0").close()
        (tmp_path / "ablation.html").write_text("<p>the result</p>", encoding="utf-8")
        assert answer(url, "/ablation") == (200, "<p>the result</p>")
        assert "there is no run database here" not in answer(url, "/run/grpo-s0/curves")[1]
        assert [run.name for run in summaries(tmp_path)] == ["grpo-s0"]
