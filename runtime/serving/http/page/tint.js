// Which characters of an answer were drafted, and where they are in its rendered text.
//
// `runs` has the lengths of alternating stretches of a text: the target's own, drafted, own, drafted, …

const BETWEEN = "blockquote, div, ol, table, tbody, thead, tr, ul"; // what stands between their children is no text
const NEAR = 400; // characters of markup between two rendered words, such as a link's address

export function extend(runs, length, drafted) {
  if (!runs.length) runs.push(0);
  if ((runs.length % 2 === 0) !== drafted) runs.push(0);
  runs[runs.length - 1] += length;
}

/** One byte for each character from `start` on: 1 if it was drafted. */
export function marks(runs, start, length) {
  const made = new Uint8Array(length);
  let place = -start;
  runs.forEach((run, index) => {
    if (index % 2) made.fill(1, Math.max(0, place), Math.max(0, place + run));
    place += run;
  });
  return made;
}

/** Put the drafted characters of a rendered block into spans. source: its Markdown. marked: see `marks`.
 *
 * Rendering removes markup and keeps the order of words, so each word is the next one of this spelling in the source. A
 * word that the source spells in another way, such as `&lt;`, gets the colour of the word before. */
export function tint(block, source, marked) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT),
    texts = [];
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (parent && !parent.matches(BETWEEN)) texts.push(walker.currentNode);
  }
  let place = 0,
    last = 0;
  for (const node of texts) {
    const text = node.data,
      kinds = new Uint8Array(text.length);
    const whole = near(source, text, place);
    if (whole >= 0) {
      kinds.set(marked.subarray(whole, whole + text.length));
      place = whole + text.length;
    } else {
      for (const { 0: word, index } of text.matchAll(/\s+|[^\s]+/g)) {
        const at = near(source, word, place);
        if (at >= 0) kinds.set(marked.subarray(at, at + word.length), index);
        else kinds.fill(last, index, index + word.length);
        if (at >= 0) place = at + word.length;
        last = kinds[index + word.length - 1];
      }
    }
    if (text.length) last = kinds[text.length - 1];
    if (kinds.includes(1)) node.replaceWith(...pieces(text, kinds));
  }
}

function near(source, text, place) {
  const at = source.slice(place, place + NEAR + text.length).indexOf(text);
  return at < 0 ? at : place + at;
}

function* pieces(text, kinds) {
  for (let from = 0, to; from < text.length; from = to) {
    for (to = from + 1; to < text.length && kinds[to] === kinds[from];) to++;
    const piece = document.createTextNode(text.slice(from, to));
    if (!kinds[from]) yield piece;
    else {
      const span = document.createElement("span");
      span.className = "drafted";
      span.append(piece);
      yield span;
    }
  }
}
