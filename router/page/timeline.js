// Drafting and verification on two tracks over the same time, so that overlap, or a bubble, is seen.
//
// Only what is in the window is drawn. While a run streams, the window follows its end.

import { byId, count, duration, percent, svg } from "./dom.js";
import { described } from "./sources.js";
import { describe } from "./tree_view.js";

const HEIGHT = 146;
const AXIS = 122;
const TRACKS = { draft: { y: 24, height: 30 }, verify: { y: 82, height: 30 } };
const FIRST_SPAN = 1.2; // seconds
const SHORTEST = 0.005;
const TICKS = 110; // pixels between two, at least
const TICK_WIDTH = 48;
const NARROWEST_LABEL = 19;

export class Timeline {
  /** `pointed(step)` hears which step's bar is pointed at; null: none. */
  constructor(pointed) {
    this.pointed = pointed;
    const container = (this.container = byId("tracks"));
    this.detail = byId("tracks-detail");
    this.figure = byId("overlap");
    this.drawing = svg("svg", { height: HEIGHT, role: "img", "aria-label": "Nothing has run yet" });
    container.replaceChildren(this.drawing);
    this.show(null);
    new ResizeObserver(() => this.draw()).observe(container);
    byId("zoom-in").addEventListener("click", () => this.#zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.#zoom(2));
    byId("zoom-fit").addEventListener("click", () => this.#fit());
    byId("zoom-follow").addEventListener("click", () => this.#follow(!this.following));
    container.addEventListener("keydown", (event) => this.#key(event));
    container.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    container.addEventListener("pointerdown", (event) => this.#drag(event));
    container.addEventListener("pointerover", (event) => this.#point(event.target));
    container.addEventListener("pointerleave", () => this.#point(null));
  }

  show(run) {
    this.run = run;
    this.step = null;
    this.start = 0;
    this.span = FIRST_SPAN;
    this.#follow(true);
  }

  /** Mark the bar of a step, and move it into sight where it is not. */
  highlight(step) {
    this.step = step;
    if (step?.end != null && !this.following && (step.end < this.start || step.start > this.start + this.span)) {
      this.start = Math.max(0, step.start - this.span / 2);
    }
    this.draw();
  }

  /** The run is over: show all of it, if it was in sight anyway. */
  settle() {
    if (this.following && this.#end <= this.span) this.#fit();
  }

  /** Draw what has come since the last time, if anything. */
  update() {
    const known = this.run.steps.length + this.run.drafts.length;
    if (known !== this.drawn) this.draw();
    this.drawn = known;
  }

  get #end() {
    if (!this.run) return 0;
    return Math.max(0, this.run.steps.at(-1)?.end ?? 0, this.run.drafts.at(-1)?.end ?? 0);
  }

  draw() {
    const width = this.container.clientWidth;
    if (!width) return;
    if (this.following) this.start = Math.max(0, this.#end - 0.96 * this.span);
    this.scale = width / this.span;
    this.drawing.setAttribute("width", width);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const inSight = (bar) => bar.end >= this.start && (bar.from ?? bar.start) <= this.start + this.span;
    const steps = (this.run?.timed ?? []).map((step) => ({ step, from: step.start - step.waited, end: step.end }));
    this.bars = [];
    this.drawing.replaceChildren(
      ...this.#axis(width),
      ...this.#track("Drafting", TRACKS.draft, width),
      ...this.#track("Verification", TRACKS.verify, width),
      ...(this.run?.drafts ?? []).filter(inSight).map((draft) => this.#bar("draft", draft, TRACKS.draft, { draft })),
      ...steps.filter(inSight).flatMap(({ step }) => this.#step(step)),
    );
    this.#tell();
  }

  #x(time) {
    return (time - this.start) * this.scale;
  }

  #axis(width) {
    const least = (TICKS * this.span) / width;
    const power = 10 ** Math.floor(Math.log10(least));
    const every = [1, 2, 5, 10].map((n) => n * power).find((candidate) => candidate >= least);
    const marks = [];
    for (let n = Math.ceil(this.start / every); n * every <= this.start + this.span; n++) {
      const x = this.#x(n * every);
      if (x > width - TICK_WIDTH) break;
      const text = every < 0.9995 ? `${Math.round(1000 * n * every)} ms` : `${n * every} s`;
      marks.push(svg("path", { class: "grid", d: `M${x} 8V${AXIS}` }));
      marks.push(svg("text", { class: "tick", x: x + 3, y: AXIS + 14, text }));
    }
    return marks;
  }

  #track(name, { y, height }, width) {
    return [
      svg("rect", { class: "lane", x: 0, y: y - 2, width, height: height + 4, rx: 4 }),
      svg("text", { class: "lane-name", x: 2, y: y - 7, text: name }),
    ];
  }

  #bar(className, { start, end, source = null }, { y, height }, target) {
    const width = Math.max((end - start) * this.scale - 0.6, 1);
    this.bars.push(target);
    const place = { x: this.#x(start), y, width, height, rx: Math.min(3, width / 3) };
    return svg("rect", { class: `bar ${className}`, "data-bar": this.bars.length - 1, "data-source": source, ...place });
  }

  #step(step) {
    const marks = [];
    const lit = step === this.step ? " lit" : "";
    const waited = { start: step.start - step.waited, end: step.start };
    if (step.waited > 0) marks.push(this.#bar("wait", waited, TRACKS.verify, { step }));
    marks.push(this.#bar(`verify${lit}`, step, TRACKS.verify, { step }));
    const [from, to] = [Math.max(step.start, this.start), Math.min(step.end, this.start + this.span)];
    if ((to - from) * this.scale > NARROWEST_LABEL) {
      const middle = this.#x((from + to) / 2);
      marks.push(svg("text", { class: "bar-label", x: middle, y: TRACKS.verify.y + 20, text: `+${step.tokens}` }));
    }
    return marks;
  }

  #tell() {
    const run = this.run;
    const share = run ? run.overlap : NaN;
    this.figure.textContent = Number.isFinite(share) ? `${percent(share)} of verification time had drafting beside it` : "";
    if (!run) return;
    const done = `${count(run.drafts.length, "proposal")} and ${count(run.timed.length, "verification")}`;
    this.drawing.setAttribute("aria-label", `${done} in ${duration(this.#end)}. ${this.figure.textContent}`);
  }

  #point(target) {
    const bar = target?.dataset?.bar === undefined ? null : this.bars[Number(target.dataset.bar)];
    if (bar?.draft) {
      const { source, tokens, start, end } = bar.draft;
      const made = `${described(source).label}: ${count(tokens, "token")} in ${duration(end - start)}`;
      this.detail.textContent = `${made}, ${when(bar.draft)}`;
    } else if (bar) {
      this.detail.textContent = `${describe(bar.step)}, ${when(bar.step)}`;
    } else {
      this.detail.textContent = "";
    }
    const step = bar?.step ?? null;
    if (step !== this.step || bar?.draft) this.pointed(step);
  }

  #follow(following) {
    this.following = following;
    byId("zoom-follow").setAttribute("aria-pressed", String(following));
    this.draw();
  }

  #fit() {
    this.start = 0;
    this.span = Math.max(1.02 * this.#end, SHORTEST);
    this.#follow(false);
  }

  /** Keeps the time at `at` (a share of the width) where it is. */
  #zoom(factor, at = this.following ? 1 : 0.5) {
    const span = Math.min(Math.max(factor * this.span, SHORTEST), Math.max(4 * this.#end, FIRST_SPAN));
    this.start = Math.max(0, this.start + (this.span - span) * at);
    this.span = span;
    this.draw();
  }

  #pan(seconds) {
    this.start = Math.min(Math.max(0, this.start + seconds), Math.max(0, this.#end - 0.1 * this.span));
    this.#follow(false);
  }

  #key(event) {
    const act = {
      ArrowLeft: () => this.#pan(-0.2 * this.span),
      ArrowRight: () => this.#pan(0.2 * this.span),
      "+": () => this.#zoom(0.5),
      "=": () => this.#zoom(0.5),
      "-": () => this.#zoom(2),
      Home: () => this.#pan(-this.start),
      End: () => this.#follow(true),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  }

  /** Sideways moves, with Ctrl (or a pinch on a touchpad) zooms; upright scrolls the page as everywhere. */
  #wheel(event) {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey) this.#zoom(1.002 ** event.deltaY, event.offsetX / this.container.clientWidth);
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.#pan(sideways / this.scale);
    else return;
    event.preventDefault();
  }

  #drag(down) {
    if (down.pointerType === "touch") this.#point(down.target);
    if (down.button !== 0 || !this.run) return;
    const from = this.start;
    const scale = this.scale;
    const move = (event) => {
      if (Math.abs(event.clientX - down.clientX) < 3) return;
      this.#pan(from - (event.clientX - down.clientX) / scale - this.start);
    };
    const released = new AbortController();
    window.addEventListener("pointermove", move, { signal: released.signal });
    for (const end of ["pointerup", "pointercancel"]) {
      window.addEventListener(end, () => released.abort(), { signal: released.signal });
    }
  }
}

function when({ start, end }) {
  return `from ${duration(start)} to ${duration(end)}`;
}
