"""Test the two signals that end a run: the first asks, the second stops at once."""

from __future__ import annotations

import signal

import pytest

from dapo.training.signals import StopRequest, handled


def test_a_second_signal_stops_at_once_but_not_before_the_first_was_reported():
    told, stopping = [], StopRequest()

    def report():
        signal.raise_signal(signal.SIGINT)  # an impatient user
        told.append("stopping")

    with handled(stopping, report):
        signal.raise_signal(signal.SIGINT)
        assert told == ["stopping"]
        assert stopping.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
