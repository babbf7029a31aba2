// Sets of stretches of time, each {start, end} in seconds.

/** The same time, in order, without overlaps. */
export function union(stretches) {
  const merged = [];
  for (const { start, end } of [...stretches].sort((a, b) => a.start - b.start)) {
    const last = merged.at(-1);
    if (last && start <= last.end) last.end = Math.max(last.end, end);
    else if (end > start) merged.push({ start, end });
  }
  return merged;
}

export function length(stretches) {
  return union(stretches).reduce((sum, { start, end }) => sum + end - start, 0);
}

/** Which share of `stretches` lies within `others`; NaN where they have no length. */
export function sharedPart(stretches, others) {
  const [ours, theirs] = [union(stretches), union(others)];
  let shared = 0;
  for (let i = 0, j = 0; i < ours.length && j < theirs.length; ) {
    shared += Math.max(0, Math.min(ours[i].end, theirs[j].end) - Math.max(ours[i].start, theirs[j].start));
    if (ours[i].end < theirs[j].end) i++;
    else j++;
  }
  return shared / length(ours);
}
