// An answer as a card: what was asked, what was said, where it came from and how long it took.

import { by, make } from "./dom.js";
import { isQuoted, place } from "./reader.js";
import { confidenceWords as inWords, count, cutter, duration, score } from "./text.js";

const list = by("answers");
const OPEN = 5; // sources that are shown at once
const SHARED = 3; // words of the question that are shown with a source
const BEFORE = 40; // characters of a source before the answer's words
const TIMES = [
  ["ttft_ms", "First token"],
  ["select_ms", "selection"],
  ["total_ms", "total"],
];
const CONDITIONS = { memory: "memory", text: "text", both: "memory and text" };

/** Identifies a block. */
const key = (citation) => `${citation.document} ${citation.start}`;

export class Card {
  /** `show(card, citation)` is called when a source is chosen. */
  constructor(question, settings, show) {
    this.question = question;
    this.settings = settings;
    this.citations = [];
    this.confidence = null;
    this.done = false;
    this.show = show;
    this.title = make("h2", {}, "Answer");
    this.chips = make("p", { class: "chips" }, ...this.chipTexts().map(chip));
    this.said = make("p", { class: "said" });
    this.said.setAttribute("aria-busy", "true");
    this.sure = make("div");
    this.costs = make("div");
    this.found = make("div", {}, make("p", { class: "note" }, "Choosing blocks …"));
    this.element = make(
      "article",
      { class: "answer panel" },
      make("header", {}, this.title, this.chips),
      make("p", { class: "asked" }, question),
      this.said,
      this.sure,
      this.costs,
      this.found,
    );
  }

  chipTexts(k = null) {
    const { answer, k: asked, condition, min_confidence: least } = this.settings;
    // A reader is given passages, however many blocks they come from.
    if (!answer) return k === null ? [] : [count(k, "passage")];
    const used = k !== null && String(k) !== String(asked) ? ` (${k} used)` : "";
    const texts = [`K ${asked}${used}`, CONDITIONS[condition]];
    return least ? [...texts, `min. ${Math.round(least * 100)} %`] : texts;
  }

  /** The blocks are chosen; this comes before the first word. */
  sources({ citations = [], confidence = null, k = null }) {
    this.citations = citations;
    this.confidence = confidence;
    this.chips.replaceChildren(...this.chipTexts(k).map(chip));
    const best = Math.max(...citations.map((one) => one.score ?? 0), 1e-6);
    this.buttons = citations.map((citation) => this.source(citation, best));
    this.sure.replaceChildren(...likeliness(confidence));
    const items = this.buttons.map((button) => make("li", {}, button));
    const more = items.splice(OPEN);
    this.found.replaceChildren(
      make("h3", {}, citations.length ? count(citations.length, "source") : "No source"),
      make("ol", { class: "sources" }, ...items),
    );
    if (!more.length) return;
    const rest = make("ol", { class: "sources", start: OPEN + 1 }, ...more);
    this.found.append(
      make("details", {}, make("summary", {}, count(more.length, "more source")), rest),
    );
  }

  source(citation, best) {
    const share = Math.max(0, Math.min(1, (citation.score ?? 0) / best));
    return make(
      "button",
      { type: "button", class: "source", on: { click: () => this.show(this, citation) } },
      make("span", { class: "unseen" }, "Source "),
      make("span", { class: "rank" }, citation.rank),
      make("span", { class: "name" }, make("bdi", {}, citation.document)),
      make("span", { class: "unseen" }, "score "),
      make("span", { class: "score" }, score(citation.score)),
      barOf(share),
      make("span", { class: "place" }, [place(citation), ...shared(citation)].join(" · ")),
      make("span", { class: "excerpt" }, beginning(citation)),
    );
  }

  add(piece) {
    this.said.append(piece);
  }

  /** The answer is whole; it may be a quotation from one of the sources. */
  finish(sedem) {
    this.done = true;
    this.last = sedem;
    this.citations = sedem.citations ?? this.citations;
    this.citations.forEach((citation, index) => {
      if (!isQuoted(citation)) return;
      this.buttons[index].querySelector(".excerpt").replaceChildren(...quotation(citation));
    });
    this.said.removeAttribute("aria-busy");
    this.timings = sedem.timings ?? {};
    if (!this.said.textContent) this.said.append(make("em", {}, "The model said nothing."));
    const { answer_confidence: right, confidence: found, alternative, sentences = [] } = sedem;
    if (typeof right === "number") {
      const words = `The answer is ${sedem.certainty}`;
      this.sure.replaceChildren(...likeliness(right * (found ?? 1), words));
      if (typeof found === "number") this.sure.append(note(`${inWords(found)} (${score(found)})`));
    }
    if (alternative) this.sure.append(make("p", { class: "other" }, `Or: ${alternative}`));
    if (sentences.length) this.sure.append(...this.decided(sentences));
    this.costs.replaceChildren(
      make(
        "p",
        { class: "note timings" },
        TIMES.map(([name, label]) => `${label} ${duration(this.timings[name])}`).join(" · "),
      ),
      ...(sedem.reader ? [note(`Written by ${sedem.answered_by}`)] : []),
      ...(sedem.finish_reason === "length" ? [note("The answer was cut off at its limit.")] : []),
      // The page sends the question before by itself, which need not be used.
      ...(sedem.cut ?? []).filter((one) => !/^message \d/.test(one)).map(note),
      ...(sedem.unsupported?.length
        ? [note(`Not in the sources: ${sedem.unsupported.join(", ")}`)]
        : []),
    );
  }

