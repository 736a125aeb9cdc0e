"""The session store's contract; implementations are imported from their own modules."""

from harness.session_store.session_store import (
    BLOB_CHUNK_BYTES,
    INPUT_SCHEMA_VERSION,
    ITEM_SCHEMA_VERSION,
    MAX_INLINE_TEXT_BYTES,
    OPERATION_SCHEMA_VERSION,
    SESSION_FORMAT_VERSION,
    SessionStore,
    get_blob_bytes,
    put_blob_bytes,
)

__all__ = [
    "BLOB_CHUNK_BYTES",
    "INPUT_SCHEMA_VERSION",
    "ITEM_SCHEMA_VERSION",
    "MAX_INLINE_TEXT_BYTES",
    "OPERATION_SCHEMA_VERSION",
    "SESSION_FORMAT_VERSION",
    "SessionStore",
    "get_blob_bytes",
    "put_blob_bytes",
]
