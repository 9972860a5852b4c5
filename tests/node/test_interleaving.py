"""Many at once: chunks of prompts and steps of answers alternate."""

from lynxkv.codec import CodecSpec
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams, Verified
from models import engine, prompt
from node.running import Asked, admit_of, prefill_node, request
from node.slow import SlowEngine

NAME = "mqa-80"


def test_a_short_prompt_is_not_blocked_by_a_long_one():
    eng, order = engine(NAME), []

    class Noting(SlowEngine):
        def prefill(self, tokens, chunk):
            for step in super().prefill(tokens, chunk):
                order.append(len(tokens))
                yield step

    slow = Noting(eng, chunks=1)
    with prefill_node(slow, chunk=64) as run:
        long = run.admitting(admit_of(request(1280)))
        assert slow.reached.wait(30)
        shorts = [run.admitting(admit_of(request(64, seed=seed))) for seed in (1, 2)]
        run.until(lambda: run.node._prefilling._turns.waiting == 2)
        slow.go.set()
        for each in (long, *shorts):
            each.result(60)
        assert order.index(64) <= 3
        assert order.count(1280) == 20
        assert run.call(run.node.holdings).entries == 3


def test_decoding_requests_take_turns():
    eng = engine(NAME)
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        log = []

        for seed in range(2):
            node.prepare(run.address, prompt(300, seed), CodecSpec(), deadline_s=60)
        params = SamplingParams(max_tokens=120, seed=1)
        with node._turns.turn(Cancellation()):
            asked = [
                Asked(
                    node.generate(run.address, Request(tuple(prompt(300, seed)), params, cap=0)),
                    lambda event, seed=seed: log.append(seed) if isinstance(event, Verified) else None,
                )
                for seed in range(2)
            ]
            run.until(lambda: node._turns.waiting == 2)
        for each in asked:
            each.outcome()
        last = log[-1]
        until_the_other_ended = log[: len(log) - log[::-1].index(1 - last)]
        assert until_the_other_ended.count(last) > 60  # of 120: neither waited for the other's end
