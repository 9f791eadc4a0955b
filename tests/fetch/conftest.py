"""Runs the `async def` tests of this folder on a loop whose clock leaps over waiting."""

from __future__ import annotations

import inspect

import pytest

from tests.fetch.leap import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(pyfuncitem.obj(**arguments))
    return True
