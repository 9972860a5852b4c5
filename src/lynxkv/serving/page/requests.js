// The table of the last hundred requests; a row's button pins its timeline.

import { endOf, first, phaseOf, stateOf } from "./phases.js";
import { bytes, clock, count, element, seconds } from "./show.js";

const body = document.querySelector("#requests tbody");
const box = document.getElementById("requests-box");
const empty = document.getElementById("requests-empty");
const total = document.getElementById("requests-count");

/** Call `pin(id)` when a request is chosen. */
export function start(pin) {
  body.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) pin(button.dataset.request);
  });
}

/** Fill the table; rows keep their elements, so that the focus stays where it is. */
export function fill(requests, now, pinned) {
  const old = new Map([...body.rows].map((row) => [row.dataset.request, row]));
  const rows = requests.map((request) => {
    const row = old.get(request.id) ?? make(request);
    update(row, request, now, request.id === pinned);
    return row;
  });
  if (rows.some((row, i) => row !== body.rows[i]) || rows.length !== body.rows.length) rearrange(rows);
  box.hidden = rows.length === 0;
  empty.hidden = rows.length > 0;
  total.textContent = rows.length === 0 ? "" : rows.length === 1 ? "1 request" : `${rows.length} requests`;
}

function rearrange(rows) {
  const focused = document.activeElement;
  body.replaceChildren(...rows);
  if (body.contains(focused)) focused.focus({ preventScroll: true });
}

const COLUMNS = [
  ["", "Started", (r) => clock(r.started)],
  ["", "Request", null],
  ["wide", "State", null],
  ["number", "Prompt", (r) => count(r.prompt_tokens)],
  ["number", "First", (r) => seconds(first(r, "first_token"))],
  ["number", "Draft", (r) => seconds(first(r, "draft"))],
  ["number", "Verified", (r) => seconds(first(r, "verified"))],
  ["number", "Kept", (r) => (r.drafted ? `${r.accepted}/${r.drafted}` : "–")],
  ["number", "Moved", (r) => bytes(Object.values(r.bytes ?? {}).reduce((sum, size) => sum + size, 0))],
  ["number", "Total", (r, now) => seconds(endOf(r, now - r.started))],
];

function make(request) {
  const cells = COLUMNS.map(([name, label]) => element("td", { class: name || null, "data-label": label }));
  const button = element("button", { type: "button", "data-request": request.id }, request.id.slice(-8));
  button.title = "Show its timeline";
  cells[1].append(button);
  cells[2].append(element("span", { class: "state" }));
  return element("tr", { "data-request": request.id }, ...cells);
}

function update(row, request, now, pinned) {
  COLUMNS.forEach(([, , show], i) => {
    if (show) set(row.cells[i], show(request, now));
  });
  row.classList.toggle("pinned", pinned);
  row.cells[1].firstChild.setAttribute("aria-pressed", String(pinned));
  const state = row.cells[2].firstChild;
  state.dataset.phase = phaseOf(request);
  state.title = request.message ?? request.finish ?? "";
  set(state, stateOf(request));
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
