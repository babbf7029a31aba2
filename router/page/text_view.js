// The generated text, piece by piece, marked by origin; which piece is pointed at, and the legend.

import { element } from "./dom.js";
import { SOURCES, described } from "./sources.js";

export class TextView {
  /** `selected(step, {spoken})` hears of the step a piece belongs to; null: of none. `spoken`: the piece keys came to. */
  constructor(container, legend, selected) {
    this.container = container;
    this.legend = legend;
    this.selected = selected;
    this.spans = [];
    this.pinned = null; // index of the piece that stays selected when the pointer leaves
    this.atEnd = true;
    this.offered = new Set(); // draft sources that run; the legend leaves out the others
    this.counts = {};
    container.addEventListener("pointerover", (event) => this.#point(event));
    container.addEventListener("pointerleave", () => this.#select(this.pinned));
    container.addEventListener("click", (event) => this.#pin(event.target));
    container.addEventListener("keydown", (event) => this.#walk(event));
    container.addEventListener("scroll", () => {
      this.atEnd = container.scrollTop + container.clientHeight > container.scrollHeight - 24;
    });
    this.#count({});
  }

  /** These draft sources run in the cluster. */
  offer(sources) {
    if ([...sources].sort().join() === [...this.offered].sort().join()) return;
    this.offered = sources;
    this.#count(this.counts);
  }

  /** Begin again; `prompt` stands before the text. */
  clear(prompt) {
    this.spans = [];
    this.pinned = null;
    this.atEnd = true;
    this.container.replaceChildren(element("span", { class: "prompt", text: prompt }));
    this.#count({});
  }

  /** Show what the run has beyond what is shown. */
  update(run) {
    const added = run.pieces.slice(this.spans.length).map((piece, index) => this.#span(piece, this.spans.length + index));
    if (!added.length) return;
    this.container.append(...added);
    this.spans.push(...added);
    this.run = run;
    this.#count(run.bySource);
    // What somebody looks at stays where it is.
    if (this.atEnd && !this.container.querySelector(".current")) this.container.scrollTop = this.container.scrollHeight;
  }

  /** Highlight the pieces of a step, wherever it was pointed at. */
  highlight(step) {
    for (const span of this.container.querySelectorAll(".lit")) span.classList.remove("lit");
    if (!step) return;
    const first = this.run.pieces.indexOf(step.pieces[0]);
    if (first >= 0) step.pieces.forEach((_, index) => this.spans[first + index]?.classList.add("lit"));
  }

  #span(piece, index) {
    const span = element("span", { class: "piece", "data-source": piece.source, "data-index": index, text: piece.text });
    if (piece.text.includes("\n")) span.classList.add("newline");
    return span;
  }

  #point(event) {
    if (event.pointerType === "mouse" && event.target.dataset.index) this.#select(Number(event.target.dataset.index));
  }

  #pin(target) {
    const index = target.dataset.index === undefined ? null : Number(target.dataset.index);
    this.pinned = index === this.pinned ? null : index;
    this.#select(this.pinned);
  }

  #walk(event) {
    const at = this.pinned ?? -1;
    const last = this.spans.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && this.pinned !== null) this.#pin(this.container);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.pinned = Math.min(Math.max(to, 0), last);
    this.#select(this.pinned, true);
    this.spans[this.pinned].scrollIntoView({ block: "nearest" });
  }

  #select(index, spoken = false) {
    this.container.querySelector(".current")?.classList.remove("current");
    if (index === null) return void this.selected(null, {});
    this.spans[index].classList.add("current");
    const piece = this.run.pieces[index];
    this.selected(piece.step, { spoken: spoken ? piece : null });
  }

  #count(counts) {
    this.counts = counts;
    const named = new Set([...Object.keys(SOURCES), ...this.offered, ...Object.keys(counts)]);
    const always = ["recovered", "bonus"];
    const names = [...named].filter((name) => always.includes(name) || this.offered.has(name) || counts[name]);
    this.legend.replaceChildren(
      ...names.map((name) => [name, described(name)]).map(([name, { label, meaning }]) =>
        element(
          "li",
          { title: meaning },
          element("span", { class: "piece", "data-source": name, "aria-hidden": "true", text: "abc" }),
          element("span", { text: label }),
          element("b", { text: String(counts[name] ?? 0) }),
        ),
      ),
    );
  }
}
