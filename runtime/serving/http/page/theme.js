"use strict";
// Runs before the page is drawn, so that a chosen theme never flashes the other one.
try {
  const chosen = localStorage.getItem("draftwood.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.toggle("no-tint", localStorage.getItem("draftwood.tint") === "off");
} catch {
  /* the browser keeps nothing for this page */
}
