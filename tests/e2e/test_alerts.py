"""Alerts: every service gets what it understands, once for each incident, from the outbox, and no secret is ever shown."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path

import pytest

from limpet import Page, Spider, Tx
from limpet.engine.alerting import Alarms
from limpet.engine.channels import Channel, channels_of
from limpet.engine.report import Report
from limpet.engine.run import run
from limpet.errors import UsageError
from limpet.settings import Settings
from limpet.store import alerts, open_store
from tests.e2e.conftest import Limpet
from tests.e2e.receivers import (
    DINGTALK,
    DINGTALK_SECRET,
    DINGTALK_TOKEN,
    FEISHU,
    FEISHU_TOKEN,
    HOOK,
    WECOM,
    WECOM_KEY,
    Post,
    Receiver,
    mail_server,
    pointed,
    receiving,
    signed,
    taken,
)
from tests.e2e.sites import GONE, Reply, page, serving

SECRETS = (DINGTALK_SECRET, DINGTALK_TOKEN, FEISHU_TOKEN, WECOM_KEY, HOOK)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that stands still for a while has taken what it took, and is waited for."""
    monkeypatch.setattr("limpet.engine.channels.ANSWER_S", 120.0)
    monkeypatch.setattr("limpet.engine.alerting.FAREWELL_S", 120.0)


def channel(address: str) -> Channel:
    """One channel."""
    (made,) = channels_of([address])
    return made


def ran(spider: Spider, db: Path, *addresses: str, start: str | None = None, **settings: object) -> Report:
    """The report of a run that tells some addresses."""
    patience = {f"{name}_timeout_s": 120.0 for name in ("connect", "read", "total")}
    chosen = Settings(**{"backoff_s": 0.01, "delay_s": 0.0, "lease_s": 60.0, **patience, **settings})  # type: ignore[arg-type]
    running = run(spider, db=f"sqlite:///{db}", starts=[start] if start else None, settings=chosen, handle_signals=False, alerts=addresses)
    return asyncio.run(running)


def told(db: Path) -> list[tuple[str, str, bool]]:
    """The alerts of a database, oldest first: kind, first line, whether it was sent."""
    store = open_store(str(db), create=False)
    try:
        return [(one.kind, one.title, bool(one.sent_ms)) for one in reversed(alerts.newest(store.db, most=100))]
    finally:
        store.close()


def hook(receiver: Receiver) -> str:
    """A webhook at a receiver."""
    return f"{receiver.url('json')}/{HOOK}"


def follower() -> Spider:
    """A spider that follows every link, and whose handler fails on a page that says so."""
    spider = Spider("shop")

    @spider.page()
    def any_page(page: Page, tx: Tx) -> None:
        if page.css(".broken"):
            raise KeyError("price")
        tx.follow(page.links())

    return spider


# -- the services --------------------------------------------------------------------------


def test_dingtalk_gets_a_signature_that_it_can_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver computes it from the secret; title and text are one message."""
    with receiving(signed) as robot:
        pointed(monkeypatch, robot)
        assert channel(DINGTALK).send("limpet: shop: dead letters", "3 of them: +/=&") == ""
        (post,) = robot.posts
        assert (post.path, post.query["access_token"]) == ("/robot/send", [DINGTALK_TOKEN])
        assert post.message["text"] == {"content": "limpet: shop: dead letters\n3 of them: +/=&"}
        assert post.message["msgtype"] == "text"


def test_without_our_own_word_for_it_dingtalks_refusal_would_pass_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apprise's own class escapes the signature twice, which the receiver refuses, and takes the refusal for success."""
    from apprise.plugins.dingtalk import NotifyDingTalk

    with receiving(signed) as robot:
        pointed(monkeypatch, robot)
        assert NotifyDingTalk(token=DINGTALK_TOKEN, secret=DINGTALK_SECRET).send("text")
        (post,) = robot.posts
        assert signed(post)[1] != {"errcode": 0, "errmsg": "ok"}


def test_a_signature_with_another_secret_is_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DingTalk says in an answer of status 200 is the reason, without the token in it."""
    with receiving(signed) as robot:
        pointed(monkeypatch, robot)
        why = channel(f"dingtalk://SECother@{DINGTALK_TOKEN}/").send("a", "b")
        assert "310000" in why
        assert "sign not match for ***" in why


def test_feishu_and_wecom_get_a_text_and_their_refusals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its own path, with its own token; an answer that refuses is no success, whatever its status."""
    with receiving() as robot:
        pointed(monkeypatch, robot)
        assert [channel(address).send("title", "body") for address in (FEISHU, WECOM)] == ["", ""]
        feishu, wecom = robot.posts
        assert (feishu.path, feishu.message["msg_type"]) == (f"/open-apis/bot/v2/hook/{FEISHU_TOKEN}/", "text")
        assert feishu.message["content"]["text"].split() == ["title", "body"]
        assert (wecom.path, wecom.query) == ("/cgi-bin/webhook/send", {"key": [WECOM_KEY]})
        assert (wecom.message["msgtype"], wecom.message["text"]["content"].split()) == ("text", ["title", "body"])
        robot.answer = lambda post: (200, {"errcode": 93000, "errmsg": "invalid webhook url", "code": 19001, "msg": "token invalid"})
        assert ["93000" in channel(WECOM).send("a", "b"), "19001" in channel(FEISHU).send("a", "b")] == [True, True]


