-- The schema of Limpet, version 1: SQLite's form. `store/migrate.py` applies the files of this
-- folder in order, one transaction each, and never edits one that was released.
--
-- Times are integer milliseconds since 1970, UTC, of the database's clock. Unique keys of the
-- protocol's own tables begin (job, shard). There are no foreign keys between hot tables: they
-- lock the parent row. Keys are 16 bytes, each kept beside the text that it digests.

CREATE TABLE meta (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);

-- One run of a spider. `halted`: a broken invariant, nobody claims. `paused`: by the breaker or a person.
CREATE TABLE job (
    job          INTEGER PRIMARY KEY,
    spider       TEXT    NOT NULL,
    slot         TEXT    NOT NULL,
    shards       INTEGER NOT NULL,
    key_version  INTEGER NOT NULL,
    hash_version INTEGER NOT NULL,
    key_profile  TEXT    NOT NULL,
    key_digest   BLOB    NOT NULL,
    created_ms   INTEGER NOT NULL,
    halted       TEXT    NOT NULL DEFAULT '',
    paused       TEXT    NOT NULL DEFAULT '',
    paused_code  BLOB    NOT NULL DEFAULT x'',
    verified     BLOB    NOT NULL DEFAULT x'',  -- digest of the watermarks at which a full verify passed
    UNIQUE (spider, slot)
);

-- One process incarnation. The lease is this row: `beat` counts heartbeats, `dead` is final.
CREATE TABLE worker (
    worker         TEXT    NOT NULL PRIMARY KEY,
    job            INTEGER NOT NULL,  -- the job that it works on
    host           TEXT    NOT NULL,
    pid            INTEGER NOT NULL,
    boot           TEXT    NOT NULL,
    lock_path      TEXT    NOT NULL,
    lock_device    INTEGER NOT NULL,
    lock_inode     INTEGER NOT NULL,
    beat           INTEGER NOT NULL,
    lease_ms       INTEGER NOT NULL,
    lease_until_ms INTEGER NOT NULL,
    started_ms     INTEGER NOT NULL,
    dead           INTEGER NOT NULL DEFAULT 0,
    dead_reason    TEXT    NOT NULL DEFAULT '',
    CHECK (dead IN (0, 1))
);

-- A fixed slice of a job's tasks. Ownership: owner and epoch. Progress: watermark.
CREATE TABLE shard (
    job       INTEGER NOT NULL,
    shard     INTEGER NOT NULL,
    owner     TEXT,
    epoch     INTEGER NOT NULL,
    watermark INTEGER NOT NULL,
    verified  INTEGER NOT NULL DEFAULT 0,  -- verify has passed up to this batch
    PRIMARY KEY (job, shard)
) WITHOUT ROWID;

-- A list of starts. Its position moves by compare-and-set, in a batch of whoever reads it.
CREATE TABLE source (
    job      INTEGER NOT NULL,
    source   INTEGER NOT NULL,
    kind     TEXT    NOT NULL,
    digest   BLOB    NOT NULL,
    place    TEXT    NOT NULL,  -- path of the file; '' where `payload` holds the list
    host     TEXT    NOT NULL,  -- the machine that has the file
    payload  TEXT    NOT NULL,
    position INTEGER NOT NULL,
    closed   INTEGER NOT NULL,
    PRIMARY KEY (job, source),
    UNIQUE (job, kind, digest),
    CHECK (closed IN (0, 1))
);

