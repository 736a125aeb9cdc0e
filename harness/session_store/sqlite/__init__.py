"""The session store over one SQLite file. The contract is `harness/session_store/session_store.py`."""

from harness.session_store.sqlite.sqlite_session_store import SqliteSessionStore, Statistics, StoreOptions

__all__ = ["SqliteSessionStore", "Statistics", "StoreOptions"]
