"""The session store on PostgreSQL."""

from harness.session_store.postgres.postgres_session_store import PostgresSessionStore

__all__ = ["PostgresSessionStore"]
