-- Every statement of the protocol, in the order in which a batch meets them.
--
-- The text is plain SQL that SQLite, PostgreSQL and MariaDB share; {now_ms} is the database's
-- clock, :name a parameter. Where a database needs other words, `sql/<database>.sql` holds the
-- whole statement again under the same name, and its comment begins "Differs:". Statements are
-- found by name (`-- name: fence`); nothing is ever put together from text that came from a site.

-- ---------------------------------------------------------------------------------------
-- 0. Stage. Temporary tables of the connection, filled before any shared row is touched.
-- ---------------------------------------------------------------------------------------

-- name: stage_tables
CREATE TEMPORARY TABLE stage_link (
    job INTEGER, shard INTEGER, host INTEGER, key BLOB, rank INTEGER, source_shard INTEGER, source_n INTEGER,
    text TEXT, url TEXT, handler TEXT, payload TEXT, priority INTEGER, depth INTEGER, hops INTEGER, chain BLOB);
CREATE TEMPORARY TABLE stage_try (
    job INTEGER, shard INTEGER, n INTEGER, task INTEGER, try INTEGER, epoch INTEGER, to_state TEXT, to_lane TEXT,
    due_in_ms INTEGER, strike INTEGER, lost_more INTEGER, solo_more INTEGER, throttle_more INTEGER, was_solo INTEGER,
    outcome TEXT, reason TEXT, status INTEGER, offered BLOB, links INTEGER, records INTEGER, url TEXT, detail TEXT);
CREATE TEMPORARY TABLE stage_key (scope INTEGER, key BLOB);
CREATE TEMPORARY TABLE stage_id (id INTEGER);

-- name: unstage
DELETE FROM stage_link;
DELETE FROM stage_try;
DELETE FROM stage_key;
DELETE FROM stage_id;

-- ---------------------------------------------------------------------------------------
-- 1. Fence. One row or none: none means that the shard is no longer ours.
-- ---------------------------------------------------------------------------------------

-- name: fence
-- Locks the shard's row first of all, so that every batch of a shard is one after the other. A clean
-- stop gives the shard up here; the epoch stays, since nobody else has had the shard.
UPDATE shard
   SET watermark = :n,
       verified = CASE WHEN :verified > verified THEN :verified ELSE verified END,
       owner = CASE WHEN :kind = 'release' THEN NULL ELSE owner END
 WHERE job = :job AND shard = :shard AND owner = :owner AND epoch = :epoch AND watermark = :n - 1

-- name: read_shard
SELECT owner, epoch, watermark, verified FROM shard WHERE job = :job AND shard = :shard

-- name: lock_shard
-- SQLite's write transaction holds every row as it is.
SELECT watermark FROM shard WHERE job = :job AND shard = :shard

-- name: read_batch_id
SELECT batch_id FROM ledger WHERE job = :job AND shard = :shard AND n = :n

-- ---------------------------------------------------------------------------------------
-- 2. Discover. The anti-join meets what is there; the conflict clause meets what came meanwhile.
-- ---------------------------------------------------------------------------------------

-- name: highest_task
SELECT COALESCE(MAX(id), 0) FROM task

-- name: discover
INSERT INTO task (job, shard, host, key, state, lane, rank, source_shard, source_n)
SELECT s.job, s.shard, s.host, s.key, 'pending', 'ready', s.rank, s.source_shard, s.source_n
  FROM stage_link AS s
 WHERE NOT EXISTS (SELECT 1 FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.host = s.host AND t.key = s.key)
 ORDER BY s.shard, s.host, s.key
ON CONFLICT (job, shard, host, key) DO NOTHING

-- name: discover_text
-- Only rows that this batch has just inserted: nobody else has this source stamp.
INSERT INTO task_text (id, text, url, handler, payload, priority, depth, hops, chain)
SELECT t.id, s.text, s.url, s.handler, s.payload, s.priority, s.depth, s.hops, s.chain
  FROM stage_link AS s
  JOIN task AS t ON t.job = s.job AND t.shard = s.shard AND t.host = s.host AND t.key = s.key
 WHERE t.id > :before AND t.source_shard = s.source_shard AND t.source_n = s.source_n
 ORDER BY t.id

-- name: count_discovered
-- `+job` keeps the planner on the id: the rows are the last ones.
SELECT source_shard, source_n, COUNT(*), MIN(id), MAX(id)
  FROM task WHERE id > :before AND +job = :job GROUP BY source_shard, source_n

-- ---------------------------------------------------------------------------------------
-- 3. Records: see datasets.py, whose tables are named after spider and type.
-- ---------------------------------------------------------------------------------------

-- name: put_offer
INSERT INTO offer (dataset, scope, key, slot, task_key, task, try, job, shard, n, key_text, content, row_json)
VALUES (:dataset, :scope, :key, :slot, :task_key, :task, :try, :job, :shard, :n, :key_text, :content, :row_json)
ON CONFLICT (dataset, scope, key, slot, task_key) DO UPDATE
   SET task = :task, try = :try, job = :job, shard = :shard, n = :n, content = :content, row_json = :row_json

-- name: next_offer
SELECT task_key, task, try, job, shard, n, key_text, content, row_json FROM offer
 WHERE dataset = :dataset AND scope = :scope AND key = :key AND slot = :slot ORDER BY task_key LIMIT 1

-- name: drop_offer
DELETE FROM offer WHERE dataset = :dataset AND scope = :scope AND key = :key AND slot = :slot AND task_key = :task_key

-- name: offers_of_task
SELECT dataset, scope, key, slot, task_key FROM offer WHERE task = :task

-- name: put_heir
INSERT INTO heir (dataset, scope, key, job, shard, n) VALUES (:dataset, :scope, :key, :job, :shard, :n)
ON CONFLICT (dataset, scope, key, job, shard) DO UPDATE SET n = :n

-- ---------------------------------------------------------------------------------------
-- 4. Finish. Own tasks only, by id, from running; the number of rows is checked.
-- ---------------------------------------------------------------------------------------

-- name: finish
UPDATE task
   SET state = s.to_state,
       lane = s.to_lane,
       due_ms = CASE WHEN s.due_in_ms > 0 THEN {now_ms} + s.due_in_ms ELSE 0 END,
       strikes = strikes + s.strike,
       lost = lost + s.lost_more,
       solo = task.solo + s.solo_more,
       throttled = throttled + s.throttle_more,
       throttled_ms = CASE WHEN s.throttle_more > 0 AND throttled_ms = 0 THEN {now_ms} ELSE throttled_ms END,
       claim_solo = 0
  FROM stage_try AS s
 WHERE task.id = s.task AND task.job = s.job AND task.shard = s.shard AND task.state = 'running'
   AND task.claim_epoch = s.epoch AND task.tries = s.try

-- ---------------------------------------------------------------------------------------
-- 5. Account. Attempt rows, paces, robots, sources, requests of people.
-- ---------------------------------------------------------------------------------------

-- name: put_attempts
INSERT INTO attempt (job, shard, n, task, try, outcome, reason, status, strike, solo, offered, links, records, url, detail, at_ms)
SELECT job, shard, n, task, try, outcome, reason, status, strike, was_solo, offered, links, records, url, detail, {now_ms}
  FROM stage_try

-- name: put_moved
INSERT INTO moved (job, key, target, shard, task, n) VALUES (:job, :key, :target, :shard, :task, :n)
ON CONFLICT (job, key) DO UPDATE SET target = :target, n = :n

-- name: drop_moved
DELETE FROM moved WHERE job = :job AND key = :key

-- name: moved_on
-- Tasks that moved to one that moved too: the only places where a circle can be.
SELECT a.key, a.target, a.shard, a.task FROM moved AS a JOIN moved AS b ON b.job = a.job AND b.key = a.target
 WHERE a.job = :job AND a.key > :after ORDER BY a.key LIMIT :most

-- name: moved_to
SELECT target, shard, task FROM moved WHERE job = :job AND key = :key

-- name: put_host
INSERT INTO host (job, shard, host, authority, delay_ms, next_ms, pause, errors, n)
VALUES (:job, :shard, :host, :authority, :delay_ms, {now_ms} + :wait_ms, :pause, :errors, :n)
ON CONFLICT (job, shard, host) DO UPDATE
   SET delay_ms = :delay_ms, next_ms = {now_ms} + :wait_ms, pause = :pause, errors = :errors, n = :n

-- name: hold_host
-- What a person asked: the pace stays as it is.
INSERT INTO host (job, shard, host, authority, delay_ms, next_ms, pause, errors, held, n)
VALUES (:job, :shard, :host, :authority, 0, 0, '', 0, :held, :n)
ON CONFLICT (job, shard, host) DO UPDATE SET held = :held, n = :n

-- name: put_robots
INSERT INTO robots (job, shard, origin, outcome, status, body, until_ms, n)
VALUES (:job, :shard, :origin, :outcome, :status, :body, {now_ms} + :ttl_ms, :n)
ON CONFLICT (job, shard, origin) DO UPDATE
   SET outcome = :outcome, status = :status, body = :body, until_ms = {now_ms} + :ttl_ms, n = :n

-- name: move_source
UPDATE source SET position = :after, closed = :closed
 WHERE job = :job AND source = :source AND position = :before AND closed = 0

-- name: shards_with_requests
SELECT shard, COUNT(*) FROM request WHERE job = :job AND applied_n IS NULL GROUP BY shard

