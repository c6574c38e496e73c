// The document: its text, cut at its blocks, with the sources of an answer lit up.

import { bankPath, getJson } from "./api.js";
import { by, make, showProblem } from "./dom.js";
import { Heat, warmth } from "./heat.js";
import { count, cutter, number, score } from "./text.js";

const PART = 400_000; // characters of a long document that are shown at once
const LONGEST = 64; // characters of a word that no mark cuts
const WORD = /[^\s\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}]+$/u;
const text = by("text");
const select = by("document-select");
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Reader {
  constructor() {
    this.heat = new Heat((block, focus) => this.scrollTo(this.blocks[block].element, focus));
    this.clear();
    select.addEventListener("change", () => this.open(Number(select.value)));
    by("earlier").addEventListener("click", () => this.open(this.index, this.start - PART));
    by("later").addEventListener("click", () => this.open(this.index, this.end));
    text.addEventListener("scroll", () => this.onScroll(), { passive: true });
    new ResizeObserver(() => this.onScroll()).observe(text);
  }

  /** The document that is shown, as the list of documents has it. */
  get current() {
    return this.documents.find((one) => one.index === this.index);
  }

  clear() {
    this.bank = null;
    this.documents = [];
    this.index = null;
    this.start = this.end = 0;
    this.blocks = [];
    this.citations = [];
    this.scores = new Map();
    this.warmth = () => 0;
    text.replaceChildren();
  }

  /** Take the documents of a bank and show the first, or the one that was shown. */
  async load(bank) {
    const { name: shown } = (bank === this.bank && this.current) || {};
    const [start, top] = [this.start, text.scrollTop];
    if (bank !== this.bank) this.clear();
    this.bank = bank;
    const { data } = await getJson(bankPath(bank, "documents"));
    if (bank !== this.bank) return;
    this.documents = data;
    this.list();
    const again = data.find((one) => one.name === shown) ?? data[0];
    if (!again) return;
    await this.open(again.index, again.name === shown ? start : 0);
    if (again.name === shown) text.scrollTop = top;
  }

  /** The documents to choose from, with the sources that each has. */
  list() {
    const sources = (name) => this.citations.filter((one) => one.document === name).length;
    select.replaceChildren(
      ...this.documents.map((one) => {
        const cited = sources(one.name);
        const label = cited ? `${one.name} (${count(cited, "source")})` : one.name;
        return make("option", { value: one.index }, label);
      }),
    );
    if (this.index !== null) select.value = this.index;
  }

  /** Show a document, or the part of a long one that begins at a character. */
  async open(index, from = 0) {
    const bank = this.bank;
    const start = Math.max(0, from);
    this.index = index;
    select.value = index;
    text.setAttribute("aria-busy", "true");
    try {
      const path = bankPath(bank, "documents", index);
      const found = await getJson(`${path}?start=${start}&end=${start + PART}`);
      if (bank !== this.bank || index !== this.index) return;
      this.render(found);
    } catch (error) {
      showProblem(error, () => this.open(index, from));
    } finally {
      text.removeAttribute("aria-busy");
    }
  }

  render({ text: shown, start: first, end: last, characters, pages, spans }) {
    const cut = cutter(shown, first);
    this.cut = cut;
    this.pages = pages;
    this.start = first;
    this.end = last;
    this.blocks = [];
    const parts = [];
    let done = first;
    for (const [from, to] of spans) {
      const [start, end] = [Math.max(from, first), Math.min(to, last)];
      const [begin, stop] = [start, end].map((at) => wordBefore(at, first, last, cut));
      const shown = [Math.max(begin, done), stop];
      if (end <= start || stop <= shown[0]) continue;
      if (shown[0] > done) parts.push(...pieces(done, shown[0], pages, cut));
      const element = make("span", { class: "block" }, ...pieces(...shown, pages, cut));
      this.blocks.push({ start, end, shown, element, text: () => cut(...shown) });
      parts.push(element);
      done = stop;
    }
    if (done < last) parts.push(...pieces(done, last, pages, cut));
    text.replaceChildren(...parts);
    text.scrollTop = 0;
    const facts = [count(characters, "character"), count(this.current.blocks, "block")];
    if (pages.length) facts.splice(1, 0, count(pages.length, "page"));
    const part = last - first < characters;
    if (part) facts.push(`shown: ${number(first)} to ${number(last)}`);
    by("reader-facts").textContent = facts.join(" · ");
    by("parts").hidden = !part;
    by("earlier").disabled = first === 0;
    by("later").disabled = last >= characters;
    this.light();
  }

  /** Light up the sources of an answer, in whatever document is shown. */
  cite(citations) {
    this.citations = citations;
    this.list();
    this.light();
  }

  /** Take the score of every block of the bank, or none. */
  score(scores) {
    this.scores = new Map(scores.map((one) => [`${one.document_index} ${one.start}`, one.score]));
    this.warmth = warmth([...this.scores.values()]);
    this.light();
  }

  light() {
    const name = this.current?.name;
    const cited = new Map(
      this.citations.filter((one) => one.document === name).map((one) => [one.start, one]),
    );
    const top = Math.min(...this.citations.map((one) => one.rank));
    const quoted = [...cited.values()]
      .flatMap((one) => one.answer_spans ?? [])
      .sort(([one], [other]) => one - other);
    for (const block of this.blocks) {
      block.score = this.scores.get(`${this.index} ${block.start}`) ?? null;
      block.citation = cited.get(block.start) ?? null;
      if (block.citation) block.score ??= block.citation.score;
      block.warmth = this.warmth(block.score);
      mark(block, top);
      this.quote(block, quoted);
    }
    this.heat.show(this.blocks, this.start, this.end);
    this.onScroll();
  }

  /** Make the words of an answer that stand in a block strong. */
  quote(block, quoted) {
    const [start, end] = block.shown;
    const { element } = block;
    const inside = quoted
      .map(([from, to]) => [Math.max(start, from), Math.min(end, to)])
      .filter(([from, to]) => from < to);
    if (!inside.length && !block.quoted) return;
    block.quoted = inside.length > 0;
    const part = (from, to) => pieces(from, to, this.pages, this.cut);
    const shown = [];
    let at = start;
    for (const [from, to] of inside) {
      shown.push(...part(at, from), make("strong", {}, ...part(from, to)));
      at = to;
    }
    element.replaceChildren(...shown, ...part(at, end));
  }

  /** Show a citation: open its document, scroll to it and, if asked, give it the focus. */
  async show(citation, focus = true) {
    const goal = this.documents.find((one) => one.name === citation.document);
    if (!goal) return;
    const { start, end } = citation;
    if (goal.index !== this.index || start < this.start || end > this.end) {
      await this.open(goal.index, end > PART ? start - PART / 4 : 0);
    }
    const index = this.blocks.findIndex((block) => block.start === start);
    if (index < 0) return;
    this.heat.move(index);
    this.scrollTo(this.blocks[index].element, focus);
  }

  scrollTo(element, focus) {
    const behavior = calm.matches ? "auto" : "smooth";
    const [block, box] = [element.getBoundingClientRect(), text.getBoundingClientRect()];
    const above = Math.max(24, (box.height - block.height) / 3);
    text.scrollTo({ top: text.scrollTop + block.top - box.top - above, behavior });
    if (!focus) return;
    element.tabIndex = -1;
    element.focus({ preventScroll: true });
    if (box.top >= 0 && box.bottom <= innerHeight) return;
    text.scrollIntoView({ behavior, block: "nearest" });
  }

  onScroll() {
    const height = Math.max(1, text.scrollHeight);
    const end = text.scrollTop + text.clientHeight;
    this.heat.view(text.scrollTop / height, Math.min(1, end / height));
  }
}

