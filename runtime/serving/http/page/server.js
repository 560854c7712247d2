// Requests to the server, its streams, and its errors in words.

const UNREACHABLE = "The server cannot be reached: is `draftwood serve` still running?";
const LOST = "The connection was lost before the end of the answer.";
let key = "";

export class ServerError extends Error {}

export function useKey(value) {
  key = value;
}

/** The answer to a GET, or to a POST of a body. A refused key is announced by the event "locked". */
export async function call(path, body, signal) {
  const headers = { "content-type": "application/json" },
    used = key;
  if (used) headers.authorization = "Bearer " + used;
  const options =
    body === undefined ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const answer = await fetch(path, options).catch(lost(UNREACHABLE));
  if (answer.ok) return answer;
  if (answer.status === 401 && key === used) {
    // unless another key was entered meanwhile
    key = "";
    document.dispatchEvent(new CustomEvent("locked", { detail: used !== "" }));
  }
  const content = await answer.json().catch(() => ({}));
  throw Object.assign(new ServerError(inWords(answer, content.error?.message)), { status: answer.status });
}

/** The events of a stream. Raises ServerError for an error among them, and if the stream breaks off. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch(lost(LOST));
    if (done) throw new ServerError(LOST);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const each of parts) {
      const data = each.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(sentence(event.error.message));
      yield event;
    }
  }
}

function lost(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new ServerError(message);
  };
}

function inWords(answer, message) {
  const said = sentence(message || `the server answered with status ${answer.status}`);
  const seconds = answer.headers.get("retry-after");
  const again = seconds ? ` Try again in ${seconds} s.` : "";
  if (answer.status === 429) return `The server is busy. ${said}${again}`;
  return answer.status === 503 ? `The server cannot answer just now. ${said}${again}` : said;
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?>]$/.test(begun) ? begun : begun + ".";
}