-- name: open_requests
SELECT id, what, argument, cursor FROM request
 WHERE job = :job AND shard = :shard AND applied_n IS NULL ORDER BY id

-- name: move_request
UPDATE request SET cursor = :cursor, changed = changed + :changed, applied_n = CASE WHEN :applied = 1 THEN :n ELSE NULL END
 WHERE id = :id AND job = :job AND shard = :shard AND applied_n IS NULL

-- name: applied_holds
SELECT what, argument FROM request
 WHERE job = :job AND shard = :shard AND applied_n = :n AND what IN ('pause_host', 'resume_host') ORDER BY id

-- name: dead_candidates
-- Dead tasks of a shard above a cursor, with the reason of their last try.
SELECT t.id, t.tries, t.state, a.reason, x.text
  FROM task AS t
  JOIN task_text AS x ON x.id = t.id
  LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.id > :cursor AND t.job = :job AND t.shard = :shard AND t.state = 'dead'
 ORDER BY t.id LIMIT :most

-- name: revisit_candidates
-- Ended tasks of a shard above a cursor, with the reason of their last try.
SELECT t.id, t.tries, t.state, a.reason, x.text
  FROM task AS t
  JOIN task_text AS x ON x.id = t.id
  LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.id > :cursor AND +t.job = :job AND +t.shard = :shard AND t.state IN ('dead', 'skipped', 'done')
 ORDER BY t.id LIMIT :most

-- name: ended_among
SELECT t.id FROM stage_id AS s JOIN task AS t ON t.id = s.id
 WHERE t.job = :job AND t.shard = :shard AND t.state IN ('dead', 'skipped', 'done') ORDER BY t.id

-- name: revisit
UPDATE task SET state = 'pending', lane = 'ready', due_ms = 0, strikes = 0, lost = 0, solo = 0, throttled = 0,
       throttled_ms = 0, revisits = revisits + 1
  FROM stage_id AS s
 WHERE task.id = s.id AND +job = :job AND +shard = :shard AND state IN ('dead', 'skipped', 'done')

-- name: put_revisits
INSERT INTO revisit (job, shard, n, task, after_try)
SELECT :job, :shard, :n, t.id, t.tries FROM stage_id AS s JOIN task AS t ON t.id = s.id

-- ---------------------------------------------------------------------------------------
-- 5. Account, money: charges, escrow and purses, answers that were paid for. See charges.py.
-- ---------------------------------------------------------------------------------------

-- name: reserved_charges
-- By the index of open charges first, and each row by its key then: SQLite would rather read all charges of the shard.
SELECT m.task, m.try, p.reserved, p.day, p.amount FROM charge AS m CROSS JOIN charge AS p
 WHERE m.job = :job AND m.shard = :shard AND m.state = 'reserved' AND p.job = m.job AND p.shard = m.shard AND p.task = m.task AND p.try = m.try

-- name: settle_charge
UPDATE charge SET state = :state, amount = :amount, host = :host, requests = :requests, reason = :reason, n = :n, at_ms = {now_ms},
       anew = :anew
 WHERE job = :job AND shard = :shard AND task = :task AND try = :try AND state = :before

-- name: note_cost
-- An answer that was paid for is kept: whatever becomes of the try, so much is known.
UPDATE charge SET amount = :amount, n = :n WHERE job = :job AND shard = :shard AND task = :task AND try = :try AND state = 'reserved'

-- name: lose_charges
-- A take-over: what the former owner had reserved may have been sent, and counts as spent until it is settled. Where an answer
-- was kept, it is known what that one cost.
UPDATE charge SET state = CASE WHEN amount > 0 THEN 'charged' ELSE 'unknown' END,
       amount = CASE WHEN amount > 0 THEN amount ELSE reserved END, reason = 'its worker was lost', n = :n, at_ms = {now_ms}
 WHERE job = :job AND shard = :shard AND state = 'reserved'

-- name: open_settlements
SELECT s.task, s.try, s.state, s.amount, c.state, c.amount, c.day
  FROM settlement AS s JOIN charge AS c ON c.job = s.job AND c.shard = s.shard AND c.task = s.task AND c.try = s.try
 WHERE s.job = :job AND s.shard = :shard AND s.applied_n IS NULL ORDER BY s.task, s.try LIMIT :most

-- name: close_settlement
UPDATE settlement SET applied_n = :n WHERE job = :job AND shard = :shard AND task = :task AND try = :try AND applied_n IS NULL

-- name: put_settlement
INSERT INTO settlement (job, shard, task, try, state, amount, who, at_ms, applied_n)
VALUES (:job, :shard, :task, :try, :state, :amount, :who, {now_ms}, NULL)
ON CONFLICT (job, shard, task, try) DO UPDATE SET state = :state, amount = :amount, who = :who, applied_n = NULL

-- name: shards_with_settlements
SELECT shard, COUNT(*) FROM settlement WHERE job = :job AND applied_n IS NULL GROUP BY shard

-- name: read_escrow
SELECT allowance, day, day_allowance FROM escrow WHERE job = :job AND shard = :shard

-- name: put_escrow
INSERT INTO escrow (job, shard, allowance, day, day_allowance, n) VALUES (:job, :shard, :allowance, :day, :day_allowance, :n)
ON CONFLICT (job, shard) DO UPDATE SET allowance = :allowance, day = :day, day_allowance = :day_allowance, n = :n

-- name: put_purse
INSERT INTO purse (name, budget, granted) VALUES (:name, :budget, 0) ON CONFLICT (name) DO UPDATE SET budget = :budget

-- name: new_purse
INSERT INTO purse (name, budget, granted) VALUES (:name, NULL, 0) ON CONFLICT (name) DO NOTHING

-- name: read_purse
SELECT budget, granted FROM purse WHERE name = :name

-- name: draw
-- The budget is looked at again here, under the row's lock: nobody can draw what another has just drawn.
UPDATE purse SET granted = granted + :amount WHERE name = :name AND (:amount <= 0 OR budget IS NULL OR granted + :amount <= budget)

-- name: held_allowances
-- Shards that hold money.
SELECT shard FROM escrow WHERE job = :job AND (allowance > 0 OR day_allowance > 0)

-- name: money_left
-- In one statement: what the purse has left, and what is reserved and may yet come back: shard by shard,
-- since a range of the index of open charges is one of a shard.
SELECT (SELECT budget FROM purse WHERE name = :name), (SELECT granted FROM purse WHERE name = :name),
       (SELECT COUNT(*) FROM shard AS s CROSS JOIN charge AS m
         WHERE s.job = :job AND m.job = s.job AND m.shard = s.shard AND m.state = 'reserved')

-- name: sum_charges
SELECT handler, host, at_ms - at_ms % 86400000, state, COUNT(*), SUM(amount), SUM(requests), SUM(reserved)
  FROM charge WHERE job = :job GROUP BY handler, host, at_ms - at_ms % 86400000, state

-- name: unknown_in_shard
-- How many charges of a shard are unknown, and what they may have cost: by the index of open charges, however many others there are.
SELECT COUNT(*), COALESCE(SUM(p.amount), 0) FROM charge AS m CROSS JOIN charge AS p
 WHERE m.job = :job AND m.shard = :shard AND m.state = 'unknown' AND p.job = m.job AND p.shard = m.shard AND p.task = m.task AND p.try = m.try

-- name: unknown_charges
-- With whether another try under the same idempotency key was charged: one between which and this none wanted another answer.
SELECT c.shard, c.task, c.try, c.reserved, x.text,
       CASE WHEN EXISTS (SELECT 1 FROM charge AS d WHERE d.job = c.job AND d.shard = c.shard AND d.task = c.task AND d.state = 'charged'
                            AND NOT EXISTS (SELECT 1 FROM charge AS e WHERE e.job = c.job AND e.shard = c.shard AND e.task = c.task
                                               AND e.anew = 1 AND ((e.try >= d.try AND e.try < c.try) OR (e.try >= c.try AND e.try < d.try))))
            THEN 1 ELSE 0 END
  FROM charge AS c JOIN task_text AS x ON x.id = c.task
 WHERE c.job = :job AND c.state = 'unknown' ORDER BY c.shard, c.task, c.try

-- name: tasks_being_charged
SELECT DISTINCT x.text FROM charge AS c JOIN task_text AS x ON x.id = c.task WHERE c.job = :job AND c.state = 'reserved'

-- name: charged_by_task
SELECT x.text, SUM(c.amount) FROM charge AS c JOIN task_text AS x ON x.id = c.task
 WHERE c.job = :job AND c.state = 'charged' GROUP BY c.task, x.text

-- name: put_kept
INSERT INTO kept (job, shard, task, request, n, try, status, url, headers, body, at_ms)
VALUES (:job, :shard, :task, :request, :n, :try, :status, :url, :headers, :body, {now_ms})
ON CONFLICT (job, shard, task, request) DO UPDATE
   SET n = :n, try = :try, status = :status, url = :url, headers = :headers, body = :body, at_ms = {now_ms}

-- name: drop_kept
DELETE FROM kept WHERE job = :job AND shard = :shard AND task = :task

-- name: read_kept
SELECT status, url, headers, body FROM kept WHERE job = :job AND shard = :shard AND task = :task AND request = :request

-- ---------------------------------------------------------------------------------------
-- 5. Account, shared values: tallies, registers, candidates of high-water marks. See shared.py.
-- ---------------------------------------------------------------------------------------

