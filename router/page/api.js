// Talking to the router this page came from: JSON, event streams, errors, the API key.

const KEY = "paceline.key";
let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Storage is switched off: a key holds until the page is left.
}

/** The API key of this tab; null: none was given. */
export function apiKey() {
  return key;
}

/** Use this key from now on; empty: none. */
export function setApiKey(value) {
  key = value || null;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // As above.
  }
}

/** The server refused, or could not be reached (status 0). `message` is for people. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The router cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const body = await response.json().catch(() => null); // no JSON: something between the router and us has answered
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(response.status, message, retryAfter);
}

export async function getJson(path) {
  const response = await send(path);
  return response.json().catch(() => {
    throw new ApiError(0, "The answer is no JSON, or broke off."); // a router that died, or something before it
  });
}

/** The events of a streamed answer, parsed, up to [DONE]. Throws ApiError, also for an error within the stream. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error.message);
    yield event;
  }
  throw new ApiError(0, "The connection broke before the text was complete.");
}

/** The data of server-sent events; each of ours is one line. */
async function* eventData(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the text was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
