// The strip beside a document: one band for each block, the warmer the higher its score.

import { by, make } from "./dom.js";
import { number, score } from "./text.js";

const LISTED = 12; // rows of the table
const LABEL = 15; // pixels on the left for the ranks of sources
const STEPS = {
  ArrowDown: 1,
  ArrowRight: 1,
  ArrowUp: -1,
  ArrowLeft: -1,
  PageDown: 10,
  PageUp: -10,
};

const canvas = by("heat");

/** Return a function from scores to 0..1: the median and what is below it are cold. */
export function warmth(scores) {
  const sorted = scores.filter((one) => one !== null).sort((a, b) => a - b);
  if (!sorted.length) return () => 0;
  const [middle, top] = [sorted[sorted.length >> 1], sorted.at(-1)];
  return (one) => {
    if (one === null) return 0;
    return top > middle ? Math.max(0, (one - middle) / (top - middle)) : 1;
  };
}

const NOT_ASKED = "Ask a question to see the score of every block.";

export class Heat {
  /** `pick(block, focus)` is called with the number of a block that was chosen here. */
  constructor(pick) {
    this.pick = pick;
    this.blocks = [];
    this.start = 0;
    this.length = 1;
    this.current = 0;
    this.reason = NOT_ASKED;
    this.seen = [0, 1];
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("pointerdown", (event) => this.onPointer(event));
    canvas.addEventListener("pointermove", (event) => {
      canvas.title = this.words(this.at(event));
    });
    for (const change of ["focus", "blur"]) canvas.addEventListener(change, () => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show the blocks of a document: each has start, end, score, warmth and perhaps a citation. */
  show(blocks, start, end) {
    this.blocks = blocks;
    this.start = start;
    this.length = Math.max(1, end - start);
    this.current = Math.min(this.current, Math.max(0, blocks.length - 1));
    canvas.setAttribute("aria-valuemax", Math.max(1, blocks.length));
    this.describe();
    this.list();
    this.draw();
  }

  /** Say why there are no scores. */
  none(reason = NOT_ASKED) {
    this.reason = reason;
    this.list();
  }

  /** Say which block is the current one. */
  move(block) {
    this.current = block;
    this.describe();
    this.draw();
  }

  /** Show which part of the text is on the screen, as shares of its height. */
  view(from, to) {
    this.seen = [from, to];
    this.draw();
  }

  onKey(event) {
    const last = this.blocks.length - 1;
    if (last < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.pick(this.current, true);
      return;
    }
    const ends = { Home: 0, End: last };
    const goal = ends[event.key] ?? this.current + STEPS[event.key];
    if (!Number.isFinite(goal)) return;
    event.preventDefault();
    this.move(Math.min(last, Math.max(0, goal)));
    this.pick(this.current, false);
  }

  onPointer(event) {
    const block = this.at(event);
    if (block < 0) return;
    this.move(block);
    this.pick(block, false);
  }

  at(event) {
    const box = canvas.getBoundingClientRect();
    const character = this.start + ((event.clientY - box.top) / box.height) * this.length;
    const found = this.blocks.findIndex((block) => block.end > character);
    return found < 0 ? this.blocks.length - 1 : found;
  }

  words(index) {
    const block = this.blocks[index];
    if (!block) return "no block";
    const parts = [`Block ${index + 1} of ${this.blocks.length}`];
    if (block.score !== null) parts.push(`score ${score(block.score)}`);
    if (block.citation) parts.push(`source ${block.citation.rank}`);
    return parts.join(", ");
  }

  describe() {
    canvas.setAttribute("aria-valuenow", this.current + 1);
    canvas.setAttribute("aria-valuetext", this.words(this.current));
  }

  /** The same as text: one sentence, and a table of the best blocks. */
  list() {
    const scored = this.blocks.filter((block) => block.score !== null);
    const best = scored.toSorted((a, b) => b.score - a.score);
    by("heat-details").hidden = !best.length;
    by("heat-summary").textContent = !best.length
      ? this.reason
      : `Highest score here: ${score(best[0].score)} at characters ` +
        `${number(best[0].start)} to ${number(best[0].end)}; lowest: ${score(best.at(-1).score)}.`;
    by("heat-rows").replaceChildren(
      ...best.slice(0, LISTED).map((block) =>
        make(
          "tr",
          {},
          make("td", {}, score(block.score)),
          make("td", {}, block.citation ? String(block.citation.rank) : "–"),
          make("td", {}, `${number(block.start)} to ${number(block.end)}`),
          make("td", {}, block.text().trim().slice(0, 60)),
        ),
      ),
    );
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const y = (character) => ((character - this.start) / this.length) * height;
    pen.fillStyle = colour("--cold");
    pen.fillRect(LABEL, 0, width - LABEL, height);
    pen.fillStyle = colour("--hot");
    for (const block of this.blocks.toSorted((a, b) => a.warmth - b.warmth)) {
      pen.globalAlpha = block.warmth;
      const tall = Math.max(2, y(block.end) - y(block.start));
      pen.fillRect(LABEL, y(block.start), width - LABEL, tall);
    }
    pen.globalAlpha = 1;
    this.drawRanks(pen, y, colour);
    const [from, to] = this.seen.map((share) => share * height);
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 1.5;
    pen.strokeRect(LABEL + 0.75, from + 0.75, width - LABEL - 1.5, to - from - 1.5);
    const current = this.blocks[this.current];
    if (!current || document.activeElement !== canvas) return;
    const middle = y((current.start + current.end) / 2);
    pen.fillStyle = colour("--accent");
    pen.fillRect(LABEL, middle - 1.5, width - LABEL, 3);
  }

  /** The ranks of sources, best first, unless there is no room for one. */
  drawRanks(pen, y, colour) {
    const used = [];
    pen.font = "600 11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    pen.fillStyle = colour("--ink");
    const cited = this.blocks.filter((block) => block.citation?.rank < 100);
    for (const block of cited.sort((a, b) => a.citation.rank - b.citation.rank)) {
      const middle = Math.max(6, y((block.start + block.end) / 2));
      if (used.some((other) => Math.abs(other - middle) < 11)) continue;
      used.push(middle);
      pen.fillText(String(block.citation.rank), LABEL / 2, middle);
    }
  }
}