-- name: add_tally
INSERT INTO tally (job, shard, name, value, n) VALUES (:job, :shard, :name, :more, :n)
ON CONFLICT (job, shard, name) DO UPDATE SET value = tally.value + :more, n = :n

-- name: sum_tallies
SELECT name, SUM(value) FROM tally WHERE job = :job GROUP BY name ORDER BY name

-- name: put_register
-- The next version, where the one before is still the last; who wrote it is read back.
INSERT INTO register (spider, name, version, value, job, shard, n, task, try)
VALUES (:spider, :name, :version, :value, :job, :shard, :n, :task, :try) ON CONFLICT (spider, name, version) DO NOTHING

-- name: writer_of_register
SELECT job, shard, n, task, try FROM register WHERE spider = :spider AND name = :name AND version = :version

-- name: last_version
SELECT COALESCE(MAX(version), 0) FROM register WHERE spider = :spider AND name = :name

-- name: read_register
SELECT version, value FROM register WHERE spider = :spider AND name = :name ORDER BY version DESC LIMIT 1

-- name: list_registers
SELECT r.name, r.version, r.value FROM register AS r WHERE r.spider = :spider
   AND r.version = (SELECT MAX(q.version) FROM register AS q WHERE q.spider = r.spider AND q.name = r.name) ORDER BY r.name

-- name: read_candidate
SELECT low, high, seen, gaps FROM candidate WHERE job = :job AND shard = :shard AND name = :name AND handler = :handler

-- name: put_candidate
INSERT INTO candidate (job, shard, name, handler, low, high, seen, gaps, n)
VALUES (:job, :shard, :name, :handler, :low, :high, :seen, :gaps, :n)
ON CONFLICT (job, shard, name, handler) DO UPDATE SET low = :low, high = :high, seen = :seen, gaps = :gaps, n = :n

-- name: candidates_of_job
SELECT name, handler, low, high, seen, gaps FROM candidate WHERE job = :job ORDER BY name, handler, shard

-- name: unread_tasks
-- Tasks that are over and of which no handler has read anything: dead, or skipped by Limpet itself (the reasons of attempt.py). Not
-- those that moved: their target is a task of its own.
SELECT x.handler, x.text, CASE WHEN t.state = 'dead' THEN '' ELSE a.reason END
  FROM task AS t
  JOIN task_text AS x ON x.id = t.id
  LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.id > :after AND t.id <= :upto AND +t.job = :job
   AND (t.state = 'dead' OR (t.state = 'skipped' AND a.reason IN ('gone', 'robots', 'too large', 'out of scope')))

-- name: last_mark
SELECT version, value, job FROM mark WHERE spider = :spider AND name = :name ORDER BY version DESC LIMIT 1

-- name: marks_before
-- What the sweeps before a job had reached: pinned to when the job was made, so that all of its tries see the same.
SELECT m.name, m.value FROM mark AS m WHERE m.spider = :spider
   AND m.version = (SELECT MAX(q.version) FROM mark AS q WHERE q.spider = m.spider AND q.name = m.name AND q.at_ms <= :at_ms AND q.job <> :job)

-- name: marks_of_spider
SELECT name, version, value, low, gap, job, at_ms FROM mark WHERE spider = :spider ORDER BY name, version

-- name: put_mark
INSERT INTO mark (spider, name, version, value, low, gap, job, at_ms)
VALUES (:spider, :name, :version, :value, :low, :gap, :job, {now_ms}) ON CONFLICT (spider, name, version) DO NOTHING

-- ---------------------------------------------------------------------------------------
-- 6. Claim. A plain SELECT, then an UPDATE by id: the owner alone claims in its shard. A `+` before a
-- column keeps the planner on the id.
-- ---------------------------------------------------------------------------------------

-- name: job_stopped
SELECT halted, paused FROM job WHERE job = :job

-- name: due
-- Tasks whose wait is over; they join the ready lane, so that a claim has one place to look.
SELECT id FROM task WHERE job = :job AND shard = :shard AND lane = 'waiting' AND due_ms <= {now_ms} ORDER BY due_ms LIMIT :most

-- name: promote
UPDATE task SET lane = 'ready', due_ms = 0
  FROM stage_id AS s
 WHERE task.id = s.id AND +job = :job AND +shard = :shard AND lane = 'waiting' AND state IN ('pending', 'failed')

-- name: released_waiting
-- Tasks of one host that were given back until a time which its pause set, among the first that are due in their shard.
SELECT first.id
  FROM (SELECT t.id, t.host, t.tries FROM task AS t WHERE t.job = :job AND t.shard = :shard AND t.lane = 'waiting'
         ORDER BY t.due_ms LIMIT :most) AS first
  JOIN attempt AS a ON a.task = first.id AND a.try = first.tries
 WHERE first.host = :host AND a.outcome = 'released'

-- name: ready_host_after
-- The next host with a task that may start at once: one step along the index, however many rows there are.
SELECT MIN(host) FROM task WHERE job = :job AND shard = :shard AND lane = 'ready' AND due_ms = 0 AND host > :after

-- name: ready_in_shard
-- A row where something in a shard may start at once: one step along the index.
SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'ready' AND due_ms = 0 LIMIT 1

-- name: ready_of_host
SELECT id FROM task
 WHERE job = :job AND shard = :shard AND lane = 'ready' AND due_ms = 0 AND host = :host
 ORDER BY rank, id LIMIT :most

-- name: ready_host_between
SELECT MIN(host) FROM task WHERE job = :job AND shard = :shard AND lane = 'ready' AND due_ms = 0 AND host > :after AND host < :before

-- name: ready_above
-- The same above a floor: what lies below it was claimed already, and its entries in the index may be dead.
SELECT id FROM task
 WHERE job = :job AND shard = :shard AND lane = 'ready' AND due_ms = 0 AND host = :host AND (rank, id) > (:rank, :id)
 ORDER BY rank, id LIMIT :most

-- name: suspects_due
SELECT id, host FROM task
 WHERE job = :job AND shard = :shard AND lane = 'suspect' AND due_ms <= {now_ms} ORDER BY due_ms, host, rank, id LIMIT :most

-- name: next_due
SELECT MIN(due_ms) - {now_ms} FROM task WHERE job = :job AND shard = :shard AND lane = :lane

-- name: claim
UPDATE task SET state = 'running', lane = 'running', due_ms = 0, tries = tries + 1, claim_epoch = :epoch, claim_n = :n, claim_solo = :solo
  FROM stage_id AS s
 WHERE task.id = s.id AND +job = :job AND +shard = :shard AND state IN ('pending', 'failed')

-- name: staged_handlers
-- What a claim is about to take, with its handler: some cost money.
SELECT t.id, t.tries, x.handler FROM stage_id AS s JOIN task AS t ON t.id = s.id JOIN task_text AS x ON x.id = t.id

-- name: unpark
UPDATE task SET lane = CASE WHEN lost >= :suspect_after THEN 'suspect' ELSE 'ready' END
 WHERE job = :job AND shard = :shard AND lane = 'parked' AND state IN ('pending', 'failed')

-- name: read_claims
SELECT t.shard, t.id, t.key, t.tries, t.strikes, t.lost, t.solo, t.throttled, t.throttled_ms, t.host, t.revisits, t.claim_solo,
       x.text, x.url, x.handler, x.payload, x.priority, x.depth, x.hops, x.chain
  FROM task AS t JOIN task_text AS x ON x.id = t.id
 WHERE t.job = :job AND t.shard = :shard AND t.lane = 'running' AND t.claim_epoch = :epoch AND t.claim_n = :n
 ORDER BY t.rank, t.id

-- ---------------------------------------------------------------------------------------
-- 7. Ledger. The books of batch n, sealed over those of batch n - 1.
-- ---------------------------------------------------------------------------------------

-- name: read_seal
SELECT seal FROM ledger WHERE job = :job AND shard = :shard AND n = :n

-- name: put_ledger
INSERT INTO ledger (job, shard, n, kind, batch_id, owner, epoch, at_ms, done, skipped, failed, dead, released, throttled, lost,
                    claimed, discovered, id_low, id_high, revisited, deltas, code, digest, previous, seal)
VALUES (:job, :shard, :n, :kind, :batch_id, :owner, :epoch, :at_ms, :done, :skipped, :failed, :dead, :released, :throttled, :lost,
        :claimed, :discovered, :id_low, :id_high, :revisited, :deltas, :code, :digest, :previous, :seal)

-- name: clock
SELECT {now_ms}

-- name: renew
-- Every commit is a heartbeat too.
UPDATE worker SET beat = beat + 1, lease_until_ms = {now_ms} + lease_ms WHERE worker = :worker AND dead = 0

-- ---------------------------------------------------------------------------------------
-- Take-over: one shard a transaction, separate statements, the shard's row first of all.
-- ---------------------------------------------------------------------------------------

-- name: take_over
UPDATE shard SET owner = :me, epoch = epoch + 1, watermark = watermark + 1
 WHERE job = :job AND shard = :shard AND epoch = :epoch AND watermark = :watermark
   AND (owner IS NULL OR owner = :me
        OR NOT EXISTS (SELECT 1 FROM worker AS w WHERE w.worker = shard.owner AND w.dead = 0))

