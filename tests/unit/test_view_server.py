"""The server of the viewer: its responses, and rejected requests."""

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from view_helpers import fake_run, metrics_row, served

pytest.importorskip("starlette", reason="pip install 'mtrl[view]'")
from starlette.testclient import TestClient

from mtrl.commands.view import page_address
from mtrl.utils.metric_glossary import find_metric
from mtrl.view import html_page as page
from mtrl.view.run_index import open_runs
from mtrl.view.server import allowed_hosts, is_loopback, make_app
from mtrl.view.shared_view import collect_report

HOST = "127.0.0.1:6060"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def client(run):
    return TestClient(
        make_app(open_runs([run]), "127.0.0.1", 6060), base_url=f"http://{HOST}", raise_server_exceptions=False
    )


def test_it_serves_its_page(client):
    about = client.get("/api/runs").json()["runs"][0]
    assert (about["name"], about["last_step"], about["steps"], about["counts"]) == ("run", 3, [1, 2, 3], [3, 3, 3])
    assert client.get("/api/series?run=0&names=reward/overall").json() == {
        "reward/overall": [[1, 2, 3], [0.1, 0.2, 0.3]]
    }
    found = client.get("/api/rollouts?run=0&from=2&to=2&sort=reward&order=desc&max_reward=1.2").json()
    assert [row["reward"] for row in found["rows"]] == [1.0, 0.5] and found["total"] == 2
    one = client.get("/api/response?run=0&step=2&row=1").json()
    assert one["text"] == "row 1" and one["pieces"] == ["t100 "]
    assert [each["row"] for each in client.get("/api/group?run=0&step=2&row=1").json()] == [0, 1]
    assert [each["row"] for each in client.get("/api/group?run=0&step=2&id=p1").json()] == [2]
    image = client.get("/api/image", params={"run": 0, "step": 2, "key": one["prompt"]["images"][0]})
    assert image.headers["content-type"] == "image/png" and image.content.startswith(b"\x89PNG")
    assert "seed: 7" in client.get("/api/config?run=0").text


def test_a_line_on_every_metric(tmp_path):
    """Of our runs; a name of TRL or verl may mean something else there."""
    (tmp_path / "ours").mkdir()
    row = metrics_row(1, **{"actor/entropy": 1.0, "val/by_kind/<b>": 0.5, "mine/weight": 2.0})
    (tmp_path / "ours/metrics.jsonl").write_text(row)
    (tmp_path / "1.jsonl").write_text('{"input": "2 + 2?", "output": "4", "score": 1, "step": 1}\n')
    runs = open_runs([tmp_path / "ours", tmp_path / "1.jsonl"])
    client = TestClient(make_app(runs, "127.0.0.1", 6060), base_url=f"http://{HOST}")
    client.get("/api/runs")
    lines = client.get("/api/glossary").json()
    assert lines["actor/entropy"] == find_metric("actor/entropy").line and "`<b>`" in lines["val/by_kind/<b>"]
    assert lines["mine/weight"] == lines["reward/mean"] == ""
    assert collect_report(runs, 0)["glossary"] == lines


def test_every_module_is_served_and_named(client):
    html = client.get("/").text
    named = json.loads(re.search(r'importmap">(.*?)</script>', html)[1])["imports"]
    assert set(named) == {f"mtrl/{path.stem}" for path in page.STATIC.glob("*.js")}
    for address in (*named.values(), "/static/view.css"):
        answer = client.get(address)
        assert answer.status_code == 200 and re.match("text/(javascript|css)", answer.headers["content-type"])
        wanted = re.findall(r'from "(mtrl/\w+)"', answer.text)
        assert set(wanted) <= set(named)
    assert not re.search(r"https?://", "".join(page.static(path.name).decode() for path in page.STATIC.iterdir())), (
        "it sends no other requests"
    )
    assert "innerHTML" not in "".join(page.static(path.name).decode() for path in page.STATIC.iterdir())


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:80", "127.0.0.1:6060.evil.example", "", "localhost:6061"]
)
def test_other_hosts_are_rejected(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 403


def test_its_own_names_are_not(client):
    for host in (HOST, "localhost:6060", "LOCALHOST:6060", "[::1]:6060"):
        assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://evil.example"},
        {"origin": "null"}, {"origin": "http://127.0.0.1:9999"},
    ],
)  # fmt: skip
def test_other_sites_are_rejected(client, headers):
    answer = client.get("/api/runs", headers=headers)
    assert answer.status_code == 403 and "runs" not in answer.text


def test_its_own_page_is_not(client):
    own = {"sec-fetch-site": "same-origin", "origin": f"http://{HOST}"}
    assert client.get("/api/runs", headers=own).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "none"}).status_code == 200


