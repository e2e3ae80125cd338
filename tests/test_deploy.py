"""What is in Dockerfile, compose.yaml and deploy/ fits the node: its settings, its port, its probes and the time it needs to stop."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ostler import config
from ostler.jobs import dispatcher
from tests.harness import call

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ENVS = (ROOT / "deploy" / "Dockerfile.envs").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
UNIT = (ROOT / "deploy" / "systemd" / "ostler.service").read_text()
PODS = {
    p.name: p.read_text() for p in (ROOT / "deploy" / "kubernetes").rglob("*.yaml") if "containers:" in p.read_text()
}
ALL = {p: p.read_text() for p in (ROOT / "deploy").rglob("*.*")} | {"Dockerfile": DOCKERFILE, "compose.yaml": COMPOSE}

# What a stop can take at worst: workers that heed nothing, families that hide, streams that stay, a store that does not answer.
SWEEP, STREAMS, LANES = 3.0, 3.0, 5.0
WORST_STOP = (
    config.Settings().stop_grace + config.Settings().term_grace + SWEEP + STREAMS + 2 * dispatcher._LAST_TURN + LANES
)


def instruction(name: str) -> str:
    """The Dockerfile's (last) line of that instruction, with those that continue it."""
    found = re.findall(rf"^{name} ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    assert found, f"the Dockerfile has no {name}"
    return re.sub(r"\\\n\s*", " ", found[-1])


def numbers(pattern: str, text: str) -> list[int]:
    found = [int(n) for n in re.findall(pattern, text, re.MULTILINE)]
    assert found, f"nothing matches {pattern}"
    return found


def test_every_variable_is_a_setting() -> None:
    names = {name for text in ALL.values() for name in re.findall(r"\bOSTLER_([A-Z_]+)\b", text)}
    assert len(names) >= 8
    unknown = {n for n in map(str.lower, names) if n not in config.NODE_KEYS}
    assert unknown == set()


def test_everything_names_the_same_port() -> None:
    port = config.Settings().port
    assert numbers(r"^EXPOSE (\d+)$", DOCKERFILE) == numbers(r"OSTLER_PORT=(\d+)", DOCKERFILE) == [port]
    assert set(numbers(r'^ +- "127\.0\.0\.1:\d+:(\d+)"$', COMPOSE)) == {port}
    for text in PODS.values():
        assert numbers(r"containerPort: (\d+)$", text) == [port]
    assert numbers(r"^ +port: (\d+)$", (ROOT / "deploy" / "kubernetes" / "service.yaml").read_text()) == [port]
    advertised = [
        n for text in ALL.values() for n in re.findall(r"ADVERTISE:? *(?:value: )?http://[^\s/]+:(\d+)", text)
    ]
    advertised += re.findall(r"value: http://\$\(POD_IP\):(\d+)", "".join(PODS.values()))
    assert len(advertised) == 3
    assert set(map(int, advertised)) == {port}


def test_everybody_waits_for_longer_than_a_stop_can_take() -> None:
    waits = numbers(r"^TimeoutStopSec=(\d+)$", UNIT) + numbers(r"--stop-timeout (\d+)", DOCKERFILE)
    node = COMPOSE[COMPOSE.index("x-node:") : COMPOSE.index("services:")]
    waits += numbers(r"stop_grace_period: (\d+)s", node)
    for text in PODS.values():
        before = [int(n) for n in re.findall(r'command: \["sleep", "(\d+)"\]', text)]
        waits.append(numbers(r"terminationGracePeriodSeconds: (\d+)$", text)[0] - sum(before))
    assert len(waits) == 5
    assert min(waits) > WORST_STOP
    promised = numbers(r"the largest `stop_grace` \+ `term_grace` \+ (\d+) s", OPERATIONS)
    assert promised == [WORST_STOP - config.Settings().stop_grace - config.Settings().term_grace]


def test_probes_are_answered_without_a_token(make_node) -> None:
    paths = {p for text in ALL.values() for p in re.findall(r"path: (/\S+)", text)}
    assert paths == {"/healthz", "/readyz"}
    node = make_node(ready=False, OSTLER_TOKEN="a-secret")
    assert call(node.url, "GET", "/api/v1/info")[0] == 401
    assert call(node.url, "GET", "/healthz")[0] == 200
    assert call(node.url, "GET", "/readyz")[0] in (200, 503)


def test_the_images_health_check_tells_a_running_node_from_a_stopped_one(make_node) -> None:
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    node = make_node(ready=False)
    env = {**node.env, "OSTLER_PORT": node.url.rpartition(":")[2]}

    def healthy() -> bool:
        return subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True, timeout=60).returncode == 0

    assert command[0] == "python"
    assert healthy()
    assert node.stop() == 0
    assert not healthy()


