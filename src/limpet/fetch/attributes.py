"""Tags with so many attributes that libxml2 would take minutes for one: what is too much is taken out before it reads.

libxml2 appends each attribute to a list that it walks from its beginning: 400,000 of them take minutes, in one call that
nothing can interrupt. Nearly every page is passed by a look for a tag that does not end for long. The others are read with one
regular expression that follows the tokenizer of the HTML standard (section 13.2.5) and never goes back, so it is linear.
"""

from __future__ import annotations

import re

#: Attributes of one tag: real tags have a few dozen, and a page of nothing but such tags still takes less than twice its time.
ATTRIBUTES_MAX = 512
#: Bytes from a `<` on without a `>` in which a tag may have so many, each with a name of its own.
STRETCH_BYTES = 4 * ATTRIBUTES_MAX
#: Bytes of a page that is always read: in a smaller one, tags that hide their `>` in quotes from that look take seconds at the worst.
SURE_BYTES = 128 * 1024

#: White space between attributes; a vertical tab is none.
_BLANK = rb"[ \t\n\f\r]"
_NAME = rb"<[A-Za-z][^ \t\n\f\r/>]*+"
_VALUE = rb"""(?:"[^"]*+"?+|'[^']*+'?+|[^ \t\n\f\r>"'][^ \t\n\f\r>]*+)"""
_ATTRIBUTE = rb"(?:[ \t\n\f\r/]*+[^ \t\n\f\r/>][^ \t\n\f\r/>=]*+(?:%b*+=%b*+%b?+)?+)" % (_BLANK, _BLANK, _VALUE)
_FEW = rb"%b{0,%d}+" % (_ATTRIBUTE, ATTRIBUTES_MAX)
#: An element whose content is text, up to its own end tag; libxml2 takes `/>` for the end of the element.
_TEXT = rb"<(?i:%b)(?=[ \t\n\f\r/>])%b(?:/*+[ \t\n\f\r]++)*+>[^<]*+(?:<(?!/(?i:%b)[ \t\n\f\r/>])[^<]*+)*+"
_TEXTS = [_TEXT % (name, _FEW, name) for name in (b"script", b"style", b"textarea", b"title", b"xmp", b"iframe", b"noembed", b"noframes")]
#: Comments, and what is taken for one.
_COMMENTS = [rb"<!--(?!-?>)[^-]*+(?:-(?!-!?>)[^-]*+)*+", rb"<(?:[!?]|/(?![A-Za-z]))[^>]*+"]
_END = rb"[ \t\n\f\r/]*+(?:>|\Z)"
_END_TAG = rb"</[A-Za-z][^ \t\n\f\r/>]*+" + _ATTRIBUTE + rb"*+" + _END
_GUARDED = rb"(?=<(?i:s[ct]|t[ei]|xm|if|no))(?:%b)" % b"|".join(_TEXTS)
#: What is passed over whole; the usual forms of an end tag, and of a tag whose values are in quotes, before all others.
_USUAL = [rb"[^<]++", rb"</[A-Za-z0-9]++>", _GUARDED, rb"""<[a-z0-9]++(?: [a-z-]++="[^"]*+"){0,20}+>"""]
_KINDS = [*_USUAL, _NAME + _FEW + _END, _END_TAG, *_COMMENTS, rb"<(?![A-Za-z])"]
_PASSED = re.compile(rb"(?:%b)*+" % b"|".join(_KINDS))
_HEAD = re.compile(_NAME + _ATTRIBUTE + rb"{%d}" % ATTRIBUTES_MAX)
_REST = re.compile(_ATTRIBUTE + rb"*+")
_EACH = re.compile(_ATTRIBUTE)
#: Attributes that lead on, or say something of the whole page, are kept wherever they stand.
_KEPT = re.compile(rb"[ \t\n\f\r/]*+(?i:href|rel|src|name|content)[ \t\n\f\r]*+=")


def thinned(source: bytes) -> bytes:
    """The page without most of the attributes of a tag that are beyond ATTRIBUTES_MAX; the page itself where there are none.

    >>> thinned(b"<p class=a>x</p>"), len(thinned(b"<p " + b" ".join(b"a%d" % n for n in range(9999)) + b">")) < 9999
    (b'<p class=a>x</p>', True)
    """
    if not _may_be_crowded(source):
        return source
    pieces, at = [], 0
    while (head := _HEAD.match(source, _end(_PASSED.match(source, at)))) is not None:
        pieces.append(source[at : head.end()])
        at = _end(_REST.match(source, head.end()))
        rest = (each[0] for each in _EACH.finditer(source, head.end(), at))
        pieces += [b" " + each for each in rest if _KEPT.match(each)]
    return b"".join([*pieces, source[at:]]) if pieces else source


def _may_be_crowded(source: bytes) -> bool:
    """Whether a tag may be too long. Looks at a byte in hundreds: from each `>` as far ahead as a tag may be long, and back."""
    if len(source) > SURE_BYTES:
        return True
    at = 0
    while at + STRETCH_BYTES < len(source):
        end = source.rfind(b">", at, at + STRETCH_BYTES)
        if end < 0:
            begin = source.find(b"<", at, at + STRETCH_BYTES)
            if begin == at:
                return True
            at = begin if begin > at else at + STRETCH_BYTES
        else:
            at = end + 1
    return False


def _end(found: re.Match[bytes] | None) -> int:
    assert found is not None, "it matches nothing as well"
    return found.end()
