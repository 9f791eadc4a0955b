-- What MySQL and MariaDB say differently. Each statement here stands for the one of the same name in core.sql.
-- ON CONFLICT ... DO UPDATE SET becomes ON DUPLICATE KEY UPDATE, and words of MySQL's own are quoted, in mysql.py.

-- name: stage_tables
-- Differs: types have names of their own; the tables belong to the session. Links have an index: what is new is joined to them,
-- and without one each new task is held against each link.
CREATE TEMPORARY TABLE IF NOT EXISTS stage_link (
    job BIGINT, shard BIGINT, host BIGINT, key VARBINARY(16), rank BIGINT, source_shard BIGINT, source_n BIGINT,
    text LONGTEXT, url LONGTEXT, handler TEXT, payload LONGTEXT, priority BIGINT, depth BIGINT, hops BIGINT, chain LONGBLOB,
    KEY stage_link_key (shard, key))
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
-- Differs: an UPDATE over a join, in this order, by this index: any other would lock tasks of others. MySQL sets from left to
-- right, and no column here is read after it was set.
UPDATE stage_try AS s STRAIGHT_JOIN task FORCE INDEX (PRIMARY) ON task.id = s.task
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
-- Differs: an UPDATE over a join, in this order, by this index.
UPDATE stage_id AS s STRAIGHT_JOIN task FORCE INDEX (PRIMARY) ON task.id = s.id SET task.lane = 'ready', task.due_ms = 0
 WHERE task.job = :job AND task.shard = :shard AND task.lane = 'waiting' AND task.state IN ('pending', 'failed')

-- name: claim
-- Differs: an UPDATE over a join, in this order, by this index.
UPDATE stage_id AS s STRAIGHT_JOIN task FORCE INDEX (PRIMARY) ON task.id = s.id
   SET task.state = 'running', task.lane = 'running', task.due_ms = 0, task.tries = task.tries + 1,
       task.claim_epoch = :epoch, task.claim_n = :n, task.claim_solo = :solo
 WHERE task.job = :job AND task.shard = :shard AND task.state IN ('pending', 'failed')

-- name: revisit
-- Differs: an UPDATE over a join, in this order, by this index.
UPDATE stage_id AS s STRAIGHT_JOIN task FORCE INDEX (PRIMARY) ON task.id = s.id
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

-- name: put_register
-- Differs: the row that is there is set to what it is.
INSERT INTO register (spider, name, version, value, job, shard, n, task, try)
VALUES (:spider, :name, :version, :value, :job, :shard, :n, :task, :try)
ON DUPLICATE KEY UPDATE register.task = register.task

-- name: put_mark
-- Differs: the row that is there is set to what it is.
INSERT INTO mark (spider, name, version, value, low, gap, job, at_ms)
VALUES (:spider, :name, :version, :value, :low, :gap, :job, {now_ms})
ON DUPLICATE KEY UPDATE mark.version = mark.version

-- name: new_purse
-- Differs: the row that is there is set to what it is.
INSERT INTO purse (name, budget, granted) VALUES (:name, NULL, 0) ON DUPLICATE KEY UPDATE purse.granted = purse.granted

-- name: verify_new_keys
-- Differs: batches first, then the range of each. Otherwise all tasks are read.
SELECT t.id, t.shard, t.host, t.key, x.text, t.source_shard, t.source_n,
       CASE WHEN t.rank = CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority THEN 0 ELSE 1 END AS odd
  FROM ledger AS l
  STRAIGHT_JOIN task AS t FORCE INDEX (PRIMARY)
        ON t.id >= l.id_low AND t.id <= l.id_high AND t.source_shard = l.shard AND t.source_n = l.n AND +t.job = l.job
  LEFT JOIN task_text AS x ON x.id = t.id
 WHERE l.job = :job AND l.shard = :shard AND l.n > :after AND l.n <= :upto AND l.discovered > 0

-- name: verify_discovered
-- Differs: a join, with the range of each batch. As a question in the list of columns all tasks are counted for each.
SELECT l.n, l.kind, l.discovered, l.deltas, l.id_low, l.id_high, COUNT(t.id)
  FROM ledger AS l
  LEFT JOIN task AS t FORCE INDEX (PRIMARY)
       ON t.id >= l.id_low AND t.id <= l.id_high AND t.source_shard = l.shard AND t.source_n = l.n AND t.job = l.job
 WHERE l.job = :job AND l.shard = :shard AND l.n > :after AND l.n <= :upto AND (l.discovered <> 0 OR l.kind = 'repair')
 GROUP BY l.n, l.kind, l.discovered, l.deltas, l.id_low, l.id_high ORDER BY l.n

-- name: alert_put
-- Differs: no ON CONFLICT; the row that is there is set to what it is.
INSERT INTO alert (job, kind, incident, text, made_ms) VALUES (:job, :kind, :incident, :text, {now_ms})
ON DUPLICATE KEY UPDATE alert.id = alert.id

-- name: lose_charges
-- Differs: MySQL sets from left to right, and the state is told by the amount as it was.
UPDATE charge SET state = CASE WHEN amount > 0 THEN 'charged' ELSE 'unknown' END, reason = 'its worker was lost', n = :n, at_ms = {now_ms},
       amount = CASE WHEN amount > 0 THEN amount ELSE reserved END
 WHERE job = :job AND shard = :shard AND state = 'reserved'

-- name: money_left
-- Differs: this index, since all charges of a shard look like a narrow range to it.
SELECT (SELECT budget FROM purse WHERE name = :name), (SELECT granted FROM purse WHERE name = :name),
       (SELECT COUNT(*) FROM shard AS s CROSS JOIN charge AS m FORCE INDEX (charge_open)
         WHERE s.job = :job AND m.job = s.job AND m.shard = s.shard AND m.state = 'reserved')
