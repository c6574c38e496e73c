// Requests to the server, and what it streams.

/** Why a request failed; a status of 0 means that no answer came. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const UNREACHABLE = "The server cannot be reached. Check that it runs and that you are connected.";
const SENTENCES = {
  401: "The server does not accept your key any more.",
  429: "The server has more questions than it can answer now. Try again in a moment.",
};

/** Send a request; returns the response if it is a success. */
export async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  if (response.ok) return response;
  const said = await response.json().then((body) => body.error?.message, () => null);
  const own = SENTENCES[response.status] ?? `The server answered with error ${response.status}.`;
  const message = response.status === 429 || !said ? own : sentence(said);
  throw new ApiError(response.status, message, Number(response.headers.get("Retry-After")) || 0);
}

const sentence = (text) => {
  const whole = text.trim();
  return whole.charAt(0).toUpperCase() + whole.slice(1) + (/[.!?]$/.test(whole) ? "" : ".");
};

export const getJson = async (path, options) => (await send(path, options)).json();

export const postJson = (path, body, signal) =>
  send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });

/** The path of a bank, or of something in it. */
export const bankPath = (bank, ...parts) => ["/v1/banks", bank, ...parts].map(encode).join("/");
const encode = (part, index) => (index ? encodeURIComponent(part) : part);

/** Yield the JSON values of a stream of server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the server was lost.");
      });
      if (done) return;
      const parts = (rest + value.replaceAll("\r", "")).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error?.message) throw new ApiError(503, sentence(event.error.message));
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
