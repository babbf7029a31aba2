// The speculation trie as far as it can be told from what was proposed and what was committed.
//
// A proposal names the draft token it continues by its number, or the position in the committed text it hangs from.

const ANCHOR = -1;
const MOST_NODES = 400;

function node(parent, token, confidence, source, since) {
  return { parent, id: token.id, text: token.text, confidence, source, since, children: [], kept: false };
}

function emptyRoot() {
  return node(null, { id: null, text: "" }, null, null, 0);
}

/** The token of this id that follows a place, if it was drafted. */
function child(place, id) {
  return place.children.find((one) => one.id === id) ?? null;
}

/** All nodes below, parents before children; the root itself has no token and is left out. */
export function* below(root) {
  for (const one of root.children) {
    yield one;
    yield* below(one);
  }
}

export class Trie {
  /** Empty, below what is committed; the next token has this position, if it is known. */
  constructor(position = null) {
    this.position = position;
    this.root = emptyRoot();
    this.size = 0;
    this.committed = []; // ids of the tokens before `position` that came since the beginning
    this.numbered = new Map();
  }

  /** Add a proposal; what hangs from somewhere unknown is dropped, as the target does. */
  insert({ anchor, after, tokens, parents, confidence, source, end }) {
    const hook = { place: this.#anchor(anchor, after), next: anchor };
    const added = [];
    tokens.forEach((token, index) => {
      const { place, next } = parents[index] === ANCHOR ? hook : added[parents[index]];
      const child = this.#add(place, next, token, confidence[index] ?? null, source, end);
      if (child !== null && child !== "committed") this.numbered.set(token.number, child);
      added.push({ place: child, next: next + 1 });
    });
  }

  /** A token below a place: "committed" if it is part of the text, null if it cannot be. */
  #add(parent, position, token, confidence, source, since) {
    if (parent === null) return null;
    if (parent === "committed") {
      if (this.committed.at(position - this.position) !== token.id) return null;
      return position + 1 === this.position ? this.root : "committed";
    }
    const known = child(parent, token.id);
    if (known) return known;
    if (this.size >= MOST_NODES) return null;
    const added = node(parent, token, confidence, source, since);
    parent.children.push(added);
    this.size++;
    return added;
  }

  /** Where a proposal hangs; null if that is not known, or no part of the tree any more. */
  #anchor(position, after) {
    if (position < this.position) return "committed";
    if (position === this.position) return this.root;
    return this.numbered.get(after) ?? null;
  }

  /**
   * Tokens were committed: `accepted` drafted ones, then the target's own; {id, text, source} of each. Returns the tree
   * as it stood, with the kept path marked, and goes on below it. What was drafted at the target was not seen before, so
   * it is added.
   */
  advance(tokens, accepted) {
    let end = this.root;
    for (const token of tokens.slice(0, accepted)) end = this.#kept(end, token);
    const stood = copy(this.root, null);
    this.committed.push(...tokens.map(({ id }) => id));
    this.position += tokens.length;
    this.#reroot(tokens.slice(accepted).reduce((at, { id }) => at && child(at, id), end));
    return stood;
  }

  #kept(parent, { id, text, source }) {
    const known = child(parent, id);
    const kept = known ?? node(parent, { id, text }, null, source, 0);
    if (!known) parent.children.push(kept);
    return Object.assign(kept, { kept: true, source });
  }

  #reroot(place) {
    this.root = place ?? emptyRoot();
    this.root.parent = null;
    const alive = new Set(below(this.root));
    this.size = alive.size;
    for (const [number, one] of this.numbered) if (!alive.has(one)) this.numbered.delete(number);
  }
}

function copy(place, parent) {
  const twin = { ...place, parent };
  twin.children = place.children.map((one) => copy(one, twin));
  return twin;
}