-- name: running_tasks
SELECT id, key, tries, lost, solo, claim_solo, claim_epoch FROM task WHERE job = :job AND shard = :shard AND lane = 'running' ORDER BY id

-- name: shards_of_job
SELECT s.shard, s.owner, s.epoch, s.watermark, s.verified, w.dead
  FROM shard AS s LEFT JOIN worker AS w ON w.worker = s.owner WHERE s.job = :job ORDER BY s.shard

-- ---------------------------------------------------------------------------------------
-- Workers: the lease.
-- ---------------------------------------------------------------------------------------

-- name: register
INSERT INTO worker (worker, job, host, pid, boot, lock_path, lock_device, lock_inode, beat, lease_ms, lease_until_ms, started_ms)
VALUES (:worker, :job, :host, :pid, :boot, :lock_path, :lock_device, :lock_inode, 1, :lease_ms, {now_ms} + :lease_ms, {now_ms})

-- name: certify_dead
-- Final, once, for ever: and only while what was looked at has not changed.
UPDATE worker SET dead = 1, dead_reason = :reason WHERE worker = :worker AND dead = 0 AND beat = :beat

-- name: retire
UPDATE worker SET dead = 1, dead_reason = 'stopped' WHERE worker = :worker AND dead = 0

-- name: living_workers
SELECT worker, host, pid, boot, lock_path, lock_device, lock_inode, beat, lease_ms, lease_until_ms, {now_ms} FROM worker WHERE dead = 0

-- name: count_workers
SELECT COUNT(*) FROM worker WHERE job = :job AND dead = 0

-- name: read_worker
SELECT host, pid, boot, beat, lease_ms, lease_until_ms, dead, dead_reason, {now_ms} FROM worker WHERE worker = :worker

-- ---------------------------------------------------------------------------------------
-- Jobs, shards, sources.
-- ---------------------------------------------------------------------------------------

-- name: find_job
SELECT job, spider, slot, shards, key_version, hash_version, key_profile, key_digest, created_ms, halted, paused, paused_code, verified
  FROM job WHERE spider = :spider AND slot = :slot

-- name: read_job
SELECT job, spider, slot, shards, key_version, hash_version, key_profile, key_digest, created_ms, halted, paused, paused_code, verified
  FROM job WHERE job = :job

-- name: list_jobs
SELECT job, spider, slot, shards, key_version, hash_version, key_profile, key_digest, created_ms, halted, paused, paused_code, verified
  FROM job ORDER BY job

-- name: put_job
INSERT INTO job (spider, slot, shards, key_version, hash_version, key_profile, key_digest, created_ms)
VALUES (:spider, :slot, :shards, :key_version, :hash_version, :key_profile, :key_digest, {now_ms})
ON CONFLICT (spider, slot) DO NOTHING

-- name: put_shard
INSERT INTO shard (job, shard, owner, epoch, watermark) VALUES (:job, :shard, NULL, 0, 0)

-- name: put_source
INSERT INTO source (job, source, kind, digest, place, host, payload, position, closed)
SELECT :job, COALESCE(MAX(source), 0) + 1, :kind, :digest, :place, :host, :payload, 0, 0 FROM source WHERE job = :job
ON CONFLICT (job, kind, digest) DO NOTHING

-- name: relocate_source
UPDATE source SET place = :place, host = :host WHERE job = :job AND kind = :kind AND digest = :digest AND place <> ''

-- name: drop_replaced_sources
-- A file is at one place: what is open and was another file there can never be read on. Its id is given to nobody again, as that of
-- the source that replaces it is higher; whoever still reads it finds no row to move.
DELETE FROM source
 WHERE job = :job AND kind = :kind AND place = :place AND host = :host AND payload = :payload AND digest <> :digest AND closed = 0

-- name: ask_generator_again
UPDATE source SET position = 0, closed = 0 WHERE job = :job AND kind = 'generator' AND digest = :digest AND closed = 1

-- name: sources
SELECT source, kind, digest, place, host, payload, position, closed FROM source WHERE job = :job ORDER BY source

-- name: halt
UPDATE job SET halted = :reason WHERE job = :job AND halted = ''

-- name: unhalt
UPDATE job SET halted = '' WHERE job = :job AND halted <> ''

-- name: pause
UPDATE job SET paused = :reason, paused_code = :code WHERE job = :job AND paused = ''

-- name: resume
UPDATE job SET paused = '' WHERE job = :job AND paused <> ''

-- name: mark_verified
UPDATE job SET verified = :vector WHERE job = :job

-- name: put_request
INSERT INTO request (job, shard, what, argument, who, at_ms) VALUES (:job, :shard, :what, :argument, :who, {now_ms})

-- ---------------------------------------------------------------------------------------
-- Complete: one statement, one snapshot, over all shards. It is written nowhere.
-- ---------------------------------------------------------------------------------------

-- name: open_work
SELECT (SELECT COUNT(*) FROM shard AS s WHERE s.job = :job
          AND EXISTS (SELECT 1 FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.lane IS NOT NULL)) AS shards_with_work,
       (SELECT COUNT(*) FROM source WHERE job = :job AND closed = 0) AS open_sources,
       (SELECT COUNT(*) FROM request WHERE job = :job AND applied_n IS NULL) AS open_requests,
       (SELECT COUNT(lowest) FROM (SELECT MIN(shard) AS lowest FROM task WHERE job = :job) AS any_task)
       + (SELECT COUNT(*) FROM sealed WHERE job = :job) AS has_tasks

-- name: open_lanes
-- Which lanes of a shard hold anything: what a job that stands still is waiting for.
SELECT EXISTS (SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'ready'),
       EXISTS (SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'waiting'),
       EXISTS (SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'suspect'),
       EXISTS (SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'running'),
       EXISTS (SELECT 1 FROM task WHERE job = :job AND shard = :shard AND lane = 'parked')

-- name: ledger_sums
SELECT COALESCE(SUM(discovered), 0), COALESCE(SUM(done), 0), COALESCE(SUM(skipped), 0) FROM ledger WHERE job = :job

-- name: put_back_by_outcome
SELECT a.outcome, COUNT(*) FROM revisit AS r JOIN attempt AS a ON a.task = r.task AND a.try = r.after_try
 WHERE r.job = :job GROUP BY a.outcome

-- name: count_dead
SELECT COUNT(*) FROM task WHERE job = :job AND state = 'dead'

-- name: ledger_deltas
SELECT deltas FROM ledger WHERE job = :job AND deltas <> '{}'

-- name: watermarks
SELECT shard, epoch, watermark, verified FROM shard WHERE job = :job ORDER BY shard

-- name: hosts_of_shard
-- Those that a person has paused come first, then the longest waits.
SELECT host, authority, delay_ms, next_ms - {now_ms}, pause, errors, held FROM host WHERE job = :job AND shard = :shard
 ORDER BY CASE WHEN held <> '' THEN 0 ELSE 1 END, next_ms DESC LIMIT :most

-- name: host_has_worked
-- Whether a task of a host is done: a name that worked once is no dead link.
SELECT id FROM task WHERE job = :job AND shard = :shard AND host = :host AND state = 'done' LIMIT 1

-- name: robots_of_origin
SELECT outcome, status, body, until_ms - {now_ms} FROM robots WHERE job = :job AND shard = :shard AND origin = :origin

-- name: task_by_key
SELECT t.id, t.state, t.lane, t.tries, t.strikes, t.lost, t.solo, t.due_ms, a.outcome, a.reason, a.url
  FROM task AS t LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.job = :job AND t.shard = :shard AND t.host = :host AND t.key = :key

-- name: done_so_far
SELECT COALESCE(SUM(done), 0) FROM ledger WHERE job = :job

-- ---------------------------------------------------------------------------------------
-- Views: what people ask. Read only, several of them in one snapshot. See views.py.
-- ---------------------------------------------------------------------------------------

-- name: view_books
-- What a job's books add up to: one row a batch is read, never the tasks.
SELECT COUNT(*), COALESCE(SUM(done), 0), COALESCE(SUM(skipped), 0), COALESCE(SUM(failed), 0), COALESCE(SUM(dead), 0),
       COALESCE(SUM(released), 0), COALESCE(SUM(throttled), 0), COALESCE(SUM(lost), 0), COALESCE(SUM(claimed), 0),
       COALESCE(SUM(discovered), 0), COALESCE(SUM(revisited), 0),
       COALESCE(MIN(CASE WHEN done + skipped + failed + dead > 0 THEN at_ms END), 0), COALESCE(MAX(at_ms), 0),
       COALESCE(SUM(CASE WHEN at_ms > {now_ms} - :window_ms THEN done + skipped + dead ELSE 0 END), 0),
       {now_ms}
  FROM ledger WHERE job = :job

-- name: view_lane
-- The tasks of one lane that is not the long one: a range of the index of open tasks in each shard. CROSS JOIN
-- keeps SQLite's planner at the shards first.
SELECT t.state, COUNT(*), COALESCE(MIN(t.due_ms), 0)
  FROM shard AS s CROSS JOIN task AS t
 WHERE s.job = :job AND t.job = :job AND t.shard = s.shard AND t.lane = :lane GROUP BY t.state

-- name: view_dead
SELECT COALESCE(a.reason, ''), COUNT(*)
  FROM task AS t LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.job = :job AND t.state = 'dead' GROUP BY a.reason ORDER BY 2 DESC, 1

