// Conversations in the browser's localStorage, each under a name of its own so that two tabs do not overwrite each
// other's. What is read back is checked: anything on this machine may have written it.

const PREFIX = "draftwood.conversation.",
  TITLE = 60;
const MOST = 50,
  MOST_CHARACTERS = 2_000_000; // of all conversations; browsers keep about five million

export function fresh(mode, system = "") {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return { id: [...random].map((each) => each.toString(36)).join(""), changed: Date.now(), mode, system, messages: [] };
}

/** {id, changed, title, characters} of each, the latest first. */
export function list() {
  const found = [];
  for (const name of names()) {
    const conversation = load(name.slice(PREFIX.length));
    if (!conversation) continue;
    const title = conversation.messages[0].content.trim().slice(0, TITLE) || "…";
    found.push({ id: conversation.id, changed: conversation.changed, title, characters: read(name).length });
  }
  return found.sort((one, other) => other.changed - one.changed);
}

/** A conversation, or null if there is none of this id that can be read. */
export function load(id) {
  try {
    const { changed, mode, system, messages } = JSON.parse(read(PREFIX + id));
    if (!messages.length || !messages.every(isMessage)) return null;
    return {
      id,
      changed: Number(changed) || 0,
      mode: mode === "text" ? "text" : "chat",
      system: String(system || ""),
      messages,
    };
  } catch {
    return null;
  }
}

/** Returns whether the browser keeps it. The oldest others make room. */
export function save(conversation) {
  conversation.changed = Date.now();
  const text = JSON.stringify(conversation),
    others = list().filter((each) => each.id !== conversation.id);
  let characters = text.length + others.reduce((sum, each) => sum + each.characters, 0);
  while (others.length && (others.length >= MOST || characters > MOST_CHARACTERS)) {
    const oldest = others.pop();
    characters -= oldest.characters;
    remove(oldest.id);
  }
  while (characters <= MOST_CHARACTERS) {
    if (keep(PREFIX + conversation.id, text)) return true;
    if (!others.length) break;
    remove(others.pop().id);
  }
  return false;
}

export function remove(id) {
  keep(PREFIX + id, null);
}

/** A text under a name, or "". */
export function read(name) {
  try {
    return localStorage.getItem(name) || "";
  } catch {
    return "";
  }
}

/** Keep a text; null deletes. Returns whether the browser did: it may be full, or keep nothing at all. */
export function keep(name, text) {
  try {
    if (text === null) localStorage.removeItem(name);
    else localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function isMessage(message) {
  if (!["user", "assistant"].includes(message.role) || typeof message.content !== "string") return false;
  if (message.role === "user") return true;
  const lists = Array.isArray(message.runs) && Array.isArray(message.facts);
  return lists && message.runs.every(Number.isSafeInteger) && message.facts.every((each) => typeof each === "string");
}
