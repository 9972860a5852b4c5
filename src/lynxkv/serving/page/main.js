// Starts the page: the key dialog, the playground, and the state that the server is asked for again and again.

import { askForKeyWith, call } from "./api.js";
import { isRunning } from "./phases.js";
import * as playground from "./playground.js";
import * as requests from "./requests.js";
import { element } from "./show.js";
import * as timeline from "./timeline.js";

const BUSY_MS = 300;
const IDLE_MS = 2000;
const FRAME_MS = 100;

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

let state = { requests: [] };
let clockAhead = 0; // of the server, in seconds
let pinned = null;
let timer = 0;

const now = () => Date.now() / 1000 + clockAhead;

/** Ask for the key; null if the reader cancels. */
function keyDialog(problem) {
  const dialog = $("key-dialog");
  $("key").value = "";
  $("key-problem").hidden = problem === null;
  $("key-problem").textContent = problem ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? $("key").value : null), { once: true });
  });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  $("key-dialog").close("ok");
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());

function draw() {
  timeline.draw(state.requests, now(), pinned);
}

function show() {
  draw();
  requests.fill(state.requests, now(), pinned);
}

function workers() {
  const items = (state.workers ?? []).map((worker) =>
    element("li", { class: worker.up === false ? "down" : null, title: worker.url }, worker.up === false ? `${worker.role} is down` : worker.role),
  );
  $("workers").replaceChildren(...items);
}

/** Fetch the state, show it, and come back sooner while something is in flight. */
async function poll() {
  clearTimeout(timer);
  try {
    if (!$("model").textContent) await model();
    const asked = Date.now();
    const answer = await (await call("/lynx/state")).json();
    state = { ...answer, requests: answer.requests.sort((a, b) => b.started - a.started).slice(0, 100) };
    clockAhead = (answer.now ?? asked / 1000) - (asked + Date.now()) / 2000;
    $("outage").hidden = true;
    workers();
    show();
  } catch (error) {
    outage(`${error.message} Transfers are not shown.`);
    if (error.status === 401) return; // the reader did not give a key: asking on would only nag
  }
  if (!document.hidden) timer = setTimeout(poll, state.requests.some(isRunning) ? BUSY_MS : IDLE_MS);
}

let drawn = 0;

function frame(at) {
  if (at - drawn >= FRAME_MS && !still.matches && state.requests.some(isRunning)) {
    drawn = at;
    draw();
  }
  requestAnimationFrame(frame);
}

/** There is none while no decode worker is up. */
async function model() {
  const { data } = await (await call("/v1/models")).json();
  const name = data[0]?.id ?? null;
  $("model").textContent = name;
  playground.useModel(name);
}

function outage(text) {
  $("outage-text").textContent = text;
  $("outage").hidden = false;
}

askForKeyWith(keyDialog);
$("again").addEventListener("click", poll);
playground.start({ sent: poll, over: poll });
requests.start((id) => {
  pinned = pinned === id ? null : id;
  show();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
requestAnimationFrame(frame);
poll();
