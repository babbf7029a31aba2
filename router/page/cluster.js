// The cluster as one router sees it, asked for every second while the page is in sight.

import { ApiError, getJson } from "./api.js";
import { age, byId, count, duration, element, number, percent, rate, UNKNOWN } from "./dom.js";

const EVERY = 1000; // milliseconds
const MOST_EVENTS = 30;
const KINDS = {
  worker_up: "good",
  worker_lost: "bad",
  session_condemned: "bad",
  drafter_quarantined: "bad",
  session_reopened: "warn",
  session_moved: "warn",
  worker_draining: "warn",
};

const COLUMNS = [
  { name: "Worker", of: (w) => [element("b", { text: w.address || w.id }), " ", muted(w.model)] },
  { name: "Role", of: (w) => w.role },
  { name: "State", of: (w, now) => [state(w.state), " ", muted(w.since ? age(now - w.since) : "")] },
  { name: "Cache", of: (w) => gauge(w.cache?.capacity ? 1 - w.cache.free / w.cache.capacity : NaN) },
  { name: "Sessions", number: true, of: (w) => (w.waiting ? `${w.sessions} + ${w.waiting} waiting` : String(w.sessions)) },
  { name: "Round trip", number: true, of: (w) => duration((w.round_trip_ms ?? NaN) / 1000) },
  { name: "Acceptance", number: true, of: (w) => percent(w.acceptance ?? NaN) },
  { name: "Tokens/s", number: true, of: (w) => rate(w.tokens_per_second ?? NaN) },
];

/**
 * Ask and show for as long as the page lives. `unauthorized` is called where a key is wanted, `drafting(sources)` with
 * the names of the draft sources that have offered something, or will.
 */
export class ClusterView {
  constructor(unauthorized, drafting) {
    this.unauthorized = unauthorized;
    this.drafting = drafting;
    this.timer = null;
    this.newest = 0;
    document.addEventListener("visibilitychange", () => this.ask());
    this.ask();
  }

  /** Ask now, and again every second. */
  async ask() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      this.#show(await getJson("cluster"));
    } catch (error) {
      this.#failed(error);
      if (error.status === 401) return void this.unauthorized();
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), EVERY);
  }

  #show({ time, router, totals, workers, events }) {
    const up = (role) => workers.filter((worker) => worker.role === role && worker.state === "up").length;
    const { running, placing, queued } = router.sessions;
    const present = `${count(up("target"), "target")}, ${count(up("draft"), "drafter")}`;
    pulse(router.ready ? "good" : "warn", router.ready ? present : (router.unready ?? "not ready"));
    byId("cluster-summary").textContent = [
      `${count(running, "session")} running`,
      placing + queued ? `${placing + queued} waiting` : null,
      `${rate(router.now.tokens_per_second)} tokens/s`,
      `${count(totals.reopened, "failover")}, ${count(totals.moved, "move")}`,
      `up ${age(router.uptime_seconds)}`,
    ].filter(Boolean).join(" · ");
    const nobody = element("p", { class: "empty", text: "No worker is listed." });
    byId("workers").replaceChildren(workers.length ? table(workers, time) : nobody);
    this.#showEvents(events);
    const offered = workers.flatMap((worker) => Object.keys(worker.sources ?? {}));
    this.drafting(new Set(up("draft") ? ["draft", ...offered] : offered));
  }

  #showEvents(events) {
    if (events.at(-1)?.number < this.newest) this.newest = 0; // another router, or the same started again
    byId("events").replaceChildren(
      ...events.slice(-MOST_EVENTS).reverse().map((event) => line(event, this.newest && event.number > this.newest)),
    );
    if (!events.length) byId("events").append(element("li", { class: "empty", text: "Nothing yet." }));
    this.newest = events.at(-1)?.number ?? this.newest;
  }

  #failed(error) {
    if (!(error instanceof ApiError)) throw error;
    const why = { 401: "API key wanted", 403: "another key wanted", 404: "not shown here" };
    pulse("bad", why[error.status] ?? "no connection");
    byId("cluster-summary").textContent = error.message;
  }
}

function pulse(kind, text) {
  byId("pulse").dataset.state = kind;
  byId("pulse-text").textContent = text;
}

function table(workers, now) {
  const align = (column) => (column.number ? "number" : null);
  const heads = COLUMNS.map((column) => element("th", { scope: "col", class: align(column), text: column.name }));
  const cell = (column, worker) =>
    element("td", { class: align(column), "data-label": column.name }, ...[column.of(worker, now)].flat());
  const rows = workers.map((worker) => element("tr", {}, ...COLUMNS.map((column) => cell(column, worker))));
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

function muted(text) {
  return element("span", { class: "muted", text });
}

function dot() {
  return element("span", { class: "dot", "aria-hidden": "true" });
}

function state(name) {
  const kind = { up: "good", draining: "warn", connecting: "warn", loading: "warn", lost: "bad" }[name] ?? "unknown";
  return element("span", { class: "state", "data-state": kind }, dot(), name);
}

function gauge(share) {
  if (!Number.isFinite(share)) return UNKNOWN;
  const filled = element("span", { class: "filled" });
  filled.style.width = `${number(100 * share, 1)}%`;
  const length = element("span", { class: "length", "aria-hidden": "true" }, filled);
  return element("span", { class: "gauge" }, length, percent(share));
}

function line(event, isNew) {
  const time = new Date(1000 * event.time);
  return element(
    "li",
    { "data-kind": KINDS[event.kind] ?? "unknown", class: isNew ? "new" : null },
    element("time", { datetime: time.toISOString(), text: time.toLocaleTimeString() }),
    dot(),
    element("span", { text: event.text + (event.times > 1 ? ` (${event.times}×)` : "") }),
  );
}