  /** The sentences that were read again as text, and decided. */
  decided(sentences) {
    const items = sentences.map((one) => {
      const inside = this.citations
        .filter(({ document }) => document === one.document)
        .toSorted((a, b) => a.start - b.start)
        .map(({ text, start }) =>
          cutter(text, start)(Math.max(start, one.start), Math.max(start, one.end)),
        );
      return make("li", {}, make("q", {}, inside.join("").trim()), ` ${place(one)}`);
    });
    return [make("h3", {}, "Decided by the text of"), make("ul", { class: "decided" }, ...items)];
  }

  /** What is kept of it over a reload of the page. */
  content() {
    const { question, settings, last } = this;
    return { question, settings, said: this.said.textContent, last };
  }

  /** Whether it answers the same question, so that the two can be compared. */
  repeats(other) {
    return this.question.toLowerCase() === other?.question.toLowerCase();
  }

  /** The answer ends before its end. */
  end(why) {
    this.said.removeAttribute("aria-busy");
    if (!this.citations.length) this.found.replaceChildren();
    this.costs.replaceChildren(note(why));
  }

  /** Say how this answer differs from the one before it. */
  compare(before) {
    if (!this.done || !this.repeats(before)) return;
    const old = new Set(before.citations.map(key));
    const added = this.citations.filter((one) => !old.has(key(one)));
    const dropped = before.citations.length - (this.citations.length - added.length);
    this.citations.forEach((citation, index) => {
      this.buttons[index].classList.toggle("new", added.includes(citation));
    });
    const same = this.said.textContent === before.said.textContent;
    const parts = [same ? "the same words" : "new wording", count(added.length, "new source")];
    const words = `Compared with before: ${parts.join(", ")}, ${dropped} left out.`;
    this.costs.append(make("p", { class: "difference" }, words));
  }

  /** Whether the document shows the sources of this answer. */
  active(is) {
    this.element.classList.toggle("active", is);
  }

  /** It is the newest answer, or the one "Before" it, or an "Earlier" one. */
  call(title) {
    this.title.textContent = title;
    this.element.classList.toggle("before", title !== "Answer");
    return this.element;
  }

  /** It behind its question; its sources are shown once it is opened. */
  folded() {
    const said = make("span", {}, this.said.textContent);
    const details = make(
      "details",
      {},
      make("summary", {}, `${this.question} `, said),
      this.call("Earlier"),
    );
    details.addEventListener("toggle", () => details.open && this.show(this, null));
    return make("li", {}, details);
  }
}

/** What a source has in common with the question: its rarest words. */
const shared = ({ words = [] }) => (words.length ? [words.slice(0, SHARED).join(", ")] : []);

/** The text of a source; a word that it may begin inside of is left out. */
const beginning = ({ text, start }) =>
  (start ? text.replace(/^[\p{Ll}\p{N}]\S*\s+/u, "… ") : text).trim();

/** The words of an answer, and the text of the source around them. */
function quotation({ text, start, end, answer_spans: spans }) {
  const cut = cutter(text, start);
  const first = Math.max(start, spans[0][0] - BEFORE);
  const shown = [first > start ? "… " : ""];
  let at = first;
  for (const [from, to] of spans) {
    // What is cut off in front begins with a whole word.
    const before = cut(at, from);
    shown.push(at > first || first === start ? before : before.replace(/^\S*\s+/, ""));
    shown.push(make("strong", {}, cut(from, Math.min(end, to))));
    at = Math.min(end, to);
  }
  return [...shown, cut(at, end)];
}

/** Show the answers, the newest first; one before to the same question stays beside it. */
export function showCards([card, ...earlier]) {
  const shown = card ? [card.call("Answer")] : [];
  if (card?.repeats(earlier[0])) shown.push(earlier.shift().call("Before"));
  list.replaceChildren(...shown);
  by("earlier-answers").hidden = !earlier.length;
  by("earlier-list").replaceChildren(...earlier.map((one) => one.folded()));
}

const chip = (text) => make("span", { class: "chip" }, text);
const note = (text) => make("p", { class: "note" }, text);

/** A probability in words, with its number and a bar. */
function likeliness(probability, words = inWords(probability)) {
  if (probability === null) return [];
  const line = make("p", {}, make("strong", {}, words), ` (${score(probability)})`);
  return [make("div", { class: "confidence" }, line, barOf(probability))];
}

function barOf(share) {
  const bar = make("span", { class: "bar", ariaHidden: "true" }, make("span"));
  bar.firstChild.style.setProperty("--share", share);
  return bar;
}
