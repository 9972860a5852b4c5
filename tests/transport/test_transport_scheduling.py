"""The scheduler and the bucket: pure, no clock, no sockets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynxkv.codec.spec import Tier
from lynxkv.errors import RequestError
from lynxkv.transport import Scheduler, TokenBucket, parse_rate
from lynxkv.transport.scheduling import AGEING

FRAME = 1000


def drive(flows, frames, *, closed=()):
    """Send ``frames`` frames of endless flows ``{name: (tier, lane)}``; names in the order they were served."""
    scheduler = Scheduler(FRAME)
    for name, (tier, lane) in flows.items():
        scheduler.add(name, tier, lane)
    served = []
    for _ in range(frames):
        flow = scheduler.pick(lambda lane: lane not in closed)
        if flow is None:
            break
        scheduler.charge(flow, FRAME)
        served.append(flow)
    return served


def test_an_anchor_goes_before_a_residual_that_was_queued_first():
    assert drive({"r": (Tier.RESIDUAL, 0), "a": (Tier.ANCHOR, 0)}, 5) == ["a"] * 5


def test_residuals_progress_under_an_endless_stream_of_anchors():
    """Field report 18."""
    served = drive({"r": (Tier.RESIDUAL, 0), "x": (Tier.EXACT, 0), "a": (Tier.ANCHOR, 0)}, 3300)
    share = 3300 / (AGEING + 2)
    for name in "rx":
        assert share * 0.9 <= served.count(name) <= share * 1.1
    gaps = [i for i, name in enumerate(served) if name == "r"]
    assert max(b - a for a, b in itertools.pairwise(gaps)) <= AGEING + 3


def test_flows_of_a_tier_take_turns():
    """Field report 18: one big transfer does not starve small ones."""
    served = drive(dict.fromkeys("abc", (Tier.ANCHOR, 0)), 9)
    assert [sorted(served[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_a_lane_that_is_closed_holds_nobody_up():
    """Field report 18."""
    flows = {"stuck": (Tier.ANCHOR, 0), "small": (Tier.RESIDUAL, 1)}
    assert drive(flows, 3, closed={0}) == ["small"] * 3
    assert drive(flows, 3, closed={0, 1}) == []


def test_what_a_tier_is_owed_ends_with_its_last_flow():
    scheduler = Scheduler(FRAME)
    scheduler.add("a", Tier.ANCHOR, 0)
    scheduler.add("r", Tier.RESIDUAL, 0)
    for _ in range(AGEING):
        scheduler.charge("a", FRAME)
    assert scheduler.pick(lambda _: True) == "r"
    scheduler.remove("r")
    scheduler.add("s", Tier.RESIDUAL, 0)
    assert scheduler.pick(lambda _: True) == "a"


@given(
    flows=st.dictionaries(
        st.integers(0, 20), st.tuples(st.sampled_from(Tier), st.integers(0, 3)), min_size=1, max_size=8
    ),
    closed=st.sets(st.integers(0, 3)),
)
def test_every_flow_on_an_open_lane_is_served_and_none_on_a_closed_one(flows, closed):
    served = drive(flows, 8 * (AGEING + 3) * len(flows), closed=closed)
    assert set(served) == {name for name, (_, lane) in flows.items() if lane not in closed}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "send"]), st.integers(0, 5), st.sampled_from(Tier)), max_size=60
    )
)
def test_the_books_are_right_after_any_history(steps):
    scheduler = Scheduler(FRAME)
    known = {}
    for what, name, tier in steps:
        if what == "add":
            scheduler.add(name, tier, 0)
            known.setdefault(name, tier)
        elif what == "remove":
            scheduler.remove(name)
            known.pop(name, None)
        else:
            flow = scheduler.pick(lambda _: True)
            assert (flow is None) == (not known)
            if flow is not None:
                assert flow in known
                scheduler.charge(flow, FRAME)
        assert len(scheduler) == len(known)
        assert all(name in scheduler for name in known)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        ("12.5MB", 12.5e6),
        ("12.5MB/s", 12.5e6),
        ("800 kbit/s".replace(" ", ""), 1e5),
        ("1Gbps", 125e6),
        ("5000", 5000.0),
        ("1MiB", 1048576.0),
    ],
)
def test_a_rate_is_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "-1mbit", "0", "1 2mbit", "mbit", "1e9"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(RequestError, match="100mbit"):
        parse_rate(text)


def spend_for(bucket, now, until, frame, late=0.0):
    """Bytes that go out in [now, until) when every timer fires ``late`` seconds late."""
    sent = 0
    while now < until:
        delay = bucket.delay(now)
        if delay > 0:
            now += delay + late
            continue
        bucket.spend(frame, now)
        sent += frame
    return sent


@given(late=st.floats(0, 0.01), frame=st.integers(8192, 65536))
def test_the_rate_is_kept_within_two_percent_even_when_timers_are_late(late, frame):
    rate = 12.5e6
    sent = spend_for(TokenBucket(rate), 0.0, 10.0, frame, late)
    assert abs(sent / 10.0 / rate - 1) < 0.02


def test_idle_time_earns_nothing():
    bucket = TokenBucket(1000.0)
    bucket.spend(1000, 0.0)
    assert bucket.delay(0.0) == 1.0
    bucket.idle()
    bucket.spend(1000, 100.0)
    assert bucket.delay(100.0) == 1.0


def test_a_debt_delays_what_follows():
    bucket = TokenBucket(1000.0)
    bucket.spend(5000, 0.0)
    bucket.spend(1000, 1.0)
    assert bucket.delay(1.0) == 5.0
