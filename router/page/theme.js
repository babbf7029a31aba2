// Light, dark, or as the system says. Runs before anything is painted, so it is no module.
"use strict";
(() => {
  const KEY = "paceline.theme";
  const ORDER = ["system", "light", "dark"];
  const LABELS = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  const root = document.documentElement;

  function stored() {
    try {
      const value = localStorage.getItem(KEY);
      return ORDER.includes(value) ? value : "system";
    } catch {
      return "system"; // storage is switched off
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.setAttribute("aria-label", LABELS[theme]);
      button.title = LABELS[theme];
    }
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = ORDER[(ORDER.indexOf(root.dataset.theme) + 1) % ORDER.length];
      apply(next);
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // It holds until the page is left.
      }
    });
  });
})();
