// The requests in flight, drawn on one scale; where none is, the latest ones.

import { LANES, endOf, isRunning, spans } from "./phases.js";
import { count, element, seconds } from "./show.js";

const MOST = 8;
const LATEST = 2;
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600];

const box = document.getElementById("flights");
const empty = document.getElementById("flights-empty");

/** Draw `requests` as they are `now` (unix seconds of the server); `pinned` is shown in any case. */
export function draw(requests, now, pinned) {
  const running = requests.filter(isRunning);
  const shown = running.slice(0, MOST);
  if (shown.length === 0) shown.push(...requests.slice(0, LATEST));
  const wanted = requests.find(({ id }) => id === pinned);
  if (wanted && !shown.includes(wanted)) shown.unshift(wanted);
  empty.hidden = running.length > 0;
  empty.textContent = shown.length > 0 ? "Nothing is in flight; these were the latest." : "Nothing is in flight.";
  if (running.length > MOST) {
    empty.hidden = false;
    empty.textContent = `${running.length - MOST} more are in flight.`;
  }
  const scale = scaleOf(Math.max(1, ...shown.map((request) => length(request, now))));
  box.style.setProperty("--step", `${(100 * scale.step) / scale.length}%`);
  box.replaceChildren(...shown.map((request, i) => flight(request, now, scale, i === shown.length - 1)));
}

function length(request, now) {
  return endOf(request, request.moments, now - request.started);
}

/** A length that grows in steps, so that bars do not shrink all the time. */
function scaleOf(longest) {
  const step = STEPS.find((each) => longest / each <= 6) ?? STEPS.at(-1);
  return { step, length: Math.ceil((longest * 1.02) / step) * step };
}

function flight(request, now, scale, last) {
  const elapsed = length(request, now);
  const facts = [
    element("b", {}, request.id.slice(-8)),
    element("span", {}, request.state),
    element("span", {}, `${count(request.prompt_tokens)} tokens`),
    ...(request.drafted ? [element("span", {}, kept(request))] : []),
    element("span", { class: "elapsed" }, seconds(elapsed)),
  ];
  const lanes = LANES.flatMap((lane) => [
    element("span", { class: "lane-name" }, lane),
    element("div", { class: "lane" }, ...bars(request, lane, now - request.started, scale)),
  ]);
  return element(
    "article",
    { class: isRunning(request) ? "flight" : "flight over", "data-request": request.id, "aria-label": words(request, elapsed) },
    element("div", { class: "flight-head" }, ...facts),
    element("div", { class: "lanes", "aria-hidden": "true" }, ...lanes, ...(last ? [axis(scale)] : [])),
  );
}

function kept({ drafted, accepted, state }) {
  return state === "draft" ? `${drafted} drafted` : `${accepted} of ${drafted} drafts kept`;
}

function words(request, elapsed) {
  return `Request ${request.id.slice(-8)}: ${request.state} after ${seconds(elapsed)}, ${request.prompt_tokens} prompt tokens`;
}

function bars(request, lane, now, scale) {
  return spans(request, now)
    .filter((span) => span.lane === lane)
    .map(({ phase, from, to }) => {
      const bar = element("span", { class: "span", "data-phase": phase, title: `${phase}: ${seconds(from)} to ${seconds(to)}` });
      bar.style.left = `${(100 * from) / scale.length}%`;
      bar.style.width = `${(100 * (to - from)) / scale.length}%`;
      return bar;
    });
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
