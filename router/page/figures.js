// The live figures of a run, and how it compares with the same request without speculation.

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

/** The same request, text for text: as many tokens, the same seed, nothing drafted, nothing kept to draft from. */
export function withoutSpeculation(run) {
  const { speculation, prediction, ...body } = run.body;
  const stopped = run.finish === null;
  const limit = stopped ? { max_tokens: Math.max(run.tokens, 1) } : {};
  return { ...body, ...limit, speculation: { enabled: false, details: true, remember: false } };
}

/** Two bars, as long as the time since the first token; the second grows as it runs. */
export function showComparison(container, run, plain, now) {
  const decoding = (one) => (one.first === null ? 0 : (one.over === null ? now : one.last) - one.first);
  const longest = Math.max(decoding(run), decoding(plain), 1e-9);
  const row = (name, one) => {
    const filled = element("span", { class: "filled" });
    filled.style.width = `${(100 * decoding(one)) / longest}%`;
    const text = `${rate(one.figures(now).tokensPerSecond)} tokens/s · ${duration(decoding(one))}`;
    const length = element("span", { class: "length" }, filled);
    return [element("span", { text: name }), length, element("span", { class: "number", text })];
  };
  const race = element("div", { class: "race" }, ...row("With", run), ...row("Without", plain));
  container.hidden = false;
  container.replaceChildren(race, verdict(run, plain));
}

function verdict(run, plain) {
  if (plain.over === null) return element("p", { class: "muted", text: "Running without speculation …" });
  const ratio = run.figures(run.over).tokensPerSecond / plain.figures(plain.over).tokensPerSecond;
  const stopped = run.finish === null; // cut off anywhere, also within a commit that had been made
  let at = 0;
  while (at < run.text.length && run.text[at] === plain.text[at]) at++;
  const same = stopped ? at === Math.min(run.text.length, plain.text.length) : plain.text === run.text;
  const times = Number.isFinite(ratio) ? `${number(ratio, ratio < 10 ? 2 : 0)}× as fast` : "Too short to compare";
  const text = same ? "The text is identical." : `The text differs from character ${at + 1} on.`;
  const shown = element("p", { class: "verdict", "data-same": String(same) }, element("b", { text: times }));
  shown.append(Number.isFinite(ratio) ? ` with speculation. ${text}` : `. ${text}`);
  return shown;
}
