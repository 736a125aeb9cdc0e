"""The tables, by the version that brought them. Changed by a new migration only, never here."""

from __future__ import annotations

from typing import Final

APPLICATION_ID: Final = 0x554E5253
"""Marks a database file as a session store ("UNRS")."""

# `session_key` stands for a session inside the file. Rows that belong to an item carry its sequence, so that a fork
# sees an ancestor's rows up to its cut, and a deletion keeps exactly those. Whole messages lie in `record` columns,
# last in their rows: what lists and checks need is before them. Times are microseconds since 1970, UTC.
VERSION_1: Final = """
CREATE TABLE store (store_id TEXT NOT NULL);

CREATE TABLE sessions (
    session_key INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL UNIQUE,
    session_uid TEXT NOT NULL,
    visibility INTEGER NOT NULL,
    needs_purge INTEGER NOT NULL DEFAULT 0,
    format_version INTEGER NOT NULL,
    max_item_version INTEGER NOT NULL DEFAULT 0,
    max_operation_version INTEGER NOT NULL DEFAULT 0,
    update_time_us INTEGER NOT NULL,
    base_sequence INTEGER NOT NULL DEFAULT 0,
    fork_end_sequence INTEGER NOT NULL DEFAULT 0,
    fork_request_id TEXT,
    last_sequence INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 0,
    latest_turn_id TEXT NOT NULL DEFAULT '',
    is_turn_open INTEGER NOT NULL DEFAULT 0,
    last_commit_id TEXT NOT NULL DEFAULT '',
    session_state INTEGER NOT NULL,
    due_time_us INTEGER,
    epoch INTEGER NOT NULL DEFAULT 0,
    owner_id TEXT NOT NULL DEFAULT '',
    owner_name TEXT NOT NULL DEFAULT '',
    owner_address TEXT NOT NULL DEFAULT '',
    former_owner BLOB,
    rest BLOB NOT NULL
);
CREATE INDEX sessions_by_state ON sessions (visibility, session_state, session_id);
CREATE INDEX sessions_in_order ON sessions (visibility, session_id);
CREATE INDEX sessions_due ON sessions (owner_id, due_time_us) WHERE due_time_us IS NOT NULL;
CREATE INDEX sessions_owned ON sessions (owner_id) WHERE owner_id <> '';
CREATE INDEX sessions_to_purge ON sessions (session_key) WHERE needs_purge = 1;
CREATE INDEX sessions_by_fork_request ON sessions (fork_request_id) WHERE fork_request_id IS NOT NULL;

CREATE TABLE session_records (session_key INTEGER PRIMARY KEY, record BLOB NOT NULL);

CREATE TABLE ancestors (
    session_key INTEGER NOT NULL,
    through_sequence INTEGER NOT NULL,
    after_sequence INTEGER NOT NULL,
    ancestor_key INTEGER NOT NULL,
    PRIMARY KEY (session_key, through_sequence)
) WITHOUT ROWID;
CREATE INDEX ancestors_by_ancestor ON ancestors (ancestor_key, through_sequence);

CREATE TABLE items (
    item_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE UNIQUE INDEX items_by_sequence ON items (session_key, sequence);

CREATE TABLE inputs (
    session_key INTEGER NOT NULL,
    input_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (session_key, input_id)
) WITHOUT ROWID;

CREATE TABLE turns (
    session_key INTEGER NOT NULL,
    turn_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    answer_sequence INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session_key, turn_id)
) WITHOUT ROWID;
CREATE INDEX turns_by_sequence ON turns (session_key, sequence);

CREATE TABLE calls (
    session_key INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    response_sequence INTEGER NOT NULL,
    first_status_sequence INTEGER NOT NULL,
    final_sequence INTEGER NOT NULL,
    operation_ids TEXT NOT NULL,
    PRIMARY KEY (session_key, call_id)
) WITHOUT ROWID;
CREATE INDEX calls_by_response ON calls (session_key, response_sequence);
CREATE INDEX calls_by_final ON calls (session_key, final_sequence, response_sequence);

CREATE TABLE operations (
    operation_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL,
    operation_id TEXT NOT NULL,
    type TEXT NOT NULL,
    type_version INTEGER NOT NULL,
    status INTEGER NOT NULL,
    step INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    is_settled INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE UNIQUE INDEX operations_by_id ON operations (session_key, operation_id);
CREATE INDEX operations_in_order ON operations (session_key);
CREATE INDEX operations_by_revision ON operations (session_key, revision);
CREATE INDEX operations_unsettled ON operations (session_key) WHERE is_settled = 0;

CREATE TABLE blobs (
    blob_key INTEGER PRIMARY KEY AUTOINCREMENT,
    session_key INTEGER NOT NULL,
    digest TEXT NOT NULL,
    size_bytes INTEGER,
    media_type TEXT NOT NULL,
    put_time_us INTEGER NOT NULL,
    reference_sequence INTEGER
);
CREATE UNIQUE INDEX blobs_by_digest ON blobs (session_key, digest);
CREATE INDEX blobs_unreferenced ON blobs (put_time_us) WHERE reference_sequence IS NULL;
CREATE TABLE blob_chunks (
    blob_key INTEGER NOT NULL,
    offset_bytes INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE UNIQUE INDEX blob_chunks_by_offset ON blob_chunks (blob_key, offset_bytes);

CREATE TABLE incarnations (
    name TEXT PRIMARY KEY,
    incarnation_id TEXT NOT NULL,
    address TEXT NOT NULL,
    lease_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE ended_incarnations (incarnation_id TEXT PRIMARY KEY, end_time_us INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE tokens (
    token_key INTEGER PRIMARY KEY AUTOINCREMENT,
    token_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL UNIQUE,
    change_number INTEGER NOT NULL,
    secret_sha256 BLOB NOT NULL,
    record BLOB NOT NULL
);
CREATE UNIQUE INDEX tokens_by_change ON tokens (change_number);
"""

# NULL: written before there were checksums.
VERSION_2: Final = """
ALTER TABLE items ADD COLUMN checksum INTEGER;
ALTER TABLE operations ADD COLUMN checksum INTEGER;
"""

# What a check that changes nothing lays over a file of version 1, so that it reads like one of version 2.
VERSION_1_AS_2: Final = """
CREATE TEMP VIEW items AS SELECT *, NULL AS checksum FROM main.items;
CREATE TEMP VIEW operations AS SELECT *, NULL AS checksum FROM main.operations;
"""
