// The requests in flight, drawn on one scale; where none is, the latest ones.

import { LANES, endOf, isRunning, phaseOf, spans, stateOf } from "./phases.js";
import { bytes, count, element, seconds } from "./show.js";

const MOST = 8;
const LATEST = 2;
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600];

const box = document.getElementById("flights");
const note = document.getElementById("flights-note");
const nothing = document.getElementById("flights-empty");

/** Draw `requests` as they are `now` (unix seconds of the server); `pinned` is shown in any case. */
export function draw(requests, now, pinned) {
  const running = requests.filter(isRunning);
  const shown = running.slice(0, MOST);
  if (shown.length === 0) shown.push(...requests.slice(0, LATEST));
  const wanted = requests.find(({ id }) => id === pinned);
  if (wanted && !shown.includes(wanted)) shown.unshift(wanted);
  nothing.hidden = shown.length > 0;
  note.textContent = noted(running.length, shown.length);
  const scale = scaleOf(Math.max(1, ...shown.map((request) => endOf(request, now - request.started))));
  box.style.setProperty("--step", `${(100 * scale.step) / scale.length}%`);
  box.replaceChildren(...shown.map((request, i) => flight(request, now - request.started, scale, i === shown.length - 1)));
}

function noted(running, shown) {
  if (running > MOST) return `${running} now, ${running - MOST} of them not shown`;
  if (running > 0) return `${running} now`;
  return shown > 0 ? "none now; the latest" : "";
}

/** A length that grows in steps, so that bars do not shrink all the time. */
function scaleOf(longest) {
  const step = STEPS.find((each) => longest / each <= 6) ?? STEPS.at(-1);
  return { step, length: Math.ceil((longest * 1.02) / step) * step };
}

function flight(request, now, scale, last) {
  const elapsed = endOf(request, now);
  const found = spans(request, now);
  const facts = [
    element("b", {}, request.id.slice(-8)),
    element("span", { class: "state", "data-phase": phaseOf(request) }, stateOf(request)),
    element("span", {}, `${count(request.prompt_tokens)} tokens`),
    ...(request.drafted ? [element("span", {}, `${request.accepted} of ${request.drafted} drafts kept`)] : []),
    element("span", { class: "elapsed" }, seconds(elapsed)),
  ];
  const lanes = LANES.flatMap((lane) => [
    element("span", { class: "lane-name" }, lane),
    element("div", { class: "lane" }, ...found.filter((span) => span.lane === lane).map((span) => bar(span, scale))),
  ]);
  return element(
    "article",
    { class: isRunning(request) ? "flight" : "flight over", "data-request": request.id, "aria-label": words(request, elapsed) },
    element("div", { class: "flight-head" }, ...facts),
    element("div", { class: "lanes", "aria-hidden": "true" }, ...lanes, ...(last ? [axis(scale)] : [])),
  );
}

function words(request, elapsed) {
  return `Request ${request.id.slice(-8)}: ${stateOf(request)} after ${seconds(elapsed)}, ${count(request.prompt_tokens)} prompt tokens`;
}

/** A bar names itself where it is wide enough; that is for the style sheet to decide. */
function bar({ phase, from, to, bytes: size }, scale) {
  const amount = size === undefined ? "" : bytes(size);
  const made = element(
    "span",
    { class: "span", "data-phase": phase, title: `${phase} ${amount}, ${seconds(from)} to ${seconds(to)}` },
    element("span", { class: "span-name" }, phase),
    element("span", { class: "span-size" }, amount),
  );
  made.style.left = `${(100 * from) / scale.length}%`;
  made.style.width = `${(100 * (to - from)) / scale.length}%`;
  return made;
}

function axis({ step, length }) {
  const ticks = [];
  for (let at = 0; at < length - step / 2; at += step) {
    const tick = element("span", { class: "tick" }, at === 0 ? "0" : `${Number(at.toFixed(1))} s`);
    tick.style.left = `${(100 * at) / length}%`;
    ticks.push(tick);
  }
  return element("div", { class: "axis" }, ...ticks);
}
