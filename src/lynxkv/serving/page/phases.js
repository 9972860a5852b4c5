// What happened to a request, as spans on three lanes: the prefill worker, the link, the decode worker.
// A moment says what began or came, `at` seconds after the request started; see docs/observability.md.

export const LANES = ["prefill", "link", "decode"];

const PREFILL = { queued: "queued", prefill: "prefill" };
const DECODE = { draft: "draft", verify: "verify", decode: "decode" };
const TIERS = new Set(["anchor", "residual", "exact"]);

/** Spans `{lane, phase, from, to}` of a request, at `now` seconds after its start. */
export function spans(request, now) {
  const moments = [...request.moments].sort((a, b) => a.at - b.at);
  const end = endOf(request, moments, now);
  const found = [];
  const open = {};
  const change = (lane, phase, at) => {
    if (open[lane]) open[lane].to = at;
    open[lane] = phase ? { lane, phase, from: at, to: end } : null;
    if (phase) found.push(open[lane]);
  };
  let arrived = null;
  for (const { what, at, tier, bytes } of moments) {
    if (what in PREFILL) {
      if (open.prefill?.phase !== what) change("prefill", what, at);
      if (what === "prefill") arrived ??= at;
    } else if (what in DECODE) {
      if (open.decode?.phase !== what) change("decode", what, at);
    } else if (what === "first_token" || what === "prefilled") {
      change("prefill", null, at);
    }
    if (TIERS.has(tier) && bytes > 0) {
      const last = found.findLast((span) => span.lane === "link");
      if (last?.phase === tier) last.to = at;
      else found.push({ lane: "link", phase: tier, from: last?.to ?? arrived ?? 0, to: at });
    }
  }
  return found;
}

/** When a request ended, in seconds after its start; `now` while it runs. */
export function endOf(request, moments, now) {
  if (isRunning(request)) return now;
  return moments.at(-1)?.at ?? 0;
}

export function isRunning(request) {
  return !request.finish && !request.error;
}

/** When something first happened, or null. */
export function first(request, what) {
  return request.moments.find((moment) => moment.what === what)?.at ?? null;
}
