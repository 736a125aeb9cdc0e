"""The session store behind an address."""

from clients.session_store.remote_session_store import RemoteSessionStore

__all__ = ["RemoteSessionStore"]