-- name: view_states
-- Every task: only where there are few, or where it was asked for.
SELECT state, lane, COUNT(*), MIN(id) FROM task WHERE job = :job GROUP BY state, lane

-- name: view_skipped
SELECT a.reason, COUNT(*) FROM attempt AS a JOIN task AS t ON t.id = a.task AND t.tries = a.try
 WHERE a.job = :job AND a.outcome = 'skipped' AND t.state = 'skipped' GROUP BY a.reason ORDER BY 2 DESC, 1

-- name: view_hosts
SELECT t.host, t.state, COUNT(*), MIN(t.id) FROM task AS t WHERE t.job = :job GROUP BY t.host, t.state

-- name: view_paces
SELECT host, authority, delay_ms, next_ms, pause, errors, held FROM host
 WHERE job = :job AND (pause <> '' OR errors > 0 OR held <> '' OR next_ms > {now_ms})
 ORDER BY CASE WHEN held <> '' THEN 0 ELSE 1 END, next_ms DESC, authority LIMIT :most

-- name: view_open_hosts
-- Hosts by their open tasks, those with the most first: (host, one of its tasks, open, ready, running, later).
SELECT t.host, MIN(t.id), COUNT(*), SUM(CASE WHEN t.lane = 'ready' THEN 1 ELSE 0 END), SUM(CASE WHEN t.lane = 'running' THEN 1 ELSE 0 END),
       SUM(CASE WHEN t.lane IN ('waiting', 'suspect') THEN 1 ELSE 0 END)
  FROM task AS t WHERE t.job = :job AND t.lane IS NOT NULL GROUP BY t.host ORDER BY 3 DESC, 1 LIMIT :most

-- name: view_open_of_host
SELECT t.host, MIN(t.id), COUNT(*), SUM(CASE WHEN t.lane = 'ready' THEN 1 ELSE 0 END), SUM(CASE WHEN t.lane = 'running' THEN 1 ELSE 0 END),
       SUM(CASE WHEN t.lane IN ('waiting', 'suspect') THEN 1 ELSE 0 END)
  FROM task AS t WHERE t.job = :job AND t.shard = :shard AND t.host = :host AND t.lane IS NOT NULL GROUP BY t.host

-- name: view_pace
SELECT host, authority, delay_ms, next_ms, pause, errors, held FROM host WHERE job = :job AND shard = :shard AND host = :host

-- name: view_authority
SELECT authority FROM host WHERE job = :job AND shard = :shard AND host = :host

-- name: view_text
SELECT text FROM task_text WHERE id = :task

-- name: view_texts
SELECT x.id, x.text FROM task_text AS x JOIN task AS t ON t.id = x.id WHERE x.id > :after AND +t.job = :job ORDER BY x.id LIMIT :most

-- name: view_discovered_at
SELECT l.at_ms FROM task AS t JOIN ledger AS l ON l.job = t.job AND l.shard = t.source_shard AND l.n = t.source_n WHERE t.id = :task

-- name: view_workers
-- Those who are not certified dead, with or without a shard, and the dead whose shards nobody has taken over yet.
SELECT w.worker, w.host, w.pid, w.boot, w.lock_path, w.lock_device, w.lock_inode, w.dead, w.dead_reason, w.lease_until_ms, w.started_ms,
       (SELECT COUNT(*) FROM shard AS s WHERE s.job = :job AND s.owner = w.worker), w.lease_ms
  FROM worker AS w
 WHERE w.job = :job AND (w.dead = 0 OR EXISTS (SELECT 1 FROM shard AS s WHERE s.job = :job AND s.owner = w.worker))
 ORDER BY w.started_ms, w.worker

-- name: view_all_workers
SELECT w.worker, w.host, w.pid, w.boot, w.lock_path, w.lock_device, w.lock_inode, w.dead, w.dead_reason, w.lease_until_ms, w.started_ms,
       (SELECT COUNT(*) FROM shard AS s WHERE s.job = w.job AND s.owner = w.worker), w.lease_ms
  FROM worker AS w ORDER BY w.started_ms, w.worker

-- name: view_rates
-- What each worker ended lately: the last batches of each shard, and not the whole ledger.
SELECT l.owner, SUM(l.done + l.skipped + l.dead)
  FROM shard AS s JOIN ledger AS l ON l.job = s.job AND l.shard = s.shard AND l.n > s.watermark - :most
 WHERE s.job = :job AND l.at_ms > {now_ms} - :window_ms GROUP BY l.owner

-- name: view_requests
SELECT what, argument, who, MIN(at_ms), COUNT(*), SUM(changed), SUM(CASE WHEN applied_n IS NULL THEN 1 ELSE 0 END)
  FROM request WHERE job = :job GROUP BY what, argument, who ORDER BY 4 DESC LIMIT :most

-- name: view_dead_letters
SELECT t.id, x.text, x.url, x.depth, t.tries, t.strikes, COALESCE(a.outcome, ''), COALESCE(a.reason, ''), COALESCE(a.status, 0),
       COALESCE(a.at_ms, 0), COALESCE(a.detail, ''), x.handler
  FROM task AS t JOIN task_text AS x ON x.id = t.id LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.job = :job AND t.shard = :shard AND t.state = 'dead' AND t.id > :after ORDER BY t.id LIMIT :most

-- name: view_task
SELECT t.id, t.state, t.lane, t.due_ms, t.tries, t.strikes, t.lost, t.solo, t.throttled, t.revisits, t.source_shard, t.source_n,
       x.text, x.url, x.handler, x.priority, x.depth, x.hops, x.chain
  FROM task AS t JOIN task_text AS x ON x.id = t.id
 WHERE t.job = :job AND t.shard = :shard AND t.host = :host AND t.key = :key

-- name: view_attempts
SELECT try, outcome, reason, status, strike, solo, links, records, url, detail, at_ms, shard, n FROM attempt WHERE task = :task ORDER BY try

-- name: view_robots
SELECT outcome, status, body, until_ms, {now_ms} FROM robots WHERE job = :job AND shard = :shard AND origin = :origin

-- name: view_open_request_shards
SELECT DISTINCT shard FROM request WHERE job = :job AND applied_n IS NULL ORDER BY shard

-- name: view_shards_with_dead
SELECT s.shard FROM shard AS s WHERE s.job = :job
   AND EXISTS (SELECT 1 FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.state = 'dead') ORDER BY s.shard

-- name: view_request
SELECT SUM(changed), SUM(CASE WHEN applied_n IS NULL THEN 1 ELSE 0 END) FROM request WHERE job = :job AND id >= :first AND id <= :last

-- name: view_last_request
SELECT COALESCE(MAX(id), 0) FROM request

-- name: view_code
SELECT code FROM ledger WHERE job = :job AND length(code) > 0 ORDER BY at_ms DESC LIMIT 1

-- ---------------------------------------------------------------------------------------
-- Slots: the jobs of a spider, what it says of its schedule, how far exports have read. See slots.py and cursor.py.
-- ---------------------------------------------------------------------------------------

-- name: slots_living
SELECT w.worker, w.host, w.pid, w.boot, w.lock_path, w.lock_device, w.lock_inode
  FROM worker AS w WHERE w.job = :job AND w.dead = 0 AND w.lease_until_ms >= {now_ms} ORDER BY w.started_ms, w.worker

-- name: slots_read_schedule
SELECT value FROM meta WHERE name = :name

