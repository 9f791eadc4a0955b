"""Bytes to text: every page comes out as its author wrote it, or says that it did not."""

# ruff: noqa: RUF001 - the letters of other scripts are what is tested
from __future__ import annotations

import codecs
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.fetch.charset import DETECT_BYTES, Decoded, declared_in, decode, name_of
from limpet.fetch.charset_labels import CODECS, NAME_OF
from limpet.url_tables import QUERY_CODECS

CHINESE = "中文网页测试内容，这是一个没有声明编码的页面。" * 5
GERMAN = "Die Straße führt über die Brücke, schöne Grüße aus Köln. " * 4
RUSSIAN = "Это русская страница без объявления кодировки. " * 5
JAPANESE = "これは日本語のページです。文字コードの宣言はありません。" * 5
KOREAN = "이것은 한국어 페이지입니다. 인코딩 선언이 없습니다." * 5
GREEK = "Αυτή είναι μια ελληνική σελίδα χωρίς δήλωση. " * 5


def page(text: str, charset: str = "") -> str:
    meta = f'<meta charset="{charset}">' if charset else ""
    return f"<!doctype html><html><head>{meta}<title>t</title></head><body><p>{text}</p></body></html>"


# -- declared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "codec", "name", "text"),
    [
        ("utf-8", "utf-8", "utf-8", CHINESE),
        ("gb18030", "gb18030", "gb18030", CHINESE + "㐀𠀀"),
        ("GB2312", "gbk", "gbk", CHINESE + "镕"),  # not in GB 2312: pages that say so use all of GBK
        ("x-gbk", "gb18030", "gbk", CHINESE + "𠀀"),
        ("Shift_JIS", "cp932", "shift_jis", JAPANESE + "①髙～"),
        ("euc-jp", "euc_jp", "euc-jp", JAPANESE),
        ("euc-jp", "euc_jis_2004", "euc-jp", JAPANESE + "①"),
        ("iso-2022-jp", "iso2022_jp", "iso-2022-jp", JAPANESE),
        ("ks_c_5601-1987", "cp949", "euc-kr", KOREAN + "똠"),
        ("big5", "big5hkscs", "big5", "這是繁體中文網頁" * 5),
        ("latin1", "cp1252", "windows-1252", GERMAN + "“€”"),
        ("us-ascii", "cp1252", "windows-1252", GERMAN),
        ("windows-1251", "cp1251", "windows-1251", RUSSIAN),
        ("koi8-ru", "koi8-u", "koi8-u", RUSSIAN + "ї"),
        ("x-mac-cyrillic", "mac-cyrillic", "x-mac-cyrillic", RUSSIAN),
        ("iso-8859-9", "cp1254", "windows-1254", "Türkçe ığdır"),
        ("tis-620", "cp874", "windows-874", "ภาษาไทย"),
    ],
)
def test_a_declared_charset_comes_out_right_from_header_and_from_meta(label: str, codec: str, name: str, text: str) -> None:
    """P107: labels mean what browsers take them for, not what codecs of that name do."""
    body = page(text).encode(codec)
    assert decode(body, f'text/html; Charset="{label}"') == Decoded(page(text), name, "header")
    if codec != "iso2022_jp":
        body = page(text, label).encode(codec)
        assert decode(body, "text/html") == Decoded(page(text, label), name, "meta")


@pytest.mark.parametrize(("codec", "name"), [("utf-16-le", "utf-16le"), ("utf-16-be", "utf-16be")])
def test_utf_16_comes_out_right_however_it_is_told(codec: str, name: str) -> None:
    """By a byte order mark, by the header, by its zero bytes alone, and where header or meta say something else."""
    text = page(CHINESE, "utf-8")
    bom = "\ufeff".encode(codec)
    assert decode(bom + text.encode(codec), "text/html; charset=utf-8") == Decoded(text, name, "bom")
    assert decode(text.encode(codec), f"text/html; charset={codec.replace('16-', '16')}") == Decoded(text, name, "header")
    assert decode(text.encode(codec)) == Decoded(text, name, "detected")
    assert decode(text.encode(codec), "text/html; charset=utf-8") == Decoded(text, name, "detected")


def test_utf_16_without_an_order_is_little_endian() -> None:
    """WHATWG Encoding, section 4.2; RFC 2781 says the contrary, and no browser does it."""
    assert decode("Größe".encode("utf-16-le"), "text/html; charset=utf-16").text == "Größe"


def test_the_byte_order_mark_wins_and_is_not_part_of_the_text() -> None:
    """WHATWG Encoding, section 6."""
    assert decode(codecs.BOM_UTF8 + "é".encode(), "text/html; charset=latin1") == Decoded("é", "utf-8", "bom")
    assert decode(codecs.BOM_UTF8) == Decoded("", "utf-8", "bom")


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b'<meta http-equiv="Content-Type" content="text/html; charset=gbk">', "gbk"),
        (b"<META CHARSET=koi8-r>", "koi8-r"),
        (b"<meta name=x content='y'><meta charset = 'sjis'/>", "shift_jis"),
        (b'<?xml version="1.0" encoding="iso-8859-2"?><html>', "iso-8859-2"),
        (b"<!-- <meta charset=gbk> --><meta charset=big5>", "big5"),
        (b"<!-- <meta charset=gbk>", None),
        (b"<meta charset=utf-16>", "utf-8"),  # written in ASCII, so it is not
        (b"<meta charset=x-user-defined>", "windows-1252"),
        (b"<meta charset=nonsense>", None),
        (b"<p>charset=gbk</p>", None),
        (b"x" * 5000 + b"<meta charset=gbk>", None),
    ],
)
def test_a_meta_is_found_as_browsers_find_it(head: bytes, name: str | None) -> None:
    """WHATWG HTML, section 13.2.3.2, within the first 4,096 bytes."""
    assert declared_in(head) == name


