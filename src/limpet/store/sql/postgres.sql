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

-- name: discover
-- Differs: a question for each link, which the planner cannot turn into a join that reads all tasks.
INSERT INTO task (job, shard, host, key, state, lane, rank, source_shard, source_n)
SELECT s.job, s.shard, s.host, s.key, 'pending', 'ready', s.rank, s.source_shard, s.source_n
  FROM stage_link AS s
 WHERE (SELECT t.id FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.host = s.host AND t.key = s.key) IS NULL
 ORDER BY s.shard, s.host, s.key
ON CONFLICT (job, shard, host, key) DO NOTHING

-- name: repair_next_task
-- Differs: ids come from a sequence, which knows nothing of a row that was inserted with an id.
SELECT CASE WHEN n.highest >= n.next THEN setval(pg_get_serial_sequence('task', 'id'), n.highest) + 1 ELSE n.next END
  FROM (SELECT COALESCE(MAX(id), 0) AS highest, nextval(pg_get_serial_sequence('task', 'id')) AS next FROM task) AS n

-- name: verify_new_keys
-- Differs: OFFSET 0 has each batch's range planned for itself. As one join it is guessed to be a ninth of all tasks, and all are read.
SELECT t.id, t.shard, t.host, t.key, x.text, t.source_shard, t.source_n,
       CASE WHEN t.rank = CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority THEN 0 ELSE 1 END AS odd
  FROM ledger AS l
 CROSS JOIN LATERAL (SELECT * FROM task AS c WHERE c.id >= l.id_low AND c.id <= l.id_high AND c.source_shard = l.shard
                        AND c.source_n = l.n AND +c.job = l.job OFFSET 0) AS t
  LEFT JOIN task_text AS x ON x.id = t.id
 WHERE l.job = :job AND l.shard = :shard AND l.n > :after AND l.n <= :upto AND l.discovered > 0

-- name: promote
-- Differs: by an array of ids. A join with a table that the server has not counted may be made by reading all tasks.
UPDATE task SET lane = 'ready', due_ms = 0
 WHERE id = ANY (ARRAY(SELECT s.id FROM stage_id AS s))
   AND +job = :job AND +shard = :shard AND lane = 'waiting' AND state IN ('pending', 'failed')

-- name: claim
-- Differs: by an array of ids.
UPDATE task SET state = 'running', lane = 'running', due_ms = 0, tries = tries + 1, claim_epoch = :epoch, claim_n = :n, claim_solo = :solo
 WHERE id = ANY (ARRAY(SELECT s.id FROM stage_id AS s)) AND +job = :job AND +shard = :shard AND state IN ('pending', 'failed')

-- name: ended_among
-- Differs: by an array of ids.
SELECT id FROM task
 WHERE id = ANY (ARRAY(SELECT s.id FROM stage_id AS s)) AND +job = :job AND +shard = :shard AND state IN ('dead', 'skipped', 'done')
 ORDER BY id

-- name: revisit
-- Differs: by an array of ids.
UPDATE task SET state = 'pending', lane = 'ready', due_ms = 0, strikes = 0, lost = 0, solo = 0, throttled = 0,
       throttled_ms = 0, revisits = revisits + 1
 WHERE id = ANY (ARRAY(SELECT s.id FROM stage_id AS s)) AND +job = :job AND +shard = :shard AND state IN ('dead', 'skipped', 'done')

-- name: revisit_candidates
-- Differs: OFFSET 0 keeps the planner on the id; it believes that there are few such tasks, and would sort all of them.
SELECT t.id, t.tries, t.state, a.reason, x.text
  FROM (SELECT * FROM task AS c WHERE c.id > :cursor ORDER BY c.id OFFSET 0) AS t
  JOIN task_text AS x ON x.id = t.id
  LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.job = :job AND t.shard = :shard AND t.state IN ('dead', 'skipped', 'done')
 ORDER BY t.id LIMIT :most
