"""Tags with hundreds of thousands of attributes, for which libxml2 takes minutes: they are read all the same, and what leads on is kept."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from lxml import etree

from limpet.fetch.attributes import ATTRIBUTES_MAX, SURE_BYTES, thinned
from limpet.fetch.page import Page

#: So many attributes that one tag takes libxml2 longer than any test may.
MANY = 300_000

#: Seconds after which a page is taken for one that is never read: none takes as much as one of them.
HANG_S = 60

#: What stands before a tag, or between its attributes, to hide it from whoever looks for it.
FORMS = [
    "a{0}=1 ", "a{0} ", "a{0}/", "<a{0} ", 'a{0}=">"\n', "a{0}='>'\t", 'a{0}="1"', 'a{0}="><b c=\'"\f', "a{0}=\v\" a{0}b='>' ",
    "a{0} = > <a ",
]  # fmt: skip
BEFORE = [
    "", "<!-->", "<!--->", "<!-- > --!>", "<title/>", "<script/>", "</>", "<?x <title>", "<![CDATA[<xmp>", "<script><a b c</script>",
    "<title><!--</title>", "<a b='>\">", "</p <b>", "<b \v='>", "<textarea>'</textarea\n>", "<A\0>",
]  # fmt: skip


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """A page that hangs the parser cannot be interrupted: the process ends, which is better than a suite that never does."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def crowded(form: str, number: int, *, before: str = "", href: str = "/x") -> bytes:
    """A page with a tag of so many attributes in this form, and a link before and behind it."""
    many = "".join(form.format(n) for n in range(number))
    return f'<title>t</title><a href="/before">b</a>{before}<a {many} href={href}>x</a><a href=/behind>y</a>'.encode()


def widest(source: bytes) -> int:
    """Attributes of the tag that has the most."""
    root = etree.fromstring(source, etree.HTMLParser(encoding="utf-8", huge_tree=True))
    found = 0
    while root is not None:
        found = max(found, *(len(element.attrib) for element in root.iter("*")))
        root = root.getnext()
    return found


@pytest.mark.parametrize("form", ["a{0}=1 ", "a{0} ", 'a{0}=">" '])
def test_a_tag_with_very_many_attributes_is_read_and_its_link_is_found(form: str) -> None:
    """Also where the link stands behind all of them; the page says that its tree is not all of it."""
    page = Page.from_html(crowded(form, MANY))
    assert [anchor.href for anchor in page.links()] == ["/before", "/x", "/behind"]
    assert page.title == "t"
    (problem,) = page.problems
    assert problem.startswith("attributes: ")
    assert widest(thinned(crowded(form, MANY))) <= ATTRIBUTES_MAX + 1


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("form", FORMS)
def test_no_tag_hides_its_attributes(form: str, before: str) -> None:
    """What libxml2 takes for one tag is taken for one here: in whatever it stands, and whatever its values hold."""
    source = crowded(form, 2 * ATTRIBUTES_MAX, before=before) + b" " * SURE_BYTES
    assert widest(thinned(source)) <= ATTRIBUTES_MAX + 5


def test_without_the_cut_such_tags_reach_the_parser() -> None:
    """The twin: the forms are tags with so many attributes to libxml2."""
    reached = [widest(crowded(form, 2 * ATTRIBUTES_MAX)) for form in FORMS]
    assert sum(number > ATTRIBUTES_MAX + 5 for number in reached) >= len(FORMS) - 2


@pytest.mark.parametrize("source", [
    crowded("a{0}=1 ", ATTRIBUTES_MAX - 1) + b" " * SURE_BYTES,
    b"<p>" + b"word and word " * 100_000 + b"</p>",
    b"<script>" + b"if (a<b && c<d) e = '<a b c d=\"' + f;\n" * 10_000 + b"</script><p>x",
    b"<!-- <a " + b"b c d " * 50_000 + b" --><p>x",
    b"<title><a " + b"b c d " * 50_000 + b"</title><p>x",
    b'<p data="' + b"<a b c d>" * 50_000 + b'">x',
    b"<p " + b"same=1 " * 3 + b">x</p>" * 50_000,
    b"<" * 300_000,
], ids=lambda source: repr(source[:20]))  # fmt: skip
def test_any_other_page_is_read_as_it_is(source: bytes) -> None:
    """Long texts, scripts, comments and values are no attributes, whatever they look like."""
    assert thinned(source) is source


def test_attributes_within_the_bound_are_all_there() -> None:
    """And there is no note; one more than that, and those behind are gone."""
    most = Page.from_html(crowded("a{0}=1 ", ATTRIBUTES_MAX - 1))
    assert (most.problems, len(most.css("a")[1].attrib)) == ((), ATTRIBUTES_MAX)
    more = Page.from_html(crowded("a{0}=1 ", ATTRIBUTES_MAX + 600))
    assert (len(more.problems), len(more.css("a")[1].attrib)) == (1, ATTRIBUTES_MAX + 1)
    assert more.css(f"a[a{ATTRIBUTES_MAX - 1}]")
    assert not more.css(f"a[a{ATTRIBUTES_MAX + 1}]")
