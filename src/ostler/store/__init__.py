"""ONE STORE: the record. The control channel is the signal."""

from ostler.store.database import home
from ostler.store.store import Store, now_ms

__all__ = ["Store", "home", "now_ms"]
