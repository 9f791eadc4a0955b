"""`limpet cost`: what collecting cost, by job, task type, host, day and outcome; and `cost settle`, for what nobody knows."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from limpet.batch import CREDIT, Billed
from limpet.cli import database, mend
from limpet.cli.exits import Exit
from limpet.cli.printing import count, cut, note, say, say_json, table
from limpet.engine.calls import CallSchema
from limpet.engine.csvfile import Csv, arguments_of
from limpet.engine.load import load
from limpet.engine.paying import credits_text
from limpet.errors import UsageError
from limpet.store import bills, jobs, requests
from limpet.store.bills import Cost
from limpet.store.charges import job_purse
from limpet.store.views import snapshot

#: What a table may be grouped by, in the order of its columns.
GROUPS = ("job", "task", "host", "day", "outcome")

#: Rows of a bill that are read at a time.
ROWS = 5000

#: Credits of one task in a bill: the ledger counts millionths in 64 bits, and a sum of such tasks still has room there.
CREDITS_MAX = 1_000_000_000

#: Characters of what stands in a bill that a message repeats.
TEXT_CHARS = 50

#: Tasks that are named where bill and ledger differ.
NAMED_MAX = 20


def cost(args: argparse.Namespace) -> int:
    """Print what was spent; or settle."""
    return settle(args) if args.what == "settle" else spent(args)


def spent(args: argparse.Namespace) -> int:
    """What the chosen jobs cost."""
    if args.bill or args.settle_as or args.idempotent or args.file:
        raise UsageError("cost: --from, --as, --idempotent and --file belong to `limpet cost settle`")
    groups = [name for name in GROUPS if name in (args.by or ["job", "task", "outcome"])]
    with database.read(args) as store:
        chosen = {job.id: job for job in database.jobs_of(store, args)}
        found = bills.costs(store.db, chosen)
        purses = {job: store.db.one("read_purse", name=job_purse(job)) for job in chosen}
    rows = _grouped(found, chosen, groups)
    total = sum(one.amount for one in found if one.state in (Billed.CHARGED, Billed.UNKNOWN))
    unknown = sum(one.amount for one in found if one.state == Billed.UNKNOWN)
    if args.json:
        for key, sums in rows:
            say_json({**dict(zip(groups, key, strict=True)), **sums, "credits": credits_text(sums["micro"]).replace(",", "")})
        budgets = {chosen[job].name: purse[0] for job, purse in purses.items() if purse and purse[0] is not None}
        say_json({"total_micro": total, "unknown_micro": unknown, "budgets_micro": budgets})
        return Exit.COMPLETE if found else Exit.NOTHING_TO_DO
    if not found:
        say("nothing was charged")
        return Exit.NOTHING_TO_DO
    lines: list[Sequence[object]] = [(*groups, "tries", "requests", "credits")]
    lines += [(*key, sums["tries"], sums["requests"], credits_text(sums["micro"])) for key, sums in rows]
    say(table(lines, indent=""))
    say(f"in all {credits_text(total)} credits" + (f", of which {credits_text(unknown)} unknown" if unknown else ""))
    for job, purse in purses.items():
        if purse and purse[0] is not None:
            say(f"{chosen[job].name}: budget {credits_text(int(purse[0]))} credits")
    if unknown:
        note("unknown: a crash came between the request and its answer. `limpet cost settle` says what they came to")
    return Exit.COMPLETE


def _grouped(found: Sequence[Cost], chosen: dict[int, jobs.Job], groups: Sequence[str]) -> list[tuple[tuple[str, ...], dict[str, int]]]:
    sums: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: {"tries": 0, "requests": 0, "micro": 0})
    for one in found:
        day = datetime.fromtimestamp(one.day_ms / 1000, UTC).date().isoformat()
        named = {"job": chosen[one.job].name, "task": one.handler, "host": one.host, "day": day, "outcome": one.state}
        row = sums[tuple(named[group] for group in groups)]
        row["tries"] += one.tries
        row["requests"] += one.requests
        row["micro"] += one.reserved if one.state == Billed.RESERVED else one.amount
    return sorted(sums.items())


# -- settle -----------------------------------------------------------------------------------


def settle(args: argparse.Namespace) -> int:
    """Say what charges of unknown outcome came to: by a bill, by idempotency, or by decree."""
    ways = [way for way in (args.bill, args.settle_as, args.idempotent) if way]
    if len(ways) != 1:
        raise UsageError("cost settle: expected one of --from BILL.csv, --as charged|refunded, --idempotent")
    with database.of_job(args) as (store, job):
        billed = _read_bill(args.bill, args.file, args.spider) if args.bill else {}
        with snapshot(store.db):
            found = bills.unknown(store.db, job)
            if args.bill:
                settlement = bills.by_bill(store.db, job, found, billed, is_whole=not args.partial)
            elif args.idempotent:
                settlement = bills.by_idempotency(found)
            else:
                settlement = bills.by_decree(found, is_charged=args.settle_as == "charged")
        if settlement.said:
            bills.ask(store, settlement, mend.who())
            applied = requests.apply(store)
        else:
            applied = requests.Applied(0, 0, ())
    charged = [amount for _, state, amount in settlement.said if state is Billed.CHARGED]
    refunded = len(settlement.said) - len(charged)
    if args.json:
        say_json({
            "job": job.name, "charged": len(charged), "charged_micro": sum(charged), "refunded": refunded, "left": settlement.left,
            "billed_more_micro": settlement.more, "billed_less_micro": settlement.less, "shards_waiting": len(applied.left),
        })  # fmt: skip
    else:
        say(
            f"{job.name}: {count(len(found), 'unknown charge')}: {count(len(charged), 'charged', 'charged')} "
            f"({credits_text(sum(charged))} credits), {count(refunded, 'refunded', 'refunded')}, {settlement.left:,} left"
        )
        _say_differences("billed beyond its charges", settlement.more)
        _say_differences("charged here and not billed", settlement.less)
        if applied.left:
            say(f"{count(len(applied.left), 'shard')} of a worker that is alive: it applies this in its next batch")
    return Exit.COMPLETE if settlement.said else Exit.NOTHING_TO_DO


def _say_differences(what: str, tasks: dict[str, int]) -> None:
    for text, amount in sorted(tasks.items())[:NAMED_MAX]:
        say(f"  {what}: {credits_text(amount)} credits for {text}")
    if len(tasks) > NAMED_MAX:
        say(f"  ... and {len(tasks) - NAMED_MAX:,} more tasks")


def _read_bill(path: str, file: str | None, spider: str) -> dict[str, int]:
    """Micro-credits by task text. The bill has a column `credits`, and `task`, or the key columns of the spider's one handler."""
    bill = Csv.at(path)
    if "credits" not in bill.heading:
        raise UsageError(f"{path}: expected a column `credits`, found {', '.join(bill.heading)}")
    schema = None if "task" in bill.heading else _schema(path, file, spider, bill.heading)
    billed: dict[str, int] = defaultdict(int)
    position, is_done = 0, False
    while not is_done:
        rows, position, is_done = bill.read(position, ROWS)
        for at, fields in rows:
            where = f"{path}, row at byte {at}"
            try:
                text = _named(fields["task"]) if schema is None else _text(schema, fields)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
            billed[text] += _micro(fields["credits"], where)
            if abs(billed[text]) > CREDITS_MAX * CREDIT:
                raise UsageError(f"{where}: this and the rows before it come to more than {CREDITS_MAX:,} credits for {text}")
    return billed


