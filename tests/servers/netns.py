"""A network namespace of one worker, joined to this machine by a pair of virtual devices that can be cut and mended.

    with namespace("limpet-1") as away:
        away.command("python", "-m", "limpet", ...)     what runs there reaches `away.here` alone
        away.cut()                                      a black hole: nothing arrives in either direction, and nobody says so
        away.mend()

Linux alone, as root, with iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Namespaces of this process, each with a network of its own.
_NUMBERS = itertools.count(1)

#: linux/sched.h
CLONE_NEWNET = 0x40000000


def _program() -> str | None:
    return shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ip(*words: str) -> None:
    done = subprocess.run([str(_program()), *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@functools.cache
def can_be_made() -> bool:
    """Whether this process may make one: tried once."""
    if _program() is None or os.geteuid():
        return False
    try:
        with namespace():
            return True
    except (RuntimeError, OSError):
        return False


@dataclass
class Namespace:
    """One network, whose only way out is a cable to this machine."""

    name: str
    here: str  # address of this machine, on the cable
    there: str  # the namespace's own
    cable: str  # this machine's end of it
    cuts: list[str] = field(default_factory=list)  # what was done to it, in order

    @property
    def network(self) -> str:
        """The addresses of both ends."""
        return f"{self.here.rpartition('.')[0]}.0/24"

    @property
    def prefix(self) -> list[str]:
        """Words before a command that is to run there."""
        return [str(_program()), "netns", "exec", self.name]

    def cut(self) -> None:
        """A black hole: what is sent there is lost without a word, and so is what comes from there."""
        _ip("link", "set", self.cable, "down")
        self.cuts.append("cut")

    def mend(self) -> None:
        """The cable is whole again."""
        _ip("link", "set", self.cable, "up")
        self.cuts.append("mended")

    def listen(self, addresses: Sequence[tuple[str, int]]) -> list[socket.socket]:
        """Sockets that listen inside the namespace and are served by this process, whatever becomes of the cable."""
        made: list[socket.socket] = []
        failed: list[BaseException] = []

        def inside() -> None:  # a thread of its own, which ends there: a thread has a network, a socket keeps the one it was made in
            try:
                handle = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(handle)
                made.extend(socket.create_server(address, backlog=256) for address in addresses)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return made


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """A namespace for as long as the block runs; what runs in it is ended with it."""
    number = next(_NUMBERS)
    mine = f"{os.getpid() % 100_000:x}{number:x}"
    name, cable, far = f"limpet-{mine}", f"lp{mine}h", f"lp{mine}n"
    net = f"10.213.{(os.getpid() + number) % 250 + 1}"
    made = Namespace(name, f"{net}.1", f"{net}.2", cable)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", cable, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", name)
        _ip("addr", "add", f"{made.here}/24", "dev", cable)
        _ip("-n", name, "addr", "add", f"{made.there}/24", "dev", far)
        for words in (("link", "set", cable), ("-n", name, "link", "set", far), ("-n", name, "link", "set", "lo")):
            _ip(*words, "up")
        yield made
    finally:
        for pid in _processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        with contextlib.suppress(RuntimeError):
            _ip("netns", "delete", name)
        if Path(f"/sys/class/net/{cable}").exists():
            with contextlib.suppress(RuntimeError):
                _ip("link", "delete", cable)


def _processes(name: str) -> list[int]:
    done = subprocess.run([str(_program()), "netns", "pids", name], check=False, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]
