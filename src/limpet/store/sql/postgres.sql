-- What PostgreSQL says differently. Each statement here stands for the one of the same name in core.sql.

-- name: stage_tables
-- Differs: types have names of their own, and the tables are made where a pooler's connection lacks them.
CREATE TEMPORARY TABLE IF NOT EXISTS stage_link (
    job BIGINT, shard BIGINT, host BIGINT, key BYTEA, rank BIGINT, source_shard BIGINT, source_n BIGINT,
    text TEXT, url TEXT, handler TEXT, payload TEXT, priority BIGINT, depth BIGINT, hops BIGINT, chain BYTEA) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE IF NOT EXISTS stage_try (
    job BIGINT, shard BIGINT, n BIGINT, task BIGINT, try BIGINT, epoch BIGINT, to_state TEXT, to_lane TEXT,
    due_in_ms BIGINT, strike BIGINT, lost_more BIGINT, solo_more BIGINT, throttle_more BIGINT, was_solo BIGINT,
    outcome TEXT, reason TEXT, status BIGINT, offered BYTEA, links BIGINT, records BIGINT, url TEXT, detail TEXT) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE IF NOT EXISTS stage_key (scope BIGINT, key BYTEA) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE IF NOT EXISTS stage_id (id BIGINT) ON COMMIT DELETE ROWS

-- name: lock_shard
-- Differs: a locking read, which waits for whoever still holds the row.
SELECT watermark FROM shard WHERE job = :job AND shard = :shard FOR UPDATE