def test_a_webhook_gets_json_and_a_server_error_is_no_success() -> None:
    """Title and text in their own fields."""
    with receiving() as robot:
        assert channel(hook(robot)).send("title", "body") == ""
        (post,) = robot.posts
        assert (post.path, post.message["title"], post.message["message"]) == (f"/{HOOK}", "title", "body")
        robot.answer = lambda post: (500, {})
        assert "500" in channel(hook(robot)).send("a", "b")
    assert channel(hook(robot)).send("a", "b")  # nobody listens any more


def test_mail_arrives_with_its_subject_and_text() -> None:
    """At the address that is named, from the one that is named."""
    with mail_server() as (mails, port):
        address = f"mailto://127.0.0.1:{port}?from=limpet@example.com&to=ops@example.com&mode=insecure"
        assert channel(address).send("limpet: shop: stands still", "only parked tasks are left") == ""
        ((to, subject, text),) = mails.taken
        assert (to, subject) == (["ops@example.com"], "limpet: shop: stands still")
        assert "only parked tasks are left" in text


@pytest.mark.parametrize("address", ["nosuch://5ecrettoken/x", "5ecrettoken", "feishu://", "dingtalk://bad_5ecrettoken!/"])
def test_an_address_that_is_none_is_refused_without_being_shown(address: str) -> None:
    """Its place and its scheme are all that is said."""
    with pytest.raises(UsageError) as refused:
        channels_of(["json://127.0.0.1:1/", address])
    assert "address 2" in str(refused.value)
    assert "5ecret" not in str(refused.value)
    assert "5ecret" not in repr(channels_of(["json://127.0.0.1/5ecrettoken"]))


# -- the commands --------------------------------------------------------------------------


