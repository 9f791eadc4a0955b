"""Where alerts arrive, on loopback: robots of chat services that check what they get, a webhook, a mail server.

The addresses of DingTalk, Feishu and WeCom are fixed in Apprise, so `pointed` sets the constant of each service's class to
the receiver for the length of a test; what Apprise and Limpet send is otherwise untouched.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiosmtpd.controller import Controller

DINGTALK_SECRET, DINGTALK_TOKEN = "SECb4d5ecre7f00dfeed", "d1ng70ken5ecret"
FEISHU_TOKEN, WECOM_KEY, HOOK = "fe15hu70ken5ecret", "wec0m-key-5ecret", "h00kpath5ecret"

#: Addresses as a user writes them.
DINGTALK = f"dingtalk://{DINGTALK_SECRET}@{DINGTALK_TOKEN}/"
FEISHU = f"feishu://{FEISHU_TOKEN}/"
WECOM = f"wecombot://{WECOM_KEY}/"


@dataclass(frozen=True)
class Post:
    """One request that arrived."""

    path: str
    query: dict[str, list[str]]
    message: dict[str, Any]


#: What a receiver answers to a post: a status and a JSON value.
Answer = Callable[[Post], tuple[int, object]]


@dataclass
class Receiver:
    """A receiver of posts on loopback; `answer` may be set anew."""

    answer: Answer
    port: int = 0
    posts: list[Post] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def url(self, scheme: str = "http") -> str:
        """Its address, without a path."""
        return f"{scheme}://127.0.0.1:{self.port}"

    def wait_for(self, number: int, seconds: float = 120.0) -> list[Post]:
        """The posts, once there are so many."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.posts) >= number, seconds), f"{len(self.posts)} posts came"
            return list(self.posts)


def taken(post: Post) -> tuple[int, object]:
    """Every service's word for success."""
    return 200, {"errcode": 0, "code": 0}


def signed(post: Post) -> tuple[int, object]:
    """What DingTalk does with a robot that is secured by a signature: verify it, and say so in an answer of status 200."""
    stamp, sign = (post.query.get(name, [""])[0] for name in ("timestamp", "sign"))
    code = hmac.new(DINGTALK_SECRET.encode(), f"{stamp}\n{DINGTALK_SECRET}".encode(), hashlib.sha256).digest()
    is_right = hmac.compare_digest(sign, base64.b64encode(code).decode()) and abs(time.time() * 1000 - float(stamp or 0)) < 3_600_000
    return 200, {"errcode": 0, "errmsg": "ok"} if is_right else {"errcode": 310000, "errmsg": f"sign not match for {DINGTALK_TOKEN}"}


@contextmanager
def receiving(answer: Answer = taken) -> Iterator[Receiver]:
    """A receiver of posts."""
    receiver = Receiver(answer)

    class Asked(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            post = Post(parts.path, parse_qs(parts.query), json.loads(body))
            status, told = receiver.answer(post)
            with receiver.came:
                receiver.posts.append(post)
                receiver.came.notify_all()
            reply = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    server.daemon_threads = True
    receiver.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pointed(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """Point the three chat services at a receiver."""
    from apprise.plugins import dingtalk, feishu, wecombot

    monkeypatch.setattr(dingtalk.NotifyDingTalk, "notify_url", receiver.url() + "/robot/send?access_token={token}")
    monkeypatch.setattr(feishu.NotifyFeishu, "notify_url", receiver.url() + "/open-apis/bot/v2/hook/{token}/")
    monkeypatch.setattr(wecombot.NotifyWeComBot, "notify_url", receiver.url() + "/cgi-bin/webhook/send?key={key}")


class Mails:
    """What a mail server took: (recipients, subject, text)."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], str, str]] = []

    async def handle_DATA(self, server: object, session: object, envelope: Any) -> str:
        """Take one mail."""
        mail = message_from_bytes(envelope.content, policy=default)
        body = mail.get_body(("plain", "html"))
        assert body is not None
        self.taken.append((list(envelope.rcpt_tos), str(mail["Subject"]), body.get_content()))
        return "250 taken"


@contextmanager
def mail_server() -> Iterator[tuple[Mails, int]]:
    """A small SMTP server, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mails = Mails()
    controller = Controller(mails, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield mails, port
    finally:
        controller.stop()
