"""Credentials: which names say that a value is one, and what stands in its place in whatever is shown, logged or kept.

One rule for parameters, fields of a query and headers alike: where a whole word of the name says so, the value is `***`. It
goes by names, since nobody can tell a key from a keyword by its looks. Texts are searched for the forms in which such pairs
come: a query, a header line, a mapping as Python and JSON write it, user and password in a URL. What is worked on (the URL of
a task, a record) is never changed by this; only what is said of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_plus

#: What stands in the place of a value.
HIDDEN = "***"

#: Words of a name, in lower case. `keyword`, `author` and `monkey` are other words.
WORDS = frozenset({
    "apikey", "apikeys", "appkey", "accesskey", "authkey", "secretkey", "privatekey", "key", "keys",
    "token", "tokens", "accesstoken", "apitoken", "authtoken", "bearer", "jwt",
    "secret", "secrets", "clientsecret", "appsecret", "apisecret",
    "password", "passwords", "passwd", "passphrase", "pass", "pwd",
    "auth", "oauth", "authorization", "authentication", "credential", "credentials", "creds", "cookie", "cookies",
    "signature", "sig", "sign", "hmac",
})  # fmt: skip

#: A change of case begins a word: apiKey, APIKey.
_WORDS_OF = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: A longer name is none that anybody gave.
_NAME = r"[\w.%\[\]$-]{1,100}"
#: `?name=value&...` and `#name=value`: the value ends with the pair, and full stops after it are the sentence's.
_QUERY = re.compile(rf"""(?<=[?&;#])({_NAME})=((?:[^\s&"'<>#;]|;(?!{_NAME}=))*[^\s&"'<>#:,.;)\]}}])""")
#: 'name': 'value'.
_ENTRY = re.compile(rf"""(["'])({_NAME})\1(\s*:\s*b?)(["'])((?:(?!\4)[^\\\n]|\\.)+)\4""")
#: A header line. Of names with one word only what is well known: "key: expected ..." is a sentence.
_HEADER = re.compile(
    rf"""(?i)(?<![\w-])(authorization|(?=[a-z0-9]{{1,40}}-)(?:[a-z0-9]{{1,40}}-){{0,8}}(?:{"|".join(sorted(WORDS))})(?:-[a-z0-9]{{1,40}}){{0,8}})"""
    r"""([ \t]*:[ \t]*)[^\s"'][^\r\n"']*"""
)
_BEARER = re.compile(r"(?i)\b(bearer +)[\w.~+/=-]{6,}")
#: Of pages, whatever stands before the host; of databases the password, up to the last @, as it may hold a / or ?.
_USER_OF_PAGE = re.compile(r"(?i)(?<=http://|ttps://)[^\s/?#\\\"'<>]{1,500}@")
_PASSWORD = re.compile(r"(?i)\b(?!https?:)([a-z][a-z0-9+.-]{0,30}://[^\s/:@]{0,200}:)[^\s\"'<>]{1,500}@")


def is_secret(name: str) -> bool:
    """Whether a name says that its value is a credential.

    >>> [name for name in ("api_key", "X-Auth-Token", "apiKey", "sig", "keyword", "keywords", "author") if is_secret(name)]
    ['api_key', 'X-Auth-Token', 'apiKey', 'sig']
    """
    return any(word.lower() in WORDS for word in _WORDS_OF.findall(name))


def hidden_value(name: str, value: str) -> str:
    """A value as it may be shown beside its name.

    >>> hidden_value("key", "x"), hidden_value("api", "http://h/?key=x"), hidden_value("key", "")
    ('***', 'http://h/?key=***', '')
    """
    return HIDDEN if value and is_secret(name) else hidden(value)


def hidden_values(values: Mapping[str, str]) -> dict[str, str]:
    """A mapping as it may be shown.

    >>> hidden_values({"token": "x", "city": "Oslo"})
    {'token': '***', 'city': 'Oslo'}
    """
    return {name: hidden_value(name, value) for name, value in values.items()}


def hidden(text: str) -> str:
    """A text without the credentials in it; the same again changes nothing.

    >>> hidden("http://h/v1?q=a&api_key=s3cret: status 500")
    'http://h/v1?q=a&api_key=***: status 500'
    >>> hidden("https://me:pw@h/"), hidden("postgresql://me:p/w@db/x"), hidden("Authorization: Bearer abc")
    ('https://***@h/', 'postgresql://me:***@db/x', 'Authorization: ***')
    >>> hidden("{'X-Api-Key': 'abc', 'keyword': 'tea'}")
    "{'X-Api-Key': '***', 'keyword': 'tea'}"
    """
    if ":" not in text and "=" not in text and "earer" not in text:
        return text  # nearly every text
    if "://" in text:
        text = _USER_OF_PAGE.sub(f"{HIDDEN}@", text)
        text = _PASSWORD.sub(rf"\g<1>{HIDDEN}@", text)
    if "=" in text:
        text = _QUERY.sub(lambda found: f"{found[1]}={HIDDEN}" if is_secret(unquote_plus(found[1])) else found[0], text)
    if ":" in text:
        text = _ENTRY.sub(_entry, text)
        text = _HEADER.sub(rf"\g<1>\g<2>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


def _entry(found: re.Match[str]) -> str:
    quote, name, between, mark = found[1], found[2], found[3], found[4]
    return f"{quote}{name}{quote}{between}{mark}{HIDDEN}{mark}" if is_secret(name) else found[0]
