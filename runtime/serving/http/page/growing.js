// Answers that grow, drawn anew only where more text changed them: an answer of thousands of tokens stays quick.

import { element } from "./dom.js";
import { lexed, rendered } from "./markdown.js";
import { marks, tint } from "./tint.js";

const UNSETTLED = 2; // blocks at the end that more text may change
const LINES = 40; // of code that are highlighted together while more follow
const INNER = { code: "code", list: "ol, ul", table: "table" }; // what holds the parts of a long block

const PARTS = {
  code: (made) => [wrapped(made.querySelector("code").childNodes)], // of their own, or all lines would be laid out anew
  list: (made) => [...made.querySelector("ol, ul").childNodes],
  table: (made) => [made.querySelector("tbody")],
};

/** A Markdown text: blocks, and the items, rows and lines of long ones. */
export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.blocks = []; // {start, type, key, node, inner, parts}
  }

  /** runs: see tint.js. complete: whether no more text follows. */
  update(text, runs, complete = false) {
    const source = text.replaceAll("\r\n", " \n").replaceAll("\r", "\n"); // as the parser does, but of the same length
    let index = complete ? 0 : Math.max(0, this.blocks.length - UNSETTLED);
    let start = index ? this.blocks[index].start : 0;
    const tokens = lexed(source.slice(start));
    const anew = complete && Object.keys(tokens.links).length > 0; // addresses at the end belong to links before
    for (const token of tokens) {
      if (token.type !== "space" && token.type !== "def")
        this.#put(index++, start, token, split(token, complete), runs, anew);
      start += token.raw.length;
    }
    for (const { node } of this.blocks.splice(index)) node.remove();
  }

  #put(index, start, { type }, { key, shell, raw, parts }, runs, anew) {
    let block = this.blocks[index];
    if (anew || !block || block.start !== start || block.type !== type || block.key !== key) {
      const node = element("div", "block");
      node.append(rendered(shell));
      tint(node, raw, marks(runs, start, raw.length));
      if (block) block.node.replaceWith(node);
      else this.box.append(node);
      block = this.blocks[index] = { start, type, key, node, inner: node.querySelector(INNER[type] || "p"), parts: [] };
    }
    let same = 0;
    while (same < parts.length && block.parts[same]?.raw === parts[same].raw) same++;
    for (const old of block.parts.splice(same)) for (const node of old.nodes) node.remove();
    let place = start + raw.length + parts.slice(0, same).reduce((sum, part) => sum + part.raw.length, 0);
    for (const part of parts.slice(same)) {
      const made = rendered(part.token);
      tint(made, part.raw, marks(runs, place, part.raw.length));
      place += part.raw.length;
      const nodes = PARTS[type](made);
      block.inner.append(...nodes);
      block.parts.push({ raw: part.raw, nodes });
    }
  }
}

/** A block as a shell and its parts; most kinds have none. key: equal for blocks of an equal shell. raw: the text of the
 * shell, before those of the parts. */
function split(token, complete) {
  const { type, raw } = token,
    lines = raw.split(/(?<=\n)/);
  if (type === "list") {
    const parts = token.items.map((item) => ({ token: { ...token, items: [item] }, raw: item.raw }));
    return { key: `${token.ordered} ${token.start} ${token.loose}`, shell: { ...token, items: [] }, raw: "", parts };
  }
  if (type === "table" && lines.length >= token.rows.length + 2) {
    const parts = token.rows.map((row, index) => ({ token: { ...token, rows: [row] }, raw: lines[index + 2] }));
    const head = lines[0] + lines[1];
    return { key: head, shell: { ...token, rows: [] }, raw: head, parts };
  }
  if (type === "code" && raw.startsWith(token.text, lines[0].length)) {
    // it is fenced
    const content = token.text.split(/(?<=\n)/),
      size = complete ? content.length : LINES,
      parts = [];
    for (let from = 0; from < content.length; from += size) {
      const text = content.slice(from, from + size).join("");
      parts.push({ token: { ...token, text }, raw: text });
    }
    return { key: lines[0], shell: { ...token, text: "" }, raw: lines[0], parts };
  }
  return { key: raw, shell: token, raw, parts: [] };
}

/** A continued text, which is no Markdown. */
export class PlainView {
  constructor(box) {
    box.classList.add("plain");
    this.box = box;
    this.shown = 0; // characters
  }

  update(text, runs) {
    const more = text.slice(this.shown),
      added = element("span", "", more);
    tint(added, more, marks(runs, this.shown, more.length));
    this.box.append(...added.childNodes);
    this.shown = text.length;
  }
}

function wrapped(nodes) {
  const box = element("span", "lines");
  box.append(...nodes);
  return box;
}
