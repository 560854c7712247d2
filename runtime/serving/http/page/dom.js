// Small helpers for elements. Texts become text nodes here, never markup.

export const part = (id) => document.getElementById(id);

export function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

export function textButton(name, text, onclick) {
  return Object.assign(element("button", name, text), { type: "button", onclick });
}

/** A button with an icon of icons.css, and perhaps a text. */
export function button(icon, label, onclick, text = "") {
  const made = textButton(icon, text, onclick);
  made.title = label;
  made.dataset.icon = icon;
  made.setAttribute("aria-label", label);
  return made;
}

/** A button that copies what `text` returns, and shows for a moment that it did. */
export function copyButton(label, text) {
  const made = button("copy", label, async () => {
    await copied(text());
    made.dataset.icon = "check";
    setTimeout(() => {
      made.dataset.icon = "copy";
    }, 1500);
  });
  return made;
}

/** The clipboard is only there on pages of this machine and over https; the old command works everywhere. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
