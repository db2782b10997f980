from __future__ import annotations

import os
import signal
import threading

import pytest

from arb_ternary_train.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.reason == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_schedulers_ask_for_a_stop_again_and_again(number: signal.Signals) -> None:
    # Where the tests were started with nohup, SIGHUP is ignored.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.reason == number.name
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_that_were_there_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_a_request_can_still_be_made() -> None:
    seen: list[str] = []

    def work() -> None:
        with StopRequest() as stop:
            stop.set("a test")
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["a test"]
