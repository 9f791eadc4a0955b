"""The arguments of `limpet cost` and `limpet seed`."""

from __future__ import annotations

from typing import Any

from limpet.cli.flags import job_flags, params, setting_flags, spider_file, which_job
from limpet.cli.values import line_of_text


def add_cost(commands: Any) -> None:
    """`limpet cost [settle]`."""
    cost = commands.add(
        "look", "cost", "what collecting cost; `cost settle` says what charges of unknown outcome came to",
        epilog="A bill is a CSV file with a column `credits`, and a column `task` (the text of the task) or, with --file, the columns of\n"
        "the key of the spider's handler. The owner of a shard applies a settlement in its next batch.",
    )  # fmt: skip
    cost.add_argument("what", nargs="?", choices=("settle",), help="settle the unknown ones instead of printing")
    cost.add_argument(
        "--by", action="append", choices=("job", "task", "host", "day", "outcome"), help="group by this; may be repeated (job task outcome)"
    )
    cost.add_argument("--from", dest="bill", metavar="BILL.csv", help="settle: by what the provider billed for each task")
    cost.add_argument(
        "--partial", action="store_true", help="settle: a task that the bill does not name stays as it is (it was not charged)"
    )
    cost.add_argument("--as", dest="settle_as", choices=("charged", "refunded"), help="settle: all of them so")
    cost.add_argument("--idempotent", action="store_true", help="settle: a try that was charged has paid for the others of its task, too")
    cost.add_argument("--file", metavar="FILE", help="settle: the spider's file, whose keys the bill has in columns")
    which_job(cost)


def add_seed(commands: Any) -> None:
    """`limpet seed FILE --from CSV`."""
    seed = commands.add("run", "seed", "put the rows of a CSV file into a job as keyed tasks; a second time changes nothing")
    spider_file(seed)
    seed.add_argument("--from", dest="csv", required=True, metavar="FILE.csv", help="UTF-8 or GB18030; the heading names arguments")
    seed.add_argument("--task", metavar="NAME", default="", help="the handler of the rows, where the spider has several")
    params(seed)
    job_flags(seed, 'the job: a logical day, any text, or today ("")')
    seed.add_argument("--set", action="append", type=line_of_text, default=[], metavar="NAME=VALUE", help="an argument that all rows share")
    setting_flags(seed)
