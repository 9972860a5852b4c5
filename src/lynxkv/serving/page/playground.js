// The form, and one answer at a time.

import { Answer } from "./answer.js";
import { ApiError, call, events } from "./api.js";
import { bytes, count, element, seconds } from "./show.js";

const $ = (id) => document.getElementById(id);

const answer = new Answer($("verified"), $("draft"));
let attached = null;
let running = null;
let model = null;

/** Set the form up; `sent` is called whenever a request has gone out, `over` when it has ended. */
export function start({ sent, over }) {
  const apple = /Mac|iPhone|iPad/.test(navigator.platform);
  if (apple) $("send-key").textContent = "⌘ ⏎";
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) send(sent).finally(over);
  });
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      $("ask").requestSubmit();
    } else if (event.key === "Escape" && running !== null) {
      event.preventDefault();
      running.abort();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("figures").addEventListener("click", (event) => {
    if (event.target.id !== "reuse") return;
    $("seed").value = event.target.dataset.seed;
    $("seed").focus();
  });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (file) attach(file.name, await file.text());
    $("file").value = "";
  });
  $("sample").addEventListener("click", async () => {
    const response = await call(new URL("answer.js", import.meta.url));
    attach("answer.js", await response.text());
    if (!$("prompt").value) $("prompt").value = "What does this program do?";
    $("prompt").focus();
  });
  $("detach").addEventListener("click", () => {
    attach(null);
    $("attach").focus();
  });
}

/** The model that requests name; null: any. */
export function useModel(name) {
  model = name;
}

function attach(name, text = "") {
  attached = name === null ? null : text;
  $("document").hidden = name === null;
  $("document-name").textContent = name === null ? "" : `${name}, ${bytes(text.length)}`;
}

function question() {
  const prompt = $("prompt").value;
  return attached === null ? prompt : `${attached}\n\n${prompt}`;
}

/** JSON; a seed goes out as the digits that were typed, see api.js. */
function body() {
  const seed = $("seed").value.trim();
  const plain = JSON.stringify({
    ...(model === null ? {} : { model }),
    messages: [{ role: "user", content: question() }],
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    lynx: { emit: $("emit").checked ? "draft" : "verified", target: $("target").value },
  });
  return seed === "" ? plain : `${plain.slice(0, -1)},"seed":${seed}}`;
}

/** Buttons that have nothing to do keep the focus, so that a keyboard never loses its place. */
function busy(yes) {
  $("send").setAttribute("aria-disabled", String(yes));
  $("stop").setAttribute("aria-disabled", String(!yes));
  $("answer").setAttribute("aria-busy", String(yes));
}

/** Once for each text: the status is read aloud. */
function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

async function send(sent) {
  running = new AbortController();
  busy(true);
  answer.clear();
  for (const id of ["answer-hint", "problem", "figures"]) $(id).hidden = true;
  say("Waiting for the first token …");
  const seen = { began: performance.now(), chunks: 0, usage: null, lynx: null };
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: body(),
      signal: running.signal,
    });
    sent();
    for await (const chunk of events(response)) take(chunk, seen);
    say(summary(seen));
    figures(seen);
  } catch (error) {
    failed(error);
  } finally {
    answer.end();
    running = null;
    busy(false);
  }
}

function take(chunk, seen) {
  const { lynx } = chunk;
  if (lynx?.event === "draft") {
    answer.drafted(lynx.index, lynx.text);
    follow();
    say("Drafting on the anchor; the residual is still on its way …");
  } else if (lynx?.event === "retract") {
    answer.retracted(lynx.index);
    say("A draft was withdrawn.");
  } else if (lynx) {
    seen.lynx = lynx;
  }
  const text = chunk.choices?.[0]?.delta?.content;
  if (text) {
    answer.verified(text);
    follow();
    seen.chunks += 1;
    if (seen.chunks > 1) say("Decoding on the target …");
  }
  if (chunk.usage) seen.usage = chunk.usage;
}

function follow() {
  const box = $("answer");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
}

function summary({ lynx, began }) {
  const took = seconds((performance.now() - began) / 1000);
  if (!lynx?.drafted) return `Done in ${took}.`;
  const wrong = lynx.drafted - lynx.accepted;
  return wrong > 0
    ? `Done in ${took}: ${lynx.accepted} of ${lynx.drafted} drafts kept.`
    : `Done in ${took}: all ${lynx.drafted} drafts kept.`;
}

function figures({ lynx, usage }) {
  if (!lynx) return;
  const moved = lynx.bytes ?? {};
  const rows = [
    ["First token", seconds(lynx.ttft_prefill_s)],
    ["Own draft", seconds(lynx.ttft_draft_s)],
    ["Verified", seconds(lynx.ttft_verified_s)],
    ["Drafts kept", lynx.drafted ? `${lynx.accepted} of ${lynx.drafted}` : "none made"],
    [lynx.target === "exact" ? "KV, exact" : "Anchor", bytes(moved.anchor)],
    ["Residual", moved.residual ? bytes(moved.residual) : null],
    ["Exact", moved.exact ? bytes(moved.exact) : null],
    ["Tokens", usage ? `${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)}` : null],
    ["KV lost", lynx.on_loss ?? null],
    ["Seed", lynx.seed === undefined ? null : reusable(lynx.seed)],
  ];
  $("figures").replaceChildren(
    ...rows
      .filter(([, value]) => value !== null)
      .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  $("figures").hidden = false;
}

function reusable(seed) {
  return element("button", { type: "button", id: "reuse", "data-seed": seed, title: "Use this seed again" }, seed);
}

function failed(error) {
  if (error.name === "AbortError") {
    say("Stopped.");
    return;
  }
  const wait = error instanceof ApiError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  $("problem").textContent = error.message + wait;
  $("problem").hidden = false;
  $("problem").scrollIntoView({ block: "nearest" });
  say("Failed.");
}
