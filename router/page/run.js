// One run: what a streamed answer says, chunk by chunk, and the figures that follow from it.

import { Trie } from "./trie.js";

export class Run {
  /** `body` is the request; `now` seconds of any clock, as everywhere here. */
  constructor(kind, body, now) {
    this.kind = kind;
    this.body = body;
    this.begun = now;
    this.first = this.last = this.over = null; // over: when the stream ended, one way or another
    this.text = "";
    this.pieces = []; // {text, source, step}
    this.steps = []; // {index, accepted, offered, tokens, committed, pieces, start, end, waited, tree}
    this.drafts = []; // {source, start, end, tokens}
    this.tokens = this.firstTokens = this.stepped = this.accepted = this.offered = this.drafted = 0;
    this.finish = null;
    this.summary = null;
    this.trie = new Trie();
  }

  /** Take one event of the stream. */
  take(event, now) {
    const [choice] = event.choices;
    const text = choice.text ?? choice.delta.content ?? "";
    const told = event.speculation; // of chunks of text, and of the last one
    this.finish = choice.finish_reason ?? this.finish;
    this.summary = told?.summary ?? this.summary;
    if (!text && !told?.tokens) return;
    this.trie.position ??= told.position;
    this.#propose(told.proposals ?? []);
    this.last = now;
    this.text += text;
    this.#commit(told);
    if (this.first === null) {
      this.first = now;
      this.firstTokens = this.tokens;
    }
  }

  #propose(proposals) {
    for (const proposal of proposals) {
      this.trie.insert(proposal);
      const { source, start, end, tokens } = proposal;
      this.drafts.push({ source, start, end, tokens: tokens.length });
    }
  }

  /** What was held back of the text to its end is told as a commit of no tokens, which has no times. */
  #commit({ accepted, offered, tokens, committed = [], pieces, step: times = { start: null, end: null, waited: 0 } }) {
    const step = { index: this.steps.length, accepted, offered, tokens, committed, ...times };
    step.pieces = pieces.map(({ text, source }) => ({ text, source, step }));
    this.pieces.push(...step.pieces);
    step.tree = this.trie.advance(committed, accepted);
    this.steps.push(step);
    this.tokens += tokens;
    this.stepped += tokens > 0;
    this.accepted += accepted;
    this.offered += offered;
    this.drafted += offered > 0;
  }

  /** How many pieces came from where. */
  get bySource() {
    const counts = {};
    for (const { source } of this.pieces) counts[source] = (counts[source] ?? 0) + 1;
    return counts;
  }

  /** Seconds, NaN while there is nothing to say, and counts. */
  figures(now) {
    const decoding = (this.last ?? NaN) - (this.first ?? NaN);
    return {
      tokens: this.tokens,
      steps: this.stepped,
      tokensPerSecond: decoding > 0 ? (this.tokens - this.firstTokens) / decoding : NaN,
      acceptance: this.offered ? this.accepted / this.offered : NaN,
      // vLLM's measure: over the steps that had drafts to verify.
      acceptanceLength: this.drafted ? 1 + this.accepted / this.drafted : NaN,
      tokensPerStep: this.stepped ? this.tokens / this.stepped : NaN,
      firstToken: this.first === null ? NaN : this.first - this.begun,
      elapsed: (this.over ?? now) - this.begun,
    };
  }

  /** Steps whose times are known. */
  get timed() {
    return this.steps.filter((step) => step.end !== null);
  }

  /** The share of verification time in which something was drafted. */
  get overlap() {
    return sharedPart(this.timed, this.drafts);
  }
}

/** Stretches of time, each {start, end} in seconds: the same time, in order, without overlaps. */
function union(stretches) {
  const merged = [];
  for (const { start, end } of [...stretches].sort((a, b) => a.start - b.start)) {
    const last = merged.at(-1);
    if (last && start <= last.end) last.end = Math.max(last.end, end);
    else if (end > start) merged.push({ start, end });
  }
  return merged;
}

/** Which share of `stretches` lies within `others`; NaN where they have no length. */
function sharedPart(stretches, others) {
  const [ours, theirs] = [union(stretches), union(others)];
  let shared = 0;
  for (let i = 0, j = 0; i < ours.length && j < theirs.length; ) {
    shared += Math.max(0, Math.min(ours[i].end, theirs[j].end) - Math.max(ours[i].start, theirs[j].start));
    if (ours[i].end < theirs[j].end) i++;
    else j++;
  }
  return shared / ours.reduce((sum, { start, end }) => sum + end - start, 0);
}
