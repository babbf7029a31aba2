// The trie at one step as a tree that reads like the text: left to right, the kept path on top.

import { count, duration, element, percent, svg } from "./dom.js";
import { described } from "./sources.js";
import { below } from "./trie.js";

const ROW = 38;
const BOX = 22;
const GAP = 22;
const PADDING = 8;
const CHARACTER = 7.6; // width of one, in the monospaced face of the boxes
const LONGEST = 14;

/** Text of a token so that every character of it can be seen. */
function visible(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown || "∅";
}

/** One line on a step. */
export function describe(step) {
  const own = step.offered > step.accepted ? "the target's own instead of a refused one" : "one of the target's own";
  const parts = [
    step.offered ? `${step.accepted} of ${count(step.offered, "draft token")} kept, then ${own}` : "nothing was offered",
  ];
  if (step.end !== null) parts.push(`verified in ${duration(step.end - step.start)}`);
  if (step.waited > 0) parts.push(`waited ${duration(step.waited)}`);
  return `Step ${step.index + 1}: ${parts.join(" · ")}`;
}

/** The tree of a step, or a line that says that it is empty. */
export function drawTree(step) {
  const own = step.committed[step.accepted] ?? null;
  if (!step.tree.children.length) {
    return element("p", { class: "empty", text: "No drafts stood in the trie." });
  }
  const columns = []; // width of each
  const free = []; // first row without a box, of each
  const boxes = place(step.tree, 0, null, step, columns, free);
  if (own) placeOwn(own, boxes, columns, free);
  const left = columns.reduce((edges, width) => [...edges, edges.at(-1) + width + GAP], [PADDING]);
  for (const box of boxes) Object.assign(box, { x: left[box.column], width: columns[box.column] });
  const height = PADDING + ROW * (1 + Math.max(...boxes.map((box) => box.row)));
  const width = left.at(-1) - GAP + PADDING;
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label(step, boxes) },
    ...boxes.map(edge),
    ...boxes.map(drawBox),
  );
}

/** Boxes of every node below: what was kept first, the others in the first rows with room for all that follows them. */
function place(parent, column, above, step, columns, free) {
  const ordered = [...parent.children].sort((a, b) => b.kept - a.kept || (b.confidence ?? 0) - (a.confidence ?? 0));
  return ordered.flatMap((child) => {
    const text = visible(child.text);
    const state = child.kept ? "kept" : step.start !== null && child.since > step.start ? "late" : "left";
    const row = Math.max(above?.row ?? 0, ...free.slice(column, column + depth(child)));
    const box = { node: child, column, row, above, text, source: child.source, state };
    occupy(box, columns, free);
    return [box, ...place(child, column + 1, box, step, columns, free)];
  });
}

function occupy({ column, row, text }, columns, free) {
  columns[column] = Math.max(columns[column] ?? 0, widthOf(text));
  free[column] = row + 1;
}

/** How many tokens the longest path from here on has. */
function depth(place) {
  return 1 + Math.max(0, ...place.children.map(depth));
}

/** The target's own token: a branch of its own, unless it had been drafted as well. */
function placeOwn(own, boxes, columns, free) {
  const above = boxes.findLast((box) => box.state === "kept") ?? null;
  const drafted = boxes.find((box) => box.above === above && box.node.id === own.id);
  if (drafted) return void Object.assign(drafted, { state: "own", source: own.source });
  const column = above ? above.column + 1 : 0;
  const row = Math.max(above?.row ?? 0, free[column] ?? 0);
  const node = { id: own.id, text: own.text, confidence: null };
  const box = { node, column, row, above, text: visible(own.text), source: own.source, state: "own" };
  occupy(box, columns, free);
  boxes.push(box);
}

function widthOf(text) {
  return Math.max(34, Math.ceil(text.length * CHARACTER) + 2 * PADDING);
}

function middle(row) {
  return PADDING + row * ROW + BOX / 2;
}

function edge({ above, x, row, state }) {
  const from = above ? above.x + above.width : 0;
  const [start, end] = [middle(above?.row ?? 0), middle(row)];
  const bend = (from + x) / 2;
  return svg("path", { class: `edge ${state}`, d: `M${from} ${start}C${bend} ${start} ${bend} ${end} ${x} ${end}` });
}

function drawBox({ node, x, row, width, text, source, state }) {
  const y = middle(row) - BOX / 2;
  const confidence = node.confidence === null ? null : percent(node.confidence);
  const title = [JSON.stringify(node.text), described(source).label, FATES[state], confidence && `${confidence} sure`];
  return svg(
    "g",
    { class: `box ${state}`, "data-source": source },
    svg("title", { text: title.filter(Boolean).join(" · ") }),
    svg("rect", { x, y, width, height: BOX, rx: 5 }),
    svg("text", { x: x + width / 2, y: y + 15, class: "token", text }),
    confidence && svg("text", { x: x + width / 2, y: y + BOX + 11, class: "sure", text: confidence }),
  );
}

const FATES = {
  kept: "kept",
  left: "not kept",
  late: "came while the step was running",
  own: "the target's own",
};

function label(step, boxes) {
  const texts = (state) => boxes.filter((box) => box.state === state).map((box) => JSON.stringify(box.node.text));
  const parts = [describe(step)];
  if (texts("kept").length) parts.push(`kept ${texts("kept").join(" ")}`);
  if (texts("own").length) parts.push(`the target's own ${texts("own")[0]}`);
  parts.push(`${[...below(step.tree)].length} tokens in the trie`);
  return parts.join("; ");
}