/** Where a mark begins or ends that would cut a word: before the word. */
function wordBefore(at, first, last, cut) {
  if (at <= first || at >= last || !WORD.test(cut(at, at + 1))) return at;
  const [part] = cut(Math.max(first, at - LONGEST), at).match(WORD) ?? [""];
  return [...part].length < LONGEST ? at - [...part].length : at;
}

/** Text from start to end, with an empty element where a page begins. */
function pieces(start, end, pages, cut) {
  const found = [];
  let from = start;
  pages.forEach((page, index) => {
    if (page < start || page >= end || !index) return;
    if (page > from) found.push(cut(from, page));
    found.push(make("span", { class: "page", data: { page: `Page ${index + 1}` } }));
    from = page;
  });
  if (from < end) found.push(cut(from, end));
  return found;
}

/** Make a block a `mark` if it is a source, and a plain `span` if it is none. */
function mark(block, top) {
  const old = block.element;
  const tag = block.citation ? "mark" : "span";
  if (old.localName !== tag) {
    block.element = make(tag, { class: "block" }, ...old.childNodes);
    old.replaceWith(block.element);
  }
  if (!block.citation) return;
  const { rank, score: value } = block.citation;
  block.element.classList.toggle("best", rank === top);
  block.element.dataset.label = value === null ? String(rank) : `${rank} · ${score(value)}`;
  block.element.dataset.rank = rank;
}

/** Whether the answer's words stand in a source. */
export const isQuoted = ({ answer_spans: spans = [] }) => spans.length > 0;

export const place = (citation) =>
  (citation.page ? `page ${citation.page}, ` : "") +
  `characters ${number(citation.start)} to ${number(citation.end)}`;