@pytest.mark.parametrize("method", ["post", "put", "delete", "options", "patch"])
def test_nothing_can_be_changed(client, method):
    assert getattr(client, method)("/api/runs").status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..%5cserver.py", "/static//etc/passwd",
        "/static/", "/etc/passwd", "/api/image?run=0&step=1&key=../../config.yaml", "/api/image?run=0&step=1&key=",
        "/api/image?run=../..&step=1&key=x", "/api/config?run=1", "/api/config?run=-1",
        "/api/response?run=0&step=1&row=99",
        "/api/response?run=0&step=99&row=0", "/api/response?run=0&step=1&row=-1", "/api/response?run=0&step=1e9&row=0",
        "/api/rollouts?run=0&sort=__class__", "/api/rollouts?run=0&size=99999", "/api/rollouts?run=0&min_reward=x",
        "/api/maps?run=0&step=1&row=0", "/api/maps?run=0&step=1&row=99", "/api/maps?run=0&step=1&row=-1",
        "/api/group?run=0&step=1&id=no", f"/api/response?run=0&step={'9' * 400}&row=0", "/api/series",
    ],
)  # fmt: skip
def test_missing_resources_are_404(client, path):
    answer = client.get(path)
    assert answer.status_code in (400, 404), answer.text
    assert "root:" not in answer.text and "Traceback" not in answer.text


def test_a_link_out_of_the_run_leads_nowhere(tmp_path):
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: 1")
    run = fake_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret)
    other = fake_run(tmp_path / "other")
    for name in ("metrics.jsonl", "record"):
        (run / name).rename(tmp_path / f"old {name}")
        (run / name).symlink_to(other / name)
    client = TestClient(make_app(open_runs([run]), "127.0.0.1", 6060), base_url=f"http://{HOST}")
    assert client.get("/api/config?run=0").text == ""
    about = client.get("/api/runs").json()["runs"][0]
    assert about["steps"] == [] and about["metrics"] == []


def test_headers_that_keep_strangers_out(client):
    for path in ("/", "/api/runs", "/static/main.js", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "'unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


def test_names_of_an_address():
    assert allowed_hosts("127.0.0.1", 1) == ["127.0.0.1:1", "127.0.0.1:1", "localhost:1", "[::1]:1"]
    assert allowed_hosts("::1", 1)[0] == "[::1]:1" and all(map(is_loopback, ("127.0.0.1", "127.0.0.5", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.7", "box.lan", "")))
    assert page_address("::1", 1, None) == "http://[::1]:1/"
    assert page_address("0.0.0.0", 1, "t") == f"http://{socket.gethostname()}:1/?token=t"


# --------------------------------------------------------------------------------------------------------------- token
@pytest.fixture
def shared(run):
    """A client of a server that other machines reach."""
    app = make_app(open_runs([run]), "0.0.0.0", 6060, "secret-token")
    return TestClient(app, base_url="http://box.lan:6060", raise_server_exceptions=False)


def test_other_machines_need_the_token(shared):
    for path in ("/", "/api/runs", "/static/main.js", "/api/runs?token=", "/api/runs?token=secret", "/?token=%ff%00"):
        answer = shared.get(path)
        assert answer.status_code == 403 and "token" in answer.text and "secret" not in answer.text
    for host in ("127.0.0.1:6060", "localhost:6060", "0.0.0.0:6060"):
        assert shared.get("/api/runs", headers={"host": host}).status_code == 403, "a Host header proves nothing"
    assert shared.get("/api/runs", headers={"cookie": "mtrl-view-6060=secret"}).status_code == 403


def test_the_token_opens_the_page_and_its_requests(shared):
    first = shared.get("/?token=secret-token", headers={"sec-fetch-site": "cross-site"})  # a link in a chat
    cookie = first.headers["set-cookie"]
    assert first.status_code == 200 and "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert shared.get("/api/runs").status_code == 200 and shared.get("/static/main.js").status_code == 200
    assert "set-cookie" not in shared.get("/api/runs").headers
    assert shared.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert shared.get("/api/runs", headers={"origin": "http://evil.example"}).status_code == 403
    assert shared.post("/api/runs").status_code == 403


def test_this_machine_needs_no_token(client):
    assert "set-cookie" not in client.get("/?token=x").headers


# ---------------------------------------------------------------------------------------------------------------- time
def test_a_request_that_never_ends_is_closed(run, monkeypatch):
    from mtrl.view import http_server

    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with served(run) as address:
        where = ("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]))
        head = f"GET /api/config?run=0 HTTP/1.1\r\nHost: 127.0.0.1:{where[1]}\r\n".encode()
        for start in (b"", b"GET / HTTP/1.1\r\nHost: x", head):
            with socket.create_connection(where, timeout=4) as slow:
                slow.sendall(start)
                assert slow.recv(65536) == b"", "it is closed; an open connection raises TimeoutError"
        with socket.create_connection(where, timeout=4) as slow:
            slow.sendall(head + b"\r\n")
            assert b"200 OK" in slow.recv(65536)
            slow.sendall(head)  # a second request
            while slow.recv(65536):
                pass


def test_a_long_sort_delays_no_other_request(run):
    (opened,) = open_runs([run])
    opened.refresh()
    begun, finish = threading.Event(), threading.Event()
    columns = opened.store.columns

    def slow_columns(step):
        begun.set()
        assert finish.wait(30)
        return columns(step)

    opened.store.columns = slow_columns
    client = TestClient(make_app([opened], "127.0.0.1", 6060), base_url=f"http://{HOST}")
    with ThreadPoolExecutor() as pool:
        try:
            sort = pool.submit(client.get, "/api/rollouts?run=0&sort=reward")
            assert begun.wait(10)
            for path in ("runs", "response?run=0&step=1&row=0", "config?run=0", "series?run=0&names=reward/overall"):
                assert pool.submit(client.get, f"/api/{path}").result(timeout=10).status_code == 200
            assert not sort.done()
        finally:
            finish.set()
        assert sort.result(timeout=10).json()["total"] == 9
