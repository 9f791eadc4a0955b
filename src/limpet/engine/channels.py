"""Where alerts go: the addresses of people, in Apprise's spelling, each tried by itself.

An address holds secrets (a robot's token, the password of a mailbox), so nothing here or above shows more of it than its
scheme: not in a message, not in a row, not in a log. What Apprise and the libraries below it say of a failure is kept,
and every piece of the address in it is struck out first.

The only module that speaks Apprise. Two of its services are wrapped, since both take an HTTP 200 for success, while
DingTalk and WeCom say in the answer's `errcode` that they refused; and Apprise escapes DingTalk's signature twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

from limpet.errors import UsageError

#: Seconds for one answer of a service.
ANSWER_S = 10.0
#: Characters of what a service said when it did not take an alert.
WHY_CHARS_MAX = 300
#: Pieces of an address shorter than that are no secret, and would strike out half of every message.
SECRET_CHARS_MIN = 3
#: Loggers that would say what was sent where.
_TALKATIVE = ("apprise", "urllib3.connectionpool", "urllib3.util.retry", "requests_oauthlib.oauth1_session")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Channel:
    """One address that alerts are sent to."""

    scheme: str
    mark: str  # names the address in the outbox, and tells nothing of it
    _address: str
    _service: Any

    def __repr__(self) -> str:
        return f"Channel({self.scheme}://***)"

    def send(self, title: str, body: str) -> str:
        """Send one alert: "" where the service took it, else why not. Never raises."""
        said: list[str] = []
        with _listening(said):
            try:
                taken = bool(self._service.notify(body=body, title=title, notify_type="warning", body_format="text"))
            except Exception as error:
                taken = False
                said.append(str(error) or type(error).__name__)
        return "" if taken else self._struck(" ".join(said)) or "not taken"

    def _struck(self, text: str) -> str:
        """The text without any piece of the address."""
        pieces = {piece for piece in re.split(r"[/?&=@:;,#]+", self._address.partition("://")[2]) if len(piece) >= SECRET_CHARS_MIN}
        for piece in sorted(pieces | {unquote(piece) for piece in pieces}, key=len, reverse=True):
            text = text.replace(piece, "***")
        return " ".join(text.split())[:WHY_CHARS_MAX]


def scheme_of(address: str) -> str:
    """All that is ever shown of an address.

    >>> scheme_of("dingtalk://SECret@token/"), scheme_of("no address")
    ('dingtalk', '')
    """
    found = _SCHEME.match(address)
    return found[1].lower() if found else ""


def channels_of(addresses: Sequence[str]) -> list[Channel]:
    """The channels at some addresses; UsageError for one that Apprise cannot use, naming its place and scheme alone."""
    if not addresses:
        return []
    try:
        import apprise
    except ImportError as error:
        raise UsageError(f"alerts need the extra: pip install 'limpet[alerts]' ({error})") from error
    asset = apprise.AppriseAsset(app_id="Limpet", app_desc="Limpet", storage_mode="memory", async_mode=False, secure_logging=True)
    found = []
    for number, address in enumerate(addresses, 1):
        scheme, said = scheme_of(address), list[str]()
        with _listening(said), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of services that are loaded with the one that is meant
            service = _service(address, scheme, asset)
        if service is None:
            shown = f"{scheme}://***" if scheme else "one without a scheme"
            raise UsageError(f"alerts: address {number} ({shown}) is none that Apprise can send to; see docs/alerts.md for examples")
        service.socket_connect_timeout = service.socket_read_timeout = ANSWER_S
        service.request_rate_per_sec = 0  # the outbox has its own waits
        found.append(Channel(scheme, blake2b(address.encode(), digest_size=4).hexdigest(), address, service))
    return found


def _service(address: str, scheme: str, asset: Any) -> Any:
    import apprise

    if scheme not in ("dingtalk", "wecombot"):
        return apprise.Apprise.instantiate(address, asset=asset)
    kind = robots()[scheme]
    try:
        parsed = kind.parse_url(address)
        return kind(asset=asset, **parsed) if parsed else None
    except (apprise.exception.AppriseException, TypeError):
        return None


@contextlib.contextmanager
def _listening(said: list[str]) -> Iterator[None]:
    """Keep what the libraries say on this thread away from the log; warnings of Apprise's own are gathered."""
    thread = threading.get_ident()

    def hear(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        if record.levelno >= logging.WARNING and record.name == "apprise":
            said.append(record.getMessage())
        return False

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(hear)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hear)


def robots() -> dict[str, Any]:
    """The services of Apprise whose answers have to be read: scheme -> class."""
    from apprise.plugins import dingtalk, wecombot

    of_dingtalk: Any = dingtalk.NotifyDingTalk
    of_wecom: Any = wecombot.NotifyWeComBot

    class DingTalk(of_dingtalk):  # type: ignore[misc]
        """DingTalk's robot; signed where the address has a secret: dingtalk://SECRET@TOKEN/."""

        def send(self, body: str, title: str = "", **_: Any) -> bool:
            """Post one message; whether the robot took it."""
            signed = {}
            if self.secret:
                timestamp, signature = self.get_signature()
                signed = {"timestamp": timestamp, "sign": unquote(signature)}  # it is escaped once more with the others
            at = {"atMobiles": self.targets, "isAtAll": False}
            return _posted(self, self.notify_url.format(token=self.token), signed, {**_text(title, body), "at": at})

    class WeCom(of_wecom):  # type: ignore[misc]
        """WeCom's robot of a group: wecombot://KEY/."""

        def send(self, body: str, title: str = "", **_: Any) -> bool:
            """Post one message; whether the robot took it."""
            return _posted(self, self.notify_url.format(key=self.key), {}, _text(title, body))

    return {"dingtalk": DingTalk, "wecombot": WeCom}


def _text(title: str, body: str) -> dict[str, object]:
    return {"msgtype": "text", "text": {"content": f"{title}\n{body}" if title else body}}


def _posted(service: Any, url: str, query: dict[str, str], message: dict[str, object]) -> bool:
    """Post a message; whether the answer's `errcode` says that it was taken. What it says else is the service's warning."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    address = urlsplit(url)
    url = address._replace(query="&".join(filter(None, (address.query, urlencode(query))))).geturl()
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "Limpet"}
    request = Request(url, json.dumps(message).encode(), headers)
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            told = json.loads(answer.read(65536))
    except HTTPError as error:
        error.close()
        service.logger.warning("status %d", error.code)
        return False
    except (OSError, ValueError) as error:
        service.logger.warning("%s", getattr(error, "reason", None) or error)
        return False
    if not isinstance(told, dict) or told.get("errcode") != 0:
        service.logger.warning("refused: %s", {name: told.get(name) for name in ("errcode", "errmsg")} if isinstance(told, dict) else told)
        return False
    return True
