// Where a token can have come from, in the order of the legend.

export const SOURCES = {
  draft: { label: "Draft model", meaning: "proposed by a draft worker and kept" },
  lookup: { label: "Lookup", meaning: "what followed when the same words stood there before, kept" },
  prediction: { label: "Prediction", meaning: "from the predicted text, kept" },
  grammar: { label: "Grammar", meaning: "all that the grammar left open" },
  eagle: { label: "EAGLE", meaning: "from an EAGLE-3 head, kept" },
  suffix: { label: "Earlier outputs", meaning: "what followed in answers before, kept" },
  recovered: { label: "Recovered", meaning: "the target's own, where a draft was refused" },
  bonus: { label: "Bonus", meaning: "the target's own, after everything offered was kept" },
  target: { label: "Target alone", meaning: "the target's own, where nothing was offered" },
};

/** What is known of a source by its name; an operator may have registered others than the page knows. */
export function described(source) {
  if (Object.hasOwn(SOURCES, source)) return SOURCES[source];
  return { label: source, meaning: "from a draft source of the operator's, kept" };
}
