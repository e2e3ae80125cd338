"""What the job `tag` does with one track: look at the file, run the model unless its content is known, keep and write what was found."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, select, update

from ostler import Cancel, Fail, Job, OstlerError
from ostler.apps.music import outputs
from ostler.apps.music.moves import content
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import Tables, embeddings, libraries, models, now_ms, scores, tracks, words
from ostler.apps.music.walk import file_facts, located, plain, said
from ostler.apps.music.writing import Changed

if TYPE_CHECKING:
    from ostler.apps.music.tagger import Tagger

_loaded: list[Tagger] = []
_LARGEST = 16 << 30  # bytes: a sparse file of terabytes would keep a worker busy for hours


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
    """One run of the job for one version of a track. What a run for an earlier version finds is not kept: the file has changed since."""

    def __init__(self, tables: Tables, job: Job, track: int, version: int, *, crashes: int, runs: int) -> None:
        """`crashes` and `runs` are how many of them a job has at most."""
        self._tables, self._job, self._track = tables, job, track
        self._own = and_(tracks.c.id == track, tracks.c.version == version)
        self._last_crash, self._last_run = job.crashes >= crashes, job.attempt >= runs

    def run(self) -> dict[str, Any]:
        """What became of it. Raises Fail where the file is to blame, and lets pass what another run may mend."""
        row = self._row()
        if row is None:
            raise Cancel(
                f"track {self._track} is not in a library any more, or has changed since: then another job tags it"
            )
        if row.state == "gone":
            raise Cancel(f"track {self._track} is gone: {row.shown}")
        self._expect_the_worst()
        try:
            path = located(row.root, row.path)
            self._look(path)
            how = self._found(row, path)
        except Fail as refusal:
            raise self._refused(refusal.code, str(refusal)) from refusal
        except Changed:
            raise
        except OSError as error:
            raise self._unreadable(row, error) from None
        return {"track": self._track, "how": how, **outputs.apply(self._tables, self._track)._asdict()}

    def _row(self) -> Any | None:
        asked = select(tracks, libraries.c.root).join(libraries, libraries.c.id == tracks.c.library)
        with self._tables.read() as connection:
            return connection.execute(asked.where(self._own)).first()

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
        if reason := values.get("reason"):
            values["reason"] = plain(reason)
        with self._tables.write() as connection:
            connection.execute(update(tracks).where(self._own).values(**values))

    def _refused(self, code: str, reason: str) -> Fail:
        self._set(state="failed", reason=reason)
        return Fail(code, reason)

    def _unreadable(self, row: Any, error: OSError) -> Exception:
        """What to make of a file that cannot be read: its library is not plugged in, and the next scan has it tagged; or the file is
        gone; or it is to blame. Other errors may pass: there are more runs.
        """
        if not _is_there(row.root):
            self._set(state="new", reason=None, job=None)
            return Cancel(
                f"the library of track {self._track} is not there; a scan that finds it has its tracks tagged"
            )
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            self._set(state="gone", before="new", reason="it was deleted before it was tagged", job=None)
            return Cancel(f"track {self._track} was deleted: {row.shown}")
        if self._last_run or isinstance(error, PermissionError):
            return self._refused("UNREADABLE", f"it cannot be read: {said(error)}")
        return error

    # ---- the file

    def _look(self, path: bytes) -> None:
        self._facts = file_facts(os.stat(path))  # noqa: PTH116  bytes
        if self._facts["size"] > _LARGEST:
            raise Fail(
                "TOO_LARGE", f"it has {self._facts['size'] / 2**30:.1f} GB; files of up to {_LARGEST >> 30} GB are read"
            )
        self._content = content(path)

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
        described = outputs.described(path)
        if file_facts(os.stat(path)) != self._facts:  # noqa: PTH116  bytes
            raise Changed(errno.EBUSY, "the file was changed while it was analysed", os.fsdecode(path))
        self._save(tagger, known, described)
        return how

    def _tick(self, seconds: float) -> None:
        self._job.check()
        self._job.progress(0, f"{seconds:.0f} s analysed")

    def _analysed(self, tagger: Tagger, path: bytes) -> Any:
        try:
            found = tagger.analyse(path, tick=self._tick)
        except (OstlerError, OSError, MemoryError):
            raise
        except Exception as error:  # whatever a decoder or model finds wrong, it will find again
            raise Fail("UNDECODABLE", f"it cannot be decoded: {str(error) or type(error).__name__}") from error
        if not all(math.isfinite(value) for value in (*found.scores.tolist(), *found.embedding.tolist())):
            raise Fail("NO_SCORES", f"the model {tagger.name} gave it scores that are not numbers")
        return found

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
            shown = connection.execute(select(tracks.c.shown).where(self._own).with_for_update()).scalar()
            if shown is None:
                raise Cancel(f"track {self._track} was removed meanwhile, or has changed: then another job tags it")
            values["words"] = words(shown, *(said_of_itself[name] for name in ("title", "artist", "album")))
            connection.execute(update(tracks).where(self._own).values(**values))
            self._tables.upsert(connection, scores, [{**key, "scores": known["scores"]}])
            self._tables.upsert(connection, embeddings, [{**key, "vec": known["vec"]}])
            tags = json.dumps(list(tagger.tags))
            self._tables.upsert(connection, models, [{"model": tagger.name, "tags": tags, "used_at": now}])


def _is_there(root: bytes) -> bool:
    """Whether a library can be looked at, and is not an empty mount point."""
    try:
        return bool(os.listdir(root))  # noqa: PTH208  bytes
    except OSError:
        return False
