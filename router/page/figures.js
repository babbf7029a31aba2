// The live figures of a run.

import { duration, element, number, percent, rate, UNKNOWN } from "./dom.js";

const KEPT = "Share of the draft tokens offered to the target that it kept";
const LENGTH = "Tokens committed by a step that had drafts to verify, on average";
const FIGURES = [
  { key: "tokensPerSecond", name: "Tokens/s", text: rate },
  { key: "acceptance", name: "Acceptance", text: percent, help: KEPT },
  { key: "acceptanceLength", name: "Acceptance length", text: (value) => number(value, 2), help: LENGTH },
  { key: "tokensPerStep", name: "Tokens a step", text: (value) => number(value, 2) },
  { key: "firstToken", name: "First token", text: duration },
  { key: "tokens", name: "Tokens", text: (value) => (value ? String(value) : UNKNOWN) },
  { key: "steps", name: "Steps", text: (value) => (value ? String(value) : UNKNOWN) },
  { key: "elapsed", name: "Elapsed", text: duration },
];

export class Figures {
  constructor(list) {
    this.values = FIGURES.map(({ key }) => element("dd", { "data-figure": key, text: UNKNOWN }));
    const rows = FIGURES.map(({ name, help }, index) =>
      element("div", { title: help }, element("dt", { text: name }), this.values[index]),
    );
    list.replaceChildren(...rows);
  }

  show(figures) {
    FIGURES.forEach(({ key, text }, index) => (this.values[index].textContent = text(figures[key])));
  }
}