-- name: slots_put_schedule
INSERT INTO meta (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = :value

-- name: cursor_watermarks
SELECT s.job, s.shard, s.watermark FROM shard AS s JOIN job AS j ON j.job = s.job WHERE j.spider = :spider ORDER BY s.job, s.shard

-- ---------------------------------------------------------------------------------------
-- Verify: what the proofs read. Ranges of ids and batches only; nothing is written. See verify.py.
-- ---------------------------------------------------------------------------------------

-- name: verify_heads
-- The vector of watermarks, with the last batch of each shard: one statement, so one moment.
SELECT s.shard, s.owner, s.epoch, s.watermark, s.verified, l.n, l.owner, l.epoch, l.kind,
       (SELECT COALESCE(MAX(m.n), 0) FROM ledger AS m WHERE m.job = s.job AND m.shard = s.shard),
       (SELECT COALESCE(MIN(m.n), 1) FROM ledger AS m WHERE m.job = s.job AND m.shard = s.shard)
  FROM shard AS s LEFT JOIN ledger AS l ON l.job = s.job AND l.shard = s.shard AND l.n = s.watermark
 WHERE s.job = :job ORDER BY s.shard

-- name: verify_ledger
SELECT job, shard, n, kind, batch_id, owner, epoch, at_ms, done, skipped, failed, dead, released, throttled, lost, claimed,
       discovered, id_low, id_high, revisited, deltas, code, digest, previous, seal
  FROM ledger WHERE job = :job AND shard = :shard AND n > :after AND n <= :upto ORDER BY n LIMIT :most

-- name: verify_attempts
-- The tries of some batches, each with the key that its batch's digest covers.
SELECT a.n, t.key, a.try, a.outcome, a.reason, a.offered, a.task
  FROM attempt AS a LEFT JOIN task AS t ON t.id = a.task AND t.job = a.job AND t.shard = a.shard
 WHERE a.job = :job AND a.shard = :shard AND a.n > :after AND a.n <= :upto

-- name: verify_attempt_counts
SELECT n, outcome, COUNT(*) FROM attempt
 WHERE job = :job AND shard = :shard AND n > :after AND n <= :upto GROUP BY n, outcome

-- name: verify_revisit_counts
SELECT n, COUNT(*) FROM revisit WHERE job = :job AND shard = :shard AND n > :after AND n <= :upto GROUP BY n

-- name: verify_discovered
-- What each batch discovered, recounted in the range of ids that it noted.
SELECT l.n, l.kind, l.discovered, l.deltas, l.id_low, l.id_high,
       (SELECT COUNT(*) FROM task AS t WHERE t.id >= l.id_low AND t.id <= l.id_high
           AND t.source_shard = l.shard AND t.source_n = l.n AND +t.job = l.job)
  FROM ledger AS l
 WHERE l.job = :job AND l.shard = :shard AND l.n > :after AND l.n <= :upto AND (l.discovered <> 0 OR l.kind = 'repair') ORDER BY l.n

-- name: verify_discoveries
-- The same, to be held against counts over all tasks.
SELECT n, kind, discovered, deltas, id_low, id_high FROM ledger
 WHERE job = :job AND shard = :shard AND n > :after AND n <= :upto AND (discovered <> 0 OR kind = 'repair') ORDER BY n LIMIT :most

-- name: verify_corrections
-- What repairs noted of the tasks that batches discovered; see repair.py.
SELECT deltas FROM ledger WHERE job = :job AND shard = :shard AND kind = 'repair' AND deltas <> '{}'

-- name: verify_chunk
-- The highest of the next ids: a chunk has so many rows, however far apart their ids are.
SELECT MAX(id) FROM (SELECT id FROM task WHERE id > :after ORDER BY id LIMIT :most) AS chunk

-- name: verify_bounds
-- Between which ids a job's tasks lie: as the ledger says, and as the rows are.
SELECT (SELECT MIN(CASE WHEN discovered > 0 THEN id_low END) FROM ledger WHERE job = :job),
       (SELECT COALESCE(MAX(id_high), 0) FROM ledger WHERE job = :job),
       (SELECT MIN(id) FROM task WHERE job = :job),
       (SELECT COALESCE(MAX(id), 0) FROM task WHERE job = :job)

-- name: verify_keys
-- `odd`: the rank is not what priority and depth make it (commit.py, `_link_row`).
SELECT t.id, t.shard, t.host, t.key, x.text, t.source_shard, t.source_n,
       CASE WHEN t.rank = CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority THEN 0 ELSE 1 END AS odd
  FROM task AS t LEFT JOIN task_text AS x ON x.id = t.id
 WHERE t.id > :after AND t.id <= :upto AND +t.job = :job ORDER BY t.id

-- name: verify_new_keys
-- The same of the tasks that some batches discovered.
SELECT t.id, t.shard, t.host, t.key, x.text, t.source_shard, t.source_n,
       CASE WHEN t.rank = CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority THEN 0 ELSE 1 END AS odd
  FROM ledger AS l
  JOIN task AS t ON t.id >= l.id_low AND t.id <= l.id_high AND t.source_shard = l.shard AND t.source_n = l.n AND +t.job = l.job
  LEFT JOIN task_text AS x ON x.id = t.id
 WHERE l.job = :job AND l.shard = :shard AND l.n > :after AND l.n <= :upto AND l.discovered > 0

-- name: verify_lone_texts
SELECT x.id FROM task_text AS x WHERE x.id > :after AND x.id <= :upto
   AND NOT EXISTS (SELECT 1 FROM task AS t WHERE t.id = x.id) ORDER BY x.id LIMIT :most

-- name: verify_count_texts
SELECT COUNT(*) FROM task_text WHERE id > :after AND id <= :upto

-- name: verify_odd_tasks
-- All tasks but those that never ran, or ran once and ended: of these two kinds, which are nearly all, one look tells
-- that they are where their history leaves them (I7). The others are recounted, one by one.
SELECT t.id FROM task AS t LEFT JOIN attempt AS a ON a.task = t.id AND a.try = 1
 WHERE t.id > :after AND t.id <= :upto AND +t.job = :job
   AND CASE
       WHEN t.revisits <> 0 OR t.lost <> 0 OR t.solo <> 0 OR t.throttled <> 0 OR t.throttled_ms <> 0 OR t.claim_solo <> 0 OR t.due_ms <> 0 THEN 1
       WHEN t.tries = 0 AND a.task IS NULL AND t.state = 'pending' AND t.lane = 'ready' AND t.strikes = 0 AND t.claim_n = 0
        AND NOT EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = t.id) THEN 0
       WHEN t.tries = 1 AND t.state = a.outcome AND a.outcome IN ('done', 'skipped', 'dead') AND t.lane IS NULL AND t.strikes = a.strike
        AND t.claim_n < a.n AND a.job = t.job AND a.shard = t.shard
        AND NOT EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = t.id AND b.try <> 1)
        AND NOT EXISTS (SELECT 1 FROM revisit AS r WHERE r.task = t.id) THEN 0
       ELSE 1 END = 1
 ORDER BY t.id

-- name: verify_odd_tried
-- The same of the tasks whose tries ended in some batches.
SELECT t.id FROM attempt AS a JOIN task AS t ON t.id = a.task
 WHERE a.job = :job AND a.shard = :shard AND a.n > :after AND a.n <= :upto
   AND NOT (t.tries = 1 AND a.try = 1 AND t.state = a.outcome AND a.outcome IN ('done', 'skipped', 'dead') AND t.lane IS NULL
            AND t.strikes = a.strike AND t.claim_n < a.n AND t.job = a.job AND t.shard = a.shard
            AND t.revisits = 0 AND t.lost = 0 AND t.solo = 0 AND t.throttled = 0 AND t.throttled_ms = 0 AND t.claim_solo = 0 AND t.due_ms = 0
            AND NOT EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = t.id AND b.try <> 1)
            AND NOT EXISTS (SELECT 1 FROM revisit AS r WHERE r.task = t.id))

-- name: verify_histories
-- Tasks with their tries and revisits, in one statement: a task and what it came from are of one moment.
SELECT t.id, 0, t.shard, t.state, COALESCE(t.lane, ''), t.due_ms, t.tries, t.strikes, t.lost, t.solo, t.throttled, t.throttled_ms,
       t.revisits, t.claim_epoch, t.claim_n, t.claim_solo,
       COALESCE((SELECT s.epoch FROM shard AS s WHERE s.job = t.job AND s.shard = t.shard), -1),
       COALESCE((SELECT s.watermark FROM shard AS s WHERE s.job = t.job AND s.shard = t.shard), -1),
       CASE WHEN t.claim_n = 0 THEN 0
            ELSE COALESCE((SELECT l.epoch FROM ledger AS l WHERE l.job = t.job AND l.shard = t.shard AND l.n = t.claim_n), -1) END
  FROM task AS t WHERE t.id >= :low AND t.id <= :high AND +t.job = :job
UNION ALL
SELECT a.task, 1, a.shard, a.outcome, a.reason, a.n, a.try, a.strike, a.solo, a.at_ms, 0, 0, 0, 0, 0, 0, 0, 0, 0
  FROM attempt AS a WHERE a.task >= :low AND a.task <= :high AND +a.job = :job
UNION ALL
SELECT r.task, 2, r.shard, '', '', r.n, r.after_try, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  FROM revisit AS r WHERE r.task >= :low AND r.task <= :high AND +r.job = :job
 ORDER BY 1, 2, 7

-- name: verify_claims
-- Each claim ends in one attempt row, or is open: one statement, since claims go on meanwhile.
SELECT s.watermark,
       (SELECT COALESCE(SUM(l.claimed), 0) FROM ledger AS l WHERE l.job = s.job AND l.shard = s.shard),
       (SELECT COALESCE(SUM(l.done + l.skipped + l.failed + l.dead + l.released + l.throttled + l.lost), 0)
          FROM ledger AS l WHERE l.job = s.job AND l.shard = s.shard),
       (SELECT COUNT(*) FROM task AS t WHERE t.job = s.job AND t.shard = s.shard AND t.lane = 'running')
  FROM shard AS s WHERE s.job = :job AND s.shard = :shard

-- name: verify_long_running
-- Reported, not failed: tasks of an owner who lives that were claimed long ago.
SELECT COUNT(*), MIN({now_ms} - l.at_ms)
  FROM shard AS s
  JOIN worker AS w ON w.worker = s.owner AND w.dead = 0 AND w.lease_until_ms >= {now_ms}
  JOIN task AS t ON t.job = s.job AND t.shard = s.shard AND t.lane = 'running'
  JOIN ledger AS l ON l.job = t.job AND l.shard = t.shard AND l.n = t.claim_n
 WHERE s.job = :job AND s.shard = :shard AND l.at_ms < {now_ms} - :age_ms

-- name: verify_stamps
-- The lowest and highest batch that rows of a shard are stamped with; the watermark is read again after this.
SELECT (SELECT MIN(n) FROM attempt WHERE job = :job AND shard = :shard), (SELECT MAX(n) FROM attempt WHERE job = :job AND shard = :shard),
       (SELECT MIN(n) FROM revisit WHERE job = :job AND shard = :shard), (SELECT MAX(n) FROM revisit WHERE job = :job AND shard = :shard),
       (SELECT MIN(n) FROM ledger WHERE job = :job AND shard = :shard), (SELECT MAX(n) FROM ledger WHERE job = :job AND shard = :shard)

