"""Compose files of task folders: what becomes a service, and what is refused by name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task import Healthcheck, Service, Task
from gyre_sdk.harness.workspace.contexts import for_classic

DATA = Path(__file__).parents[3] / "shared" / "data" / "harbor-tasks"


def folder(place: Path, compose: str) -> Path:
    files = {
        "task.toml": '[environment]\ndocker_image = "gyre/base"\n[environment.env]\nB = "task"\n',
        "instruction.md": "Do it.",
        "tests/test.sh": "true",
        "environment/docker-compose.yaml": compose,
        "environment/web/Dockerfile": "FROM gyre/base",
    }
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    return place


def load(place: Path, compose: str, **variables: str) -> Task:
    return Task.load(folder(place, compose), variables=variables)


def test_a_real_file():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is missing: the shared data are not part of the repository")
    place = (DATA / "cookbook-multi-container" / "environment").resolve()
    assert Task.load(place.parent).services == (
        Service(
            name="api-server",
            dockerfile=place / "api-server",
            healthcheck=Healthcheck(
                command=shlex.join(
                    [
                        "python3",
                        "-c",
                        "import socket; s=socket.create_connection(('localhost',5000),timeout=2); s.close()",
                    ]
                ),
                interval_s=2.0,
                timeout_s=5.0,
                retries=15,
                start_period_s=5.0,
                start_interval_s=1.0,
            ),
        ),
    )


def test_all_that_a_service_can_say(tmp_path):
    task = load(
        tmp_path,
        """
name: demo
x-note: ignored
services:
  main:
    depends_on: [web]
    environment: ["A=1", "B=compose"]
  web:
    build: { context: ./web }
    depends_on: { db: { condition: service_healthy } }
    command: serve --port 80 "two words"
    environment: { PORT: 80, DEBUG: true, KEY: "${KEY}", MODE: "${MODE:-plain}" }
    expose: ["80"]
  db:
    image: gyre/base
    entrypoint: ["/bin/db"]
    command: ["-v"]
    user: 1000
    working_dir: /data
    healthcheck: { test: ["CMD-SHELL", "test -e /ready"], interval: 1m30s, timeout: 500ms, retries: 2 }
""",
        KEY="given",
    )
    assert [service.name for service in task.services] == ["db", "web"]
    db, web = task.services
    assert (db.image, db.entrypoint, db.command, db.user, db.workdir) == (
        "gyre/base",
        ("/bin/db",),
        ("-v",),
        "1000",
        "/data",
    )
    assert db.healthcheck is not None and db.healthcheck.command == "test -e /ready"
    assert (db.healthcheck.interval_s, db.healthcheck.timeout_s, db.healthcheck.retries) == (90.0, 0.5, 2)
    assert web.dockerfile == (tmp_path / "environment" / "web").resolve()
    assert web.command == ("serve", "--port", "80", "two words")
    assert web.env == {"PORT": "80", "DEBUG": "true", "KEY": "given", "MODE": "plain"}
    assert task.env == {"A": "1", "B": "task"}


SERVICE = "services:\n  web:\n    image: gyre/base\n"


@pytest.mark.parametrize(
    ("compose", "words"),
    [
        ("services: [", ["docker-compose.yaml", "cannot be read"]),
        ("- a", ["no services"]),
        ("services: []", ["services", "table"]),
        (SERVICE + "volumes: { data: {} }", ["volumes", "not supported"]),
        (SERVICE + "networks: { back: {} }", ["networks", "not supported"]),
        (SERVICE + "    volumes: ['/:/host']", ["services.web.volumes", "/:/host", "not supported"]),
        (SERVICE + "    privileged: true", ["services.web.privileged", "True", "not supported"]),
        (SERVICE + "    ports: ['80:80']", ["services.web.ports", "not supported"]),
        (SERVICE + "    network_mode: host", ["services.web.network_mode", "host"]),
        (SERVICE + "    build: ./web", ["one of them"]),
        ("services:\n  web: {}", ["an image or a build"]),
        ("services:\n  web:\n    build: ../..", ["services.web.build", "a folder below"]),
        ("services:\n  web:\n    build: ./none", ["services.web.build", "a folder below"]),
        ("services:\n  web:\n    build: { context: ./web, target: a }", ["services.web.build.target", "Dockerfile"]),
        (SERVICE + "    environment: { KEY: '${KEY}' }", ["services.web.environment.KEY", "--set KEY=VALUE"]),
        (SERVICE + "    environment: [KEY]", ["services.web.environment", "NAME=VALUE"]),
        (SERVICE + "    environment: { KEY: }", ["services.web.environment", "NAME: VALUE"]),
        (SERVICE + "    depends_on: [db]", ["services.web.depends_on", "db", "not there"]),
        (SERVICE + "    healthcheck: { test: [true] }", ["services.web.healthcheck.test", "CMD"]),
        (SERVICE + "    healthcheck: { test: x, interval: soon }", ["healthcheck.interval", "soon", "1m30s"]),
        ("services:\n  main:\n    image: other", ["services.main.image", "task.toml"]),
        ("services:\n  Web_1:\n    image: a", ["Web_1", "lower-case"]),
    ],
)
def test_what_is_refused(tmp_path, compose, words):
    with pytest.raises(TaskError) as caught:
        load(tmp_path, compose)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("COPY a.py b.md .", "COPY a.py b.md ./"),
        ("  copy --chown=1:1 a b .\nRUN x", "  copy --chown=1:1 a b ./\nRUN x"),
        ("COPY a .", "COPY a ."),
        ("COPY a b /app", "COPY a b /app"),
        ("COPY a b ./", "COPY a b ./"),
        ("RUN cp a b .", "RUN cp a b ."),
        ('COPY ["a", "b", "."]', 'COPY ["a", "b", "."]'),
    ],
)
def test_dockerfiles_for_the_classic_builder(given, wanted):
    assert for_classic(given.encode()).decode() == wanted
