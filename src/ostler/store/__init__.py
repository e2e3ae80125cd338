"""ONE STORE: the record. The control channel is the signal."""

from ostler.store.store import Store, database_path, now_ms

__all__ = ["Store", "database_path", "now_ms"]