-- The hot table: narrow, changed in place, by id.
CREATE TABLE task (
    id           INTEGER PRIMARY KEY,
    job          INTEGER NOT NULL,
    shard        INTEGER NOT NULL,
    host         INTEGER NOT NULL,
    key          BLOB    NOT NULL,
    state        TEXT    NOT NULL,
    lane         TEXT,  -- where an open task waits; NULL once it has ended
    due_ms       INTEGER NOT NULL DEFAULT 0,
    rank         INTEGER NOT NULL DEFAULT 0,  -- smaller is sooner: priority, then depth
    tries        INTEGER NOT NULL DEFAULT 0,
    strikes      INTEGER NOT NULL DEFAULT 0,
    lost         INTEGER NOT NULL DEFAULT 0,
    solo         INTEGER NOT NULL DEFAULT 0,
    throttled    INTEGER NOT NULL DEFAULT 0,
    throttled_ms INTEGER NOT NULL DEFAULT 0,  -- since when
    revisits     INTEGER NOT NULL DEFAULT 0,
    claim_epoch  INTEGER NOT NULL DEFAULT 0,
    claim_n      INTEGER NOT NULL DEFAULT 0,
    claim_solo   INTEGER NOT NULL DEFAULT 0,
    source_shard INTEGER NOT NULL,
    source_n     INTEGER NOT NULL,
    UNIQUE (job, shard, host, key),
    CHECK (state IN ('pending', 'running', 'failed', 'done', 'skipped', 'dead')),
    CHECK (CASE
        WHEN state IN ('done', 'skipped', 'dead') THEN lane IS NULL
        WHEN lane IS NULL THEN lane IS NOT NULL
        WHEN state = 'running' THEN lane = 'running'
        ELSE lane IN ('ready', 'waiting', 'suspect', 'parked') END),
    CHECK (due_ms = 0 OR lane IN ('waiting', 'suspect'))
);

-- All that a claim, a take-over and the question "is anything left?" read: open tasks only.
CREATE INDEX task_open ON task (job, shard, lane, due_ms, host, rank, id) WHERE lane IS NOT NULL;

-- Dead letters, to list and to put back.
CREATE INDEX task_dead ON task (job, shard, id) WHERE state = 'dead';

-- What a task is: written once.
CREATE TABLE task_text (
    id       INTEGER PRIMARY KEY,
    text     TEXT    NOT NULL,
    url      TEXT    NOT NULL,  -- as found; '' where it is the same as `text`
    handler  TEXT    NOT NULL,
    payload  TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    depth    INTEGER NOT NULL,
    hops     INTEGER NOT NULL,
    chain    BLOB    NOT NULL
);

-- Tasks that ended as `skipped: moved`, and where to: two that moved to each other are found here.
CREATE TABLE moved (
    job    INTEGER NOT NULL,
    key    BLOB    NOT NULL,
    target BLOB    NOT NULL,
    shard  INTEGER NOT NULL,
    task   INTEGER NOT NULL,
    n      INTEGER NOT NULL,
    PRIMARY KEY (job, key)
) WITHOUT ROWID;

-- One row for the end of each try, never changed.
CREATE TABLE attempt (
    job     INTEGER NOT NULL,
    shard   INTEGER NOT NULL,
    n       INTEGER NOT NULL,
    task    INTEGER NOT NULL,
    try     INTEGER NOT NULL,
    outcome TEXT    NOT NULL,
    reason  TEXT    NOT NULL,
    status  INTEGER NOT NULL,
    strike  INTEGER NOT NULL,
    solo    INTEGER NOT NULL,
    offered BLOB    NOT NULL,
    links   INTEGER NOT NULL,
    records INTEGER NOT NULL,
    url     TEXT    NOT NULL,  -- address of the answer, or the target of a move
    detail  TEXT    NOT NULL,
    at_ms   INTEGER NOT NULL,
    PRIMARY KEY (job, shard, n, task),
    UNIQUE (task, try),
    CHECK (outcome IN ('done', 'skipped', 'failed', 'dead', 'released', 'throttled', 'lost')),
    CHECK (reason <> '' OR outcome NOT IN ('skipped', 'failed', 'dead'))
) WITHOUT ROWID;

-- One row per batch, never changed; each seals the one before it.
CREATE TABLE ledger (
    job        INTEGER NOT NULL,
    shard      INTEGER NOT NULL,
    n          INTEGER NOT NULL,
    kind       TEXT    NOT NULL,
    batch_id   BLOB    NOT NULL,
    owner      TEXT    NOT NULL,
    epoch      INTEGER NOT NULL,
    at_ms      INTEGER NOT NULL,
    done       INTEGER NOT NULL,
    skipped    INTEGER NOT NULL,
    failed     INTEGER NOT NULL,
    dead       INTEGER NOT NULL,
    released   INTEGER NOT NULL,
    throttled  INTEGER NOT NULL,
    lost       INTEGER NOT NULL,
    claimed    INTEGER NOT NULL,
    discovered INTEGER NOT NULL,
    id_low     INTEGER NOT NULL,
    id_high    INTEGER NOT NULL,
    revisited  INTEGER NOT NULL,
    deltas     TEXT    NOT NULL,  -- {"dataset": [new, replaced, kept, removed, conflicts]}
    code       BLOB    NOT NULL,
    digest     BLOB    NOT NULL,  -- over the batch's attempt rows
    previous   BLOB    NOT NULL,  -- seal of row n - 1
    seal       BLOB    NOT NULL,  -- over this whole row
    PRIMARY KEY (job, shard, n),
    CHECK (kind IN ('work', 'takeover', 'release', 'request', 'repair'))
) WITHOUT ROWID;

