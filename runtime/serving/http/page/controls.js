// What surrounds a conversation: settings, errors, the message that is being written, the sides of the page.

import { keep } from "./storage.js";
import { part } from "./dom.js";

export const DRAFT = "draftwood.draft"; // the message that was not answered yet

/** The fields of a request, other than its texts. Without a seed of the user's a random one, so that the text can be
 * generated again. */
export function settings() {
  const number = (name) => Number(part(name).value);
  return {
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("limit"),
    seed: part("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : number("seed"),
    ...(part("speculate").checked ? {} : { speculative: false }),
  };
}

export function fail(text) {
  part("error").hidden = !text;
  part("error").firstElementChild.textContent = text;
}

/** Put a text where messages are written, as high as its lines. */
export function write(text) {
  part("prompt").value = text;
  part("prompt").oninput();
}

export function side(open) {
  part("side").classList.toggle("open", open);
  part("curtain").hidden = !open;
  part("menu").setAttribute("aria-expanded", open);
}

export function options(open) {
  part("options").hidden = !open;
  part("gear").setAttribute("aria-expanded", open);
}

part("prompt").oninput = () => {
  const area = part("prompt");
  keep(DRAFT, area.value);
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
};
part("menu").onclick = () => side(!part("side").classList.contains("open"));
part("curtain").onclick = () => side(false);
part("gear").onclick = () => options(part("options").hidden);
part("options").onsubmit = (event) => {
  event.preventDefault();
  options(false);
};
part("error").lastElementChild.onclick = () => fail("");
part("theme").onclick = () => {
  const { dataset } = document.documentElement,
    dark = matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = (dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  keep("draftwood.theme", dataset.theme);
};
part("tint").onclick = () => {
  const off = document.documentElement.classList.toggle("no-tint");
  part("tint").setAttribute("aria-pressed", !off);
  keep("draftwood.tint", off ? "off" : "on");
};
part("tint").setAttribute("aria-pressed", !document.documentElement.classList.contains("no-tint"));
