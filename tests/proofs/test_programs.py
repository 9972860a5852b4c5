"""The programs behind the claims, on the real models, cut short; the full runs are `python bench/NAME.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def run(program: str, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / program), *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout, f"{program} ended with {done.returncode} and printed nothing"
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_output_equals_plain_decoding_on_the_target(model):
    result = run("equality.py", "--model", model, "--prompts", "4", "--longest", "2048")
    assert [m["unequal"] for m in result["models"]] == [0]
    assert result["models"][0]["runs"] == 8


def test_stepwise_verification_in_bfloat16_equals_plain_decoding():
    arguments = ["--dtype", "bfloat16", "--verify", "stepwise", "--prompts", "3", "--longest", "1024"]
    result = run("equality.py", "--model", "smollm2-135m", *arguments)
    assert result["models"][0]["unequal"] == 0


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_drafts_are_better_than_int4s_and_the_full_kv_is_as_good_as_bf16(model):
    result = run("draft_quality.py", "--model", model, "--documents", "3", "--steps", "60")
    figures = result["models"][0]
    assert figures["kl_ratio_to_int4"] <= 0.85
    assert figures["kl_anchor"] <= 0.02
    assert figures["kl_full"] <= 0.0002


def test_requests_at_once_are_answered_as_they_are_alone_and_leave_nothing_behind():
    sizes = ["--requests", "40", "--longest", "1024", "--short", "400", "--distinct", "10", "--max-tokens", "16"]
    result = run("serve_load.py", *sizes)
    assert (result["requests"], result["unequal"], result["what_is_left"]) == (40, 0, {})
