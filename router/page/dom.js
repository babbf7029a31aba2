// Making elements, and writing numbers for people.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** An HTML element. Attributes that are null or false are left out; `text` is its text. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, likewise. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** What is not known is a dash. */
export const UNKNOWN = "–";

/** With so many digits after the point. */
export function number(value, digits = 0) {
  return Number.isFinite(value) ? value.toFixed(digits) : UNKNOWN;
}

/** Of a share between 0 and 1. */
export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)}\u202f%` : UNKNOWN;
}

/** A rate, with as many digits as it deserves. */
export function rate(value) {
  return number(value, value < 10 ? 1 : 0);
}

/** Of a length of time in seconds. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  const milliseconds = 1000 * seconds;
  if (milliseconds < 9.95) return `${milliseconds.toFixed(1)}\u202fms`;
  if (milliseconds < 999.5) return `${Math.round(milliseconds)}\u202fms`;
  return seconds < 99.95 ? `${seconds.toFixed(seconds < 9.995 ? 2 : 1)}\u202fs` : age(seconds);
}

/** How long something has lasted, roughly. */
export function age(seconds) {
  const [minutes, hours, days] = [60, 3600, 86400].map((unit) => Math.floor(seconds / unit));
  if (days) return `${days}\u202fd ${hours % 24}\u202fh`;
  if (hours) return `${hours}\u202fh ${minutes % 60}\u202fmin`;
  return minutes ? `${minutes}\u202fmin` : `${Math.max(0, Math.floor(seconds))}\u202fs`;
}

/** "1 token", "2 tokens". */
export function count(n, noun) {
  return `${n}\u00a0${noun}${n === 1 ? "" : "s"}`;
}
