// The page: the conversation that is open, and the request that is running.

import { DRAFT, fail, options, settings, side, write } from "./controls.js";
import { fresh, keep, list, load, read, remove, save } from "./storage.js";
import { button, element, part } from "./dom.js";
import { showRounds } from "./rounds.js";
import { call, events, useKey } from "./server.js";
import { extend } from "./tint.js";
import { AnswerTurn, edit, entered, explainTint, figures, userTurn, welcome } from "./turns.js";

const CONVERSATION = "v1/chat/completions",
  TEXT = "v1/completions";
const STREAM = { include_usage: true, continuous_usage_stats: true, include_pieces: true };
let conversation = load(location.hash.slice(1)) || fresh("chat");
let running = null; // {control, ended} of the request that is running

// ---- requests

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
    part("options").reportValidity();
    return refused();
  }
  if (running) await stop();
  const own = conversation,
    before = own.messages,
    control = new AbortController();
  const message = { role: "assistant", content: "", runs: [], facts: [], tokens: 0, settings: settings(), system: part("system").value },
    turn = new AnswerTurn(own.mode);
  own.system = message.system;
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
  const failure = await running.ended,
    stopped = failure?.name === "AbortError",
    came = own.messages.at(-1) === message;
  if (running?.control === control) busy(false);
  if (!came) own.messages = before;
  else if (failure) message.facts = [...message.facts, stopped ? "stopped" : "broken off"];
  if (came) keepConversation(own);
  if (own === conversation && came) following(() => complete(turn, message, messages));
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
      for (const choice of event.choices)
        for (const piece of choice.pieces || []) {
          message.content += piece.text;
          extend(message.runs, piece.text.length, piece.drafted);
        }
      if (!event.usage?.completion_tokens) continue;
      if (!start) begun();
      const now = performance.now();
      start = start || { time: now, tokens: event.usage.completion_tokens };
      message.tokens = event.usage.completion_tokens;
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

// ---- what is shown

let draw = null; // what the next frame draws

/** Draw in the next frame; of several before it, only the last. */
function soon(drawing) {
  if (draw === null)
    requestAnimationFrame(() => {
      const last = draw;
      draw = null;
      following(last);
    });
  draw = drawing;
}

/** Draw; a reader at the end stays there. */
function following(drawing) {
  const log = part("log"),
    follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  drawing();
  explainTint();
  if (follows) log.scrollTop = log.scrollHeight;
}

/** Show the conversation; its first `kept` turns are shown already. */
function show(kept = 0) {
  const { messages } = conversation,
    log = part("log"),
    all = log.classList.toggle("empty", !messages.length);
  for (const old of [...log.children].slice(kept)) old.remove();
  if (all) log.append(welcome(conversation.mode, send));
  messages.forEach((message, index) => {
    if (index >= kept) log.append(turnOf(message, index));
  });
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
  const own = conversation,
    asking = { ...own, system: message.system ?? own.system },
    rounds = () => showRounds(request(asking, asked, message.settings), message.tokens);
  turn.complete(message, () => answer(asked, () => {}), rounds);
}

function listConversations() {
  part("list").replaceChildren(
    ...list().map(({ id, title }) => {
      const row = element("li", id === conversation.id ? "open" : ""),
        link = element("a", "", title);
      link.href = "#" + id;
      if (id === conversation.id) link.setAttribute("aria-current", "page");
      const away = button("trash", `Delete “${title}”`, () => {
        remove(id);
        if (id !== conversation.id) return listConversations();
        conversation.gone = true; // what may still run is not kept either
        open(fresh(part("mode").value));
      });
      row.append(link, away);
      return row;
    }),
  );
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
  if (own.gone) return;
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

part("ask").onsubmit = (event) => {
  event.preventDefault();
  if (!running && part("prompt").value) send(part("prompt").value);
};
part("prompt").onkeydown = (event) => {
  if (entered(event)) {
    event.preventDefault();
    part("ask").requestSubmit();
  }
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
    if (error.status !== 400) return;
    part("mode").value = "text";
    part("mode").firstElementChild.disabled = true;
    if (!conversation.messages.length) open(fresh("text"));
  });
}

part("mode").value = conversation.mode;
part("system").value = conversation.system;
write(read(DRAFT));
show();
look();
