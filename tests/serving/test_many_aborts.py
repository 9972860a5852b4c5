"""A thousand clients that go away at any moment leave nothing behind."""

import asyncio
import os
import random
import threading

import aiohttp
import pytest

from serving.apps import MODEL, ask, cluster, until

ABORTS = 1000
AT_ONCE = 12


@pytest.fixture(scope="module")
def run(eng):
    with cluster(eng, prefill={"rate": 3_000_000}) as running:
        yield running


def body(draw):
    """A request whose transfer, drafts and decoding take some tens of milliseconds."""
    return {
        "model": MODEL,
        "prompt": f"{draw.randrange(40)} and so on " * draw.randint(5, 30),
        "max_tokens": draw.randint(1, 60),
        "temperature": 1,
        "stream": draw.random() < 0.7,
        "n": 2 if draw.random() < 0.1 else 1,
        "lynx": {"target": draw.choice(["residual", "residual", "exact"]), "emit": "draft"},
    }


async def abort_all(url, count, draw):
    """Send requests and leave each at a random moment; how many were answered before."""
    answered = 0
    left = iter(range(count))

    async def client(session):
        nonlocal answered
        for _ in left:
            try:
                async with asyncio.timeout(draw.random() ** 3 * 0.3):
                    async with session.post(f"{url}/v1/completions", json=body(draw)) as response:
                        await response.read()
                        assert response.status in (200, 429)
                answered += 1
            except TimeoutError:
                pass

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(AT_ONCE)))
    return answered


def of_process(run):
    """Threads outside of pools (those are bounded), files, and tasks of this process."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(("decode", "prefill"))]
    return len(threads), len(os.listdir("/proc/self/fd")), run.on_loop(lambda: len(asyncio.all_tasks()))


def test_a_thousand_aborts_leave_nothing_behind(run):
    draw = random.Random(5)
    right = ask(run.url, "/v1/completions", body(random.Random(1)) | {"stream": False, "seed": 3})[2]["choices"]
    asyncio.run(abort_all(run.url, 50, draw))  # threads of pools, connections
    run.empties()
    before = of_process(run)
    answered = asyncio.run(abort_all(run.url, ABORTS, draw))
    assert answered < ABORTS * 0.9
    run.empties()
    until(lambda: all(map(int.__le__, of_process(run), before)), 60, lambda: (of_process(run), before))
    again = ask(run.url, "/v1/completions", body(random.Random(1)) | {"stream": False, "seed": 3})[2]["choices"]
    assert again == right
    states = {request.state for request in run.router.activity.requests()}
    assert states <= {"aborted", "finished", "failed"}
