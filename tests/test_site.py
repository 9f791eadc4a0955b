"""The demo shop serves exactly what it says it holds: every other test that crawls it leans on this."""

from __future__ import annotations

import http.client
import io
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urljoin, urlsplit
from urllib.request import urlopen

import lxml.html
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.demo.catalogue import FAULTS, LASTING, PASSING, Shop
from limpet.demo.replies import Site, page_of
from limpet.demo.site import HEAD_BYTES_MAX, listen, main, running, spawned

FIELDS = ("url", "sku", "title", "price", "stock")


@dataclass(frozen=True, slots=True)
class Got:
    """An answer as a client of the standard library sees it."""

    url: str
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def document(self) -> lxml.html.HtmlElement:
        """The parsed page, in the charset of its header, else of its meta tag."""
        found = re.search(r"charset=([\w-]+)", self.headers["Content-Type"]) or re.search(rb'charset="([\w-]+)', self.body)
        assert found, self.url
        name = found.group(1)
        return lxml.html.fromstring(self.body.decode(name if isinstance(name, str) else name.decode()))

    def links(self) -> list[str]:
        """Every link, made absolute."""
        return [urljoin(self.url, str(href).strip()) for href in self.document.xpath("//a/@href")]

    def record(self) -> dict[str, str]:
        """What the page shows of a product, as text."""
        shown = {name: self.document.find_class(name)[0].text_content() for name in FIELDS[1:]}
        return {"url": self.url, **shown}


def ask(url: str, method: str = "GET", **headers: str) -> Got:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request(method, (parts.path or "/") + ("?" + parts.query if parts.query else ""), headers=headers)
        answer = connection.getresponse()
        return Got(url, answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def same(url: str) -> str:
    """An own canonical form, so that the shop's idea of a page is held against another one."""
    parts = urlsplit(urljoin(url, urlsplit(url).path + ("?" + urlsplit(url).query if urlsplit(url).query else "")))
    query = urlencode(sorted(parse_qsl(parts.query)))
    path = unquote(urlsplit(urljoin(url, parts.path)).path)
    return f"http://{parts.netloc}{path}" + (f"?{query}" if query else "")


def crawl(*starts: str) -> dict[str, Got]:
    """Every page that an obedient crawl meets, by canonical URL; redirects lead to another page's entry."""
    pages: dict[str, Got] = {}
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        url = waiting.pop()
        got = ask(url)
        found = [got.headers["Location"]] if got.status == 301 else got.links() if got.status == 200 else []
        if got.status != 301:
            pages[url] = got
        for link in map(same, found):
            if link not in seen and "/staff/" not in link:
                seen.add(link)
                waiting.append(link)
    return pages


@pytest.fixture
def site() -> Iterator[Site]:
    """A small shop without faults."""
    with running(Shop(products=130)) as served:
        yield served


def test_a_crawl_finds_every_product_as_the_truth_has_it_and_nothing_else(site: Site) -> None:
    """What an obedient crawl collects equals `truth`, and the pages without a product equal `listing_urls`."""
    pages = crawl(*site.shop.starts())
    shown = {url: page.record() for url, page in pages.items() if "/p/" in url}
    truth = {str(row["url"]): {name: str(row[name]) for name in FIELDS} for row in site.shop.truth()}
    assert shown == truth
    assert pages.keys() - shown.keys() == set(site.shop.listing_urls())
    assert site.stats.breaches.total() == 0


def test_one_start_page_is_enough(site: Site) -> None:
    """From the first host alone every product of every host is reached."""
    pages = crawl(site.shop.starts()[0])
    assert {row["url"] for row in site.shop.truth()} <= pages.keys()


@pytest.mark.parametrize(("products", "hosts"), [(0, 1), (1, 1), (3, 2), (25, 1), (61, 3)])
def test_the_truth_holds_for_a_shop_of_any_size(products: int, hosts: int) -> None:
    """Empty shelves, single pages and several hosts alike."""
    with running(Shop(products=products, hosts=hosts)) as site:
        pages = crawl(*site.shop.starts())
    wanted = {str(row["url"]) for row in site.shop.truth()} | set(site.shop.listing_urls())
    assert pages.keys() == wanted
    assert {page.status for page in pages.values()} == {200}


@pytest.mark.parametrize("profile", ["mild", "harsh"])
def test_faults_end_as_the_truth_says(profile: str) -> None:
    """After three tries every page shows its outcome, and the lasting faults are still there."""
    with running(Shop(products=150, hosts=2, faults=profile, port=0)) as site:  # type: ignore[arg-type]
        for row in site.shop.truth():
            *_, last = [_status(str(row["url"])) for _ in range(3)]
            assert last == {"done": 200, "gone": 404, "dead": 500}[str(row["outcome"])], row


def _status(url: str) -> int:
    try:
        return ask(url).status
    except (ConnectionResetError, http.client.IncompleteRead):
        return 0


@pytest.mark.parametrize("start", [running, spawned])
def test_every_fault_of_a_profile_occurs_and_shows_as_itself(
    start: Callable[[Shop], AbstractContextManager[Site | Shop]],
) -> None:
    """Each kind of fault is met at its first try in the way that its name says, under either event loop."""
    with start(Shop(products=400, hosts=2, faults="harsh")) as served:
        truth = [*(served.shop if isinstance(served, Site) else served).truth()]
        by_fault = {str(row["fault"]): str(row["url"]) for row in truth}
        first = {
            "": 200,
            "busy": 503,
            "throttled": 429,
            "reset": "reset",
            "short": "short",
            "slow": 200,
            "gone": 404,
            "dead": 500,
        }
        assert {fault: _first_answer(url) for fault, url in by_fault.items()} == first
        throttled = next(str(row["url"]) for row in truth if row["fault"] == "throttled")  # another page than before
        assert ask(throttled).headers["Retry-After"] == "1"


def _first_answer(url: str) -> int | str:
    try:
        return ask(url).status
    except ConnectionResetError:
        return "reset"
    except http.client.IncompleteRead:
        return "short"


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 6), st.sampled_from(sorted(FAULTS)))
def test_only_products_have_lasting_faults_and_passing_ones_pass_in_time(seed: int, products: int, hosts: int, profile: str) -> None:
    """A listing is never lost for good, and no passing fault outlives two tries: the truth stays reachable."""
    shop = Shop(products=products, hosts=hosts, faults=profile, seed=seed)  # type: ignore[arg-type]
    for host in range(hosts):
        for path in ("/", "/robots.txt", "/c/lamps", f"/old/{products - 1}"):
            assert shop.fault(host, path) not in LASTING
        assert shop.fault(host, "/") == shop.fault(host, "/robots.txt") == ""
    for row in shop.truth():
        if row["fault"] in PASSING:
            path = urlsplit(str(row["url"])).path
            assert not shop.spoils(shop.host_of(int(path[3:])), path, 3)


