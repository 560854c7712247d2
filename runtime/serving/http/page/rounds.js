// The rounds of an answer in a dialog: the server generates the text again with the same seed, and draws each round.

import { part } from "./dom.js";
import { call } from "./server.js";

const MOST_EXPLAINED = 512; // tokens
let shown = null;

/** path, body: of the request that the answer was for. tokens: of the answer. Errors are shown in the dialog. */
export async function showRounds([path, body], tokens) {
  const dialog = part("rounds"),
    [note, status] = [dialog.querySelector(".soft"), dialog.querySelector("[role=status]")];
  const link = dialog.querySelector("a"),
    frame = dialog.querySelector("iframe"),
    control = new AbortController();
  note.textContent = tokens > MOST_EXPLAINED ? `of the first ${MOST_EXPLAINED} tokens` : "";
  status.textContent = "The server writes the text again with the same seed, and draws every round …";
  link.hidden = frame.hidden = true;
  status.hidden = false;
  dialog.querySelector("button").onclick = () => dialog.close();
  dialog.onclose = () => {
    control.abort();
    frame.removeAttribute("src");
  };
  dialog.showModal();
  try {
    const most = Math.min(body.max_tokens, MOST_EXPLAINED);
    const answer = await call(path + "/explain", { ...body, max_tokens: most }, control.signal),
      text = await answer.text();
    if (shown) URL.revokeObjectURL(shown);
    shown = URL.createObjectURL(new Blob([text], { type: "text/html" }));
    frame.src = link.href = shown;
    link.hidden = frame.hidden = false;
    status.hidden = true;
  } catch (error) {
    if (error.name !== "AbortError") status.textContent = error.message;
  }
}
