"""What happens at the same time: prefill and transfer, transfer and decoding."""

from lynxkv.codec import Tier
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import Drafted, SamplingParams
from models import engine, prompt
from node.running import Asked, finish, prefill_node
from node.slow import SlowEngine


class Watched:
    """An engine whose sessions tell when they are asked for a forward pass."""

    def __init__(self, inner, tell) -> None:
        self._inner, self._tell = inner, tell

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def open(self, *arguments):
        session = self._inner.open(*arguments)
        forward = session.forward

        def told(tokens):
            self._tell("forward")
            return forward(tokens)

        session.forward = told
        return session


def test_anchor_segments_of_a_long_prompt_arrive_before_its_prefill_ends():
    eng = SlowEngine(engine("gqa-64"), chunks=4)
    moments = []
    with prefill_node(eng, chunk=256) as run, DecodeNode(engine("gqa-64")) as node:
        request = Request(tuple(prompt(2000)), SamplingParams(max_tokens=4))
        asked = Asked(node.generate(run.address, request, moments.append))
        run.until(lambda: sum(m.tier is Tier.ANCHOR for m in list(moments)) >= 6)
        assert eng.chunks_done <= 4  # of 8: the prefill waits for this test
        assert "first_token" not in [m.what for m in moments]
        eng.go.set()
        assert asked.outcome().finish == "length"
        assert run.idle()


def test_drafting_starts_as_soon_as_the_last_anchor_layer_is_written_and_the_residual_is_missing():
    log = []
    eng = engine("gqa-64")
    with (
        prefill_node(eng, chunk=256, rate=1_500_000) as run,
        DecodeNode(Watched(eng, log.append)) as node,
    ):
        request = Request(tuple(prompt(1000)), SamplingParams(max_tokens=40))
        events, outcome = finish(node.generate(run.address, request, lambda moment: log.append(moment)))
        assert run.idle()
    kinds = [entry if entry == "forward" else entry.what for entry in log]
    after = [kind for kind in kinds[kinds.index("anchor") + 1 :] if kind != "segment"]
    assert after[0] == "forward"
    landed = sum(m.size for m in log[: kinds.index("forward")] if m != "forward" and m.tier is Tier.RESIDUAL)
    assert landed < outcome.bytes["residual"]
    assert kinds.index("forward") < kinds.index("target")
    assert isinstance(events[1], Drafted)


def test_token_1_is_given_before_the_anchor_is_whole():
    with prefill_node(engine("gqa-64"), chunk=128, rate=300_000) as run, DecodeNode(engine("gqa-64")) as node:
        tokens, moments = tuple(prompt(600)), []
        node.prepare(run.address, tokens, Request(tokens).spec, deadline_s=60)
        generation = node.generate(run.address, Request(tokens, SamplingParams(max_tokens=4)), moments.append)
        assert next(generation).position == 0
        assert "anchor" not in [m.what for m in moments]
        finish(generation)
        assert run.idle()


def test_residual_is_written_between_draft_steps_while_it_arrives():
    eng = engine("gqa-64")
    log = []
    with prefill_node(eng, chunk=64, rate=700_000) as run, DecodeNode(Watched(eng, log.append)) as node:
        generation = node.generate(run.address, Request(tuple(prompt(600)), SamplingParams(max_tokens=60)), log.append)
        _, outcome = finish(generation)
        assert run.idle()
    residual = [i for i, entry in enumerate(log) if entry != "forward" and entry.tier is Tier.RESIDUAL]
    drafts = [i for i, entry in enumerate(log) if entry == "forward"][: outcome.drafted]
    assert any(residual[0] < draft < residual[-1] for draft in drafts)