def test_equal_shops_are_equal_byte_for_byte_and_another_seed_is_another_shop() -> None:
    """Pages follow from the fields alone."""
    one, twin, other = Shop(port=80, products=60), Shop(port=80, products=60), Shop(port=80, products=60, seed=2)
    assert [one.product_page(n) for n in range(60)] == [twin.product_page(n) for n in range(60)]
    assert [*one.truth()] == [*twin.truth()]
    assert not {row["title"] for row in one.truth()} >= {row["title"] for row in other.truth()}


def test_links_are_spelled_in_every_way_and_all_mean_the_same_page() -> None:
    """Ten spellings, each of which the shop and an own canonicaliser read as the page itself."""
    shop = Shop(port=8800, products=500)
    for path, query in (("/p/12", ""), ("/c/lamps", "page=2&sort=name")):
        spelled = {shop.spell(0, path, query, salt) for salt in range(300)}
        assert len(spelled) == 10
        for text in spelled:
            met = urlsplit(urljoin(shop.origin(0) + "/p/3", text.strip()))
            assert (met.hostname, met.port) == ("127.0.0.1", 8800), text
            assert page_of(f"{met.path}?{met.query}") == (path, dict(sorted(parse_qsl(query)))), text
    assert {replace(shop, plain=True).spell(0, "/p/12", "", salt) for salt in range(50)} == {"/p/12"}


@given(st.text())
def test_any_target_means_some_page(target: str) -> None:
    """Whatever a client asks for is a path from the root, without dot segments."""
    path, _ = page_of("/" + target)
    assert path.startswith("/")
    assert not {".", ".."} & set(path.split("/"))


