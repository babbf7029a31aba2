// Light, dark, or as the system says. Runs before anything is painted, so it is no module.
"use strict";
(() => {
  const KEY = "paceline.theme";
  const LABELS = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  const ORDER = Object.keys(LABELS);
  const root = document.documentElement;
  let stored = null;
  try {
    stored = localStorage.getItem(KEY);
  } catch {
    // Storage is switched off: a theme holds until the page is left.
  }
  root.dataset.theme = ORDER.includes(stored) ? stored : "system";

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.title = LABELS[root.dataset.theme];
      button.setAttribute("aria-label", button.title);
    };
    label();
    button.addEventListener("click", () => {
      root.dataset.theme = ORDER[(ORDER.indexOf(root.dataset.theme) + 1) % ORDER.length];
      label();
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // As above.
      }
    });
  });
})();
