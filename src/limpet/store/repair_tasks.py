"""Mending tasks: counters and states from their history, keys from their texts, and what is missing from where it came from.

Nothing is invented. A task's row is derived from its attempt and revisit rows and the books of its shard;
a key from its text, or a text from an address that has that key; a task that is gone is found again by the
tasks that led to it. Invariants: I3, I4, I6, I7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from limpet.batch import Part, tries_digest
from limpet.errors import InvariantBroken, UrlRejected
from limpet.store import frontier, ledger
from limpet.store.dialect import quote
from limpet.store.proofs import Finding, Remedy
from limpet.store.repair_work import Work
from limpet.store.verify_history import Account, History, histories, misplaced, not_running, recount, unlawful, wrong_lane
from limpet.store.verify_tasks import corrected
from limpet.task import CLAIMABLE, Lane, State, lane_of
from limpet.url import authority_of, canonicalise, digest16, host_id

#: Rank = depth - priority * 2**20 (commit.py, `_link_row`).
_DEPTHS = 2**20

#: Records of a task in which its address is looked for.
_CLUES_MAX = 100


def shards_of(work: Work, findings: Iterable[Finding]) -> set[int]:
    """The shards that have to be owned for these findings: where they are, and where the texts belong that lie elsewhere."""
    shards = {one.shard for one in findings if one.shard is not None}
    for task in {one.task for one in findings if one.task is not None}:
        row = work.db.one("repair_read_task", job=work.job.id, task=task)
        text = work.db.one("repair_read_text", task=task)
        shards |= {row[0]} if row else set()
        shards |= {host_id(authority_of(text[0])) % work.job.shards} if text else set()
    return shards & set(range(work.job.shards))


def mend(work: Work, by_remedy: Mapping[Remedy, Sequence[Finding]]) -> None:
    """Every remedy for tasks but the recount, which comes with the take-over."""
    for one in by_remedy.get(Remedy.RECOUNT, ()):
        if one.fault == "rank":
            work.changes += work.db.run("repair_rank", task=one.task, job=work.job.id)
    for one in by_remedy.get(Remedy.REKEY, ()):
        _rekey(work, one)
    for one in by_remedy.get(Remedy.REBUILD, ()):
        _rebuild(work, one)
    for one in by_remedy.get(Remedy.ADOPT, ()):
        _adopt(work, one)
    for one in by_remedy.get(Remedy.REDISCOVER, ()):
        _rediscover(work, one)
    for one in by_remedy.get(Remedy.FORGET, ()):
        _forget(work, one)


# -- recount ------------------------------------------------------------------------------------


def recount_shard(work: Work, shard: int, findings: Sequence[Finding]) -> None:
    """Put the tasks that were found out of line, and those that say they run, where their history leaves them.

    How many claims are open the shard's books say: those tasks have one that show most of its traces.
    """
    running = [row[0] for row in work.db.rows("running_tasks", job=work.job.id, shard=shard)]
    named = [one.task for one in findings if one.task is not None and one.fault != "rank"]
    wrong: list[History] = []
    sound = 0
    for task in sorted({*running, *named}):
        for history in histories(work.db.rows("verify_histories", job=work.job.id, low=task, high=task)):
            if unlawful(history):
                continue
            account = recount(history)
            # The take-over has just raised the epoch of the shard.
            aged = replace(history, task=replace(history.task, shard_epoch=history.task.shard_epoch - 1))
            if not_running(aged, account) or misplaced(history, account):
                wrong.append(history)
            else:
                sound += account.is_open
    _, claimed, ended, _ = work.db.one("verify_claims", job=work.job.id, shard=shard) or (0, 0, 0, 0)
    missing = max(0, claimed - ended - sound)
    for place, history in enumerate(sorted(wrong, key=_traces_of_a_claim, reverse=True)):
        _write(work, history, is_open=place < missing and _traces_of_a_claim(history) > 0)


def _traces_of_a_claim(history: History) -> int:
    """How much of a task's row says that it has a claim that has not ended."""
    task, account = history.task, recount(history)
    return (task.state == State.RUNNING) + (task.tries == len(history.tries) + 1) + (account.is_open and task.batch_epoch >= 0)


def _write(work: Work, history: History, *, is_open: bool) -> None:
    """Write a task's row by its account."""
    task, tries = history.task, history.tries
    last_n = tries[-1].n if tries else 0
    # An open claim is not older than the last try, and older than the take-over that ends it.
    claim_n = max(last_n, 1, min(task.claim_n, task.watermark - 1)) if is_open else 0
    account = recount(replace(history, task=replace(task, claim_n=claim_n)))
    lane, due_ms = _lane(work, history, account)
    throttles = [one.at_ms for one in tries if one.outcome == "throttled"]
    work.changes += work.db.run(
        "repair_task", task=task.id, job=work.job.id, state=str(account.state), lane=str(lane) or None, due_ms=due_ms,
        tries=account.tries, strikes=account.strikes, lost=account.lost, solo=account.solo, throttled=account.throttled,
        throttled_ms=(task.throttled_ms or throttles[-1]) if account.throttled else 0, revisits=account.revisits,
        claim_n=claim_n, claim_solo=int(bool(task.claim_solo)) if is_open else 0,
    )  # fmt: skip


