// Numbers, names and offsets as people and the server write them.

const ASTRAL = /[\u{10000}-\u{10FFFF}]/gu;
const NUMBER = new Intl.NumberFormat("en");

/**
 * Return a function that cuts `text` by the server's offsets; `first` is that of its beginning.
 * The server counts characters, a browser counts units of UTF-16, of which an emoji has two.
 */
export function cutter(text, first = 0) {
  const wide = [];
  for (const match of text.matchAll(ASTRAL)) wide.push(match.index - wide.length);
  const unit = (offset) => {
    const character = offset - first;
    let low = 0;
    let high = wide.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (wide[middle] < character) low = middle + 1;
      else high = middle;
    }
    return character + low;
  };
  return (start, end) => text.slice(unit(start), unit(end));
}

export const number = (value) => NUMBER.format(value);

/** "1 block", "2 blocks". */
export const count = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;

export function duration(milliseconds) {
  if (milliseconds === undefined || milliseconds === null) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  return `${(milliseconds / 1000).toFixed(2)} s`;
}

export const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

const CONFIDENCE = [
  [0.75, "Very likely in the documents"],
  [0.5, "Probably in the documents"],
  [0.25, "Perhaps in the documents"],
  [0, "Probably not in the documents"],
];

/** A confidence in words. */
export const confidenceWords = (value) => CONFIDENCE.find(([least]) => value >= least)[1];

/** A name for a bank that a server accepts, from that of a file. */
export function slug(name) {
  const plain = name.replace(/\.[^.]*$/, "").normalize("NFKD").toLowerCase();
  return plain.replace(/[^a-z0-9_-]+/g, "-").replace(/^[-_]+|-+$/g, "").slice(0, 64) || "documents";
}

export const SLUG = /^[a-z0-9][a-z0-9_-]{0,63}$/;
