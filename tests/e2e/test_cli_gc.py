"""`limpet gc`: what it says, what stays usable of a sealed slot, and what the other commands make of it."""

from __future__ import annotations

from pathlib import Path

from limpet.store.views import reading
from tests.e2e.conftest import Limpet
from tests.e2e.sites import page, serving
from tests.servers.kinds import Databases

SPIDER = """
from limpet import Spider, record

@record(key="url")
class Seen:
    url: str
    title: str

shop = Spider("shop", records=[Seen], delay_s=0.0, shards=4)

@shop.page()
def any_page(page, tx):
    tx.emit(Seen(url=page.key_url, title=page.one("h1")))
    tx.follow(page.links())
"""


def test_a_sealed_slot_is_finished_exported_proved_and_no_longer_put_back(limpet: Limpet, databases: Databases, tmp_path: Path) -> None:
    """Its rows are as they were; run says 6, retry says what to do instead; the next slot is collected beside it."""
    (tmp_path / "s.py").write_text(SPIDER)
    db = databases.ready()
    with serving(lambda host, path, times: page("/1", "/2", "/3", title=path)) as site:
        for slot in ("1", "2"):
            assert limpet("run", "s.py", "--db", db, "--slot", slot, "--start", site.url("/")).code == 0
        before = limpet("export", "seen", "--all-slots", "--db", db).out
        assert limpet("gc", "--slots-older", "90d", "--db", db).code == 6
        shown = limpet("gc", "--slots-older", "0s", "--slot", "1", "--dry-run", "--db", db)
        assert (shown.code, "would be removed" in shown.out) == (0, True)
        assert limpet("status", "--db", db, "--slot", "1").lines[0] == "shop@1: complete and verified"
        ended = limpet("gc", "--slots-older", "0s", "--slot", "1", "--db", db)
        assert (ended.code, ended.lines) == (0, ["shop@1: sealed; 4 tasks with their tries removed"])
        with reading(db) as store:
            assert [int(rows) for (rows,) in store.db.rows_text("SELECT COUNT(*) FROM attempt WHERE job = 1")] == [0]

        asked = site.requests
        assert limpet("run", "s.py", "--db", db, "--slot", "1", "--start", site.url("/")).code == 6
        assert site.requests == asked
        assert limpet("export", "seen", "--all-slots", "--db", db).out == before
        assert limpet("verify", "--full", "--db", db).code == 0
        status = limpet("status", "--db", db, "--slot", "1")
        assert (status.lines[0], "done  4" in status.out, "sealed" in status.out) == ("shop@1: sealed", True, True)
        found = limpet("status", "--db", db, "--slot", "1", "--json").json["jobs"][0]
        assert (found["state"], found["complete"], found["verified"], found["tasks"]["done"]) == ("sealed", True, True, 4)
        refused = limpet("retry", "--state", "done", "--slot", "1", "--db", db)
        assert (refused.code, "sealed" in refused.err) == (2, True)
        assert limpet("gc", "--slots-older", "0s", "--slot", "1", "--db", db).code == 6
        assert limpet("run", "s.py", "--db", db, "--slot", "3", "--start", site.url("/")).code == 0
        vacuum = limpet("gc", "--slots-older", "0s", "--db", db, "--vacuum", "--json")
        if databases.name != "sqlite":  # refused before anything is done
            assert (vacuum.code, vacuum.json["error"]["kind"]) == (2, "UsageError")
            assert "--vacuum is for files" in vacuum.json["error"]["message"]
        assert limpet("gc", "--slots-older", "0s", "--db", db, "--json").code == (6 if databases.name == "sqlite" else 0)
        assert limpet("verify", "--full", "--db", db).code == 0


def test_an_age_that_is_none_is_a_usage_error(limpet: Limpet) -> None:
    """It says what was expected."""
    for age in ("90", "d", "-1d", "9x", "1.2.3d"):
        ended = limpet("gc", f"--slots-older={age}")
        assert (ended.code, "expected an age" in ended.err) == (2, True), age
