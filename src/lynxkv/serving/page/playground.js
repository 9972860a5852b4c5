// The form, and one answer at a time.

import { Answer } from "./answer.js";
import { ApiError, call, events } from "./api.js";
import { bytes, element, seconds } from "./show.js";

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

/** The model that requests name. */
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

function body() {
  const seed = $("seed").value;
  return {
    model,
    messages: [{ role: "user", content: question() }],
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    stream: true,
    stream_options: { include_usage: true },
    lynx: { emit: $("emit").checked ? "draft" : "verified", target: $("target").value },
  };
}

function busy(yes) {
  $("send").disabled = yes;
  $("stop").disabled = !yes;
  $("answer").setAttribute("aria-busy", String(yes));
}

function say(text) {
  $("status").textContent = text;
}

async function send(sent) {
  running = new AbortController();
  busy(true);
  answer.clear();
  for (const id of ["answer-hint", "problem", "figures"]) $(id).hidden = true;
  say("Waiting for the first token …");
  const seen = { began: performance.now(), drafted: false, chunks: 0, usage: null, lynx: null };
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
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
    say("Drafting on the anchor; the residual is still on its way …");
    seen.drafted = true;
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
    ["Anchor", bytes(moved.anchor)],
    ["Residual", bytes(moved.residual)],
    ...(moved.exact ? [["Exact", bytes(moved.exact)]] : []),
    ["Prompt, answer", usage ? `${usage.prompt_tokens}, ${usage.completion_tokens} tokens` : null],
    ["Seed", lynx.seed === undefined ? null : String(lynx.seed)],
    ["Loss", lynx.on_loss ?? null],
  ];
  $("figures").replaceChildren(
    ...rows
      .filter(([, value]) => value !== null)
      .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  $("figures").hidden = false;
}

function failed(error) {
  if (error.name === "AbortError") {
    say("Stopped.");
    return;
  }
  const wait = error instanceof ApiError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  $("problem").textContent = error.message + wait;
  $("problem").hidden = false;
  say("Failed.");
}