def test_charsets_are_named_by_header_or_by_the_page_alone(site: Site) -> None:
    """utf-8 and utf-16 stand in the header; gb18030 only in the page; all three occur."""
    seen = Counter(ask(site.shop.url(n)).headers["Content-Type"] for n in range(site.shop.products))
    assert seen.keys() == {"text/html; charset=utf-8", "text/html; charset=utf-16", "text/html"}
    plain = replace(site.shop, plain=True)
    assert {plain.encoding(n) for n in range(200)} == {"utf-8"}


def test_old_addresses_lead_to_the_product_on_whatever_host_it_stands(site: Site) -> None:
    """/old/<n> answers 301 on every host, with the one canonical URL."""
    for host in range(site.shop.hosts):
        got = ask(f"{site.shop.origin(host)}/old/7")
        assert (got.status, got.headers["Location"]) == (301, site.shop.url(7))
    assert ask(f"{site.shop.origin(0)}/old/{site.shop.products}").status == 404


@pytest.mark.parametrize(
    "path", ["/p/130", "/p/1", "/p/007", "/p/x", "/p/", "/p/²", "/c/boats", "/c/lamps?page=99", "/c/lamps?page=0", "/x"]
)
def test_what_the_shop_does_not_hold_is_not_found(site: Site, path: str) -> None:
    """No such page, a product of another host, a number in another spelling: 404."""
    assert ask(site.shop.origin(0) + path.replace("²", "%C2%B2")).status == 404


def test_requests_repeats_breaches_and_peaks_are_counted(site: Site) -> None:
    """Every spelling of a page counts as that page; /_stats itself does not count."""
    origin = site.shop.origin(0)
    assert ask(f"{origin}/robots.txt").body == b"User-agent: *\nDisallow: /staff/\n"
    for path in ("/p/4", "/%70/4?", "/about/.././p/4", "/staff/lamps"):
        assert ask(origin + path).status == 200
    report = json.loads(ask(f"{origin}/_stats").body)
    assert report == {
        "requests": 5,
        "pages": 3,
        "repeated": 2,
        "most_repeated": [["127.0.0.1/p/4", 2]],
        "breaches": 1,
        "peaks": {"127.0.0.1": 1},
    }
    assert json.loads(ask(f"{origin}/_stats?only=requests").body) == {"requests": 5}
    assert site.stats.open_now.total() == 0


def test_peaks_show_how_many_requests_stood_open_at_once() -> None:
    """Five clients that wait for their answers are a peak of five on their host and of none elsewhere."""
    with running(Shop(products=10, hosts=2), latency_s=30) as site:
        clients = [http.client.HTTPConnection("127.0.0.1", site.shop.port, timeout=10) for _ in range(5)]
        for client in clients:
            client.request("GET", "/p/0")
        _until(site, lambda: site.stats.requests == 5)
        for client in clients:
            client.close()
        _until(site, lambda: site.stats.open_now.total() == 0)
        assert site.stats.peaks == {"127.0.0.1": 5}


def test_a_client_that_leaves_before_its_answer_is_counted_as_gone() -> None:
    """The log has status 0 for it, and it no longer counts as open."""
    log = io.StringIO()
    with running(Shop(products=4, hosts=1), latency_s=30, log=log) as site:
        client = http.client.HTTPConnection("127.0.0.1", site.shop.port, timeout=10)
        client.request("GET", "/p/0")
        _until(site, lambda: site.stats.open_now.total() == 1)
        client.close()
        _until(site, lambda: site.stats.open_now.total() == 0)
        assert log.getvalue().endswith("\t127.0.0.1/p/0\t0\n")


def _until(site: Site, is_so: Callable[[], bool]) -> None:
    """Wait for a condition, with a question to the site (which no latency delays) between two looks."""
    for _ in range(5000):
        if is_so():
            return
        ask(f"{site.shop.origin(0)}/_stats")
    pytest.fail(f"never came true: {site.stats}")


