"""Turns are handed on in the order they are asked for, and a cancelled wait takes none."""

import itertools
import threading
import time

import pytest

from lynxkv.errors import Cancelled
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.turns import SessionInTurns, Turns, in_turns


class Asking(threading.Thread):
    """Asks for turns on a thread of its own and notes each one."""

    def __init__(self, turns, name, log, times=1, ahead=False, cancellation=None):
        super().__init__(daemon=True)
        self._turns, self._name, self._log, self._times, self._ahead = turns, name, log, times, ahead
        self.cancellation = cancellation or Cancellation()
        self.error = None
        self.start()

    def run(self):
        try:
            for _ in range(self._times):
                with self._turns.turn(self.cancellation, ahead=self._ahead):
                    self._log.append(self._name)
        except Cancelled as error:
            self.error = error

    def over(self):
        self.join(10)
        assert not self.is_alive()


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.0005)


def queued(turns, log, *waiting):
    """Threads that wait, in this order: ``(name, ahead)`` each."""
    threads = []
    for name, ahead in waiting:
        threads.append(Asking(turns, name, log, ahead=ahead))
        until(lambda: turns.waiting == len(threads))
    return threads


def test_turns_are_taken_in_the_order_they_were_asked_for():
    turns, log = Turns(), []
    with turns.turn(Cancellation()):
        threads = queued(turns, log, *((name, False) for name in "abcde"))
        assert log == []
    for thread in threads:
        thread.over()
    assert "".join(log) == "abcde"
    assert turns.waiting == 0


def test_who_goes_ahead_passes_those_who_do_not_and_no_one_else():
    turns, log = Turns(), []
    with turns.turn(Cancellation()):
        threads = queued(turns, log, ("a", False), ("b", False), ("1", True), ("2", True))
    for thread in threads:
        thread.over()
    assert "".join(log) == "12ab"


def test_those_who_ask_again_and_again_alternate():
    turns, log, both = Turns(), [], threading.Barrier(2)

    def work(name):
        both.wait()
        for _ in range(50):
            with turns.turn(Cancellation()):
                log.append(name)
                if len(log) < 99:
                    until(lambda: turns.waiting == 1)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(one != other for one, other in itertools.pairwise(log[1:99]))


def test_a_cancelled_wait_ends_at_once_and_its_turn_goes_to_the_next():
    turns, log = Turns(), []
    with turns.turn(Cancellation()):
        a, b, c = queued(turns, log, ("a", False), ("b", False), ("c", True))
        b.cancellation.cancel("enough")
        b.over()
        c.cancellation.cancel("enough")
        c.over()
        assert turns.waiting == 1
    a.over()
    assert log == ["a"]
    assert "enough" in str(b.error)
    with turns.turn(Cancellation()):
        pass


def test_a_request_cancelled_before_it_asks_gets_no_turn():
    turns, cancelled = Turns(), Cancellation()
    cancelled.cancel("early")
    with pytest.raises(Cancelled, match="early"), turns.turn(cancelled):
        pass
    with turns.turn(Cancellation()):
        pass


def test_a_turn_is_handed_on_when_its_work_fails():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn(Cancellation()):
        raise ZeroDivisionError
    with turns.turn(Cancellation()):
        pass


def test_cancels_that_race_with_turns_lose_none():
    """Whoever is cancelled while the turn is handed to it hands it on."""
    for _ in range(200):
        turns, log = Turns(), []
        cancellation = Cancellation()
        with turns.turn(Cancellation()):
            first = Asking(turns, "x", log, cancellation=cancellation)
            until(lambda turns=turns: turns.waiting == 1)
            canceller = threading.Thread(target=cancellation.cancel, args=("now",))
            canceller.start()
        first.over()
        canceller.join()
        last = Asking(turns, "y", log)
        last.over()
        assert log in (["y"], ["x", "y"])


def test_steps_are_each_made_in_a_turn():
    turns, seen = Turns(), []

    def steps():
        for i in range(3):
            seen.append(turns._taken)
            yield i

    for _ in in_turns(steps(), turns, Cancellation()):
        assert not turns._taken
    assert seen == [True] * 3


def test_a_session_in_turns_goes_ahead_with_its_first_pass_only():
    class Inner:
        length = 7

        def forward(self, tokens):
            return [token + 1 for token in tokens]

        def truncate(self, length):
            self.length = length

    turns, log, inner = Turns(), [], Inner()
    session = SessionInTurns(inner, turns, Cancellation())

    def work():
        log.extend(session.forward([0]))
        log.extend(session.forward([1]))

    with turns.turn(Cancellation()):
        (other,) = queued(turns, log, ("other", False))
        mine = threading.Thread(target=work)
        mine.start()
        until(lambda: turns.waiting == 2)
    mine.join(10)
    other.over()
    assert log[0] == 1
    assert sorted(map(str, log)) == ["1", "2", "other"]
    session.truncate(3)
    assert session.length == inner.length == 3
