-- Version 2: collecting that costs money. Charges and purses, answers that were paid for, tallies, registers, high-water
-- marks, settlements and alerts.
--
-- Money is integer micro-credits: a credit is 1,000,000 of them.

-- What a shard may still spend: granted from its job's purse, and from a day's purse for the day that it names. Only the
-- owner of the shard changes it, under its fence.
CREATE TABLE escrow (
    job           INTEGER NOT NULL,
    shard         INTEGER NOT NULL,
    allowance     INTEGER NOT NULL,
    day           TEXT    NOT NULL,
    day_allowance INTEGER NOT NULL,
    n             INTEGER NOT NULL,
    PRIMARY KEY (job, shard)
) WITHOUT ROWID;

-- What a job ("job:7"), or a spider on a day ("day:serp:2026-11-30"), may spend. `granted` is out in allowances, or spent.
CREATE TABLE purse (
    name    TEXT    NOT NULL PRIMARY KEY,
    budget  INTEGER,  -- NULL: no limit
    granted INTEGER NOT NULL
);

-- One row for each try of a task that costs. `reserved` is committed with the claim, before any request.
CREATE TABLE charge (
    job      INTEGER NOT NULL,
    shard    INTEGER NOT NULL,
    task     INTEGER NOT NULL,
    try      INTEGER NOT NULL,
    handler  TEXT    NOT NULL,
    host     TEXT    NOT NULL,  -- who was asked; '' while nobody was
    day      TEXT    NOT NULL,  -- the day whose purse pays; '' where none does
    state    TEXT    NOT NULL,
    reserved INTEGER NOT NULL,
    amount   INTEGER NOT NULL,  -- what it cost; of an unknown one what it may have cost
    requests INTEGER NOT NULL,
    reason   TEXT    NOT NULL,
    n        INTEGER NOT NULL,  -- the batch that wrote it last
    at_ms    INTEGER NOT NULL,
    anew     INTEGER NOT NULL DEFAULT 0,  -- 1: the next try wants another answer, under another idempotency key
    PRIMARY KEY (job, shard, task, try),
    CHECK (anew IN (0, 1)),
    CHECK (state IN ('reserved', 'charged', 'refunded', 'void', 'unknown'))
) WITHOUT ROWID;

CREATE INDEX charge_open ON charge (job, shard, state);

-- What a person, or a provider's bill, says of charges of unknown outcome; the owner of the shard applies it.
CREATE TABLE settlement (
    job       INTEGER NOT NULL,
    shard     INTEGER NOT NULL,
    task      INTEGER NOT NULL,
    try       INTEGER NOT NULL,
    state     TEXT    NOT NULL,
    amount    INTEGER NOT NULL,
    who       TEXT    NOT NULL,
    at_ms     INTEGER NOT NULL,
    applied_n INTEGER,
    PRIMARY KEY (job, shard, task, try),
    CHECK (state IN ('charged', 'refunded'))
) WITHOUT ROWID;

-- Answers that were paid for, until their task is done: a later try reads them and sends nothing.
CREATE TABLE kept (
    job     INTEGER NOT NULL,
    shard   INTEGER NOT NULL,
    task    INTEGER NOT NULL,
    request BLOB    NOT NULL,  -- digest of method, URL, body
    n       INTEGER NOT NULL,
    try     INTEGER NOT NULL,
    status  INTEGER NOT NULL,
    url     TEXT    NOT NULL,
    headers TEXT    NOT NULL,  -- JSON: pairs
    body    BLOB    NOT NULL,  -- compressed (zlib)
    at_ms   INTEGER NOT NULL,
    PRIMARY KEY (job, shard, task, request)
) WITHOUT ROWID;

-- Shared counters: a row for each shard, written under its fence, summed on reading.
CREATE TABLE tally (
    job   INTEGER NOT NULL,
    shard INTEGER NOT NULL,
    name  TEXT    NOT NULL,
    value INTEGER NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (job, shard, name)
) WITHOUT ROWID;

-- Shared values: every version stays. A write is the next version, or is lost.
CREATE TABLE register (
    spider  TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    version INTEGER NOT NULL,
    value   TEXT    NOT NULL,  -- canonical JSON
    job     INTEGER NOT NULL,
    shard   INTEGER NOT NULL,
    n       INTEGER NOT NULL,
    task    INTEGER NOT NULL,
    try     INTEGER NOT NULL,
    PRIMARY KEY (spider, name, version)
) WITHOUT ROWID;

CREATE INDEX register_batch ON register (job, shard, n);

-- How far a sweep has seen: the lowest and highest value in each shard, as "type:text".
CREATE TABLE candidate (
    job     INTEGER NOT NULL,
    shard   INTEGER NOT NULL,
    name    TEXT    NOT NULL,
    handler TEXT    NOT NULL,
    low     TEXT    NOT NULL,
    high    TEXT    NOT NULL,
    seen    INTEGER NOT NULL,
    gaps    INTEGER NOT NULL,  -- whether a gap below what was seen is worth a warning
    n       INTEGER NOT NULL,
    PRIMARY KEY (job, shard, name, handler)
) WITHOUT ROWID;

-- High-water marks: what a complete sweep has reached; every version stays.
CREATE TABLE mark (
    spider  TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    version INTEGER NOT NULL,
    value   TEXT    NOT NULL,
    low     TEXT    NOT NULL,  -- the lowest value that the sweep saw
    gap     TEXT    NOT NULL,  -- '' or what lies between this sweep and the one before, unseen
    job     INTEGER NOT NULL,
    at_ms   INTEGER NOT NULL,
    PRIMARY KEY (spider, name, version)
) WITHOUT ROWID;

-- What people are to be told, once for each incident. Whoever is alive sends it; `sent_ms` is 0 until then.
CREATE TABLE alert (
    id       INTEGER PRIMARY KEY,
    job      INTEGER NOT NULL,
    kind     TEXT    NOT NULL,
    incident TEXT    NOT NULL,
    text     TEXT    NOT NULL,
    made_ms  INTEGER NOT NULL,
    sent_ms  INTEGER NOT NULL DEFAULT 0,
    busy_ms  INTEGER NOT NULL DEFAULT 0,  -- somebody is sending it, until then
    tries    INTEGER NOT NULL DEFAULT 0,
    error    TEXT    NOT NULL DEFAULT '',
    UNIQUE (job, kind, incident)
);

-- Jobs whose tasks and tries were removed after a full proof, with what they came to; ledger and datasets stay.
CREATE TABLE sealed (
    job       INTEGER NOT NULL PRIMARY KEY,
    at_ms     INTEGER NOT NULL,
    tasks     INTEGER NOT NULL,
    done      INTEGER NOT NULL,
    skipped   INTEGER NOT NULL,
    dead      INTEGER NOT NULL,
    charged   INTEGER NOT NULL,
    vector    BLOB    NOT NULL  -- digest of the watermarks at which the proof had passed
);

-- Keys whose record is an older offer, or an older version, since a batch took the one that stood away: the record keeps
-- its own stamp, so an export of what is new looks here too.
CREATE TABLE heir (
    dataset TEXT    NOT NULL,
    scope   INTEGER NOT NULL,
    key     BLOB    NOT NULL,
    job     INTEGER NOT NULL,
    shard   INTEGER NOT NULL,
    n       INTEGER NOT NULL,
    PRIMARY KEY (dataset, scope, key, job, shard)
) WITHOUT ROWID;
