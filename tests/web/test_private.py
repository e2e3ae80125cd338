"""Private by default: what another user of the same machine can see and do. With real users."""

from __future__ import annotations

import grp
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ostler.jobs import results, scratch
from tests import users
from tests.harness import APP, FAST, call, until
from tests.users import NOBODY, STRANGER, as_root, place

_ = place
GROUP = next((g for g in grp.getgrall() if g.gr_gid not in (0, NOBODY, STRANGER)), None)


def modes(folder: Path) -> dict[str, int]:
    """Everything in the data directory, with its mode."""
    found = {".": stat.S_IMODE(folder.stat().st_mode)}
    for path in folder.rglob("*"):
        if path.relative_to(folder).parts[0] not in ("scratch", "run") and path.name != "node.log":
            found[str(path.relative_to(folder))] = stat.S_IMODE(path.lstat().st_mode)
    return found


def wrong_modes(folder: Path, directory: int, file: int, token: int) -> dict[str, str]:
    def wanted(name: str) -> int:
        return directory if (folder / name).is_dir() else token if name == "token" else file

    return {name: f"{mode:04o}" for name, mode in modes(folder).items() if mode != wanted(name)}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_nodes_user_can_read_what_a_node_writes_whatever_the_umask(make_node, tmp_path, umask: int) -> None:
    before = os.umask(umask)
    try:
        node = make_node("--pool", "work=1", "--pool", "other=1")
    finally:
        os.umask(before)
    node.wait_job(node.enqueue("other", say="hello"))
    assert {
        "ostler.db",
        "ostler.db-wal",
        "ostler.db-shm",
        "node.lock",
        "node.json",
        "doorbell",
        "token",
        "logs",
    } <= modes(node.folder).keys()
    assert wrong_modes(node.folder, 0o700, 0o600, 0o600) == {}