def test_the_node_is_the_containers_first_process_and_no_root() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == [
        "ostler"
    ]  # a string would be run by a shell, which forwards no signals
    assert json.loads(instruction("CMD"))[0] == "up"
    assert instruction("STOPSIGNAL") == "SIGTERM"
    user = instruction("USER").partition(":")[0]
    assert user != "0"
    for text in PODS.values():
        assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", text)) == {user}


def test_volumes_are_where_the_node_keeps_its_data() -> None:
    data = re.search(r"OSTLER_DATA=(\S+)", DOCKERFILE)[1]
    assert instruction("VOLUME") == data
    assert len(re.findall(rf"- node-[12]:{data}$", COMPOSE, re.MULTILINE)) == 2
    for text in PODS.values():
        assert f"mountPath: {data}\n" in text
        assert f"value: {data}/node\n" in text
    results = re.search(r"OSTLER_RESULTS: (\S+)", COMPOSE)[1]
    assert results in DOCKERFILE  # made there for the image's user; a volume takes after it
    assert len(re.findall(rf"- results:{results}$", COMPOSE, re.MULTILINE)) == 2


def test_the_variables_that_kubernetes_makes_of_a_service_are_kept_out(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match="OSTLER_PORT"):
        config.load(environ={"OSTLER_PORT": "tcp://10.0.0.1:8356"})
    assert len(PODS) == 2
    assert all("enableServiceLinks: false\n" in text for text in PODS.values())


def test_all_that_the_image_copies_reaches_the_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert source.partition("/")[0] in allowed


def test_the_image_installs_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = set(re.search(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)[1].split(","))
    assert wanted <= set(extras)


def test_the_operations_page_names_these_files() -> None:
    links = re.findall(r"\]\(([^)#]*)", OPERATIONS)
    assert {"../compose.yaml", "../deploy/systemd/ostler.service"} <= {*links}


def test_the_image_with_environments_builds_them_as_the_nodes_user_and_not_in_the_volume() -> None:
    folder = re.search(r"OSTLER_ENV_DIR=(\S+)", ENVS)[1]
    assert not folder.startswith(instruction("VOLUME"))
    assert f"install -d -o ostler -g ostler {folder}" in ENVS
    built = ENVS.index("RUN ostler env build")
    assert re.findall(r"^USER (\S+)$", ENVS[:built], re.MULTILINE)[-1] == instruction("USER")
    assert json.loads(re.search(r"^CMD (.*)$", ENVS, re.MULTILINE)[1])[0] == "up"
    shown = (ROOT / "docs" / "environments.md").read_text()
    assert ENVS[ENVS.index("FROM") :] in shown


def test_the_image_of_the_task_server_has_two_of_its_environments() -> None:
    from ostler.apps.models import app

    text = (ROOT / "deploy" / "Dockerfile.models").read_text()
    assert text[text.index("FROM") :] in (ROOT / "docs" / "apps-models.md").read_text()
    built = re.findall(r"^RUN ostler env build (\S+) --app ostler.apps.models$", text, re.MULTILINE)
    assert len(built) == 2
    assert set(built) < set(app.envs)


def test_the_command_in_that_image_builds_all_environments_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from ostler import Ostler\napp = Ostler()\napp.env('one')\napp.job('q', env='one')(lambda job: None)\n"
    )
    (tmp_path / "ostler.toml").write_text("[env.two]\n")
    command = re.search(r"^RUN (ostler env .*)$", ENVS, re.MULTILINE)[1].split()
    env = {**os.environ, "OSTLER_ENV_DIR": str(tmp_path / "envs")}
    for args in (command[1:], ["check", "app.py"]):
        done = subprocess.run(
            [sys.executable, "-m", "ostler", *args], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "envs").iterdir() if p.is_symlink()} == {"one", "two"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "ostler.service"
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