-- name: verify_notes
-- Rows of a job that a later batch may write again, by shard: the highest batch that they are stamped with.
SELECT 'host', shard, MIN(n), MAX(n) FROM host WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'robots', shard, MIN(n), MAX(n) FROM robots WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'moved', shard, MIN(n), MAX(n) FROM moved WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'request', shard, MIN(applied_n), MAX(applied_n) FROM request WHERE job = :job AND applied_n IS NOT NULL GROUP BY shard
UNION ALL
SELECT 'charge', shard, MIN(n), MAX(n) FROM charge WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'kept answer', shard, MIN(n), MAX(n) FROM kept WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'tally', shard, MIN(n), MAX(n) FROM tally WHERE job = :job GROUP BY shard
UNION ALL
SELECT 'candidate', shard, MIN(n), MAX(n) FROM candidate WHERE job = :job GROUP BY shard

-- name: verify_moved
-- Notes of moves whose task did not end as skipped in that batch.
SELECT m.shard, m.task, m.n FROM moved AS m
 WHERE m.job = :job
   AND NOT EXISTS (SELECT 1 FROM attempt AS a JOIN task AS t ON t.id = a.task AND t.key = m.key
                    WHERE a.job = m.job AND a.shard = m.shard AND a.n = m.n AND a.task = m.task AND a.outcome = 'skipped')
 LIMIT :most

-- name: verify_strays
-- Rows in shards that the job does not have.
SELECT 'shard', COUNT(*) FROM shard WHERE job = :job AND (shard < 0 OR shard >= :shards)
UNION ALL
SELECT 'ledger', COUNT(*) FROM ledger WHERE job = :job AND (shard < 0 OR shard >= :shards)
UNION ALL
SELECT 'attempt', COUNT(*) FROM attempt WHERE job = :job AND (shard < 0 OR shard >= :shards)
UNION ALL
SELECT 'revisit', COUNT(*) FROM revisit WHERE job = :job AND (shard < 0 OR shard >= :shards)

-- name: verify_next_jobs
-- The next job that has rows of each kind: a loop over them costs one step of an index for each job.
SELECT (SELECT MIN(job) FROM shard WHERE job > :after), (SELECT MIN(job) FROM task WHERE job > :after),
       (SELECT MIN(job) FROM ledger WHERE job > :after), (SELECT MIN(job) FROM attempt WHERE job > :after)

-- name: verify_deltas
SELECT deltas FROM ledger WHERE job = :job AND deltas <> '{}'

-- name: verify_jobs_of_spider
SELECT job FROM job WHERE spider = :spider ORDER BY job

-- name: verify_offers
-- The offers of one dataset and scope, in the order of their key.
SELECT o.key, o.slot, o.task_key, o.task, o.try, o.job, o.shard, o.n, o.key_text, o.content, o.row_json,
       a.outcome, a.job, a.shard, a.n, t.key,
       CASE WHEN t.tries = o.try THEN 0
            WHEN EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = o.task AND b.try > o.try
                            AND (b.outcome = 'done' OR (b.outcome = 'dead' AND b.records > 0))) THEN 1 ELSE 0 END
  FROM offer AS o
  LEFT JOIN attempt AS a ON a.task = o.task AND a.try = o.try
  LEFT JOIN task AS t ON t.id = o.task
 WHERE o.dataset = :dataset AND o.scope = :scope AND (o.key, o.slot, o.task_key) > (:key, :slot, :task_key)
 ORDER BY o.key, o.slot, o.task_key LIMIT :most

-- name: verify_offers_of_batches
SELECT o.key, o.slot, o.task_key, o.task, o.try, o.job, o.shard, o.n, o.key_text, o.content, o.row_json,
       a.outcome, a.job, a.shard, a.n, t.key,
       CASE WHEN t.tries = o.try THEN 0
            WHEN EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = o.task AND b.try > o.try
                            AND (b.outcome = 'done' OR (b.outcome = 'dead' AND b.records > 0))) THEN 1 ELSE 0 END
  FROM attempt AS a
  JOIN offer AS o ON o.task = a.task AND o.try = a.try AND o.dataset = :dataset
  LEFT JOIN task AS t ON t.id = o.task
 WHERE a.job = :job AND a.shard = :shard AND a.n > :after AND a.n <= :upto AND a.records > 0

-- name: verify_offered_datasets
SELECT DISTINCT dataset, scope FROM offer

-- name: verify_notes_of_deltas
-- Ledger rows that note something beside the counts of datasets.
SELECT shard, deltas FROM ledger WHERE job = :job AND deltas LIKE :like

-- name: verify_charges
-- Charges whose try is not where their state says: reserved means that it runs, anything else that it has ended.
SELECT c.task, c.try, c.shard, c.n,
       CASE WHEN c.state = 'reserved' THEN 'it is reserved, but that try does not run' ELSE 'it has ended, but that try has not' END
  FROM charge AS c
 WHERE c.job = :job
   AND CASE WHEN c.state = 'reserved'
            THEN (SELECT COUNT(*) FROM task AS t WHERE t.id = c.task AND t.job = c.job AND t.shard = c.shard AND t.state = 'running' AND t.tries = c.try)
            ELSE (SELECT COUNT(*) FROM attempt AS a WHERE a.task = c.task AND a.try = c.try AND a.job = c.job AND a.shard = c.shard)
       END = 0
 ORDER BY c.shard, c.task, c.try LIMIT :most

-- name: verify_charge_sums
SELECT shard, SUM(CASE WHEN state = 'reserved' THEN reserved ELSE 0 END), SUM(CASE WHEN state = 'charged' THEN amount ELSE 0 END),
       SUM(CASE WHEN state = 'unknown' THEN amount ELSE 0 END)
  FROM charge WHERE job = :job GROUP BY shard

-- name: verify_escrow
SELECT shard, allowance FROM escrow WHERE job = :job

-- name: verify_kept
SELECT k.task, k.shard, k.n FROM kept AS k
 WHERE k.job = :job
   AND NOT EXISTS (SELECT 1 FROM task AS t WHERE t.id = k.task AND t.job = k.job AND t.shard = k.shard AND t.state <> 'done')
 ORDER BY k.shard, k.task LIMIT :most

-- name: verify_tallies
SELECT shard, name, value FROM tally WHERE job = :job

-- name: verify_registers
SELECT name, MIN(version), MAX(version), COUNT(*) FROM register WHERE spider = :spider GROUP BY name ORDER BY name

-- name: verify_register_stamps
-- Versions that no try of this job wrote.
SELECT r.name, r.version, r.shard, r.n, r.task FROM register AS r
 WHERE r.job = :job
   AND NOT EXISTS (SELECT 1 FROM attempt AS a WHERE a.job = r.job AND a.shard = r.shard AND a.n = r.n AND a.task = r.task AND a.try = r.try
                                                AND a.outcome IN ('done', 'dead'))
 ORDER BY r.name, r.version LIMIT :most

-- ---------------------------------------------------------------------------------------
-- Repair: what is written again from what can be trusted, under the fences of the shards that it touches. See repair.py.
-- ---------------------------------------------------------------------------------------

-- name: repair_head
UPDATE shard SET owner = NULL, epoch = :epoch, watermark = :n, verified = 0 WHERE job = :job AND shard = :shard

-- name: repair_last_batch
SELECT n, epoch FROM ledger WHERE job = :job AND shard = :shard ORDER BY n DESC LIMIT 1

-- name: repair_task
UPDATE task SET state = :state, lane = :lane, due_ms = :due_ms, tries = :tries, strikes = :strikes, lost = :lost, solo = :solo,
       throttled = :throttled, throttled_ms = :throttled_ms, revisits = :revisits, claim_n = :claim_n, claim_solo = :claim_solo
 WHERE id = :task AND job = :job

-- name: repair_rank
UPDATE task SET rank = (SELECT CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority FROM task_text AS x WHERE x.id = task.id)
 WHERE id = :task AND job = :job

-- name: repair_place
UPDATE task SET key = :key, shard = :shard, host = :host WHERE id = :task AND job = :job

-- name: repair_source
UPDATE task SET source_shard = :source_shard, source_n = :source_n WHERE id = :task AND job = :job

-- name: repair_put_task
INSERT INTO task (id, job, shard, host, key, state, lane, rank, claim_n, source_shard, source_n)
SELECT x.id, :job, :shard, :host, :key, 'pending', 'ready', CASE WHEN x.depth < 1048575 THEN x.depth ELSE 1048575 END - 1048576 * x.priority,
       0, :source_shard, :source_n
  FROM task_text AS x WHERE x.id = :task

-- name: repair_put_text
INSERT INTO task_text (id, text, url, handler, payload, priority, depth, hops, chain)
VALUES (:task, :text, :url, '', '', :priority, :depth, 0, :chain)

-- name: repair_set_text
UPDATE task_text SET text = :text, url = :url WHERE id = :task

-- name: repair_drop_task
DELETE FROM task WHERE id = :task AND job = :job AND tries = 0

-- name: repair_drop_text
DELETE FROM task_text WHERE id = :task

-- name: repair_read_task
SELECT t.shard, t.host, t.key, t.rank, t.tries, t.source_shard, t.source_n, x.text, COALESCE(x.url, '')
  FROM task AS t LEFT JOIN task_text AS x ON x.id = t.id WHERE t.id = :task AND t.job = :job

