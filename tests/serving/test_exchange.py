"""One exchange with a client that takes nothing, leaves, or is told to wait, without a socket."""

import asyncio

import pytest

from lynxkv.serving.activity import Activity
from lynxkv.serving.exchange import Exchange, Reply


class Client:
    """What a server offers an application; ``full`` holds writes back, ``gone`` says that the client left."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.full, self.gone = False, asyncio.Event()

    async def send(self, message):
        if self.full:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def run(work, client, stopping=None):
    """The request as it was tracked, once the exchange is over."""
    activity = Activity("router")
    tracked = activity.begin("id", "chat", {})
    exchange = Exchange(work, activity, tracked, stopping or asyncio.Event())
    async with asyncio.timeout(10):
        await exchange({}, client.receive, client.send)
    assert activity.running == 0
    return tracked


def test_a_client_that_takes_no_byte_is_given_up(monkeypatch):
    monkeypatch.setattr(Reply, "patience_s", 0.05)

    async def test():
        client = Client()

        async def work(reply, _):
            await reply.stream()
            client.full = True
            await reply.event(b"{}")

        tracked = await run(work, client)
        assert (tracked.state, tracked.error, client.text()) == ("failed", "client_stalled", b"")

    asyncio.run(test())


@pytest.mark.parametrize("full", [False, True])
def test_a_stop_ends_what_runs_even_if_the_client_takes_nothing(full):
    async def test():
        client, stopping = Client(), asyncio.Event()

        async def work(reply, _):
            await reply.stream()
            client.full = full
            stopping.set()
            await asyncio.Event().wait()

        tracked = await run(work, client, stopping)
        assert (tracked.state, tracked.error) == ("failed", "draining")
        assert (b"event: error" in client.text()) != full
        assert b"[DONE]" not in client.text()

    asyncio.run(test())


def test_a_client_that_leaves_ends_the_work_and_is_told_nothing():
    async def test():
        client, ended = Client(), []

        async def work(reply, _):
            await reply.stream()
            client.gone.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        tracked = await run(work, client)
        assert (tracked.state, tracked.error, ended, client.text()) == ("aborted", None, [True], b"")

    asyncio.run(test())


def test_a_client_that_leaves_after_the_last_byte_has_its_answer():
    """What is still put away then is not cut short."""

    async def test():
        client, ended = Client(), []

        async def work(reply, _):
            await reply.json(b"{}")
            client.gone.set()
            await asyncio.sleep(0.02)
            ended.append(True)

        tracked = await run(work, client)
        assert (tracked.state, tracked.status, ended) == ("finished", 200, [True])

    asyncio.run(test())


def test_a_defect_is_told_as_one_and_logged(caplog):
    async def test():
        client = Client()

        async def work(_, __):
            raise KeyError("secret words of the request")

        tracked = await run(work, client)
        assert (tracked.status, tracked.error) == (500, "internal_error")
        assert b"secret words" not in client.text()
        assert "KeyError" in caplog.text

    asyncio.run(test())
