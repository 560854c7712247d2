// The turns of a conversation as elements: messages, answers that may still grow, and what stands before the first.

import { keep, read } from "./storage.js";
import { button, copyButton, element, textButton } from "./dom.js";
import { MarkdownView, PlainView } from "./growing.js";

const LEGEND = "draftwood.legend";
const INTRODUCTION =
  "A draft model proposes words ahead and this model checks them: faster, and the answers are its own.";
const EXAMPLES = {
  chat: [
    "Write a Python function that reverses a string.",
    "Compare TCP and UDP in a table.",
    "What makes a good question?",
  ],
  text: [
    "def fibonacci(n):\n",
    "Once upon a time there was a little girl",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
  ],
};

/** resend: called with the edited text. */
export function userTurn(content, resend) {
  const turn = element("article", "turn user"),
    text = element("div", "text", content),
    row = element("footer");
  turn.setAttribute("aria-label", "Your message");
  row.append(
    copyButton("Copy", () => content),
    button("edit", "Edit", () => edit(turn, content, resend)),
  );
  turn.append(text, row);
  return turn;
}

/** Let the user change a message in its place. */
export function edit(turn, content, resend) {
  const form = element("form", "editor"),
    area = element("textarea"),
    shown = [...turn.childNodes];
  const close = () => turn.replaceChildren(...shown);
  Object.assign(area, { value: content, required: true, rows: Math.min(12, content.split("\n").length + 1) });
  area.setAttribute("aria-label", "Your message, edited");
  const send = element("button", "strong", "Send");
  form.append(area, textButton("cancel", "Cancel", close), send);
  form.onsubmit = (event) => {
    event.preventDefault();
    resend(area.value);
  };
  area.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (entered(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  turn.replaceChildren(form);
  area.focus();
}

/** Whether a key sends: Enter, but not where it chooses among the candidates of an input method. */
export function entered(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

export class AnswerTurn {
  constructor(mode) {
    this.node = element("article", "turn assistant");
    this.node.setAttribute("aria-label", "Answer");
    this.text = element("div", "text");
    this.row = element("footer");
    this.facts = element("span", "facts");
    this.view = mode === "text" ? new PlainView(this.text) : new MarkdownView(this.text);
    this.node.append(this.text, this.row);
    this.row.append(this.facts);
    this.completed = false;
  }

  update(message) {
    if (this.completed) return; // a frame later
    this.view.update(message.content, message.runs);
    this.#tell(message.facts);
  }

  /** The whole answer, with its buttons. again: generates it anew. rounds: shows how it was drafted. */
  complete(message, again, rounds) {
    this.completed = true;
    this.view.update(message.content, message.runs, true);
    this.#tell(message.facts);
    const tools = element("span", "tools");
    tools.append(
      copyButton("Copy", () => message.content),
      button("again", "Regenerate", again),
    );
    tools.append(button("explain", "Rounds: how the draft and the model wrote this", rounds, "Rounds"));
    this.row.prepend(tools);
  }

  #tell(facts) {
    this.facts.replaceChildren(...facts.map((fact) => element("span", "", fact)));
  }
}

/** What an answer took so far. start: time and tokens of the first event, whose time is mostly the prompt's. */
export function figures(model, usage, start, now) {
  const tokens = usage.completion_tokens,
    detail = usage.completion_tokens_details,
    words = [model, `${tokens} tokens`];
  const seconds = (now - start.time) / 1000;
  if (tokens > start.tokens && seconds > 0) words.push(`${((tokens - start.tokens) / seconds).toFixed(1)} tokens/s`);
  if (!detail) return words;
  const accepted = detail.accepted_prediction_tokens,
    drafted = accepted + detail.rejected_prediction_tokens;
  if (!drafted) return [...words, "nothing drafted: plain decoding is expected to be faster"];
  words.push(`${(tokens / Math.max(1, tokens - accepted)).toFixed(2)} tokens a pass`); // each adds one of the target's
  return [...words, `${accepted} of ${drafted} drafted tokens accepted`];
}

/** What is shown before the first message. send: called with an example. */
export function welcome(mode, send) {
  const box = element("section", "welcome"),
    examples = element("div", "examples");
  box.append(
    element("h2", "", mode === "text" ? "Begin a text" : "Ask something"),
    element("p", "soft", INTRODUCTION),
    examples,
  );
  for (const example of EXAMPLES[mode]) {
    examples.append(textButton("example", example.trim(), () => send(example)));
  }
  return box;
}

/** Say what the colour means below the first answer that has it, until the reader knows. */
export function explainTint() {
  if (read(LEGEND) || document.querySelector(".legend")) return;
  const first = document.querySelector(".assistant .drafted")?.closest(".turn");
  if (!first) return;
  const legend = element("p", "legend"),
    words = element("span"),
    sample = element("span", "drafted", "Tinted");
  const known = textButton("known", "Got it", () => {
    keep(LEGEND, "known");
    legend.remove();
  });
  words.append(sample, " tokens were proposed by the draft, and the model agreed. The others are its own.");
  legend.append(words, known);
  first.append(legend);
}
