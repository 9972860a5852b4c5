"""Draft, refine, verify; and the coupled sampler that makes drafts right or wrong, never lucky."""

from lynxkv.speculation.answer import Answer, Detokenize, Step
from lynxkv.speculation.params import SamplingParams
from lynxkv.speculation.sampler import Draw, Sampler, gumbel
from lynxkv.speculation.session import Logits, Session
from lynxkv.speculation.speculator import (
    CAP,
    Drafted,
    Event,
    Refinement,
    Retracted,
    Speculator,
    State,
    Verified,
    Verify,
    Window,
)

__all__ = [
    "CAP",
    "Answer",
    "Detokenize",
    "Drafted",
    "Draw",
    "Event",
    "Logits",
    "Refinement",
    "Retracted",
    "Sampler",
    "SamplingParams",
    "Session",
    "Speculator",
    "State",
    "Step",
    "Verified",
    "Verify",
    "Window",
    "gumbel",
]