-- name: repair_read_text
SELECT text, url FROM task_text WHERE id = :task

-- name: repair_next_task
-- The next task's id is above all that are there: here it is by itself.
SELECT COALESCE(MAX(id), 0) + 1 FROM task

-- name: repair_known
SELECT id FROM task WHERE job = :job AND shard = :shard AND host = :host AND key = :key

-- name: repair_clues
-- Where a task's text may still stand: the addresses that answered it.
SELECT url FROM attempt WHERE task = :task AND url <> ''

-- name: repair_sources_around
-- Batches that may have discovered a task, by its id.
SELECT shard, n FROM ledger WHERE job = :job AND discovered > 0 AND id_low <= :task AND id_high >= :task ORDER BY shard, n

-- name: repair_discovered
SELECT discovered FROM ledger WHERE job = :job AND shard = :shard AND n = :n

-- name: repair_named
SELECT id FROM task WHERE job = :job AND source_shard = :shard AND source_n = :n ORDER BY id

-- name: repair_tried
-- Tasks whose tries ended in a batch, and how many links each led to.
SELECT task, links FROM attempt WHERE job = :job AND shard = :shard AND n = :n ORDER BY task

-- name: repair_reopen_sources
UPDATE source SET position = 0, closed = 0 WHERE job = :job AND (position <> 0 OR closed <> 0)

-- name: repair_forget_hosts
DELETE FROM host WHERE job = :job AND shard = :shard AND (n < 1 OR n > :upto)

-- name: repair_forget_robots
DELETE FROM robots WHERE job = :job AND shard = :shard AND (n < 1 OR n > :upto)

-- name: repair_forget_moves
DELETE FROM moved WHERE job = :job AND shard = :shard
   AND (n < 1 OR n > :upto OR NOT EXISTS (SELECT 1 FROM attempt AS a JOIN task AS t ON t.id = a.task AND t.key = moved.key
         WHERE a.job = moved.job AND a.shard = moved.shard AND a.n = moved.n AND a.task = moved.task AND a.outcome = 'skipped'))

-- name: repair_forget_requests
-- Such a request is applied anew.
UPDATE request SET applied_n = NULL, cursor = 0 WHERE job = :job AND shard = :shard AND (applied_n < 1 OR applied_n > :upto)

-- name: repair_offers_of_key
SELECT task, try, shard, n FROM offer WHERE dataset = :dataset AND scope = :scope AND key = :key ORDER BY slot, task_key

-- name: repair_drop_offers
DELETE FROM offer WHERE dataset = :dataset AND scope = :scope AND key = :key AND task = :task

-- name: repair_drop_tried_offers
DELETE FROM offer WHERE task = :task AND try = :number

-- ---------------------------------------------------------------------------------------
-- Alerts: an outbox, outside every batch. See alerts.py.
-- ---------------------------------------------------------------------------------------

-- name: alert_put
INSERT INTO alert (job, kind, incident, text, made_ms) VALUES (:job, :kind, :incident, :text, {now_ms})
ON CONFLICT (job, kind, incident) DO NOTHING

-- name: alert_there
SELECT id FROM alert WHERE job = :job AND kind = :kind AND incident = :incident

-- name: alert_lately
SELECT COUNT(*) FROM alert WHERE job = :job AND kind = :kind AND made_ms > {now_ms} - :window_ms

-- name: alert_first_dead
SELECT x.text, COALESCE(a.reason, '')
  FROM task AS t JOIN task_text AS x ON x.id = t.id LEFT JOIN attempt AS a ON a.task = t.id AND a.try = t.tries
 WHERE t.job = :job AND t.state = 'dead' LIMIT 1

-- name: alert_put_back
SELECT COALESCE(SUM(revisited), 0) FROM ledger WHERE job = :job

-- name: alert_due
-- Waits after a failure have an error; one that somebody is sending has none.
SELECT a.id, j.spider, j.slot, a.kind, a.incident, a.text, a.made_ms, a.sent_ms, a.busy_ms, a.tries, a.error
  FROM alert AS a JOIN job AS j ON j.job = a.job
 WHERE a.sent_ms = 0 AND a.id > :after AND (:any_spider = 1 OR j.spider = :spider)
   AND (a.busy_ms <= {now_ms} OR (:by_hand = 1 AND a.error <> '')) AND (:by_hand = 1 OR a.made_ms > {now_ms} - :old_ms)
 ORDER BY a.id LIMIT 1

-- name: alert_claim
UPDATE alert SET busy_ms = {now_ms} + :hold_ms, tries = tries + 1, error = ''
 WHERE id = :id AND sent_ms = 0 AND busy_ms = :busy_ms AND tries = :tries

-- name: alert_sent
UPDATE alert SET sent_ms = {now_ms}, error = '' WHERE id = :id AND tries = :tries AND sent_ms = 0

-- name: alert_failed
UPDATE alert SET busy_ms = {now_ms} + :wait_ms, error = :error WHERE id = :id AND tries = :tries AND sent_ms = 0

-- name: alert_list
SELECT a.id, j.spider, j.slot, a.kind, a.incident, a.text, a.made_ms, a.sent_ms, a.busy_ms, a.tries, a.error
  FROM alert AS a JOIN job AS j ON j.job = a.job WHERE :waiting = 0 OR a.sent_ms = 0 ORDER BY a.id DESC LIMIT :most

-- ---------------------------------------------------------------------------------------
-- gc: what a job that is finished and proved no longer needs. See gc.py, sealing.py.
-- ---------------------------------------------------------------------------------------

-- name: read_sealed
SELECT at_ms, tasks, done, skipped, dead, charged, vector FROM sealed WHERE job = :job

-- name: gc_last_batch
SELECT COALESCE(MAX(at_ms), 0), {now_ms} FROM ledger WHERE job = :job

-- name: gc_states
SELECT state, COUNT(*) FROM task WHERE job = :job GROUP BY state

-- name: gc_open_charges
SELECT COUNT(*) FROM charge WHERE job = :job AND state IN ('unknown', 'reserved')

-- name: gc_charged
SELECT COALESCE(SUM(amount), 0) FROM charge WHERE job = :job AND state = 'charged'

-- name: gc_seal
INSERT INTO sealed (job, at_ms, tasks, done, skipped, dead, charged, vector)
VALUES (:job, {now_ms}, :tasks, :done, :skipped, :dead, :charged, :vector)

-- name: gc_tasks
-- All but the highest of the whole table.
SELECT id FROM task WHERE job = :job AND shard = :shard AND id < (SELECT MAX(id) FROM task) LIMIT :most

-- name: gc_last_task
SELECT id FROM task WHERE job = :job AND shard = :shard AND id = (SELECT MAX(id) FROM task)

-- name: gc_has_tries
SELECT task FROM attempt WHERE task = :task LIMIT 1

-- name: gc_rest
SELECT host FROM host WHERE job = :job AND shard = :shard
UNION ALL
SELECT 0 FROM robots WHERE job = :job AND shard = :shard
UNION ALL
SELECT 0 FROM request WHERE job = :job AND shard = :shard
 LIMIT 1

-- name: gc_attempts
DELETE FROM attempt WHERE +job = :job AND +shard = :shard AND task IN (SELECT id FROM stage_id)

-- name: gc_revisits
DELETE FROM revisit WHERE +job = :job AND +shard = :shard AND task IN (SELECT id FROM stage_id)

-- name: gc_moved
DELETE FROM moved WHERE job = :job AND key IN (SELECT t.key FROM stage_id AS s JOIN task AS t ON t.id = s.id)

-- name: gc_charges
DELETE FROM charge WHERE job = :job AND shard = :shard AND task IN (SELECT id FROM stage_id)

-- name: gc_settlements
DELETE FROM settlement WHERE job = :job AND shard = :shard AND task IN (SELECT id FROM stage_id)

-- name: gc_kept
DELETE FROM kept WHERE job = :job AND shard = :shard AND task IN (SELECT id FROM stage_id)

-- name: gc_offers
-- Those of histories stay: they decide what counts in the slots around this one.
DELETE FROM offer WHERE +job = :job AND +shard = :shard AND task IN (SELECT id FROM stage_id)
   AND dataset NOT IN (SELECT name FROM dataset WHERE policy = 'history')

-- name: gc_texts
DELETE FROM task_text WHERE id IN (SELECT id FROM stage_id)

-- name: gc_remove_tasks
DELETE FROM task WHERE +job = :job AND id IN (SELECT id FROM stage_id)

-- name: gc_hosts
DELETE FROM host WHERE job = :job AND shard = :shard
   AND host IN (SELECT host FROM (SELECT host FROM host WHERE job = :job AND shard = :shard LIMIT :most) AS piece)

-- name: gc_robots
DELETE FROM robots WHERE job = :job AND shard = :shard
   AND origin IN (SELECT origin FROM (SELECT origin FROM robots WHERE job = :job AND shard = :shard LIMIT :most) AS piece)

-- name: gc_requests
DELETE FROM request WHERE job = :job AND shard = :shard
   AND id IN (SELECT id FROM (SELECT id FROM request WHERE job = :job AND shard = :shard LIMIT :most) AS piece)

-- name: verify_sealed_sums
SELECT COALESCE(SUM(discovered), 0), COALESCE(SUM(claimed), 0),
       COALESCE(SUM(done + skipped + failed + dead + released + throttled + lost), 0)
  FROM ledger WHERE job = :job
