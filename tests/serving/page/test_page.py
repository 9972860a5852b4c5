"""The page, clicked through in a browser, against a router that does what the test says."""

import re

import pytest
from playwright.sync_api import expect

from lynxkv.errors import Overloaded
from lynxkv.serving.errors import HttpError
from serving.apps import until
from serving.page.stage import MODEL, PREFILL, busy, request

SOMETHING = re.compile(r"\S")


def ready(tab):
    expect(tab.locator("#model")).to_have_text(MODEL)
    return tab


def send(tab, prompt="What is a cache?"):
    tab.get_by_label("Prompt", exact=True).fill(prompt)
    tab.get_by_role("button", name="Send").click()


def look(tab):
    """Have the page ask for the state now, as it does when it comes to the front."""
    tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def verified(tab):
    return tab.locator("#verified > :not(.withdrawn)")


def test_drafts_are_tentative_until_they_are_verified(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    send(tab)
    stage.verify("A")
    stage.draft(1, " 𝄞")
    stage.draft(3, " cache")
    tentative = tab.locator("#draft")
    expect(tentative).to_have_text(" 𝄞 cache")
    expect(tentative).to_have_attribute("aria-hidden", "true")
    expect(tentative).to_have_css("text-decoration-line", "underline")
    expect(tab.locator("#verified")).to_have_text("A")
    stage.verify(" 𝄞 ca")
    expect(tentative).to_have_text("che")
    stage.verify("che keeps")
    expect(tentative).to_have_text("")
    expect(tab.locator("#verified")).to_have_text("A 𝄞 cache keeps")
    expect(tab.locator("#verified")).to_have_attribute("aria-live", "polite")
    stage.finish()
    expect(tab.get_by_role("status")).to_contain_text("6 of 8 drafts kept")
    (body,) = stage.asked
    assert body["lynx"] == {"emit": "draft", "target": "residual"}
    assert body["messages"] == [{"role": "user", "content": "What is a cache?"}]


def test_a_withdrawn_draft_is_struck_and_no_part_of_the_answer(stage, opened, picture):
    stage, url = stage
    tab = ready(opened(url))
    tab.clock.install()
    send(tab)
    stage.verify("The")
    stage.draft(3, " cache")
    stage.draft(9, " forgets")
    expect(tab.locator("#draft")).to_have_text(" cache forgets")
    stage.retract(9)
    struck = tab.locator(".withdrawn")
    expect(struck).to_have_text(" forgets")
    expect(struck).to_have_css("text-decoration-line", "line-through")
    expect(tab.locator("#draft")).to_have_text(" cache")
    picture(tab, "retracted", animations="allow")
    stage.verify(" cache")
    stage.verify(" remembers")
    tab.clock.run_for(3000)
    expect(struck).to_have_count(0)
    expect(tab.locator("#answer .text")).to_have_text("The cache remembers")
    stage.finish()
    expect(tab.locator("#figures")).to_be_visible()


def test_the_keyboard_alone_asks_stops_and_asks_again(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    order = []
    for _ in range(11):
        tab.keyboard.press("Tab")
        order.append(tab.locator(":focus").get_attribute("id"))
        expect(tab.locator(":focus")).to_have_css("outline-style", "solid")
        if order[-1] == "prompt":
            tab.keyboard.type("Why?")
    assert order == [
        "skip", "prompt", "attach", "sample", "max-tokens", "temperature", "seed", "target", "emit", "stop", "send",
    ]  # fmt: skip
    tab.keyboard.press("Enter")
    stage.verify("Because")
    expect(tab.locator("#verified")).to_have_text("Because")
    expect(tab.get_by_role("button", name="Send")).to_be_focused()
    stage.draft(7, " of")
    expect(tab.locator("#draft")).to_have_text(" of")
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("status")).to_have_text("Stopped.")
    expect(tab.locator("#draft")).to_have_text("")
    until(lambda: stage.activity.requests()[0].state == "aborted")
    tab.get_by_label("Prompt", exact=True).focus()
    tab.keyboard.press("Control+Enter")
    stage.verify("Again")
    stage.finish()
    expect(tab.locator("#figures")).to_be_visible()
    assert [body["messages"][0]["content"] for body in stage.asked] == ["Why?", "Why?"]


def test_a_failure_in_mid_answer_is_told_and_its_drafts_go(stage, opened, picture):
    stage, url = stage
    tab = ready(opened(url))
    send(tab)
    stage.verify("Once")
    stage.draft(4, " upon")
    expect(tab.locator("#draft")).to_have_text(" upon")
    stage.fail(HttpError(502, "peer_lost", "the decode worker went away"))
    expect(tab.locator("#problem")).to_have_text("the decode worker went away")
    expect(tab.locator("#problem")).to_have_attribute("role", "alert")
    expect(tab.locator("#draft")).to_have_text("")
    expect(verified(tab)).to_have_text("Once")
    picture(tab, "error")
    send(tab)
    expect(tab.locator("#problem")).to_be_hidden()


def test_a_refusal_says_when_to_try_again(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    send(tab)
    stage.fail(Overloaded("64 requests wait already", retry_after_s=3))
    expect(tab.locator("#problem")).to_have_text("64 requests wait already Try again in 3 s.")


def test_a_server_that_goes_away_is_told_and_found_again(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    tab.route("**/lynx/state", lambda route: route.abort())
    look(tab)
    expect(tab.locator("#outage")).to_contain_text("cannot be reached")
    tab.unroute("**/lynx/state")
    tab.get_by_role("button", name="Try again").click()
    expect(tab.locator("#outage")).to_be_hidden()
    stage.up = False
    look(tab)
    expect(tab.locator("#workers")).to_contain_text("decode is down")


def test_a_server_with_keys_is_asked_with_the_one_that_the_reader_gives(staged, opened, picture):
    with staged(tokens=["right"]) as (_, url):
        tab = opened(url)
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_be_visible()
        expect(tab.get_by_label("Key", exact=True)).to_be_focused()
        tab.keyboard.type("wrong")
        tab.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("The server refused this key.")
        picture(tab, "key")
        tab.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(tab.locator("#outage")).to_be_visible()
        tab.get_by_role("button", name="Try again").click()
        tab.get_by_label("Key", exact=True).fill("right")
        tab.get_by_role("button", name="Continue").click()
        ready(tab)
        expect(tab.locator("#outage")).to_be_hidden()


def test_a_seed_keeps_all_its_digits(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    send(tab)
    stage.verify("x")
    stage.finish(seed=9007199254740993)
    tab.get_by_role("button", name="9007199254740993").click()
    expect(tab.get_by_label("Seed", exact=True)).to_have_value("9007199254740993")
    tab.keyboard.press("Control+Enter")
    until(lambda: len(stage.asked) == 2)
    assert stage.asked[1]["seed"] == 9007199254740993


def test_options_are_what_is_sent(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    tab.get_by_label("Max tokens").fill("7")
    tab.get_by_label("Temperature").fill("0.7")
    tab.get_by_label("Target").select_option("exact")
    tab.get_by_label("Show drafts").uncheck()
    tab.get_by_role("button", name="own code").click()
    expect(tab.locator("#document")).to_contain_text("answer.js")
    tab.get_by_role("button", name="Send").click()
    until(lambda: stage.asked)
    (body,) = stage.asked
    assert (body["max_tokens"], body["temperature"], body["model"]) == (7, 0.7, MODEL)
    assert body["lynx"] == {"emit": "verified", "target": "exact"}
    assert "export class Answer" in body["messages"][0]["content"]
    assert "seed" not in body


def test_what_is_in_flight_is_drawn_lane_by_lane(stage, opened):
    stage, url = stage
    stage.shown = busy()
    tab = ready(opened(url))
    expect(tab.locator("#flights-note")).to_have_text("2 now")
    flight = tab.locator(".flight", has_text="00a09d44")
    expect(flight).to_have_attribute("aria-label", re.compile("draft after .* s, 1,834 prompt tokens"))
    lanes = flight.locator(".lane")

    def phases(lane):
        return [bar.get_attribute("data-phase") for bar in lanes.nth(lane).locator(".span").all()]

    assert phases(0) == ["queued", "prefill"]
    assert phases(1) == ["anchor", "residual"]
    assert phases(2) == ["draft"]
    anchor = lanes.nth(1).locator(".span").first
    expect(anchor).to_have_attribute("title", "anchor 6.4 MB, 1.00 s to 2.60 s")


def test_a_row_of_the_table_pins_its_timeline(stage, opened):
    stage, url = stage
    stage.shown = busy()
    tab = ready(opened(url))
    row = tab.locator("#requests tbody tr").last
    expect(row).to_contain_text("7/9")
    button = row.get_by_role("button")
    pinned = tab.locator(f".flight[data-request='{stage.shown[-1]['id']}']")
    expect(pinned).to_have_count(0)
    button.focus()
    tab.keyboard.press("Enter")
    expect(pinned).to_have_count(1)
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_be_focused()
    tab.keyboard.press("Enter")
    expect(pinned).to_have_count(0)


def test_the_table_has_the_last_hundred(stage, opened):
    stage, url = stage
    tab = ready(opened(url))
    expect(tab.locator("#requests-empty")).to_be_visible()
    stage.shown = [
        request(i, PREFILL, ago=i, state="failed", error="peer_lost", message="it went away", ended_s=2.0)
        for i in range(130)
    ]
    look(tab)
    expect(tab.locator("#requests tbody tr")).to_have_count(100)
    expect(tab.locator("#requests-count")).to_have_text("100 requests")
    expect(tab.locator("#requests tbody tr").first).to_contain_text("peer_lost")


def test_nothing_moves_for_readers_who_want_no_motion(stage, opened):
    stage, url = stage
    tab = ready(opened(url, reduced_motion="reduce"))
    send(tab)
    stage.draft(0, "A")
    expect(tab.locator("#draft")).to_have_text("A")
    stage.verify("A")
    expect(tab.locator(".settled")).to_have_css("animation-duration", "1e-05s")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 900, 360])
def test_it_fits_and_its_text_can_be_read(stage, opened, picture, width, scheme):
    stage, url = stage
    tab = ready(opened(url, viewport={"width": width, "height": 900}, color_scheme=scheme))
    picture(tab, f"idle-{width}-{scheme}")
    stage.shown = busy()
    send(tab, "What is a KV cache?\nAnswer in two sentences.")
    stage.verify("A KV cache holds the keys and values of every token that a model has read,")
    stage.draft(75, " so that it reads none of them twice")
    expect(tab.locator("#draft")).to_have_text(SOMETHING)
    expect(tab.locator(".flight")).to_have_count(2)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    picture(tab, f"drafting-{width}-{scheme}")
    assert tab.evaluate(CONTRAST) == []
    stage.verify(" so that it reads none of them twice. It grows by one row for every token of the answer.")
    stage.finish()
    expect(tab.locator("#figures")).to_be_visible()
    tab.locator("#figures").scroll_into_view_if_needed()
    picture(tab, f"verified-{width}-{scheme}")


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const each of colours) { canvas.fillStyle = each; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.checkVisibility({ checkVisibilityCSS: true })
    && e.getClientRects().length && !e.closest("[aria-disabled=true]"));
  return texts.flatMap((e) => {
    const grounds = [];
    for (let at = e; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    const ground = over(["white", ...grounds]);
    const ink = over([`rgb(${ground.map((c) => c * 255)})`, getComputedStyle(e).color]);
    const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    return ratio < 4.5 ? [`${e.className || e.tagName} ${e.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`] : [];
  });
}"""
