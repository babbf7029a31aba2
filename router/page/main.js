// The page put together: form, run, text, tree, timeline, cluster.

import { ApiError, apiKey, getJson, setApiKey, stream } from "./api.js";
import { ClusterView } from "./cluster.js";
import { byId, count, duration, percent } from "./dom.js";
import { Figures, showComparison, withoutSpeculation } from "./figures.js";
import { Form } from "./form.js";
import { Run } from "./run.js";
import { described } from "./sources.js";
import { TextView } from "./text_view.js";
import { Timeline } from "./timeline.js";
import { describe, drawTree } from "./tree_view.js";

const GLANCE = 0.4; // seconds between two trees shown while nothing is pointed at
const NARROW = "(max-width: 56rem)"; // as in style.css: the form stands above the text

const now = () => performance.now() / 1000;

class Page {
  constructor() {
    this.form = new Form();
    this.figures = new Figures(byId("figures"));
    this.text = new TextView(byId("output"), byId("legend"), (step, how) => this.select(step, how));
    this.timeline = new Timeline((step) => this.select(step, {}));
    this.cluster = new ClusterView(() => this.askForKey(), (sources) => this.text.offer(sources));
    this.run = this.abort = this.step = null;
    this.glanced = 0;
    this.#listen();
    this.loadModels();
  }

  #listen() {
    byId("playground").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("playground").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("compare").addEventListener("click", () => this.compare());
    byId("copy").addEventListener("click", () => this.copy());
    byId("copy").hidden = !navigator.clipboard; // browsers give it to trustworthy addresses only
    byId("model").addEventListener("focus", () => this.loadModels());
    byId("step-close").addEventListener("click", () => this.select(null, {}));
    byId("key").addEventListener("click", () => this.askForKey());
    byId("key-dialog").addEventListener("close", () => this.#keyGiven());
  }

  async loadModels() {
    try {
      const { data } = await getJson("v1/models");
      this.form.setModels(data.map((model) => model.id));
      if (!data.length) setTimeout(() => this.loadModels(), 2000);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) this.askForKey();
      else setTimeout(() => this.loadModels(), 2000);
    }
  }

  /** Run what the form says. */
  async send() {
    if (this.abort) return;
    const body = this.form.body;
    const run = (this.run = new Run(this.form.kind, body, now()));
    this.path = this.form.path;
    byId("outcome").textContent = "";
    this.text.clear(run.kind === "completion" ? body.prompt : "");
    this.timeline.show(run);
    byId("comparison").hidden = true;
    this.select(null, {});
    if (matchMedia(NARROW).matches) byId("output-title").scrollIntoView();
    await this.#stream(run, () => this.#showRun(run));
    this.timeline.settle();
    byId("outcome").textContent = outcome(run, !byId("error").hidden);
    byId("copy").disabled = !run.text;
    byId("compare").disabled = !run.tokens || !body.speculation.enabled;
  }

  /** The same again without speculation, and how the two compare. */
  async compare() {
    if (this.abort) return;
    const run = this.run;
    const plain = new Run(run.kind, withoutSpeculation(run), now());
    const finished = await this.#stream(plain, () => showComparison(byId("comparison"), run, plain, now()));
    if (!finished) byId("comparison").hidden = true;
    byId("copy").disabled = byId("compare").disabled = false;
  }

  /** Read the whole answer to a run, showing it as it comes. Whether it was read to its end. */
  async #stream(run, show) {
    this.abort = new AbortController();
    this.#busy(true);
    byId("error").hidden = true;
    const painting = new AbortController();
    repaint(show, painting.signal);
    let finished = false;
    try {
      for await (const event of stream(this.path, run.body, this.abort.signal)) run.take(event, now());
      finished = true;
    } catch (error) {
      this.#failed(error);
    } finally {
      painting.abort();
      this.abort = null;
      run.over = now();
      show();
      this.#busy(false);
    }
    return finished;
  }

  #showRun(run) {
    this.text.update(run);
    this.figures.show(run.figures(now()));
    this.timeline.update();
    if (!this.step && run.steps.length && now() > this.glanced + GLANCE) {
      this.glanced = now();
      this.#showTree(run.steps.at(-1));
    }
  }

  /** Show the drafts of a step; null: of none. `spoken` is the piece that keys came to. */
  select(step, { spoken = null }) {
    this.step = step;
    byId("step").classList.toggle("shown", Boolean(step));
    this.text.highlight(step);
    this.timeline.highlight(step);
    if (!step) return;
    this.#showTree(step);
    if (spoken) byId("announcer").textContent = `${spoken.text}: ${described(spoken.source).label}. ${describe(step)}`;
  }

  #showTree(step) {
    byId("step-summary").textContent = describe(step);
    byId("tree").replaceChildren(drawTree(step));
  }

  async copy() {
    await navigator.clipboard.writeText(this.run.text);
    byId("announcer").textContent = "Copied";
  }

  askForKey() {
    byId("key").hidden = false;
    const dialog = byId("key-dialog");
    if (dialog.open) return;
    byId("key-reason").textContent = apiKey()
      ? "This server does not know the key. Another one is kept until this tab is closed."
      : "This server answers those who have a key. It is kept until this tab is closed.";
    byId("key-input").value = "";
    dialog.returnValue = "";
    dialog.showModal();
  }

  #keyGiven() {
    if (byId("key-dialog").returnValue !== "use") return;
    setApiKey(byId("key-input").value.trim());
    byId("key-input").value = "";
    this.loadModels();
    this.cluster.ask();
  }

  #busy(busy) {
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    if (busy) byId("copy").disabled = byId("compare").disabled = true;
    document.body.classList.toggle("busy", busy);
  }

  #failed(error) {
    if (error.name === "AbortError") return;
    if (error.status === 401) this.askForKey();
    const later = error.retryAfter ? ` Try again in ${count(error.retryAfter, "second")}.` : "";
    byId("error").textContent = `${error.message}${later}`;
    byId("error").hidden = false;
    if (!(error instanceof ApiError)) throw error;
  }
}

/** What there is to say of a run that is over. Where it failed, the error says how it ended. */
function outcome(run, failed) {
  const { tokens, elapsed } = run.figures(run.over);
  if (failed && !tokens) return "";
  const how = { stop: "ended by itself", length: "as long as it may be", null: "stopped" }[run.finish] ?? run.finish;
  const parts = [`${count(tokens, "token")} in ${duration(elapsed)}${failed ? "" : `, ${how}`}`, `seed ${run.body.seed}`];
  const kept = run.summary?.by_position?.slice(0, 6) ?? [];
  if (kept.length) parts.push(`kept at the 1st, 2nd, … place: ${kept.map((share) => percent(share)).join(", ")}`);
  if (run.summary?.reopened) parts.push(`moved to another target ${count(run.summary.reopened, "time")}`);
  return parts.join(" · ");
}

/** Call `show` before every frame until the signal. */
function repaint(show, signal) {
  requestAnimationFrame(() => {
    if (signal.aborted) return;
    show();
    repaint(show, signal);
  });
}

new Page();
