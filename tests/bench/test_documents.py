import re

import pytest

from lynxkv.bench.documents import MODULES, long_prompt, pydoc_text, read_document
from lynxkv.bench.schemes import SCHEMES
from lynxkv.codec import Tier
from lynxkv.errors import RequestError


class Letters:
    """An engine whose tokens are letters; its chat template costs ten of them."""

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def chat(self, prompt):
        return self.encode(f"<user>{prompt}<ai>")


@pytest.mark.parametrize("tokens", [30, 31, 100, 5000])
def test_a_long_prompt_has_the_asked_size_and_ends_with_the_question(tokens):
    prompt = Letters().decode(long_prompt(Letters(), "x" * 10_000, "why?", tokens))
    assert len(prompt) == tokens
    assert prompt.endswith("x\n\nwhy?<ai>")


def test_a_short_document_is_taken_whole():
    assert "short\n\nwhy?" in Letters().decode(long_prompt(Letters(), "short", "why?", 1000))


def test_a_question_that_leaves_no_room_is_refused():
    with pytest.raises(RequestError, match="10 tokens leave no room"):
        long_prompt(Letters(), "x" * 100, "a long question", 10)


def test_pydoc_text_is_the_same_every_time_and_every_module_can_be_rendered():
    assert pydoc_text(3, 2) == pydoc_text(3, 2)
    whole = pydoc_text(0, len(MODULES))
    assert not re.search(" at 0x[0-9a-f]{6}", whole)
    assert len(whole) > 500_000


def test_documents_that_cannot_be_read_are_refused_by_name(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "missing", tmp_path):
        with pytest.raises(RequestError, match=path.name):
            read_document(path)


def test_only_lynx_has_more_than_an_anchor():
    assert {name: scheme.spec.target for name, scheme in SCHEMES.items()} == {
        "bf16": Tier.ANCHOR,
        "int8": Tier.ANCHOR,
        "int4": Tier.ANCHOR,
        "lynx": Tier.RESIDUAL,
    }