def test_an_existing_directory_is_tightened_at_the_next_start_and_the_log_says_so(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", start=False)
    (node.folder / "results" / "1").mkdir(parents=True)
    (node.folder / "results" / "1" / "clip.mp4").write_text("x")
    node.folder.chmod(0o755)
    outside = node.folder.parent / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    (node.folder / "link").symlink_to(outside)
    node.start()
    assert wrong_modes(node.folder, 0o700, 0o600, 0o600).keys() <= {"link"}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    assert "had mode 0755; it and its contents now have 0700" in node.log()
    node.stop()
    said = node.log().count("had mode")
    node.start()
    assert node.log().count("had mode") == said, "a directory that is private already is not worth a line"


def test_results_elsewhere_are_left_alone(make_node, tmp_path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    results.chmod(0o755)
    node = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_RESULTS=str(results))
    node.stop()
    assert stat.S_IMODE(results.stat().st_mode) == 0o755


@pytest.mark.parametrize("directory", [0o700, 0o2770])
def test_scratch_and_artifacts_are_as_private_as_the_data_directory(tmp_path, directory: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(directory)
    source = tmp_path / "clip"
    source.write_text("x")
    source.chmod(0o644)
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            results.connect("", data).put(source, f"{umask}/clip", 1)
            scratch.make(data / "scratch", umask, 1)
        finally:
            os.umask(before)
    file = 0o660 if directory == 0o2770 else 0o600
    assert {"results/0/clip", "results/63/.clip.ostler"} <= modes(data).keys()
    assert wrong_modes(data, directory, file, file) == {}
    assert {stat.S_IMODE(p.stat().st_mode) for p in (data / "scratch").rglob("*")} == {directory}


@as_root
def test_another_user_sees_nothing_and_needs_the_token_while_root_and_the_nodes_user_do_not(make_node, place) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=place / "data")
    info = f"{node.url}/api/v1/info"
    assert call(node.url, "GET", "/api/v1/info")[0] == 200
    assert users.run(NOBODY, "-c", f"open({str(node.folder / 'ostler.db')!r})").returncode != 0
    assert users.status(NOBODY, info) == 401
    assert users.status(NOBODY, f"{node.url}/api/v1/workers/pause", method="POST") == 401
    assert [users.status(NOBODY, node.url + path) for path in ("/healthz", "/readyz")] == [200, 200]
    token = (node.folder / "token").read_text().strip()
    assert users.status(NOBODY, info, Authorization=f"Bearer {token}") == 200
    assert users.status(NOBODY, info, Authorization=f"Bearer {token}x") == 401
    assert users.status(NOBODY, f"{node.url}/metrics") == 401
    assert users.status(NOBODY, f"{node.url}/metrics", Authorization=f"Bearer {token}") == 200, "as Prometheus does"
    node.stop()
    node.start()
    assert (node.folder / "token").read_text().strip() == token, "links and cookies outlive a restart"


def _whole(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("}")


@as_root
def test_a_node_of_another_user_trusts_that_user_and_root_alone(place) -> None:
    data = place / "data"
    data.mkdir()
    os.chown(data, NOBODY, NOBODY)
    argv = ("-m", "ostler", "up", str(APP), "--data", str(data), "--port", "0", "--pool", "work=1", "--pool", "other=0")
    with (place / "node.log").open("w") as log:
        node = users.popen(NOBODY, *argv, stdout=log, stderr=log, cwd=data, env=FAST)
    try:
        until(lambda: _whole(data / "node.json") or node.poll() is not None, "the node")
        assert node.poll() is None, (place / "node.log").read_text()
        info = json.loads((data / "node.json").read_text())["url"] + "/api/v1/info"
        assert users.status(NOBODY, info) == 200
        assert users.status(0, info) == 200
        assert users.status(STRANGER, info) == 401
        forwarded = {"X-Forwarded-For": "203.0.113.9"}
        assert users.status(NOBODY, info, **forwarded) == 401, "a proxy of the same user speaks for somebody else"
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(40)


@as_root
@pytest.mark.skipif(GROUP is None, reason="the machine has no group to share with")
def test_with_a_group_its_members_enqueue_in_python_and_by_command_and_others_are_told_what_to_do(
    make_node, place
) -> None:
    assert GROUP is not None
    node = make_node("--pool", "work=1", "--pool", "other=1", folder=place / "data", OSTLER_GROUP=GROUP.gr_name)
    assert wrong_modes(node.folder, 0o2770, 0o660, 0o640) == {}
    assert node.folder.stat().st_gid == GROUP.gr_gid
    env = {"OSTLER_DATA": str(node.folder)}
    code = "import tests.work as work; print(int(work.add.enqueue(a=1)))"
    member = users.run(NOBODY, "-c", code, groups=(GROUP.gr_gid,), env=env)
    assert member.returncode == 0, member.stderr
    node.wait_job(int(member.stdout))
    command = ("-m", "ostler", "enqueue", "add", "a=2", "--data", str(node.folder))
    done = users.run(NOBODY, *command, groups=(GROUP.gr_gid,))
    assert done.returncode == 0, done.stderr
    workers = users.run(NOBODY, "-m", "ostler", "health", "--data", str(node.folder), groups=(GROUP.gr_gid,))
    assert workers.returncode == 0, workers.stderr
    node.wait_job(node.enqueue("other", say="hello"))
    assert wrong_modes(node.folder, 0o2770, 0o660, 0o640) == {}
    for argv in (("-c", code), command, ("-m", "ostler", "jobs", "--data", str(node.folder))):
        other = users.run(STRANGER, *argv, env=env)
        assert other.returncode != 0
        assert "permission denied" in other.stderr
        assert re.search(r"mode 2770.*runs as user 65533.*group = .*HTTP API", other.stderr), other.stderr
        assert "try again" not in other.stderr


@as_root
def test_a_store_that_becomes_read_only_for_a_producer_is_permission_denied_and_not_busy(make_node, place) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=place / "data")
    node.folder.chmod(0o755)
    for path in node.folder.glob("ostler.db*"):
        path.chmod(0o644)
    code = "import tests.work as work; work.add.enqueue(a=1)"
    done = users.run(NOBODY, "-c", code, env={"OSTLER_DATA": str(node.folder)})
    assert "permission denied" in done.stderr
    assert "try again" not in done.stderr


@as_root
def test_the_token_command_prints_the_token_and_a_link_that_logs_in_without_leaving_it_in_the_address(
    make_node, place
) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=place / "data")
    done = users.run(0, "-m", "ostler", "token", "--data", str(node.folder))
    token, link = done.stdout.split()
    assert link == f"{node.url}/?token={token}"
    assert "permission denied" in users.run(NOBODY, "-m", "ostler", "token", "--data", str(node.folder)).stderr
    where = urlsplit(link)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.request("GET", f"{where.path}?{where.query}", headers={"X-Forwarded-Proto": "https"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie, _, rest = answer.headers["Set-Cookie"].partition(";")
    assert {"httponly", "samesite=strict", "secure"} <= {part.strip().lower() for part in rest.split(";")}
    assert users.status(NOBODY, f"{node.url}/api/v1/info", Cookie=f'a(b)=1; j={{"a":1}}; {cookie}') == 200


@as_root
def test_a_user_without_access_to_the_directory_reaches_the_node_with_the_token(make_node, place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    node = make_node("--pool", "work=1", "--pool", "other=0", "--port", str(port), folder=place / "data")
    token = (node.folder / "token").read_text().strip()
    argv = ("-m", "ostler", "health", "--data", str(node.folder))
    assert "permission denied" in users.run(NOBODY, *argv).stderr
    done = users.run(NOBODY, *argv, env={"OSTLER_TOKEN": token, "OSTLER_PORT": str(port)})
    assert done.returncode == 0, done.stderr


@as_root
def test_a_directory_whose_mode_cannot_be_changed_is_one_warning(place) -> None:
    data = place / "data"
    data.mkdir()
    data.chmod(0o777)
    (data / "token").write_text("planted")
    (data / "token").chmod(0o644)
    os.chown(data / "token", STRANGER, STRANGER)
    code = (
        "import logging, sys; from pathlib import Path; from ostler import private; logging.basicConfig()\n"
        "data = Path(sys.argv[1]); private.prepare(data); private.make(data / 'logs'); private.open(data / 'a', 'w').close()\n"
        "print(private.token(data))"
    )
    done = users.run(NOBODY, "-c", code, str(data))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1, done.stderr
    assert "its mode is 0777" in done.stderr
    assert done.stdout.strip() != "planted", "a token that somebody else has put there is not the node's"
    assert stat.S_IMODE((data / "token").stat().st_mode) == 0o600


@as_root
def test_a_directory_of_everybody_is_not_closed(place) -> None:
    place.chmod(0o1777)
    code = (
        "import logging, sys; from pathlib import Path; from ostler import private; private.prepare(Path(sys.argv[1]))"
    )
    done = users.run(0, "-c", code, str(place))
    assert "left unchanged" in done.stderr
    assert stat.S_IMODE(place.stat().st_mode) == 0o1777


@as_root
def test_a_bench_in_a_temporary_directory_needs_no_rights(place) -> None:
    code = (
        "import tests.work as work\nfrom ostler.testing import Bench\n"
        "with Bench(work.app) as bench:\n    job = bench.enqueue(work.add, a=1)\n    bench.run()\n    print(bench.job(job)['status'])\n"
    )
    done = users.run(NOBODY, "-c", code)
    assert done.stdout.strip() == "done", done.stderr


def test_jobs_do_not_see_the_token(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", ready=False, OSTLER_TOKEN="sesame")
    bearer = {"Authorization": "Bearer sesame"}

    def healthy() -> list[int]:
        workers = call(node.url, "GET", "/api/v1/workers", headers=bearer)[1]["workers"]
        return [w["pid"] for w in workers if w["status"] == "healthy"]

    pid = until(healthy, "a worker")[0]
    assert b"OSTLER_DATA=" in Path(f"/proc/{pid}/environ").read_bytes()
    assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()


# ---- behind a reverse proxy

PROXY = """
import http.client, http.server, sys
upstream, host = sys.argv[1], sys.argv[2]
class Proxy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        connection = http.client.HTTPConnection(upstream, timeout=30)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        sent["Host"] = self.headers["Host"] if host == "keep" else upstream
        connection.request(self.command, self.path, body, sent)
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_POST = do_GET
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
print(server.server_port, flush=True)
server.serve_forever()
"""


@as_root
@pytest.mark.parametrize("host", ["keep", "rewrite"])
@pytest.mark.parametrize("uid", [NOBODY, 0])
def test_behind_a_proxy_a_public_name_works_with_the_token_and_not_without(
    make_node, place, host: str, uid: int
) -> None:
    node = make_node(
        "--pool",
        "work=1",
        "--pool",
        "other=0",
        folder=place / "data",
        ready=False,
        OSTLER_PUBLIC="jobs.example.org, other.example",
    )
    token = (node.folder / "token").read_text().strip()
    proxy = users.popen(uid, "-c", PROXY, urlsplit(node.url).netloc, host, stdout=subprocess.PIPE)
    assert proxy.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(proxy.stdout.readline())}"
        page = {"Host": "jobs.example.org", "Origin": "https://jobs.example.org"}
        bearer = {"Authorization": f"Bearer {token}"}
        assert call(url, "GET", "/api/v1/info", headers=page)[0] == 401
        assert call(url, "GET", "/api/v1/info", headers={**page, **bearer})[0] == 200
        assert call(url, "POST", "/api/v1/workers/resume", headers={**page, **bearer})[0] == 200
        evil = {**page, **bearer, "Origin": "https://evil.example"}
        assert call(url, "POST", "/api/v1/workers/resume", headers=evil)[0] == 403
        if host == "keep":
            assert call(url, "GET", "/api/v1/info", headers={**bearer, "Host": "evil.example"})[0] == 403
    finally:
        proxy.kill()
        proxy.wait()
        proxy.stdout.close()