def _named(text: str) -> str:
    if not text.strip():
        raise UsageError("names no task")
    return text.strip()


def _micro(text: str, where: str) -> int:
    """Micro-credits of a row. UsageError, naming the row, for what is no number, or more than any task can cost.

    >>> _micro(" 1.5", "bill.csv")
    1500000
    """
    try:
        credits = Decimal(text.strip())
        if abs(credits) <= CREDITS_MAX:
            return int(credits * CREDIT)
    except ArithmeticError:  # no number at all, or one that cannot be compared
        credits = Decimal("NaN")
    expected = "a number" if credits.is_nan() else f"at most {CREDITS_MAX:,}"
    raise UsageError(f"{where}: credits {cut(text, TEXT_CHARS)!r}: expected {expected}")


def _schema(path: str, file: str | None, spider: str, heading: Sequence[str]) -> CallSchema:
    if file is None:
        raise UsageError(f"{path}: has no column `task`; name the spider with --file, so that its key columns are known")
    loaded = load(file, name=spider).spider
    calls = [handler.schema for name in loaded.handler_names() if (handler := loaded.handler(name)) and handler.schema]
    fitting = [schema for schema in calls if set(schema.key) <= set(heading)]
    if len(fitting) != 1:
        keys = "; ".join(f"{schema.handler}: {', '.join(schema.key)}" for schema in calls) or "none"
        raise UsageError(f"{path}: expected a column `task`, or the key columns of one handler ({keys}); found {', '.join(heading)}")
    return fitting[0]


def _text(schema: CallSchema, fields: Mapping[str, str]) -> str:
    found = arguments_of(schema, {name: fields[name] for name in schema.key})
    return schema.text(found)
