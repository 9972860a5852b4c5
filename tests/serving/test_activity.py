"""What a process remembers of its requests."""

from lynxkv.serving.activity import KEPT, MOST_SEGMENTS, Activity


def begun(activity, name="a"):
    return activity.begin(name, "chat", {})


def test_a_request_is_listed_from_its_beginning_on():
    activity = Activity("decode")
    first, second = begun(activity, "first"), begun(activity, "second")
    activity.end(first, "finished")
    assert activity.running == 1
    assert [(r["id"], r["state"]) for r in activity.plain()["requests"]] == [
        ("second", "queued"),
        ("first", "finished"),
    ]
    activity.end(second, "aborted")
    assert activity.running == 0


def test_the_last_hundred_are_remembered():
    activity = Activity("decode")
    for i in range(KEPT + 20):
        activity.end(begun(activity, str(i)), "finished")
    ids = [request.id for request in activity.requests()]
    assert ids == [str(i) for i in range(KEPT + 19, 19, -1)]


def test_many_segments_are_summed_and_no_byte_is_lost():
    activity = Activity("decode")
    request = begun(activity)
    for i in range(1000):
        request.segment("anchor", 10, request._begun + i)
        request.segment("residual", 7, request._begun + i)
    moments = [moment for moment in request.plain()["moments"] if moment["what"] == "segment"]
    assert len(moments) <= 2 * MOST_SEGMENTS
    assert sum(moment["bytes"] for moment in moments if moment["tier"] == "anchor") == 10_000
    assert request.plain()["bytes"] == {"anchor": 10_000, "residual": 7_000}
    assert [moment["at"] for moment in moments] == sorted(moment["at"] for moment in moments)
    assert moments[-1]["at"] == 999


def test_observers_hear_of_every_request_once():
    heard = []

    class Ear:
        def began(self, request):
            heard.append(("began", request.id))
            request.onward["traceparent"] = "mine"

        def ended(self, request):
            heard.append(("ended", request.id, request.state, request.ended_s is not None))

    activity = Activity("decode", [Ear()])
    request = begun(activity)
    activity.end(request, "failed")
    activity.end(request, "aborted")
    assert heard == [("began", "a"), ("ended", "a", "failed", True)]
    assert request.onward == {"x-request-id": "a", "traceparent": "mine"}