def test_alert_test_says_which_address_took_it(limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line an address, 7 where one did not take it; addresses of limpet.toml, by spider where they are."""
    with receiving(signed) as robot, receiving() as other:
        pointed(monkeypatch, robot)
        (tmp_path / "limpet.toml").write_text(
            f'[limpet]\nalerts = ["{DINGTALK}", "{hook(other)}"]\n[spider.b]\nalerts = ["{hook(other)}"]\n'
        )
        assert limpet("alert", "test").lines == ["1. dingtalk://***  taken", "2. json://***  taken"]
        robot.answer = lambda post: (200, {"errcode": 1, "errmsg": "no"})
        ended = limpet("alert", "test", "--json")
        assert (ended.code, [one["taken"] for one in ended.json["channels"]]) == (7, [False, True])
        assert limpet("alert", "test", "--spider", "b").code == 0
        assert len(other.posts) == 3
    assert limpet("alert", "test").code == 7  # nobody listens any more


def test_alert_test_without_an_address_is_a_usage_error(limpet: Limpet) -> None:
    """It says where to name one."""
    ended = limpet("alert", "test")
    assert (ended.code, "LIMPET_ALERTS" in ended.err) == (2, True)


def test_no_secret_is_shown_anywhere(
    limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by config, not in a row, not in a log at its loudest, not in an error, even where a service sends the secrets back."""
    caplog.set_level(logging.DEBUG)

    def echoes(post: Post) -> tuple[int, object]:
        return 500, {"errcode": 1, "errmsg": f"{post.path} {post.query}", "code": 1, "msg": post.path}

    with receiving(echoes) as robot, serving(lambda host, path, times: page("/gone") if path == "/" else GONE) as site:
        pointed(monkeypatch, robot)
        spider = tmp_path / "s.py"
        spider.write_text(
            "from limpet import Spider\nshop = Spider('shop')\n@shop.page('/')\ndef home(page, tx):\n    raise KeyError('x')\n"
        )
        monkeypatch.setenv("LIMPET_ALERTS", f"{DINGTALK} {FEISHU} {WECOM} {hook(robot)}")
        shown = [limpet("config"), limpet("config", "--json")]
        assert "dingtalk://***, feishu://***, wecombot://***, json://***" in shown[0].out
        shown += [limpet("run", spider, "--db", "x.db", "--start", site.url("/"), "--log-level", "debug")]
        shown += [limpet("alert", "send", "--db", "x.db"), limpet("alert", "test"), limpet("alert", "list", "--db", "x.db", "--json")]
        monkeypatch.setenv("LIMPET_ALERTS", f"{DINGTALK} no-scheme{HOOK}")
        shown += [limpet("config"), limpet("alert", "test")]
    assert [one.code for one in shown] == [0, 0, 3, 7, 7, 0, 2, 2]
    assert robot.posts
    rows = "".join(map(repr, sqlite3.connect(tmp_path / "x.db").execute("SELECT * FROM alert")))
    monkeypatch.delenv("LIMPET_ALERTS")
    assert "not sent" in limpet("alert", "list", "--db", "x.db").out
    for secret in SECRETS:
        assert secret not in "".join(one.out + one.err for one in shown) + rows + caplog.text


# -- what is told while a job runs ------------------------------------------------------------


def test_dead_letters_are_told_twice_the_first_and_in_the_end_how_many(tmp_path: Path) -> None:
    """Once each, however often the job is run again; after they were put back they are told anew."""
    db = tmp_path / "x.db"
    pages = {"/": page("/1", "/2", "/3"), "/3": page(title="fine")}

    def answer(host: str, path: str, times: int) -> Reply:
        return pages.get(path) or Reply('<p class="broken">')

    with receiving() as robot, serving(answer) as site:
        assert ran(follower(), db, hook(robot), start=site.url("/")).exit_code == 3
        titles = [post.message["title"] for post in robot.posts]
        assert titles == ["limpet: shop: dead letters"] * 2
        assert "The first dead letter" in robot.posts[0].message["message"]
        assert "2 dead letters: handler:KeyError 2" in robot.posts[1].message["message"]
        assert ran(follower(), db, hook(robot)).exit_code == 6
        assert len(robot.posts) == 2
        assert told(db) == [("dead", "shop: dead letters", True)] * 2


def test_one_dead_letter_is_told_once(tmp_path: Path) -> None:
    """There is nothing to add in the end."""
    with receiving() as robot, serving(lambda host, path, times: Reply('<p class="broken">')) as site:
        assert ran(follower(), tmp_path / "x.db", hook(robot), start=site.url("/")).exit_code == 3
        assert len(robot.posts) == 1


def test_a_tripped_breaker_is_told_with_its_reason(tmp_path: Path) -> None:
    """Raised by the transaction that pauses the job; the next run, which finds it paused, raises nothing."""
    links = [f"/{number}" for number in range(9)]

    def answer(host: str, path: str, times: int) -> Reply:
        return page(*links) if path == "/" else Reply('<p class="broken">')

    with receiving() as robot, serving(answer) as site:
        db = tmp_path / "x.db"
        assert ran(follower(), db, hook(robot), start=site.url("/"), breaker=3).exit_code == 7
        assert ran(follower(), db, hook(robot), breaker=3).exit_code == 7
        paused = [post.message for post in robot.posts if post.message["title"] == "limpet: shop: paused"]
        assert len(paused) == 1
        assert "failed 3 times in a row" in paused[0]["message"]


def test_a_job_that_stands_still_is_told_once_for_where_it_stands(tmp_path: Path) -> None:
    """Only parked tasks are left: run again, it is the same incident."""
    first, second = Spider("shop"), Spider("shop")

    @first.page("/")
    def home(page: Page, tx: Tx) -> None:
        tx.follow("/x", to=later)

    @first.page("/x")
    def later(page: Page, tx: Tx) -> None:
        """Never reached: the second release does not have it."""

    @second.page("/")
    def home_again(page: Page, tx: Tx) -> None:
        """The handler of the second release."""

    with receiving() as robot, serving(lambda host, path, times: page()) as site:
        db = tmp_path / "x.db"
        assert ran(first, db, start=site.url("/"), max_pages=1).exit_code == 5
        assert [ran(second, db, hook(robot)).exit_code for _ in range(2)] == [7, 7]
        assert [post.message["title"] for post in robot.posts] == ["limpet: shop: stands still"]


def test_a_failed_proof_is_told_once_by_whoever_finds_it(limpet: Limpet, tmp_path: Path) -> None:
    """`limpet verify` raises it, the next worker or `alert send` sends it; a second proof of the same fault raises nothing."""
    with receiving() as robot, serving(lambda host, path, times: page()) as site:
        db = tmp_path / "x.db"
        assert ran(follower(), db, start=site.url("/")).exit_code == 0
        with sqlite3.connect(db) as tampered:
            tampered.execute("UPDATE task SET strikes = 3")
        assert [limpet("verify", "--full", "--db", db).code for _ in range(2)] == [8, 8]
        assert told(db) == [("verify", "shop: verify failed", False)]
        assert ran(follower(), db, hook(robot)).exit_code == 8
        (post,) = robot.posts
        assert "I7" in post.message["message"]
        assert told(db) == [("verify", "shop: verify failed", True)]
        assert limpet("alert", "list", "--db", db).lines[0].endswith("shop: verify failed")


def test_a_sender_that_hangs_delays_no_page(tmp_path: Path) -> None:
    """The webhook answers only after the whole site was fetched; the alert counts as sent all the same."""
    crawled = threading.Event()
    links = [f"/{number}" for number in range(40)]

    def answer(host: str, path: str, times: int) -> Reply:
        if path == "/39":
            crawled.set()
        return page(*links) if path == "/" else Reply('<p class="broken">') if path == "/0" else page()

    def late(post: Post) -> tuple[int, object]:
        return (200, {}) if crawled.wait(60) else (500, {})

    with receiving(late) as robot, serving(answer) as site:
        db = tmp_path / "x.db"
        assert ran(follower(), db, hook(robot), start=site.url("/")).exit_code == 3
        assert crawled.is_set()
        assert told(db) == [("dead", "shop: dead letters", True)]


def test_what_a_killed_worker_left_in_the_outbox_is_sent_by_the_next_or_by_hand(
    limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Raised and not sent is sent later; `alert send` says what it sent, and 6 where nothing waits."""
    db = tmp_path / "x.db"
    with receiving() as robot, serving(lambda host, path, times: Reply('<p class="broken">')) as site:
        assert ran(follower(), db, start=site.url("/")).exit_code == 3  # nobody is told: it lies in the outbox
        assert told(db) == [("dead", "shop: dead letters", False)]
        monkeypatch.setenv("LIMPET_ALERTS", hook(robot))
        robot.answer = lambda post: (500, {})
        assert limpet("alert", "send", "--db", db).code == 7
        robot.answer = taken
        ended = limpet("alert", "send", "--db", db)
        assert (ended.code, ended.lines) == (0, ["shop: dead letters: sent"])
        assert limpet("alert", "send", "--db", db).code == 6
        assert len(robot.posts) == 2


def test_an_address_that_took_it_is_not_told_again_when_another_failed(
    limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The outbox remembers who has it."""
    db = tmp_path / "x.db"
    with (
        receiving() as well,
        receiving(lambda post: (500, {})) as ill,
        serving(lambda host, path, times: Reply('<p class="broken">')) as site,
    ):
        assert ran(follower(), db, hook(well), hook(ill), start=site.url("/")).exit_code == 3
        assert (len(well.posts), len(ill.posts)) == (1, 1)
        ill.answer = taken
        monkeypatch.setenv("LIMPET_ALERTS", f"{hook(well)} {hook(ill)}")
        assert limpet("alert", "send", "--db", db).code == 0
        assert (len(well.posts), len(ill.posts)) == (1, 2)


def test_several_workers_and_their_parent_tell_an_incident_once(limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of them may send; the outbox gives each alert to one."""
    links = [f"/{number}" for number in range(30)]
    (tmp_path / "s.py").write_text(
        "from limpet import Spider\nshop = Spider('shop', delay_s=0.0)\n@shop.page()\ndef any_page(page, tx):\n"
        "    tx.follow(page.links())\n    if page.css('.broken'):\n        raise KeyError('price')\n"
    )

    def answer(host: str, path: str, times: int) -> Reply:
        return page(*links) if path == "/" else Reply('<p class="broken">') if path in ("/3", "/5", "/7") else page()

    with receiving() as robot, serving(answer) as site:
        monkeypatch.setenv("LIMPET_ALERTS", hook(robot))
        assert limpet("run", "s.py", "--db", "x.db", "--start", site.url("/"), "--workers", "3", "--json").code == 3
        messages = [post.message["message"] for post in robot.posts]
        assert len([text for text in messages if "The first dead letter" in text]) == 1
        assert len([text for text in messages if "3 dead letters" in text]) == 1
        assert len(messages) == 2


def test_a_budget_that_is_reached_is_told_once_for_each_budget(tmp_path: Path) -> None:
    """The report of a run that ends so raises it; a larger budget that is reached is another incident."""
    store = open_store(f"sqlite:///{tmp_path / 'x.db'}")
    job = store.join(spider="serp", slot="2026-11-30")

    async def ended(*messages: str) -> None:
        for message in messages:
            async with Alarms(store, job) as alarms:
                alarms.ended(Report(5, message, job.name))

    asyncio.run(
        ended("the budget of 137 credits is reached", "the budget of 137 credits is reached", "the budget of 200 credits is reached")
    )
    store.close()
    assert [kind for kind, _, _ in told(tmp_path / "x.db")] == ["budget", "budget"]
