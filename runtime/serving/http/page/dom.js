// Small helpers for elements. Texts become text nodes here, never markup.

export const part = (id) => document.getElementById(id);

export function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

/** A button with an icon of icons in page.css; without a text of its own it has only the icon. */
export function button(icon, label, onclick, text = "") {
  const made = element("button", icon, text);
  Object.assign(made, { type: "button", title: label, onclick });
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