def test_all_labels_of_the_standard_are_known_and_have_a_codec() -> None:
    """40 encodings; what `limpet.url` writes queries in is the same table, seen from the other side."""
    assert len(set(NAME_OF.values())) == 40
    assert set(NAME_OF.values()) - set(CODECS) == {"replacement", "x-user-defined"}
    for names in CODECS.values():
        for codec in names:
            codecs.lookup(codec)
    for label, name in NAME_OF.items():
        if label in QUERY_CODECS and name in QUERY_CODECS:
            assert QUERY_CODECS[label] == QUERY_CODECS[name], label


@pytest.mark.parametrize("label", ["utf-7", "unknown", "", "none", "utf-8-sig", "idna", "rot13", "zlib"])
def test_names_of_python_codecs_are_no_labels(label: str) -> None:
    """A server cannot pick any codec that Python happens to have."""
    assert name_of(label) is None
    assert decode(b"plain", f"text/html; charset={label}") == Decoded("plain", "utf-8", "valid")


def test_bytes_that_a_code_page_leaves_open_are_controls() -> None:
    """WHATWG: 81 in windows-1252 is U+0081, where Python raises; beyond 9F it is U+FFFD."""
    assert decode(b"a\x81b\x80", "text/html; charset=windows-1252").text == "a\x81b€"
    assert decode(b"a\xaab", "text/html; charset=windows-1253").text == "a\ufffdb"


def test_replacement_encodings_are_not_decoded() -> None:
    """WHATWG Encoding, section 14.1: one U+FFFD, as in browsers; the bytes stay with the page."""
    assert decode(b"~{<:~}", "text/html; charset=hz-gb-2312") == Decoded("\ufffd", "replacement", "header")


# -- contradicted --------------------------------------------------------------------------


def test_a_header_that_the_bytes_contradict_gives_way_to_a_meta_that_they_fit() -> None:
    """P107: gbk bytes, the header says utf-8, the meta says gb2312."""
    text = page(CHINESE, "gb2312")
    assert decode(text.encode("gbk"), "text/html; charset=utf-8") == Decoded(text, "gbk", "meta")


def test_a_header_that_the_bytes_contradict_gives_way_to_detection() -> None:
    """The same without a meta."""
    assert decode(page(CHINESE).encode("gbk"), "text/html; charset=utf-8") == Decoded(page(CHINESE), "gb18030", "detected")


def test_utf_8_bytes_are_utf_8_where_header_and_meta_differ() -> None:
    """A server's default (AddDefaultCharset) does not spoil a page that says what it is; on its own it is believed."""
    text = page(GERMAN, "utf-8")
    assert decode(text.encode(), "text/html; charset=iso-8859-1") == Decoded(text, "utf-8", "meta")
    assert decode(page(GERMAN).encode(), "text/html; charset=iso-8859-1").encoding == "windows-1252"
    legacy = page(GERMAN, "utf-8")
    assert decode(legacy.encode("cp1252"), "text/html; charset=iso-8859-1") == Decoded(legacy, "windows-1252", "header")


def test_one_damaged_character_does_not_change_the_charset() -> None:
    """It is replaced, and so counted by the page's problems."""
    body = page(CHINESE).encode() + b"\xe4\xb8"
    assert decode(body, "text/html; charset=utf-8") == Decoded(page(CHINESE) + "\ufffd", "utf-8", "header")
    gbk = page(CHINESE).encode("gbk") + b"\xff"
    assert decode(gbk, "text/html; charset=gb2312").text == page(CHINESE) + "\ufffd"


# -- undeclared ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("utf-8", CHINESE), ("gb18030", CHINESE), ("cp932", JAPANESE), ("euc_jp", JAPANESE), ("cp949", KOREAN),
        ("cp1251", RUSSIAN), ("koi8-r", RUSSIAN), ("cp1252", GERMAN), ("cp1253", GREEK), ("ascii", "plain"),
    ],
)  # fmt: skip
def test_an_undeclared_charset_is_recognised(codec: str, text: str) -> None:
    """UTF-8 by its validity, the others by charset-normalizer."""
    decoded = decode(page(text).encode(codec), "text/html")
    assert decoded.text == page(text)
    assert decoded.how == ("valid" if codec in ("utf-8", "ascii") else "detected")


def test_detection_sees_a_bounded_prefix() -> None:
    """The last resort takes milliseconds, for a page of any size; a prefix that ends within a character is no matter."""
    for shift in range(4):
        body = (b"<" * shift + page(CHINESE * 2000).encode("gb18030")) * 4
        assert len(body) > 100 * DETECT_BYTES
        started = time.process_time()
        assert decode(body).encoding == "gb18030"
        assert time.process_time() - started < 0.5


@given(st.binary(max_size=400), st.sampled_from(["", "text/html", *(f"text/html; charset={label}" for label in NAME_OF)]))
def test_any_bytes_give_a_text(body: bytes, content_type: str) -> None:
    """Never an exception, never a lone surrogate, always a name that is known."""
    decoded = decode(body, content_type or None)
    decoded.text.encode()
    assert decoded.encoding in CODECS or decoded.encoding in ("replacement", "x-user-defined")
    assert decoded.how in ("bom", "header", "meta", "valid", "detected", "fallback")


@given(st.text(max_size=200).filter(lambda t: not t.startswith(("\ufeff", "\x00")) and "\x00" not in t[:4]))
def test_any_text_in_utf_8_comes_back(text: str) -> None:
    """Declared or not, unless it looks like something else by a mark or zero bytes."""
    assert decode(text.encode(), "text/html; charset=utf-8").text == text
