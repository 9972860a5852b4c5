"""Options that would hang a node or end its link are refused where they are given."""

import pytest

from lynxkv.errors import RequestError
from lynxkv.node.decode import Request
from lynxkv.node.prefill import PrefillNode
from models import engine


@pytest.mark.parametrize("seconds", [0, -1, 86401, float("inf"), float("nan")])
def test_a_deadline_the_wire_cannot_carry_is_refused(seconds):
    """It would end the link, and every other request on it."""
    with pytest.raises(RequestError, match="deadline_s"):
        Request((1, 2), deadline_s=seconds)


@pytest.mark.parametrize("option", ["ttl_s", "lease_s"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_prefill_node_without_time_is_refused(option, seconds):
    """It would tend its entries without a pause."""
    with pytest.raises(RequestError, match=option):
        PrefillNode(engine("mqa-80"), **{option: seconds})
