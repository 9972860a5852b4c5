"""The page over ``lynxkv serve all``, with a real model and a slow link."""

import re

from playwright.sync_api import expect

from serving.apps import ask
from serving.processes import served

TEXT = "A cache keeps what was computed once, so that it is not computed again. " * 16
PROMPT = f"{TEXT}\n\nWhat does a cache do?"
LONG_MS = 120_000


def test_a_real_answer_is_drafted_verified_and_listed(opened, picture):
    with served("all", "--model", "smollm2-135m", "--link", "8mbit") as it:
        tab = opened(it.url)
        expect(tab.locator("#model")).to_have_text("smollm2-135m")
        tab.get_by_label("Prompt", exact=True).fill(PROMPT)
        tab.get_by_label("Max tokens").fill("16")
        tab.keyboard.press("Control+Enter")
        expect(tab.locator("#draft")).to_have_text(re.compile(r"\w \w"), timeout=LONG_MS)
        bars = tab.locator(".flight .span")
        expect(bars.and_(tab.locator("[data-phase=draft]"))).to_have_count(1)
        picture(tab, "real-drafting")
        expect(tab.get_by_role("status")).to_contain_text("drafts kept", timeout=LONG_MS)
        expect(tab.locator("#draft")).to_have_text("")
        expect(tab.locator("#figures")).to_contain_text(re.compile(r"Drafts kept\d+ of \d+"))
        row = tab.locator("#requests tbody tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text("done")
        for phase in ("prefill", "anchor", "residual", "draft", "verify", "decode"):
            expect(bars.and_(tab.locator(f"[data-phase={phase}]"))).not_to_have_count(0)
        picture(tab, "real-verified")
        expect(tab.locator(".withdrawn")).to_have_count(0)
        shown = tab.locator("#verified").inner_text()
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0}
        status, _, answer = ask(it.url, "/v1/chat/completions", body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, shown)
