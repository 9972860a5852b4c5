"""Memory is reserved before it is used: in order, up to a bound, with a bounded queue."""

import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynxkv.errors import Cancelled, CapacityExceeded, DeadlineExceeded, LynxError, Overloaded
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.room import Room


def soon(seconds=10.0):
    return time.monotonic() + seconds


class Reserving(threading.Thread):
    """Holds room on a thread of its own until ``leave`` is set."""

    def __init__(self, room, size, until=None):
        super().__init__(daemon=True)
        self._room, self._size, self._until = room, size, until or soon()
        self.cancellation = Cancellation()
        self.inside, self.leave = threading.Event(), threading.Event()
        self.error = None
        self.start()

    def run(self):
        try:
            with self._room.reserved(self._size, self.cancellation, self._until):
                self.inside.set()
                self.leave.wait(10)
        except LynxError as error:
            self.error = error

    def over(self):
        self.leave.set()
        self.join(10)
        assert not self.is_alive()


def waits(room, count):
    end = soon()
    while room.waiting != count:
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_room_is_held_and_given_back():
    room = Room(100, 0)
    with room.reserved(60, Cancellation(), soon()), room.reserved(40, Cancellation(), soon()):
        assert (room.used_bytes, room.holders) == (100, 2)
    assert (room.used_bytes, room.holders) == (0, 0)


def test_more_than_there_ever_is_is_refused_at_once_with_both_sizes():
    with (
        pytest.raises(CapacityExceeded, match="101 bytes cannot fit in 100"),
        Room(100, 9).reserved(101, Cancellation(), soon()),
    ):
        pass


def test_one_more_than_may_wait_is_refused_for_now():
    room = Room(100, 1)
    with room.reserved(80, Cancellation(), soon()):
        first = Reserving(room, 30)
        waits(room, 1)
        with pytest.raises(Overloaded, match="retry later") as caught, room.reserved(1, Cancellation(), soon()):
            pass
        assert caught.value.retry_after_s > 0
    assert first.inside.wait(10)
    first.over()
    assert room.used_bytes == 0


def test_who_waits_first_is_served_first_even_when_a_smaller_one_would_fit():
    room = Room(100, 9)
    with ExitStack() as held:
        held.enter_context(room.reserved(60, Cancellation(), soon()))
        large = Reserving(room, 90)
        waits(room, 1)
        small = Reserving(room, 10)
        waits(room, 2)
        assert not small.inside.is_set()
    assert large.inside.wait(10)
    assert small.inside.wait(10)  # both fit now
    for each in (large, small):
        each.over()
    assert room.used_bytes == 0


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_who_leaves_the_queue_makes_way_and_holds_nothing(how):
    room = Room(100, 9)
    with room.reserved(60, Cancellation(), soon()):
        large = Reserving(room, 90, until=soon(10) if how == "cancelled" else soon(0.01))
        if how == "cancelled":
            waits(room, 1)
            small = Reserving(room, 10)
            large.cancellation.cancel("enough")
        else:
            small = Reserving(room, 10)
        large.over()
        assert isinstance(large.error, Cancelled if how == "cancelled" else DeadlineExceeded)
        assert small.inside.wait(10)
        small.over()
    assert (room.used_bytes, room.holders, room.waiting) == (0, 0, 0)


def test_cancels_that_race_with_room_lose_none():
    for _ in range(200):
        room = Room(10, 1)
        with room.reserved(10, Cancellation(), soon()):
            waiting = Reserving(room, 10)
            waits(room, 1)
            canceller = threading.Thread(target=waiting.cancellation.cancel, args=("now",))
            canceller.start()
        waiting.over()
        canceller.join()
        assert (room.used_bytes, room.holders, room.waiting) == (0, 0, 0)


def test_a_reservation_grows_into_free_room_only():
    room = Room(100, 0)
    with room.reserved(60, Cancellation(), soon()) as mine:
        mine.grow(40)
        with pytest.raises(CapacityExceeded, match="1 bytes more"):
            mine.grow(1)
        assert room.used_bytes == 100
    assert room.used_bytes == 0


def test_room_without_a_bound_takes_everyone():
    room = Room(None, 0)
    with room.reserved(1 << 60, Cancellation(), soon()) as mine:
        mine.grow(1 << 60)
        assert room.used_bytes == 1 << 61


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_any_crowd_keeps_the_bound_and_leaves_nothing(sizes, cancelled):
    room, seen = Room(60, 100), []

    def work(size, cancellation):
        try:
            with room.reserved(size, cancellation, soon()):
                seen.append(room.used_bytes)
        except Cancelled:
            pass

    cancellations = [Cancellation() for _ in sizes]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(sizes, cancellations, strict=True)]
    for thread in threads:
        thread.start()
    for i in cancelled:
        if i < len(sizes):
            cancellations[i].cancel("drawn")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(used <= 60 for used in seen)
    assert (room.used_bytes, room.holders, room.waiting) == (0, 0, 0)
