-- What MySQL and MariaDB say differently. Each statement here stands for the one of the same name in core.sql.
-- ON CONFLICT ... DO UPDATE SET becomes ON DUPLICATE KEY UPDATE, and words of MySQL's own are quoted, in mysql.py.

-- name: stage_tables
-- Differs: types have names of their own; the tables belong to the session.
CREATE TEMPORARY TABLE IF NOT EXISTS stage_link (
    job BIGINT, shard BIGINT, host BIGINT, key VARBINARY(16), rank BIGINT, source_shard BIGINT, source_n BIGINT,
    text LONGTEXT, url LONGTEXT, handler TEXT, payload LONGTEXT, priority BIGINT, depth BIGINT, hops BIGINT, chain LONGBLOB)
    CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE TEMPORARY TABLE IF NOT EXISTS stage_try (
    job BIGINT, shard BIGINT, n BIGINT, task BIGINT, try BIGINT, epoch BIGINT, to_state VARCHAR(16), to_lane VARCHAR(16),
    due_in_ms BIGINT, strike BIGINT, lost_more BIGINT, solo_more BIGINT, throttle_more BIGINT, was_solo BIGINT,
    outcome VARCHAR(16), reason TEXT, status BIGINT, offered VARBINARY(16), links BIGINT, records BIGINT, url LONGTEXT, detail LONGTEXT)
    CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE TEMPORARY TABLE IF NOT EXISTS stage_key (scope BIGINT, key VARBINARY(16));
CREATE TEMPORARY TABLE IF NOT EXISTS stage_id (id BIGINT)

-- name: lock_shard
-- Differs: a locking read, which waits for whoever still holds the row.
SELECT watermark FROM shard WHERE job = :job AND shard = :shard FOR UPDATE

-- name: discover
-- Differs: no ON CONFLICT; the row that is there is set to what it is.
INSERT INTO task (job, shard, host, key, state, lane, rank, source_shard, source_n)
SELECT s.job, s.shard, s.host, s.key, 'pending', 'ready', s.rank, s.source_shard, s.source_n
  FROM stage_link AS s
 WHERE NOT EXISTS (SELECT 1 FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.host = s.host AND t.key = s.key)
 ORDER BY s.shard, s.host, s.key
ON DUPLICATE KEY UPDATE task.id = task.id

-- name: finish
-- Differs: an UPDATE over a join. MySQL sets from left to right, and no column here is read after it was set.
UPDATE task JOIN stage_try AS s ON task.id = s.task
   SET task.throttled_ms = CASE WHEN s.throttle_more > 0 AND task.throttled_ms = 0 THEN {now_ms} ELSE task.throttled_ms END,
       task.throttled = task.throttled + s.throttle_more,
       task.due_ms = CASE WHEN s.due_in_ms > 0 THEN {now_ms} + s.due_in_ms ELSE 0 END,
       task.strikes = task.strikes + s.strike,
       task.lost = task.lost + s.lost_more,
       task.solo = task.solo + s.solo_more,
       task.claim_solo = 0,
       task.lane = s.to_lane,
       task.state = s.to_state
 WHERE task.job = s.job AND task.shard = s.shard AND task.state = 'running'
   AND task.claim_epoch = s.epoch AND task.tries = s.try

-- name: promote
-- Differs: an UPDATE over a join.
UPDATE task JOIN stage_id AS s ON task.id = s.id SET task.lane = 'ready', task.due_ms = 0
 WHERE task.job = :job AND task.shard = :shard AND task.lane = 'waiting' AND task.state IN ('pending', 'failed')

-- name: claim
-- Differs: an UPDATE over a join.
UPDATE task JOIN stage_id AS s ON task.id = s.id
   SET task.state = 'running', task.lane = 'running', task.due_ms = 0, task.tries = task.tries + 1,
       task.claim_epoch = :epoch, task.claim_n = :n, task.claim_solo = :solo
 WHERE task.job = :job AND task.shard = :shard AND task.state IN ('pending', 'failed')

-- name: revisit
-- Differs: an UPDATE over a join.
UPDATE task JOIN stage_id AS s ON task.id = s.id
   SET task.state = 'pending', task.lane = 'ready', task.due_ms = 0, task.strikes = 0, task.lost = 0, task.solo = 0,
       task.throttled = 0, task.throttled_ms = 0, task.revisits = task.revisits + 1
 WHERE task.job = :job AND task.shard = :shard AND task.state IN ('dead', 'skipped', 'done')

-- name: put_job
-- Differs: the row that is there is set to what it is; who made it is told by its shards.
INSERT INTO job (spider, slot, shards, key_version, hash_version, key_profile, key_digest, created_ms)
VALUES (:spider, :slot, :shards, :key_version, :hash_version, :key_profile, :key_digest, {now_ms})
ON DUPLICATE KEY UPDATE spider = spider

-- name: put_source
-- Differs: the row that is there is set to what it is.
INSERT INTO source (job, source, kind, digest, place, host, payload, position, closed)
SELECT :job, COALESCE(MAX(source), 0) + 1, :kind, :digest, :place, :host, :payload, 0, 0 FROM source WHERE job = :job
ON DUPLICATE KEY UPDATE source.position = source.position
