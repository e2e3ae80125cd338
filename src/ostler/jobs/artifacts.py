"""Reading artifacts from any program: in the results of this data directory, or from the node that published them. Standard library alone.

Where all nodes share their results (one node, a bucket, a network disk that `results` names) an artifact is found there. Where each node has
a directory of its own, the store knows which one has it, and that node is asked over HTTP, with the secret that all nodes share.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from ostler.errors import NotFound, OstlerError, Unreachable
from ostler.jobs import results
from ostler.jobs.results import LocalResults, Published, Results, check_key
from ostler.names import media_type

if TYPE_CHECKING:
    from ostler.config import Settings
    from ostler.store.artifacts import ArtifactRow
    from ostler.store.store import Store

T = TypeVar("T")
INNER = "/api/v1/inner/artifacts/"
_PATIENCE = 10.0  # seconds that another node may be silent
_CHUNK = 1 << 18
_PAGE = 200  # artifacts that are read from the store at once


@dataclass(frozen=True)
class Artifact:
    """A file that a job has published. Its contents are read only when you ask for them."""

    key: str
    size: int
    sha256: str
    type: str
    """The media type, guessed from the key's name."""
    at: int
    """When it was published, in milliseconds UTC."""
    _reader: Reader = field(repr=False, compare=False)

    def open(self) -> IO[bytes]:
        """Its bytes, as a file to read from and to close. Raises NotFound when it was deleted or replaced since, and Unreachable when the
        node that has it cannot be asked.
        """
        return self._reader.open(self.key, self.sha256)

    def read_bytes(self) -> bytes:
        """Read the whole file into memory, and verify its checksum."""
        return b"".join(self._checked())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file, or into a directory under its own name, and return the path. The file appears complete and verified, or not at all."""
        target = Path(path)
        if target.is_dir():
            target /= self.key.rpartition("/")[2]
        part = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                for piece in self._checked():
                    file.write(piece)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def _checked(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        with self.open() as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
                yield piece
        if digest.hexdigest() != self.sha256:
            raise OstlerError(f"artifact {self.key}: the data does not match its checksum; it is incomplete or damaged")


@dataclass(frozen=True)
class JobArtifact(Artifact):
    """An artifact that a job uses."""

    _scratch: Callable[[], Path] = field(repr=False, compare=False)

    def path(self) -> Path:
        """A local file with its bytes, to read and not to change: the published file itself where that is on this machine, else a copy in
        the job's scratch.
        """
        return self._reader.local(self.key, self.sha256) or self._copied()

    def _copied(self) -> Path:
        folder = self._scratch() / "artifacts" / self.sha256
        target = folder / self.key.rpartition("/")[2]  # its name: programs look at endings
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.save(target)
        return target


class Reader:
    """Finds and opens artifacts. `read` does something with the store; it is asked only where nodes do not share their results."""

    def __init__(self, settings: Settings, read: Callable[[Callable[[Store], T]], T]) -> None:
        self._settings: Any = settings
        self._read: Any = read
        self._results = results.connect(settings.results, settings.data_dir)

    def get(self, key: str) -> Found:
        """What is published under the key, newest. Raises NotFound."""
        row = self._newest(check_key(key))
        found = nearest(self._results.find(key), row, self._home() if row else "")
        if found is None:
            raise missing(key, row)
        return found

    def artifact(self, key: str) -> Artifact:
        """`get`, to read from."""
        found = self.get(key)
        return Artifact(key, found.size, found.sha256, media_type(key), found.at, self)

    def of(self, job: int) -> list[Artifact]:
        """What a job has published, in the order of the keys. Raises NotFound when there is no such job."""
        self._read(lambda store: store.jobs.find(job))
        made: list[Artifact] = []
        rows: list[ArtifactRow] = []
        while rows := self._read(lambda store: store.jobs.artifacts.of(job, rows[-1].key if rows else "", _PAGE)):
            for row in completed(rows, self._results):
                assert row.size is not None and row.sha256 is not None and row.at is not None  # noqa: PT018
                made.append(Artifact(row.key, row.size, row.sha256, media_type(row.key), row.at, self))
            if len(rows) < _PAGE:
                break
        return made

    def open(self, key: str, sha256: str) -> IO[bytes]:
        taken = self._results.take(key)
        if taken is not None and taken[0].sha256 == sha256:
            return taken[1]
        if taken is not None:
            taken[1].close()
        row = self._newest(key)
        if row is not None and row.sha256 == sha256 and row.home != self._home():
            node, secret = self._read(lambda store: whose(store, row))
            return fetch(node, secret, row)
        if taken is not None or row is not None:
            raise NotFound(
                f"artifact {key} was replaced: another job, or another run, has published under this key since"
            )
        raise missing(key, row)

    def local(self, key: str, sha256: str) -> Path | None:
        """The published file itself, where it is on this machine."""
        if not isinstance(self._results, LocalResults):
            return None
        found = self._results.find(key)
        return self._results.path(key) if found is not None and found.sha256 == sha256 else None

    def _newest(self, key: str) -> ArtifactRow | None:
        from ostler.store.database import is_postgres  # noqa: PLC0415

        if not isinstance(self._results, LocalResults) or not is_postgres(self._settings.store):
            return None
        row: ArtifactRow | None = self._read(lambda store: store.jobs.artifacts.newest(key))
        return row

    def _home(self) -> str:
        from ostler.store.database import home  # noqa: PLC0415

        try:
            path = home(self._settings.store, self._settings.data_dir) / "home"
            return path.read_text(encoding="ascii").strip()
        except OSError:
            return ""


def by_store(settings: Settings) -> Callable[[Callable[[Store], T]], T]:
    """What a reader asks the store with, where it is asked seldom: a connection for each question."""

    def read(work: Callable[[Store], T]) -> T:
        from ostler.store import Store  # noqa: PLC0415

        with Store.open(settings.store, settings.data_dir, read_only=True) as store:
            return work(store)

    return read


# ---- where it is


class Found(Protocol):
    """What is known of an artifact, wherever it is: a `Published` here, an `ArtifactRow` of another node."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> Any: ...
    @property
    def sha256(self) -> Any: ...
    @property
    def at(self) -> Any: ...


