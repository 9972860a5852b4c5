// What happened to a request, as spans on three lanes: the prefill worker, the link, the decode worker.
// A moment says what began or came, `at` seconds after the request started; see docs/observability.md.

export const LANES = ["prefill", "link", "decode"];

const PREFILL = { queued: "queued", prefill: "prefill" };
const DECODE = { draft: "draft", verify: "verify", decode: "decode" };

/** Spans `{lane, phase, from, to, bytes?}` of a request, at `now` seconds after its start. */
export function spans(request, now) {
  const moments = [...request.moments].sort((a, b) => a.at - b.at);
  const end = endOf(request, now);
  const found = [];
  const open = {};
  const change = (lane, phase, at) => {
    if (open[lane]?.phase === phase) return;
    if (open[lane]) open[lane].to = at;
    open[lane] = phase ? { lane, phase, from: at, to: end } : null;
    if (phase) found.push(open[lane]);
  };
  for (const { what, at } of moments) {
    if (what in PREFILL) change("prefill", PREFILL[what], at);
    else if (what in DECODE) change("decode", DECODE[what], at);
    else if (what === "first_token") change("prefill", null, at);
  }
  const begun = first(request, "prefill") ?? first(request, "room") ?? 0;
  return [...found, ...onLink(moments.filter(({ bytes }) => bytes > 0), begun)];
}

/** A segment is known by when it was whole: its bar ends there, and is as long as the link's pace makes it. */
function onLink(landed, begun) {
  const pace = paceOf(landed, begun);
  const found = [];
  for (const { at, tier, bytes } of landed) {
    const last = found.at(-1);
    const free = last?.to ?? begun;
    const took = bytes / pace;
    const from = at - free < took * 1.4 ? free : at - took;
    if (last && last.phase === tier && from === free) {
      last.to = at;
      last.bytes += bytes;
    } else {
      found.push({ lane: "link", phase: tier, from, to: at, bytes });
    }
  }
  return found;
}

/** Bytes a second while the link is busy: the upper quartile, by bytes, of what came between two segments. */
function paceOf(landed, begun) {
  const paces = landed.map(({ at, bytes }, i) => ({ bytes, pace: bytes / Math.max(at - (landed[i - 1]?.at ?? begun), 1e-6) }));
  paces.sort((a, b) => a.pace - b.pace);
  let left = 0.75 * paces.reduce((sum, { bytes }) => sum + bytes, 0);
  return paces.find(({ bytes }) => (left -= bytes) <= 0)?.pace ?? Infinity;
}

/** When a request ended, in seconds after its start; `now` while it runs. */
export function endOf(request, now) {
  return isRunning(request) ? now : (request.ended_s ?? request.moments.at(-1)?.at ?? 0);
}

export function isRunning(request) {
  return !request.finish && !request.error;
}

/** `draft`, `done`, `peer_lost` …: what a request is in, or how it ended. */
export function stateOf(request) {
  return request.error ?? (request.finish ? "done" : request.state);
}

/** Which colour that has. */
export function phaseOf(request) {
  if (isRunning(request)) return request.state;
  if (request.error) return request.error === "aborted" ? "aborted" : "failed";
  return "done";
}

/** When something first happened, or null. */
export function first(request, what) {
  return request.moments.find((moment) => moment.what === what)?.at ?? null;
}
