"""What operators see of requests: one trace across three processes, metrics that add up, log lines without text."""

import json
import signal

import pytest

from lynxkv.serving.activity import Activity
from lynxkv.serving.metrics import Metrics, Reading
from lynxkv.serving.observing import Metered
from serving.apps import ask
from serving.collector import collector
from serving.processes import fleet

TRACE, REFUSED, PARENT = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d", "b7ad6b7169203331"
SECRET_TEXT = "the launch code is tango"
BODY = {"prompt": f"{SECRET_TEXT} " * 8, "max_tokens": 12, "temperature": 0}
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "request-of-ours"}


@pytest.fixture(scope="module")
def observed(tiny_folder):
    """A cluster that has answered one request and refused another; the collector of its spans, and what it logged."""
    with collector() as spans:
        options = ("--log-format", "json")
        secrets = {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with fleet(
            tiny_folder, prefill=(*options, "--link", "200kB"), decode=options, router=options, secrets=secrets
        ) as ((prefill,), (decode,), router):
            status, headers, answer = ask(router.url, "/v1/completions", BODY, HEADERS)
            assert (status, headers["x-request-id"]) == (200, "request-of-ours")
            refused = {"traceparent": f"00-{REFUSED}-{PARENT}-01"}
            assert ask(router.url, "/v1/completions", {**BODY, SECRET_TEXT: 1}, refused)[0] == 400
            processes = {"prefill": prefill, "decode": decode, "router": router}
            metrics = {role: metrics_of(each.url) for role, each in processes.items()}
            logs = {}
            for role, each in processes.items():
                each.send(signal.SIGTERM)
                _, err = each.process.communicate(timeout=60)
                logs[role] = [json.loads(line) for line in err.splitlines()]
        yield answer, spans, metrics, logs


def metrics_of(url):
    """Values by sample, as ``name{labels}``."""
    status, headers, body = ask(url, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_one_trace_goes_from_the_client_through_all_three_processes(observed):
    answer, spans, _, _ = observed
    found = spans.of_trace(TRACE)
    servers = {service: span for service, span in found if span.name.endswith(" completion")}
    assert set(servers) == {"lynxkv-router", "lynxkv-prefill", "lynxkv-decode"}
    router = servers["lynxkv-router"]
    assert router.parent_span_id.hex() == PARENT
    assert {servers[f"lynxkv-{role}"].parent_span_id for role in ("prefill", "decode")} == {router.span_id}
    phases = {(service, span.name) for service, span in found if span is not servers[service]}
    assert {
        ("lynxkv-prefill", "prefill"),
        ("lynxkv-decode", "pull anchor"),
        ("lynxkv-decode", "pull residual"),
    } <= phases
    assert ("lynxkv-decode", "decode") in phases
    for service, span in found:
        assert router.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, service
        assert SECRET_TEXT not in str(span)
    told = {each.key: each.value.string_value for each in router.attributes}
    assert told["lynxkv.transfer"] == answer["lynx"]["transfer_id"]
    assert told["lynxkv.request"] == "request-of-ours"


def test_a_refused_requests_span_tells_the_code_and_not_the_text(observed):
    _, spans, _, _ = observed
    ((service, span),) = spans.of_trace(REFUSED)
    assert (service, span.status.message) == ("lynxkv-router", "invalid_request")
    assert SECRET_TEXT not in str(span)


def test_metrics_of_all_processes_add_up_to_what_the_answer_says(observed):
    answer, _, metrics, _ = observed
    lynx, prefill, decode, router = answer["lynx"], metrics["prefill"], metrics["decode"], metrics["router"]
    assert router['lynxkv_requests_total{status="200"}'] == router['lynxkv_requests_total{status="400"}'] == 1
    assert decode["lynxkv_answer_tokens_total"] == answer["usage"]["completion_tokens"]
    assert decode["lynxkv_prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert decode["lynxkv_window_drafted_tokens_total"] == lynx["drafted"]
    assert decode["lynxkv_window_accepted_tokens_total"] == lynx["accepted"]
    for kind in ("prefill", "draft", "verified"):
        assert decode[f'lynxkv_ttft_seconds_sum{{kind="{kind}"}}'] == pytest.approx(lynx[f"ttft_{kind}_s"])
    for tier in ("anchor", "residual"):
        received = decode[f'lynxkv_transfer_bytes_total{{direction="received",tier="{tier}"}}']
        assert received == lynx["bytes"][tier] > 0
        assert prefill[f'lynxkv_transfer_bytes_total{{direction="sent",tier="{tier}"}}'] >= received
    assert prefill['lynxkv_leases_ended_total{reason="acknowledged"}'] == 1
    assert (prefill["lynxkv_leases"], prefill["lynxkv_entries"]) == (0, 1)
    assert decode['lynxkv_memory_bytes{kind="reserved"}'] == 0
    assert router["lynxkv_tasks"] > 0


def test_log_lines_carry_the_ids_and_never_the_text(observed):
    answer, _, _, logs = observed
    for role, lines in logs.items():
        about = [line for line in lines if line.get("request") == "request-of-ours" and "status" in line]
        assert [line["role"] for line in about] == [role]
        assert about[0]["transfer"] == answer["lynx"]["transfer_id"]
        assert (about[0]["status"], about[0]["level"]) == (200, "info")
        assert SECRET_TEXT not in json.dumps(lines)
    refused = [line for line in logs["router"] if line.get("status") == 400]
    assert [line["error"] for line in refused] == ["invalid_request"]


def test_an_abort_and_a_retry_are_counted_as_such():
    metrics = Metrics("router", "", Reading)
    activity = Activity("router", [Metered(metrics)])
    gone = activity.begin("a", "chat", {})
    activity.end(gone, "aborted")
    retried = activity.begin("b", "chat", {})
    retried.retried.append("prefill")
    retried.status = 502
    activity.end(retried, "failed")
    text = metrics.render()[0].decode()
    assert "lynxkv_aborts_total 1.0" in text
    assert 'lynxkv_requests_total{status="502"} 1.0' in text
    assert 'lynxkv_router_retries_total{role="prefill"} 1.0' in text
