"""The scheduler and the bucket: pure, no clock, no sockets."""

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynxkv.codec.spec import Tier
from lynxkv.errors import RequestError
from lynxkv.transport import Scheduler, TokenBucket, parse_rate
from lynxkv.transport.scheduling import AGEING, EVERY

FRAME = 1000


def drive(flows, frames, *, closed=()):
    """Send ``frames`` frames of endless flows ``{name: (tier, lane)}``; names in the order they were served."""
    scheduler = Scheduler(FRAME)
    for name, (tier, lane) in flows.items():
        scheduler.add(name, tier, lane, 1 << 40)
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


def test_flows_of_one_size_take_turns():
    served = drive(dict.fromkeys("abc", (Tier.ANCHOR, 0)), 9)
    assert [sorted(served[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_the_flow_with_the_least_left_goes_first_and_every_fourth_frame_to_whom_waits_longest():
    scheduler, left = Scheduler(FRAME), {"long": 1000, "middle": 100, "short": 10}
    for name, frames in left.items():
        scheduler.add(name, Tier.ANCHOR, 0, frames)
    served = []
    while "short" in scheduler:
        flow = scheduler.pick(lambda _: True)
        served.append(flow)
        scheduler.charge(flow, FRAME)
        left[flow] -= 1
        if left[flow]:
            scheduler.add(flow, Tier.ANCHOR, 0, left[flow])
        else:
            scheduler.remove(flow)
    assert served == ["short"] * 3 + ["long"] + ["short"] * 3 + ["middle"] + ["short"] * 3 + ["long", "short"]


def test_a_long_flow_progresses_under_an_endless_stream_of_short_ones():
    """Field report 18."""
    scheduler, served = Scheduler(FRAME), []
    scheduler.add("long", Tier.ANCHOR, 0, 1 << 40)
    for _ in range(400):
        scheduler.add("short", Tier.ANCHOR, 0, FRAME)
        flow = scheduler.pick(lambda _: True)
        scheduler.charge(flow, FRAME)
        if flow == "short":
            scheduler.remove(flow)
        served.append(flow)
    assert served.count("long") == 400 // EVERY


class Client:
    """Asks for one transfer after the other, of ``tokens`` each, and thinks in between."""

    def __init__(self, tokens, think_s):
        self.tokens, self.think_s = tokens, think_s
        self.waited = []

    def ask(self, now):
        self.asked = now
        self.left = {tier: next(self.tokens) * ANCHOR_BYTES for tier in (Tier.ANCHOR, Tier.RESIDUAL)}


ANCHOR_BYTES = 6300  # of a token of SmolLM2; the residual has about as many
RATE = 12.5e6


def closed_loop(clients, seconds):
    """Run the scheduler on a link of ``RATE`` with a clock of its own."""
    frame = int(RATE * 0.005)
    scheduler, now = Scheduler(frame), 0.0
    due = [(0.1 * i, i, client) for i, client in enumerate(clients)]
    while now < seconds:
        while due and due[0][0] <= now:
            _, i, client = heapq.heappop(due)
            client.ask(now)
            scheduler.add((i, Tier.ANCHOR), Tier.ANCHOR, 0, client.left[Tier.ANCHOR])
        flow = scheduler.pick(lambda _: True)
        if flow is None:
            now = due[0][0]
            continue
        i, tier = flow
        client = clients[i]
        now += frame / RATE
        scheduler.charge(flow, frame)
        client.left[tier] -= frame
        if client.left[tier] > 0:
            scheduler.add(flow, tier, 0, client.left[tier])
            continue
        scheduler.remove(flow)
        if tier is Tier.ANCHOR:
            client.waited.append(now - client.asked)
            scheduler.add((i, Tier.RESIDUAL), Tier.RESIDUAL, 0, client.left[Tier.RESIDUAL])
        else:
            heapq.heappush(due, (now + client.think_s, i, client))


def p95(clients):
    waited = sorted(w for client in clients for w in client.waited)
    return waited[int(len(waited) * 0.95)]


@pytest.mark.parametrize(("longs", "think_s"), [(2, 15.0), (4, 5.0), (8, 1.0), (8, 15.0)])
def test_short_transfers_wait_at_most_twice_as_long_beside_long_ones(longs, think_s):
    """16 at a time on a link of 100 Mbit/s, with a clock of its own."""

    def shorts(seed):
        drawn = random.Random(seed)
        return iter(lambda: drawn.randint(200, 1000), None)

    alone = [Client(shorts(i), think_s) for i in range(16 - longs)]
    beside = [Client(shorts(i), think_s) for i in range(16 - longs)]
    long = [Client(itertools.repeat(4096), think_s) for _ in range(longs)]
    closed_loop(alone, 200)
    closed_loop([*beside, *long], 200)
    assert p95(beside) <= 2 * p95(alone)
    assert all(client.waited for client in long)


def test_a_lane_that_is_closed_holds_nobody_up():
    """Field report 18."""
    flows = {"stuck": (Tier.ANCHOR, 0), "small": (Tier.RESIDUAL, 1)}
    assert drive(flows, 3, closed={0}) == ["small"] * 3
    assert drive(flows, 3, closed={0, 1}) == []


def test_what_a_tier_is_owed_ends_with_its_last_flow():
    scheduler = Scheduler(FRAME)
    scheduler.add("a", Tier.ANCHOR, 0, FRAME)
    scheduler.add("r", Tier.RESIDUAL, 0, FRAME)
    for _ in range(AGEING):
        scheduler.charge("a", FRAME)
    assert scheduler.pick(lambda _: True) == "r"
    scheduler.remove("r")
    scheduler.add("s", Tier.RESIDUAL, 0, FRAME)
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
            scheduler.add(name, tier, 0, FRAME)
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
