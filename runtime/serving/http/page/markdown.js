// A model's Markdown as elements. Markup of HTML is shown as the text that it is: the parser knows none, and whatever
// it makes passes through DOMPurify, which alone may turn a string into elements (the page's Trusted Types).

import hljs from "./libraries/highlight.min.js";
import { Marked } from "./libraries/marked.esm.js";
import "./libraries/purify.min.js"; // sets DOMPurify
import { copyButton, element } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "span",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  breaks: true,
  tokenizer: { html: () => undefined, tag: () => undefined },
  renderer: {
    code({ text, lang }) {
      const [name] = /^[\w+#.-]{0,30}/.exec(lang || "");
      const content = hljs.getLanguage(name)
        ? hljs.highlight(text, { language: name, ignoreIllegals: true }).value
        : escaped(text);
      return `<pre><code class="language-${name}">${content}</code></pre>\n`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // loading it would tell its server
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** The blocks of a text, as the parser's tokens. `raw` of all together is the text. */
export function lexed(text) {
  return shallow(() => marked.lexer(text)) ?? Object.assign([{ type: "plain", raw: text }], { links: {} });
}

/** The elements of a block. */
export function rendered(token) {
  const html = token.type === "plain" ? null : shallow(() => marked.parser([token]));
  if (html === null) return element("p", "plain", token.raw);
  const fragment = DOMPurify.sanitize(html.trimEnd(), ALLOWED);
  for (const link of fragment.querySelectorAll("a"))
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of fragment.querySelectorAll("table")) wrapped(table, "scroll");
  for (const pre of fragment.querySelectorAll("pre")) {
    const head = element("div", "head"),
      code = pre.querySelector("code");
    head.dataset.language = code.className.replace("language-", ""); // shown by the style: it is no text of the answer
    head.append(copyButton("Copy the code", () => code.textContent));
    wrapped(pre, "code").prepend(head);
  }
  return fragment;
}

function wrapped(node, name) {
  const box = element("div", name);
  node.replaceWith(box);
  box.append(node);
  return box;
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** What `work` returns, or null where a text is too deep for the parser, such as thousands of quotes in each other. */
function shallow(work) {
  try {
    return work();
  } catch (error) {
    if (error instanceof RangeError) return null;
    throw error;
  }
}