def nearest(found: Published | None, row: ArtifactRow | None, home: str) -> Published | ArtifactRow | None:
    """The newest publish under a key: what is found here, or, by the store's row of it, on another node. `home` is our data directory."""
    if row is None or row.home == home or (found is not None and found.sha256 == row.sha256):
        return found
    return row


def missing(key: str, row: ArtifactRow | None) -> NotFound:
    if row is not None:
        return NotFound(
            f"artifact {key} of job {row.job} is gone: its file was deleted; `ostler retry {row.job}` runs the job again"
        )
    return NotFound(
        f"no artifact is published under {key!r}; `ostler artifacts JOB` lists what a job has published. "
        "Artifacts are deleted with their job (see retention)"
    )


def completed(rows: list[ArtifactRow], place: Results) -> list[ArtifactRow]:
    """The rows of artifacts that are there. One whose run died before it could say so is looked up in the results."""
    made = []
    for row in rows:
        found = None if row.at is not None else place.find(row.key)
        if row.at is not None:
            made.append(row)
        elif found is not None and found.job == row.job:
            made.append(row._replace(at=found.at, size=found.size, sha256=found.sha256))
    return made


# ---- another node


class Owner(NamedTuple):
    node: Mapping[str, Any]
    secret: str


def whose(store: Store, row: ArtifactRow) -> Owner:
    """The node that uses the data directory with the artifact now; raises Unreachable."""
    from ostler.store.fleet import read  # noqa: PLC0415
    from ostler.store.identity import SECRET  # noqa: PLC0415

    for node in read(store).living:
        if node["home"] == row.home:
            return Owner(node, store.meta.get(SECRET) or "")
    raise Unreachable(
        f"artifact {row.key} of job {row.job} is in the data directory of a node that is not running; start it, or set "
        "results to a place that all nodes share"
    )


def fetch(node: Mapping[str, Any], secret: str, row: ArtifactRow, span: tuple[int, int] | None = None) -> IO[bytes]:
    """The bytes of an artifact that another node has, all or those of the span (first and last); raises Unreachable or NotFound."""
    import http.client  # noqa: PLC0415
    import json  # noqa: PLC0415

    if not node["url"]:
        raise Unreachable(
            f"artifact {row.key} is on node {node['label']}, which listens on loopback only; set advertise (and host) there, or set "
            "results to a place that all nodes share"
        )
    parts = urlsplit(node["url"])
    path = f"{parts.path.rstrip('/')}{INNER}{quote(row.key)}?{urlencode({'node': node['id'], 'sha256': row.sha256})}"
    head = {"Authorization": f"Bearer {secret}", "Connection": "close"}
    if span is not None:
        head["Range"] = f"bytes={span[0]}-{span[1]}"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=_PATIENCE)
        connection.request("GET", path, headers=head)
        answer = connection.getresponse()  # closing it closes the connection
        if answer.status in (200, 206):
            return io.BufferedReader(answer)
        with answer:
            message = json.loads(answer.read(_CHUNK))["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise Unreachable(
            f"node {node['label']}, which has artifact {row.key}, cannot be read from at {node['url']} ({error}); check its advertise "
            "setting and the network, or set results to a place that all nodes share"
        ) from error
    raise (NotFound if answer.status == 404 else Unreachable)(f"node {node['label']} at {node['url']}: {message}")
