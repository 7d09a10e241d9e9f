"""Ctrl-C arrives, also where Python drops exceptions."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time

import pytest

from jaxformer.runtime import interrupts


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back afterwards
    interrupts.install()
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_at_once():
    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        press()


def press_once(sent):
    if not sent:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs in here


def assert_delivered(sent, capfd):
    assert sent
    assert time.monotonic() - sent[0] < 5
    assert "Exception ignored" not in capfd.readouterr().err


def test_an_interrupt_in_a_garbage_collection_callback_is_not_lost(capfd):
    def callback(*args):
        press_once(sent)

    def collect():
        gc.collect()
        time.sleep(10)

    sent: list[float] = []
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):
            collect()
    finally:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(callback)
    assert_delivered(sent, capfd)


def test_an_interrupt_in_a_finaliser_is_not_lost(capfd):
    class Finalised:
        def __del__(self):
            press_once(sent)

    def drop():
        Finalised()
        time.sleep(10)

    sent: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        drop()
    assert_delivered(sent, capfd)


def test_other_dropped_exceptions_are_still_reported(monkeypatch):
    class Failing:
        def __del__(self):
            raise ValueError("in a finaliser")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_type))
    interrupts.install()
    Failing()
    assert reported == [ValueError]
