"""The Grafana dashboard and the metrics it draws are the same."""

import json
import re
from pathlib import Path

import pytest
from fastapi import FastAPI

from lynxkv.serving import observing
from lynxkv.serving.tracing import Tracing
from serving.apps import MODEL, ask, cluster

DASHBOARD = json.loads((Path(__file__).parents[2] / "dashboards/lynxkv.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
WORDS = {"rate", "sum", "by", "le", "on", "group_left", "histogram_quantile"}
LABELS = {"instance", "status", "kind", "tier", "direction", "reason", "cause", "role", "queue", "worker"}


def names(expression):
    """Metrics in an expression: its words outside braces, brackets and numbers that PromQL or a label does not take."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", expression)
    return set(re.findall(r"[a-z][a-z_]+", bare)) - WORDS - LABELS


@pytest.fixture(scope="module")
def exposed(eng):
    """Names of samples that the ``/metrics`` of the three roles can have."""
    found = set()
    with cluster(eng) as it:
        reads = {it.prefill: observing.of_prefill, it.decode: observing.of_decode, it.router: observing.of_router}
        for service, read in reads.items():
            app = FastAPI()
            app.include_router(observing.observe(service, MODEL, lambda s=service, of=read: of(s), Tracing()))
            with it.site.serving(app) as url:
                status, _, text = ask(url, "/metrics")
            assert status == 200
            for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text.decode(), re.M):
                parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
                found |= {name + part for part in parts}
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_of_the_dashboard_is_exposed(exposed, expression):
    assert names(expression)
    assert names(expression) <= exposed


def test_every_metric_of_ours_is_on_the_dashboard(exposed):
    drawn = set().union(*map(names, EXPRESSIONS))
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in exposed if name.startswith("lynxkv_")}
    assert ours <= {re.sub("_bucket$", "", name) for name in drawn}


def test_every_panel_says_what_it_shows_in_a_place_of_its_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