def _lane(work: Work, history: History, account: Account) -> tuple[Lane, int]:
    """Where a task waits: where it did, if it may; else at once, or as a suspect."""
    task = history.task
    if account.state in CLAIMABLE and not account.is_open and not wrong_lane(task, account):
        return Lane(task.lane), task.due_ms
    return lane_of(account.state, due_ms=0, lost=account.lost, suspect_after=work.settings.suspect_after), 0


# -- keys and texts -----------------------------------------------------------------------------


def _rekey(work: Work, finding: Finding) -> None:
    """Make key, shard and host those of the text again; or the text that of the key, where the text was altered."""
    row = work.db.one("repair_read_task", job=work.job.id, task=finding.task)
    if row is None:
        return
    _, _, key, rank, tries, source_shard, source_n, text, url = row
    if text is not None and (key == digest16(text) or (tries and _proves_key(work, finding, digest16(text)))):
        if not _place(work, finding, text, digest16(text)):
            work.give_up(finding)
        return
    found = _find_text(work, finding, key, url)
    if found is not None:
        if text is None:
            priority, depth = -(rank // _DEPTHS), rank % _DEPTHS
            work.changes += work.db.run("repair_put_text", task=finding.task, text=found, url="", priority=priority, depth=depth, chain=b"")
        else:
            work.changes += work.db.run("repair_set_text", task=finding.task, text=found, url=url if url != found else "")
        _place(work, finding, found, key)
    elif not tries and work.db.run("repair_drop_task", task=finding.task, job=work.job.id) == 1:
        work.changes += work.db.run("repair_drop_text", task=finding.task)
        _lead_back(work, source_shard, source_n, 1)
    else:
        work.give_up(finding)


def _place(work: Work, finding: Finding, text: str, key: bytes) -> bool:
    """Put a task where its text belongs; False where another task is there already."""
    host = host_id(authority_of(text))
    shard = host % work.job.shards
    known = work.db.one("repair_known", job=work.job.id, shard=shard, host=host, key=key)
    if known is not None and known[0] != finding.task:
        return False
    work.changes += work.db.run("repair_place", task=finding.task, job=work.job.id, key=key, shard=shard, host=host)
    return True


def _proves_key(work: Work, finding: Finding, key: bytes) -> bool:
    """Whether a batch that ended a try of this task digested it under this key."""
    history = next(histories(work.db.rows("verify_histories", job=work.job.id, low=finding.task, high=finding.task)), None)
    if history is None or not history.tries:
        return False
    last = history.tries[-1]
    rows = work.db.rows("verify_attempts", job=work.job.id, shard=last.shard, after=last.n - 1, upto=last.n)
    tries = [(key if task == finding.task else its or b"", *rest) for _, its, *rest, task in rows]
    books = work.db.rows("verify_ledger", job=work.job.id, shard=last.shard, after=last.n - 1, upto=last.n, most=1)
    return bool(books) and tries_digest(tries) == books[0][ledger.COLUMNS.index("digest")]


def _find_text(work: Work, finding: Finding, key: bytes, url: str) -> str | None:
    """A text with this key: from the address as it was found, those that answered, or what the task's records hold."""
    clues = [url, *(row[0] for row in work.db.rows("repair_clues", task=finding.task))]
    for table in work.tables.values():
        texts = [quote(column.name) for column in table.type.columns if str(column.kind) == "str"]
        if texts:
            query = f"SELECT {', '.join(texts)} FROM {quote(table.name)} WHERE _task = ? LIMIT {_CLUES_MAX}"
            clues += [value for row in work.db.rows_text(query, (finding.task,)) for value in row if value]
    for clue in clues:
        try:
            text = canonicalise(clue, work.job.profile).text
        except UrlRejected:
            continue
        if digest16(text) == key:
            return text
    return None


def _rebuild(work: Work, finding: Finding) -> None:
    """Make a task's row again from its text; its tries and revisits say where it stands."""
    row = work.db.one("repair_read_text", task=finding.task)
    source = next((s for s in _sources_around(work, finding.task) if _lacking(work, *s) > 0), None)
    if row is None or source is None:
        work.give_up(finding)
        return
    host = host_id(authority_of(row[0]))
    place = {"shard": host % work.job.shards, "host": host, "key": digest16(row[0])}
    if work.db.one("repair_known", job=work.job.id, **place) is not None:
        work.changes += work.db.run("repair_drop_text", task=finding.task)
        return
    work.changes += work.db.run("repair_put_task", task=finding.task, job=work.job.id, source_shard=source[0], source_n=source[1], **place)
    for history in histories(work.db.rows("verify_histories", job=work.job.id, low=finding.task, high=finding.task)):
        _write(work, history, is_open=False)


def _sources_around(work: Work, task: int | None) -> list[tuple[int, int]]:
    return [(shard, n) for shard, n in work.db.rows("repair_sources_around", job=work.job.id, task=task)]


# -- sources ------------------------------------------------------------------------------------


def _lacking(work: Work, shard: int, n: int) -> int:
    """How many tasks of a batch are not there; fewer than none where there are more."""
    discovered = (work.db.one("repair_discovered", job=work.job.id, shard=shard, n=n) or (0,))[0]
    there = len(work.db.rows("repair_named", job=work.job.id, shard=shard, n=n))
    return int(discovered) - there - corrected(work.db, work.job.id, (shard, n)) - work.gone[shard, n]


def _rediscover(work: Work, finding: Finding) -> None:
    """Have what is missing found again."""
    if finding.shard is not None and finding.n is not None and (lacking := _lacking(work, finding.shard, finding.n)) > 0:
        _lead_back(work, finding.shard, finding.n, lacking)


def _lead_back(work: Work, shard: int, n: int, missing: int) -> None:
    """Put back the tasks whose tries led to what a batch discovered, or read the sources again; and note what is gone."""
    parents = [task for task, links in work.db.rows("repair_tried", job=work.job.id, shard=shard, n=n) if links]
    if parents:
        work.ask_back(shard, parents)
    else:
        work.changes += work.db.run("repair_reopen_sources", job=work.job.id)
    work.own(shard)
    work.gone[shard, n] += missing
    work.changes += missing


def _adopt(work: Work, finding: Finding) -> None:
    """Let the repair be the source of tasks that name another one in vain."""
    if finding.shard is None or finding.n is None:
        return
    tasks = [row[0] for row in work.db.rows("repair_named", job=work.job.id, shard=finding.shard, n=finding.n)]
    if finding.fault == "forged":
        surplus = -_lacking(work, finding.shard, finding.n)
        around = {task for task in tasks if (finding.shard, finding.n) in _sources_around(work, task)}
        tasks = [task for task in tasks if task not in around]
        if len(tasks) != surplus:
            work.give_up(finding)  # which of them was forged, nobody can tell
            return
    work.adopted[min(work.owned)].update(tasks)  # any shard that is ours will do: a source is where a task was found


def adopt(work: Work, part: Part, *, gone: int) -> ledger.Found:
    """What the repair's batch of a shard discovers: the tasks that it adopts, less those that it found gone."""
    tasks = sorted(work.adopted.get(part.shard, ()))
    for task in tasks:
        work.changes += work.db.run("repair_source", task=task, job=part.job, source_shard=part.shard, source_n=part.n)
    return ledger.Found(len(tasks) - gone, *((tasks[0], tasks[-1]) if tasks else (0, 0)))


def _forget(work: Work, finding: Finding) -> None:
    """Drop what is stamped with a batch that cannot have written it."""
    where = {"job": work.job.id, "shard": finding.shard}
    upto = work.owned[finding.shard].n - 1 if finding.shard in work.owned else 0
    for statement in ("repair_forget_hosts", "repair_forget_robots", "repair_forget_moves", "repair_forget_requests"):
        work.changes += work.db.run(statement, upto=upto, **where)


# -- put back -----------------------------------------------------------------------------------


def tried_in(work: Work, shard: int, n: int) -> list[int]:
    """The tasks whose tries ended in a batch."""
    return [task for task, _ in work.db.rows("repair_tried", job=work.job.id, shard=shard, n=n)]


def put_back(work: Work, part: Part) -> int:
    """Put the tasks of a shard that were asked for back, as a person would; how many had ended."""
    frontier.stage_ids(work.db, sorted(work.put_back.get(part.shard, ())))
    ended = [row[0] for row in work.db.rows("ended_among", job=part.job, shard=part.shard)]
    work.put_back[part.shard] = set(ended)
    if not ended:
        return 0
    frontier.stage_ids(work.db, ended)
    work.db.run("put_revisits", job=part.job, shard=part.shard, n=part.n)
    changed = work.db.run("revisit", job=part.job, shard=part.shard)
    if changed != len(ended):
        raise InvariantBroken(f"{len(ended)} tasks had ended in shard {part.shard}, {changed} could be put back", invariant="I7")
    return changed
