"""`limpet explain`: how a URL becomes its key, and what became of it. With `--key` it is the filter of `keys.py`."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.keys import WHATWG, keys, profile_of
from limpet.cli.printing import count, moment, say, say_json, table
from limpet.credentials import hidden
from limpet.engine.contact import USER_AGENT
from limpet.engine.load import load
from limpet.engine.spider import Spider
from limpet.errors import UrlRejected, UsageError
from limpet.fetch.redirects import origin_of
from limpet.fetch.robots import Outcome, Rules, product_token
from limpet.scope import Scope
from limpet.store import Store, jobs
from limpet.store.views import RobotsStory, TaskStory, find_robots, find_task, snapshot
from limpet.url import Canonical, KeyProfile, Step, canonicalise, shard_of
from limpet.url import explain as steps_of


def explain(args: argparse.Namespace) -> int:
    """Key texts alone, or the whole story of each URL. 2 where a URL is rejected, but of a filter."""
    if args.key:
        return keys(args)
    if not args.urls:
        raise UsageError("explain: expected a URL; with --key they may come as lines on stdin")
    spider = load(args.file, name=args.spider or "").spider if args.file else None
    has_database = args.db or os.environ.get("LIMPET_DB") or len(database.job_databases(".")) == 1
    if not has_database:
        return max([_explain(args, url, spider, None, None) for url in args.urls])
    with database.read(args) as store:
        job = database.job_of(store, args)
        return max([_explain(args, url, spider, store, job) for url in args.urls])


# -- the whole story --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Story:
    """Everything there is to say about a URL."""

    url: str
    steps: list[Step]
    canonical: Canonical
    shard: int | None
    scope: str
    route: str
    robots: str
    robots_story: RobotsStory | None
    task: TaskStory | None
    is_known: bool  # there is a database to ask


def _explain(args: argparse.Namespace, url: str, spider: Spider | None, store: Store | None, job: jobs.Job | None) -> int:
    own = spider.profile if spider else job.profile if job else KeyProfile.of()
    profile = profile_of(args.profile or "standard", args.option) if args.profile or args.option else own
    if profile is None:
        raise UsageError(f"{WHATWG} is for --key: it is no profile of a job")
    try:
        canonical = canonicalise(url, profile, base=args.base)
    except UrlRejected as rejected:
        if args.json:
            say_json({"url": url, "rejected": rejected.reason, "message": str(rejected)})
        else:
            say(f"{url}\n  rejected ({rejected.reason}): {rejected}")
        return Exit.USAGE
    story = _tell(url, canonical, steps_of(url, profile, base=args.base), spider, store, job)
    if args.json:
        say_json(_as_json(story), is_data=True)
    else:
        say(_as_text(story))
    return Exit.COMPLETE


def _tell(url: str, canonical: Canonical, steps: list[Step], spider: Spider | None, store: Store | None, job: jobs.Job | None) -> Story:
    robots_story, task, sources = None, None, []
    if store and job:
        with snapshot(store.db) as db:
            task = find_task(db, job, canonical.text)
            robots_story = find_robots(db, job, origin_of(canonical.request_url), canonical.authority)
            sources = jobs.sources(db, job.id)
    token = product_token((spider.user_agent if spider else "") or USER_AGENT)
    return Story(
        url=url,
        steps=steps,
        canonical=canonical,
        shard=shard_of(canonical.authority, job.shards) if job else None,
        scope=_scope(canonical, spider, sources),
        route=_route(canonical, spider),
        robots=_robots(canonical, robots_story, token),
        robots_story=robots_story,
        task=task,
        is_known=store is not None,
    )


def _scope(canonical: Canonical, spider: Spider | None, sources: list[jobs.SourceRow]) -> str:
    if spider is None:
        return "the database does not say; --file FILE, of the spider, does"
    starts = [*spider.starts] if isinstance(spider.starts, (list, tuple)) else []
    starts += [start for row in sources for start in row.starts()]
    places = []
    for start in starts:
        try:
            places.append(canonicalise(start, spider.profile))
        except UrlRejected:
            continue
    refusal = Scope.of(spider.scope, places, hosts=spider.hosts).refusal(canonical)
    if not refusal:
        return f"followed from any page (scope {spider.scope})"
    if refusal == "scope" and spider.scope in ("host", "domain"):
        return f"followed only from pages of its own {spider.scope}: no start lies there"
    return f"not followed as a link ({refusal}); a start, and what a handler asks for by enqueue, is always fetched"


def _route(canonical: Canonical, spider: Spider | None) -> str:
    if spider is None:
        return ""
    route = spider.route(canonical.text)
    if route is None:
        return "no handler takes it: a crawl would skip it"
    captures = ", ".join(f"{name}={value!r}" for name, value in route.captures.items())
    return f"{route.handler.name}({captures})"


def _robots(canonical: Canonical, story: RobotsStory | None, token: str) -> str:
    if story is None:
        return "not asked yet"
    until = f"until {moment(story.until_ms)}" if story.until_ms > story.now_ms else "since then out of date"
    if story.outcome == Outcome.DISALLOW_ALL:
        return f"not reached (status {story.status}): nothing is asked, {until}"
    rules = Rules(story.body.decode("utf-8", "replace"), token, outcome=Outcome(story.outcome))
    verdict = "allowed" if rules.allowed(canonical.request_url) else "forbidden"
    delay = f", with a Crawl-delay of {rules.crawl_delay_s:g} s" if rules.crawl_delay_s is not None else ""
    return f"{verdict} to {token}{delay} (status {story.status}, {until})"


def _as_json(story: Story) -> dict[str, object]:
    robots = story.robots_story
    return {
        "url": story.url,
        "steps": [asdict(step) for step in story.steps],
        "key": story.canonical.text,
        "digest": story.canonical.key.hex(),
        "authority": story.canonical.authority,
        "shard": story.shard,
        "scope": story.scope,
        "route": story.route,
        "robots": {
            "verdict": story.robots,
            "outcome": robots.outcome if robots else None,
            "status": robots.status if robots else None,
        },
        "task": None if story.task is None else _task_as_json(story.task),
    }


def _task_as_json(task: TaskStory) -> dict[str, object]:
    tries = [{**asdict(each), "url": hidden(each.url)} for each in task.attempts]  # of a Limpet before this one they may be whole
    return {**asdict(task), "url": hidden(task.url), "chain": task.chain.hex(), "attempts": tries}


def _as_text(story: Story) -> str:
    changed = [
        (step.name, step.text)
        for step, before in zip(story.steps, [None, *story.steps], strict=False)
        if before is None or before.text != step.text
    ]
    facts: list[tuple[object, ...]] = [("key", story.canonical.text), ("digest", story.canonical.key.hex())]
    facts += [("shard", str(story.shard))] if story.shard is not None else []
    facts += [("scope", story.scope)]
    facts += [("handler", story.route)] if story.route else []
    facts += [("robots", story.robots)] if story.is_known else []
    lines = [story.url, table(changed, indent="    "), table(facts)]
    if story.task:
        lines += _task(story.task)
    elif story.is_known:
        lines.append("  unknown: the job has no task with this key")
    return "\n".join(lines)


def _task(task: TaskStory) -> list[str]:
    due = f", due {moment(task.due_ms)}" if task.due_ms else ""
    lane = f" ({task.lane})" if task.lane and task.lane != task.state else ""
    lines = [f"  {task.state}{lane}{due}: found {moment(task.found_ms)}, depth {task.depth}, as {task.url}"]
    counters = [
        ("strike", task.strikes),
        ("lost try", task.lost),
        ("solo loss", task.solo),
        ("throttle", task.throttled),
        ("revisit", task.revisits),
    ]
    plural = {"lost try": "lost tries", "solo loss": "solo losses"}
    if named := [count(number, noun, plural.get(noun, "")) for noun, number in counters if number]:
        lines.append(f"  {', '.join(named)}")
    if task.chain:
        lines.append(f"  redirected to, over {count(task.hops, 'hop')}")
    for attempt in task.attempts:
        status = f" (status {attempt.status})" if attempt.status else ""
        made = f", {count(attempt.records, 'record')}, {count(attempt.links, 'link')}" if attempt.outcome == "done" else ""
        place = f", batch {attempt.shard}:{attempt.batch}"
        reason = f": {attempt.reason}" if attempt.reason else ""
        lines.append(f"    try {attempt.number}  {moment(attempt.at_ms)}  {attempt.outcome}{reason}{status}{made}{place}")
        lines += [f"           -> {attempt.url}"] if attempt.url else []
        lines += [f"           {attempt.detail.rstrip().splitlines()[-1].strip()}"] if attempt.detail.strip() else []
    return lines + [f"    {dataset} {key}" for dataset, emitted in task.records.items() for key in emitted]