def test_pipelined_and_broken_up_requests_are_answered_in_order(site: Site) -> None:
    """Requests that arrive byte by byte, or three at once, each get their own answer."""
    client = http.client.HTTPConnection("127.0.0.1", site.shop.port, timeout=10)
    client.connect()
    for byte in b"GET /p/0 HTTP/1.1\r\nHost: x\r\n\r\nGET /p/4 HTTP/1.1\r\n\r\nGET /p/9999 HTTP/1.1\r\nConnection: close\r\n\r\n":
        client.sock.sendall(bytes([byte]))
    with client.sock.makefile("rb") as stream:
        whole = stream.read()
    client.close()
    assert re.findall(rb"HTTP/1.1 (\d+) ", whole) == [b"200", b"200", b"404"]
    assert re.findall(rb'class="sku">(LP-\d+)', whole) == [b"LP-000000", b"LP-000004"]


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n\r\n", b"x" * (HEAD_BYTES_MAX + 1)])
def test_what_is_no_request_ends_the_connection(site: Site, sent: bytes) -> None:
    """No answer but 400, and the shop goes on."""
    client = http.client.HTTPConnection("127.0.0.1", site.shop.port, timeout=10)
    client.connect()
    client.sock.sendall(sent)
    try:
        with client.sock.makefile("rb") as stream:
            assert stream.read()[:12] in (b"", b"HTTP/1.1 400")
    except ConnectionResetError:
        pass
    client.close()
    assert ask(site.shop.starts()[0]).status == 200


def test_other_methods_are_refused_and_head_has_no_body(site: Site) -> None:
    """HEAD has the length of the GET; POST is 405 with the methods that are allowed."""
    whole, head = ask(site.shop.url(0)), ask(site.shop.url(0), "HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(whole.body)))
    refused = ask(site.shop.url(0), "POST")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


def test_a_port_is_free_on_every_host_and_a_taken_one_is_refused() -> None:
    """Port 0 becomes one port of all hosts; a port that another has raises OSError and leaves nothing open."""
    shop, sockets = listen(Shop(hosts=3))
    try:
        assert [opened.getsockname() for opened in sockets] == [(shop.address(host), shop.port) for host in range(3)]
        with pytest.raises(OSError, match="in use"):
            listen(replace(shop, hosts=1))
    finally:
        for opened in sockets:
            opened.close()


def test_truth_prints_a_line_a_product(capsys: pytest.CaptureFixture[str]) -> None:
    """`truth` is `Shop.truth` as JSON lines."""
    assert main(["truth", "--products", "40", "--port", "81", "--faults", "harsh", "--seed", "3"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [*Shop(port=81, products=40, faults="harsh", seed=3).truth()]


def test_a_spawned_shop_serves_its_truth_logs_each_request_and_ends_with_its_block(tmp_path: Path) -> None:
    """The child has the shop that was asked for, its log is whole, and its port is free afterwards."""
    log = tmp_path / "requests.tsv"
    with spawned(Shop(products=9, hosts=2, seed=5, plain=True), log=str(log)) as shop:
        shown = [ask(shop.url(n)).record() for n in range(9)]
        assert shown == [{name: str(row[name]) for name in FIELDS} for row in shop.truth()]
        assert _status(f"{shop.origin(0)}/p/77") == 404
    lines = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
    assert [(page, status) for _, page, status in lines] == [
        *((f"{shop.address(n % 2)}/p/{n}", "200") for n in range(9)),
        ("127.0.0.1/p/77", "404"),
    ]
    again, sockets = listen(shop)
    assert again == shop
    for opened in sockets:
        opened.close()


def test_a_spawned_shop_that_cannot_serve_says_so() -> None:
    """A taken port is an OSError here, not a silent child."""
    with running(Shop(products=1, hosts=1)) as site, pytest.raises(OSError, match="did not start"), spawned(site.shop):
        pytest.fail("a port was given out twice")


def test_a_spawned_shop_ends_with_its_parent_however_that_ends() -> None:
    """A parent that is killed leaves no shop behind: standard error is open as long as the child lives."""
    code = (
        "import os, signal",
        "from limpet.demo.site import Shop, spawned",
        "with spawned(Shop(products=1, hosts=1)) as shop:",
        "    print(shop.port, flush=True)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
    )
    killed = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False, timeout=60)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, "")
    again, sockets = listen(Shop(port=int(killed.stdout), hosts=1))
    sockets[0].close()
    assert again.port == int(killed.stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_shop_ends_by_signal_with_exit_0(number: signal.Signals) -> None:
    """The command line's server goes quietly, an open connection or not."""
    command = [sys.executable, "-m", "limpet.demo.site", "serve", "--hosts=1", "--products=3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        start = server.stdout.readline().split()[-1]
        with urlopen(start, timeout=10) as answer:
            assert answer.status == 200
        server.send_signal(number)
        assert server.wait(10) == 0
