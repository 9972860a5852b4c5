// Requests to the server this page came from: the key, errors in OpenAI's shape, server-sent events.

const KEY = "lynxkv-api-key";

// A seed has up to 63 bits, more than a number here holds: it is kept as its digits.
// Inside a JSON string the quotes would be escaped, so no text can look like this.
const SEED = /"seed":\s*(\d+)/g;

let asking = null;
let ask = async () => null;

/** Have `dialog(problem)` ask for a key when the server wants one; it resolves to the key, or null. */
export function askForKeyWith(dialog) {
  ask = dialog;
}

export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Fetch `path`; asks for a key and tries again on 401, throws ApiError for every other status of 400 and above. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await reached(fetch(path, { ...options, headers }), "The server cannot be reached.");
    if (response.ok) return response;
    if (response.status !== 401 || !(await newKey(key))) throw await failure(response);
  }
}

/** The network's own failures come as TypeError; an abort stays what it is. */
function reached(promise, otherwise) {
  return promise.catch((error) => {
    throw error instanceof TypeError ? new ApiError(0, otherwise) : error;
  });
}

async function newKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true; // another request has asked meanwhile
  asking ??= ask(refused ? "The server refused this key." : null).finally(() => (asking = null));
  const key = await asking;
  if (key) sessionStorage.setItem(KEY, key);
  return Boolean(key);
}

async function failure(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim();
  try {
    message = (await response.json()).error?.message ?? message;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error; // a proxy's page is no JSON: its status has to do
  }
  return new ApiError(response.status, message, response.headers.get("Retry-After"));
}

/** The objects of a stream, read to its end; throws on an error event, and on a stream that ends without `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let whole = false;
  try {
    for (;;) {
      const { value, done } = await reached(reader.read(), "The connection to the server was lost.");
      if (done && whole) return;
      if (done) throw new ApiError(502, "The answer was cut off: the stream ended early.");
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        whole = data === "[DONE]";
        if (whole) continue;
        const event = JSON.parse(data.replace(SEED, '"seed":"$1"'));
        if (event.error) throw new ApiError(200, event.error.message ?? "The server failed.");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that has failed has nothing left to cancel
  }
}