-- Put back by hand: a task's counters start anew after this try.
CREATE TABLE revisit (
    job       INTEGER NOT NULL,
    shard     INTEGER NOT NULL,
    n         INTEGER NOT NULL,
    task      INTEGER NOT NULL,
    after_try INTEGER NOT NULL,
    PRIMARY KEY (job, shard, n, task)
) WITHOUT ROWID;

CREATE INDEX revisit_task ON revisit (task, after_try);

-- What people and tools ask of a shard; its owner applies it in its next batch.
CREATE TABLE request (
    id        INTEGER PRIMARY KEY,
    job       INTEGER NOT NULL,
    shard     INTEGER NOT NULL,
    what      TEXT    NOT NULL,
    argument  TEXT    NOT NULL,
    who       TEXT    NOT NULL,
    at_ms     INTEGER NOT NULL,
    cursor    INTEGER NOT NULL DEFAULT 0,  -- task ids up to here are done with
    changed   INTEGER NOT NULL DEFAULT 0,
    applied_n INTEGER,
    CHECK (what IN ('retry', 'repair', 'pause_host', 'resume_host'))
);

CREATE INDEX request_open ON request (job, shard, id) WHERE applied_n IS NULL;

-- The pace of each host, committed with the batch that changed it. `held`: why a person has paused it; no pace touches that.
CREATE TABLE host (
    job       INTEGER NOT NULL,
    shard     INTEGER NOT NULL,
    host      INTEGER NOT NULL,
    authority TEXT    NOT NULL,
    delay_ms  INTEGER NOT NULL,
    next_ms   INTEGER NOT NULL,
    pause     TEXT    NOT NULL,
    errors    INTEGER NOT NULL,
    held      TEXT    NOT NULL DEFAULT '',
    n         INTEGER NOT NULL,
    PRIMARY KEY (job, shard, host)
) WITHOUT ROWID;

CREATE TABLE robots (
    job      INTEGER NOT NULL,
    shard    INTEGER NOT NULL,
    origin   TEXT    NOT NULL,
    outcome  TEXT    NOT NULL,
    status   INTEGER NOT NULL,
    body     BLOB    NOT NULL,
    until_ms INTEGER NOT NULL,
    n        INTEGER NOT NULL,
    PRIMARY KEY (job, shard, origin)
) WITHOUT ROWID;

-- The record types that have a table of their own here.
CREATE TABLE dataset (
    name       TEXT    NOT NULL PRIMARY KEY,  -- the table: spider_type
    spider     TEXT    NOT NULL,
    type       TEXT    NOT NULL,
    scope      TEXT    NOT NULL,
    policy     TEXT    NOT NULL,
    definition TEXT    NOT NULL,
    created_ms INTEGER NOT NULL,
    UNIQUE (spider, type)
);

-- Offers of a key by other tasks than the one whose record stands.
CREATE TABLE offer (
    dataset  TEXT    NOT NULL,
    scope    INTEGER NOT NULL,
    key      BLOB    NOT NULL,
    slot     TEXT    NOT NULL,
    task_key BLOB    NOT NULL,
    task     INTEGER NOT NULL,
    try      INTEGER NOT NULL,
    job      INTEGER NOT NULL,
    shard    INTEGER NOT NULL,
    n        INTEGER NOT NULL,
    key_text TEXT    NOT NULL,
    content  BLOB    NOT NULL,
    row_json TEXT    NOT NULL,
    PRIMARY KEY (dataset, scope, key, slot, task_key)
) WITHOUT ROWID;

CREATE INDEX offer_task ON offer (task);
