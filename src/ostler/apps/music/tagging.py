"""What the job `tag` does with one track: look at the file, run the model unless its content is known, keep and write what was found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from ostler import Cancel, Fail, Job, OstlerError
from ostler.apps.music import outputs
from ostler.apps.music.library import content
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import Tables, embeddings, libraries, models, now_ms, scores, tracks
from ostler.apps.music.walk import said, signed

if TYPE_CHECKING:
    from ostler.apps.music.tagger import Tagger

_loaded: list[Tagger] = []
_REASON = 1_000  # characters


def load() -> Tagger:
    """The model, loaded once in a worker and shared by its jobs. Raises ConfigError where it is missing."""
    if not _loaded:
        from ostler.apps.music.tagger import Tagger  # noqa: PLC0415

        _loaded.append(Tagger.load(*_model()))
    return _loaded[0]


def check() -> None:
    """Raise ConfigError, with what to do, when the model is missing: a node without it would only fail to start workers."""
    from ostler.apps.music import weights  # noqa: PLC0415

    name, folder = _model()
    if not _loaded and not (folder / (name or weights.DEFAULT)).is_dir():
        weights.load(name or weights.DEFAULT, folder)


def _model() -> tuple[str, Path]:
    from ostler.apps.music import app  # noqa: PLC0415

    rules = Rules.from_environment()
    return rules.model, rules.models_in(app.settings().data_dir)


class Tagging:
    """One run of the job for one track."""

    def __init__(self, tables: Tables, job: Job, track: int, *, crashes: int, runs: int) -> None:
        """`crashes` and `runs` are how many of them a job has at most."""
        self._tables, self._job, self._track = tables, job, track
        self._last_crash, self._last_run = job.crashes >= crashes, job.attempt >= runs

    def run(self) -> dict[str, Any]:
        """What became of it. Raises Fail where the file is to blame, and lets pass what another run may mend."""
        row = self._row()
        if row is None:
            raise Cancel(f"track {self._track} is not in a library any more")
        if row.state == "gone":
            raise Cancel(f"track {self._track} is gone: {row.shown}")
        path = os.path.join(row.root, row.path)  # noqa: PTH118  bytes
        self._expect_the_worst()
        try:
            self._look(row, path)
        except FileNotFoundError:
            raise self._vanished(row) from None
        except OSError as error:
            raise self._refused("UNREADABLE", f"it cannot be read: {said(error)}") from error
        try:
            how = self._found(row, path)
        except Fail as refusal:
            raise self._refused(refusal.code, str(refusal)) from refusal
        try:
            return {"track": self._track, "how": how, **outputs.apply(self._tables, self._track)._asdict()}
        except OSError as error:  # a full disk: another run may do better
            self._note(f"its tags could not be written: {said(error)}")
            raise

    def _row(self) -> Any | None:
        asked = select(tracks, libraries.c.root).join(libraries, libraries.c.id == tracks.c.library)
        with self._tables.read() as connection:
            return connection.execute(asked.where(tracks.c.id == self._track)).first()

    # ---- what the rows say, whatever happens to this process

    def _expect_the_worst(self) -> None:
        """The last run of a job that took its workers down, or never ended: if this one does not end either, nobody is left to
        write it down. A run that ends well writes something better.
        """
        if self._last_crash:
            self._set(
                state="toxic", reason=f"{self._job.crashes + 1} workers died on it: job {self._job.id} has the crash"
            )
        elif self._last_run:
            self._set(
                state="failed", reason=f"all {self._job.attempt} runs of job {self._job.id} failed or took too long"
            )

    def _set(self, **values: Any) -> None:
        with self._tables.write() as connection:
            connection.execute(update(tracks).where(tracks.c.id == self._track).values(**values))

    def _note(self, reason: str) -> None:
        self._set(reason=reason[:_REASON])

    def _refused(self, code: str, reason: str) -> Fail:
        self._set(state="failed", reason=reason[:_REASON])
        return Fail(code, reason)

    def _vanished(self, row: Any) -> Cancel:
        """A file that is not there: gone, or its library is not plugged in, and the next scan has it tagged."""
        if os.path.isdir(row.root) and os.listdir(row.root):  # noqa: PTH112, PTH208  bytes
            self._set(state="gone", before="new", reason="it was deleted before it was tagged", job=None)
            return Cancel(f"track {self._track} was deleted: {row.shown}")
        self._set(state="new", reason=None, job=None)
        return Cancel(f"the library of track {self._track} is not there; a scan that finds it has its tracks tagged")

    # ---- the file

    def _look(self, row: Any, path: bytes) -> None:
        facts = os.stat(path)  # noqa: PTH116  bytes
        self._content = content(path)
        self._facts = {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "inode": signed(facts.st_ino)}

    def _found(self, row: Any, path: bytes) -> str:
        """Have the scores of this content in the tables: those that are there, those of a copy, or the model's."""
        tagger = load()
        known = self._known(tagger.name, same=row.sha256 == self._content)
        if known is None:
            analysis = self._analysed(tagger, path)
            known = {"scores": analysis.scores.tobytes(), "vec": analysis.embedding.tobytes()}
            how = "analysed"
        else:
            how = known.pop("how")
        self._save(tagger, known, outputs.described(path))
        return how

    def _tick(self, seconds: float) -> None:
        self._job.check()
        self._job.progress(0, f"{seconds:.0f} s analysed")

    def _analysed(self, tagger: Tagger, path: bytes) -> Any:
        try:
            return tagger.analyse(path, tick=self._tick)
        except (OstlerError, OSError, MemoryError):
            raise
        except Exception as error:  # whatever a decoder or model finds wrong, it will find again
            raise Fail("UNDECODABLE", f"it cannot be decoded: {str(error) or type(error).__name__}") from error

    def _known(self, model: str, *, same: bool) -> dict[str, Any] | None:
        """What is known of the content already: of this track, or of another with the same bytes."""
        both = select(scores.c.scores, embeddings.c.vec, tracks.c.id).join(scores, scores.c.track == tracks.c.id)
        both = both.join(embeddings, (embeddings.c.track == tracks.c.id) & (embeddings.c.model == scores.c.model))
        own = tracks.c.id == self._track if same else tracks.c.sha256 == self._content
        with self._tables.read() as connection:
            row = connection.execute(both.where(own, scores.c.model == model).limit(1)).first()
        if row is None:
            return self._known(model, same=False) if same else None
        return {"scores": row.scores, "vec": row.vec, "how": "known" if row.id == self._track else f"as track {row.id}"}

    def _save(self, tagger: Tagger, known: dict[str, Any], said_of_itself: dict[str, Any]) -> None:
        now = now_ms()
        key = {"track": self._track, "model": tagger.name, "at": now}
        tagged = {"state": "tagged", "reason": None, "before": None, "tagged_at": now, "model": tagger.name}
        values = {**tagged, **self._facts, "sha256": self._content, **said_of_itself}
        with self._tables.write() as connection:
            if not connection.execute(update(tracks).where(tracks.c.id == self._track).values(**values)).rowcount:
                raise Cancel(f"track {self._track} was removed meanwhile")
            self._tables.upsert(connection, scores, [{**key, "scores": known["scores"]}])
            self._tables.upsert(connection, embeddings, [{**key, "vec": known["vec"]}])
            tags = json.dumps(list(tagger.tags))
            self._tables.upsert(connection, models, [{"model": tagger.name, "tags": tags, "used_at": now}])
