// An answer as a card: what was asked, what was said, where it came from and how long it took.

import { by, make } from "./dom.js";
import { isQuoted, place } from "./reader.js";
import { confidenceWords, count, cutter, duration, score } from "./text.js";

const list = by("answers");
const OPEN = 5; // sources that are shown at once
const SHARED = 3; // words of the question that are shown with a source
const BEFORE = 60; // characters of a source before the answer's words
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
    const { k: asked, condition, min_confidence: least } = this.settings;
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
    this.sure.replaceChildren(...confidenceLine(confidence));
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
    const bar = make("span", { class: "bar", ariaHidden: "true" }, make("span"));
    const share = Math.max(0, Math.min(1, (citation.score ?? 0) / best));
    bar.firstChild.style.setProperty("--share", share);
    return make(
      "button",
      { type: "button", class: "source", on: { click: () => this.show(this, citation) } },
      make("span", { class: "unseen" }, "Source "),
      make("span", { class: "rank" }, citation.rank),
      make("span", { class: "name" }, make("bdi", {}, citation.document)),
      make("span", { class: "unseen" }, "score "),
      make("span", { class: "score" }, score(citation.score)),
      bar,
      make("span", { class: "place" }, [place(citation), ...shared(citation)].join(" · ")),
      make("span", { class: "excerpt" }, citation.text.trim() || citation.note || ""),
    );
  }

  add(piece) {
    this.said.append(piece);
  }

  /** The answer is whole; it may be a quotation from one of the sources. */
  finish(sedem) {
    this.done = true;
    this.citations = sedem.citations ?? this.citations;
    this.citations.forEach((citation, index) => {
      if (!isQuoted(citation)) return;
      this.buttons[index].querySelector(".excerpt").replaceChildren(...quotation(citation));
    });
    this.said.removeAttribute("aria-busy");
    this.timings = sedem.timings ?? {};
    if (!this.said.textContent) this.said.append(make("em", {}, "The model said nothing."));
    if (typeof sedem.answer_confidence === "number") {
      const other = sedem.alternative ? `. Perhaps: ${sedem.alternative}` : "";
      this.sure.append(
        note(`The answer is ${sedem.certainty} (${score(sedem.answer_confidence * (sedem.confidence ?? 1))})${other}`),
      );
    }
    this.costs.replaceChildren(
      make(
        "dl",
        { class: "timings" },
        ...TIMES.map(([name, label]) =>
          make("div", {}, make("dt", {}, label), make("dd", {}, duration(this.timings[name]))),
        ),
      ),
      ...(sedem.finish_reason === "length" ? [note("The answer was cut off at its limit.")] : []),
      ...(sedem.sentences?.length
        ? [note(`Decided by the text of ${sedem.sentences.map(cited).join("; ")}`)]
        : []),
      ...(sedem.cut ?? []).map(note),
      ...(sedem.unsupported?.length
        ? [note(`Not in the sources: ${sedem.unsupported.join(", ")}`)]
        : []),
    );
  }

  /** The answer ends before its end. */
  end(why) {
    this.said.removeAttribute("aria-busy");
    if (!this.citations.length) this.found.replaceChildren();
    this.costs.replaceChildren(note(why));
  }

  /** Say how this answer differs from the one before it. */
  compare(before) {
    if (!this.done || !before?.done) return;
    const old = new Set(before.citations.map(key));
    const added = this.citations.filter((one) => !old.has(key(one)));
    const dropped = before.citations.length - (this.citations.length - added.length);
    this.citations.forEach((citation, index) => {
      this.buttons[index].classList.toggle("new", added.includes(citation));
    });
    const parts = [
      this.said.textContent === before.said.textContent ? "the same words" : "new wording",
      added.length || dropped
        ? [added.length && count(added.length, "new source"), dropped && `${dropped} left out`]
            .filter(Boolean)
            .join(", ")
        : "the same sources",
    ];
    const time = this.timings.total_ms - before.timings.total_ms;
    const word = time < 0 ? "faster" : "slower";
    if (Number.isFinite(time)) parts.push(`${duration(Math.abs(time))} ${word}`);
    const words = `Compared with before: ${parts.join("; ")}.`;
    this.costs.append(make("p", { class: "difference" }, words));
  }

  /** Whether the document shows the sources of this answer. */
  active(is) {
    this.element.classList.toggle("active", is);
  }

  /** Make it the previous answer, which stays beside the new one. */
  retire() {
    this.title.textContent = "Before";
    this.element.classList.add("before");
  }
}

/** What a source has in common with the question: its rarest words. */
const cited = (sentence) => `${sentence.document}, ${place(sentence)}`;

const shared = ({ words = [] }) => (words.length ? [words.slice(0, SHARED).join(", ")] : []);

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

/** Show the present answer, and the one before it if there is one. */
export function showCards(...cards) {
  list.replaceChildren(...cards.filter(Boolean).map((card) => card.element));
}

const chip = (text) => make("span", { class: "chip" }, text);
const note = (text) => make("p", { class: "note" }, text);

function confidenceLine(confidence) {
  if (confidence === null) return [];
  const bar = make("span", { class: "bar", ariaHidden: "true" }, make("span"));
  bar.firstChild.style.setProperty("--share", confidence);
  const words = `${confidenceWords(confidence)}: confidence ${confidence.toFixed(2)}`;
  return [make("div", { class: "confidence" }, make("p", {}, words), bar)];
}
