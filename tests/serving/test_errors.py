"""Errors in OpenAI's shape."""

import pytest

from lynxkv import errors
from lynxkv.serving.errors import Draining, HttpError, tell, told_by

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.LynxError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_status_and_its_message(cls):
    told = tell(cls("what happened"))
    assert 400 <= told.status < 600
    assert told.body["error"].keys() == {"message", "type", "param", "code"}
    assert told.message == "what happened"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.RequestError("x"), 400, "invalid_request"),
        (errors.PromptTooLong("x"), 400, "context_length_exceeded"),
        (errors.Overloaded("x"), 429, "overloaded"),
        (errors.CapacityExceeded("x"), 503, "capacity_exceeded"),
        (errors.PeerLost("x"), 502, "peer_lost"),
        (errors.TransferRejected("x"), 502, "transfer_rejected"),
        (errors.TransferError("x"), 502, "transfer_failed"),
        (errors.DeadlineExceeded("x"), 504, "deadline_exceeded"),
        (errors.EngineError("x"), 500, "internal_error"),
        (Draining(), 503, "draining"),
    ],
)
def test_the_status_says_whose_failure_it_is(error, status, code):
    told = tell(error)
    assert (told.status, told.code) == (status, code)


@pytest.mark.parametrize(("after_s", "header"), [(0.2, "1"), (2.1, "3")])
def test_whoever_is_refused_for_now_is_told_when_to_come_back(after_s, header):
    assert tell(errors.Overloaded("x", retry_after_s=after_s)).headers == {"retry-after": header}
    assert "retry-after" in tell(Draining()).headers
    assert tell(errors.CapacityExceeded("never fits")).headers == {}


def test_a_workers_error_is_passed_on_as_it_is():
    told = tell(HttpError(429, "overloaded", "full", param="n", retry_after_s=3))
    again = tell(told_by(told.status, told.encoded(), told.headers))
    assert again == told


def test_a_workers_error_of_another_shape_is_quoted():
    error = told_by(500, b"<html>oops</html>", {})
    assert (error.status, error.code) == (500, "worker_error")
    assert "<html>oops" in str(error)
