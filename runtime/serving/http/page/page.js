// The page: conversations, settings, and the request that is running.

import { fresh, keep, list, load, read, remove, save } from "./conversations.js";
import { button, element, part } from "./dom.js";
import { showRounds } from "./rounds.js";
import { call, events, useKey } from "./server.js";
import { extend } from "./tint.js";
import { AnswerTurn, edit, entered, figures, userTurn } from "./turns.js";

const CONVERSATION = "v1/chat/completions", TEXT = "v1/completions";
const STREAM = { include_usage: true, continuous_usage_stats: true, include_pieces: true };
const DRAFT = "draftwood.draft", LEGEND = "draftwood.legend";
const INTRODUCTION = "A draft model proposes words ahead and this model checks them: faster, and the answers are its own.";
const EXAMPLES = {
  chat: ["What is a hash table? Show one in Python.", "Compare TCP and UDP in a table.", "Write a limerick about a carpenter."],
  text: ["def fibonacci(n):\n", "Once upon a time there was a little girl", "import os\nimport sys\n\n\ndef main(argv=None):\n"],
};
let conversation = load(location.hash.slice(1)) || fresh("chat");
let running = null; // {control, ended} of the request that is running

// ---- requests

function settings() {
  const number = (name) => Number(part(name).value);
  return {
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("limit"),
    seed: part("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : number("seed"),
    ...(part("speculate").checked ? {} : { speculative: false }),
  };
}

/** Path and body of the request for what follows `messages`. */
function request({ mode, system }, messages, chosen) {
  if (mode === "text") return [TEXT, { ...chosen, prompt: messages.at(-1).content }];
  const said = messages.map(({ role, content }) => ({ role, content }));
  return [CONVERSATION, { ...chosen, messages: system ? [{ role: "system", content: system }, ...said] : said }];
}

/** Have the last of `messages` answered. refused: called if nothing came; the conversation is then as it was before. */
async function answer(messages, refused) {
  if (!part("options").checkValidity()) {
    options(true);
    return void part("options").reportValidity();
  }
  if (running) await stop();
  const own = conversation, before = own.messages, control = new AbortController();
  const message = { role: "assistant", content: "", runs: [], facts: [], settings: settings() }, turn = new AnswerTurn(own.mode);
  own.system = part("system").value;
  own.messages = messages;
  const changed = messages.findIndex((each, index) => each !== before[index]);
  show(changed < 0 ? messages.length : changed);
  part("log").append(turn.node);
  fail("");
  const begun = () => {
    own.messages = [...messages, message];
    keepConversation(own);
    keep(DRAFT, part("prompt").value);
  };
  running = { control, ended: stream(own, messages, message, turn, begun, control.signal) };
  busy(true);
  const failure = await running.ended, stopped = failure?.name === "AbortError", came = own.messages.at(-1) === message;
  if (running?.control === control) busy(false);
  if (!came) own.messages = before;
  else if (failure) message.facts = [...message.facts, stopped ? "stopped" : "broken off"];
  if (came) keepConversation(own);
  if (own === conversation && came) complete(turn, message, messages);
  else if (own === conversation) {
    show();
    refused();
  }
  if (failure && !stopped) fail(failure.message);
  else if (!failure && !came) fail("The model ended its answer at once.");
}

/** Add to `message` what the server sends. Returns the error that ended it, if one did. */
async function stream(own, messages, message, turn, begun, signal) {
  try {
    const [path, body] = request(own, messages, message.settings);
    let start = null;
    for await (const event of events(await call(path, { ...body, stream: true, stream_options: STREAM }, signal))) {
      for (const choice of event.choices) for (const piece of choice.pieces || []) {
        message.content += piece.text;
        extend(message.runs, piece.text.length, piece.drafted);
      }
      if (!event.usage?.completion_tokens) continue;
      if (!start) begun();
      const now = performance.now();
      start = start || { time: now, tokens: event.usage.completion_tokens };
      if (event.choices.length) message.facts = figures(event.model, event.usage, start, now);
      if (own === conversation) soon(() => turn.update(message));
    }
  } catch (error) {
    return error;
  }
}

/** Stop what runs; what came so far stays. */
async function stop() {
  const { control, ended } = running;
  control.abort();
  await ended;
}

function busy(yes) {
  if (!yes) running = null;
  part("send").hidden = yes;
  part("stop").hidden = !yes;
  part("log").setAttribute("aria-busy", yes);
}

function fail(text) {
  part("error").hidden = !text;
  part("error").firstElementChild.textContent = text;
}

// ---- what is shown

let draw = null; // what the next frame draws

/** Draw in the next frame; of several before it, only the last. A reader at the end stays there. */
function soon(drawing) {
  if (draw === null) requestAnimationFrame(() => {
    const log = part("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60, last = draw;
    draw = null;
    last();
    explainTint();
    if (follows) log.scrollTop = log.scrollHeight;
  });
  draw = drawing;
}

/** Show the conversation; its first `kept` turns are shown already. */
function show(kept = 0) {
  const { messages } = conversation, log = part("log"), all = log.classList.toggle("empty", !messages.length);
  for (const old of [...log.children].slice(kept)) old.remove();
  if (all) log.append(welcome());
  messages.forEach((message, index) => { if (index >= kept) log.append(turnOf(message, index)); });
  explainTint();
  log.scrollTop = log.scrollHeight;
  listConversations();
}

function turnOf(message, index) {
  if (message.role === "user") return userTurn(message.content, (text) => resend(index, text));
  const turn = new AnswerTurn(conversation.mode);
  complete(turn, message, conversation.messages.slice(0, index));
  return turn.node;
}

/** asked: the messages before an answer. */
function complete(turn, message, asked) {
  const own = conversation, rounds = () => showRounds(...request(own, asked, message.settings));
  turn.complete(message, () => answer(asked, () => {}), rounds);
  explainTint();
}

function welcome() {
  const box = element("section", "welcome"), examples = element("div", "examples");
  box.append(element("h2", "", conversation.mode === "text" ? "Begin a text" : "Ask something"), element("p", "soft", INTRODUCTION), examples);
  for (const example of EXAMPLES[conversation.mode]) {
    const choice = element("button", "example", example.trim());
    choice.type = "button";
    choice.onclick = () => send(example);
    examples.append(choice);
  }
  return box;
}

/** Say what the colour means below the first answer that has it, until the reader knows. */
function explainTint() {
  if (read(LEGEND) || document.querySelector(".legend")) return;
  const first = document.querySelector(".assistant .drafted")?.closest(".turn");
  if (!first) return;
  const legend = element("p", "legend"), sample = element("span", "drafted", "Tinted");
  const known = button("known", "Got it", () => { keep(LEGEND, "known"); legend.remove(); }, "Got it");
  legend.append(sample, " tokens were proposed by the draft, and the model agreed. The others are its own. ", known);
  first.append(legend);
}

function listConversations() {
  part("list").replaceChildren(...list().map(({ id, title }) => {
    const row = element("li", id === conversation.id ? "open" : ""), link = element("a", "", title);
    link.href = "#" + id;
    if (id === conversation.id) link.setAttribute("aria-current", "page");
    const away = button("delete", `Delete “${title}”`, () => {
      remove(id);
      if (id === conversation.id) open(fresh(part("mode").value));
      else listConversations();
    });
    away.dataset.icon = "trash";
    row.append(link, away);
    return row;
  }));
}

// ---- what the user does

function open(next) {
  if (running) stop();
  conversation = next;
  history.replaceState(null, "", next.messages.length ? "#" + next.id : location.pathname);
  part("mode").value = next.mode;
  part("system").value = next.system;
  fail("");
  side(false);
  show();
  part("prompt").focus();
}

function keepConversation(own) {
  if (!save(own)) fail("This browser does not keep this conversation: it is too long, or storage is turned off.");
  if (own === conversation) history.replaceState(null, "", "#" + own.id);
  listConversations();
}

function send(text) {
  write("");
  keep(DRAFT, text); // until an answer comes, also where the page is closed meanwhile
  const back = () => write([text, part("prompt").value].filter(Boolean).join("\n"));
  answer([...conversation.messages, { role: "user", content: text }], back);
}

function resend(index, text) {
  const own = conversation;
  answer([...own.messages.slice(0, index), { role: "user", content: text }], () => {
    edit(part("log").children[index], text, (again) => resend(index, again));
  });
}

/** Put a text where messages are written, as high as its lines. */
function write(text) {
  part("prompt").value = text;
  part("prompt").oninput();
}

function side(open) {
  part("side").classList.toggle("open", open);
  part("curtain").hidden = !open;
  part("menu").setAttribute("aria-expanded", open);
}

function options(open) {
  part("options").hidden = !open;
  part("gear").setAttribute("aria-expanded", open);
}

part("ask").onsubmit = (event) => {
  event.preventDefault();
  if (!running && part("prompt").value) send(part("prompt").value);
};
part("prompt").onkeydown = (event) => {
  if (entered(event)) { event.preventDefault(); part("ask").requestSubmit(); }
};
part("prompt").oninput = () => {
  const area = part("prompt");
  keep(DRAFT, area.value);
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
};
document.onkeydown = (event) => {
  if (event.key !== "Escape" || part("rounds").open) return;
  if (part("side").classList.contains("open")) side(false);
  else if (running) stop();
  else options(false);
};
part("stop").onclick = () => running && stop();
part("new").onclick = () => open(fresh(part("mode").value, part("system").value));
part("mode").onchange = () => open(fresh(part("mode").value, part("system").value));
part("menu").onclick = () => side(!part("side").classList.contains("open"));
part("curtain").onclick = () => side(false);
part("gear").onclick = () => options(part("options").hidden);
part("options").onsubmit = (event) => { event.preventDefault(); options(false); };
part("error").lastElementChild.onclick = () => fail("");
part("theme").onclick = () => {
  const { dataset } = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = (dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  keep("draftwood.theme", dataset.theme);
};
part("tint").onclick = () => {
  const off = document.documentElement.classList.toggle("no-tint");
  part("tint").setAttribute("aria-pressed", !off);
  keep("draftwood.tint", off ? "off" : "on");
};
part("unlock").onsubmit = (event) => {
  event.preventDefault();
  useKey(part("key").value);
  part("key").value = "";
  look();
};
document.addEventListener("locked", ({ detail: refused }) => {
  part("unlock").hidden = false;
  part("refused").hidden = !refused;
  part("key").focus();
});
window.addEventListener("hashchange", () => {
  const next = load(location.hash.slice(1));
  if (next && next.id !== conversation.id) open(next);
});
window.addEventListener("storage", listConversations);
window.addEventListener("pagehide", () => {
  if (running && conversation.messages.at(-1).role === "assistant") keepConversation(conversation);
});

/** Ask for the model, and whether it has a chat template: one without continues texts. */
async function look() {
  try {
    const { data } = await (await call("v1/models")).json();
    part("model").textContent = data[0].id;
    part("unlock").hidden = true;
  } catch (error) {
    return error.status === 401 ? undefined : fail(error.message);
  }
  await call("tokenize", { messages: [{ role: "user", content: "a" }] }).catch((error) => {
    if (error.status !== 400 || conversation.messages.length) return;
    conversation.mode = part("mode").value = "text";
    show();
  });
}

part("tint").setAttribute("aria-pressed", !document.documentElement.classList.contains("no-tint"));
part("mode").value = conversation.mode;
part("system").value = conversation.system;
write(read(DRAFT));
show();
look();
