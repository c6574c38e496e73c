// The question, its settings, and the stream of its answer.

import { Card, showCards } from "./answers.js";
import { bankPath, events, getJson, postJson } from "./api.js";
import { announce, by, clearNotice, make, showProblem } from "./dom.js";
import { isQuoted } from "./reader.js";
import { confidenceWords, count } from "./text.js";

const GROUPS = [
  ["k", "Blocks to use (K)", ["1", "2", "4", "8", "all", "auto"]],
  ["condition", "Read them as", ["memory", "text", "both"]],
  ["selection", "Find them by", ["states", "words", "both"]],
  ["answer", "Answer with", ["span", "free", "auto"]],
];
const LABELS = { states: "meaning", span: "quote" };
const USUAL = ["2", "memory", "states", "free"]; // if no model says it
const KEPT = "sedem-answers-1"; // where a tab keeps its answers; another number is another form
const MOST = 20; // answers that are kept of a bank

export class Asking {
  constructor(reader) {
    this.reader = reader;
    this.bank = null;
    this.model = "";
    this.own = {};
    this.cards = []; // of the bank, the newest first
    this.running = null;
    by("groups").prepend(...GROUPS.map(choices));
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    by("stop").addEventListener("click", () => this.stop());
    by("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      by("ask").requestSubmit();
    });
    by("groups").addEventListener("input", showSettings);
    document.querySelector(".sign-out").addEventListener("submit", () => sessionStorage.clear());
  }

  /** Learn the model's name and what it does by itself. */
  async start() {
    const { data } = await getJson("/v1/models");
    const model = data.find((one) => !one.id.includes("@")) ?? data[0];
    if (!model) return;
    this.model = model.id;
    by("model").textContent = model.id;
    const own = (this.own = model.sedem ?? {});
    for (const [name] of GROUPS) check(name, String(own[name]));
    if (own.reader) {
      // Whoever chooses no way to answer gets the reader's.
      const chosen = { type: "radio", name: "answer", value: "", checked: true };
      const label = make("label", {}, make("input", chosen), own.reader);
      document.querySelector("input[name=answer]").closest("fieldset").append(label);
    }
    if (own.confidence === false) by("min-confidence").disabled = true;
    this.least = by("min-confidence").value = Math.round(100 * (own.min_confidence ?? 0));
    showSettings(); // a browser may have kept the minimum confidence
  }

  /** Ask another bank from now on; its answers are shown again. */
  use(bank) {
    if (bank === this.bank) return;
    this.stop();
    this.bank = bank;
    by("asked-bank").textContent = bank;
    this.cards = (kept()[bank] ?? []).map(({ question, settings, said, last }) => {
      const card = this.newCard(question, settings);
      card.add(said);
      card.sources(last);
      card.finish(last);
      return card;
    });
    this.cards[0]?.compare(this.cards[1]);
    showCards(this.cards);
  }

  newCard(question, settings) {
    const card = new Card(question, settings, (one, citation) => this.light(one, citation));
    card.bank = this.bank;
    return card;
  }

  /** Keep the answers for a reload of the page, as many of the newest as there is room for. */
  keep() {
    const answers = this.cards.slice(0, MOST).map((card) => card.content());
    for (let others = kept(); ; others = {}) {
      try {
        sessionStorage.setItem(KEPT, JSON.stringify({ ...others, [this.bank]: answers }));
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
        if (!answers.pop()) return;
      }
    }
  }

  /** Forget the answers from a bank that is deleted. */
  forget(bank) {
    sessionStorage.setItem(KEPT, JSON.stringify({ ...kept(), [bank]: undefined }));
  }

  settings() {
    const form = new FormData(by("ask"));
    const k = form.get("k");
    const least = Number(by("min-confidence").value);
    return {
      k: /^\d+$/.test(k) ? Number(k) : k,
      condition: form.get("condition"),
      // Left out where it is the model's own, which a bank without an index of words need not have.
      ...(form.get("selection") === this.own.selection
        ? {}
        : { selection: form.get("selection") }),
      ...(form.get("answer") ? { answer: form.get("answer") } : {}),
      // The model's own threshold is finer, and spares sources with the question's words.
      ...(least === this.least ? {} : { min_confidence: least / 100 }),
    };
  }

  async ask() {
    const question = by("question").value.trim();
    if (!question || this.running) return;
    clearNotice();
    const card = this.newCard(question, this.settings());
    const controller = new AbortController();
    this.running = controller;
    this.cards = [card, ...this.cards.filter((one) => one.done)];
    showCards(this.cards);
    announce("Answering");
    busy(true);
    try {
      await this.stream(card, controller.signal);
      if (card.bank === this.bank) this.keep();
      const said = [`Answer: ${card.said.textContent}`, count(card.citations.length, "source")];
      if (card.confidence !== null) said.splice(1, 0, confidenceWords(card.confidence));
      announce(`${said.join(". ")}.`);
    } catch (error) {
      this.fail(card, error);
    } finally {
      this.running = null;
      busy(false);
    }
  }

  async stream(card, signal) {
    const { question, settings } = card;
    const before = this.cards.find((one) => one !== card && one.done);
    const turns = before ? [before.question, before.said.textContent, question] : [question];
    const body = {
      model: this.model,
      messages: turns.map((content, n) => ({ role: n === 1 ? "assistant" : "user", content })),
      stream: true,
      bank: card.bank,
      ...settings,
    };
    // The number of passages for a reader, unless another one was chosen than is usual here.
    if (!settings.answer && settings.k === this.own.k) delete body.k;
    const response = await postJson("/v1/chat/completions", body, signal);
    let last = {};
    for await (const { sedem, choices: [choice] = [] } of events(response)) {
      if (sedem) {
        last = { ...last, ...sedem };
        // Only once, unless they change: a source that has the focus must stay.
        if (last.citations && card.buttons?.length !== last.citations.length) {
          card.sources(last);
          this.light(card);
        }
      }
      if (choice?.delta?.content) card.add(choice.delta.content);
    }
    card.finish(last);
    card.compare(this.cards[1]);
    if (last.citations?.some(isQuoted)) this.light(card);
  }

  fail(card, error) {
    if (error.name === "AbortError") {
      card.end("Stopped.");
      announce("Stopped");
      return;
    }
    card.end(error.message);
    showProblem(error, () => {
      by("question").value = card.question;
      this.ask();
    });
  }

  stop() {
    this.running?.abort();
  }

  /** Show the sources of an answer in the document, and the scores of all blocks. */
  async light(card = this.cards[0], citation = null) {
    if (!card || card.bank !== this.bank) return;
    const other = this.lit !== card;
    this.lit = card;
    for (const one of this.cards) one.active(one === card);
    this.reader.cite(card.citations);
    if (other) this.reader.score(card.scores ?? []);
    const quoted = card.citations.find(isQuoted);
    const goal = citation ?? quoted ?? card.citations.find((one) => one.rank === 1);
    const shown = goal && this.reader.show(goal, citation !== null);
    if (card.scores === undefined) await this.scores(card);
    await shown;
  }

  async scores(card) {
    card.scores = null;
    try {
      const path = bankPath(card.bank, "scores");
      const response = await postJson(path, { question: card.question });
      card.scores = (await response.json()).data;
      if (this.lit === card) this.reader.score(card.scores);
    } catch (error) {
      if (error.status === 400) this.reader.heat.none(error.message);
      else showProblem(error);
    }
  }
}

const kept = () => JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");

function choices([name, legend, options]) {
  const labels = options.map((value) => {
    const input = make("input", { type: "radio", name, value, checked: USUAL.includes(value) });
    return make("label", {}, input, LABELS[value] ?? value);
  });
  return make("fieldset", {}, make("legend", {}, legend), ...labels);
}

function check(name, value) {
  const found = document.querySelector(`input[name="${name}"][value="${CSS.escape(value)}"]`);
  if (found) found.checked = true;
}

/** Say the settings in the line that they are folded behind. */
function showSettings() {
  const value = Number(by("min-confidence").value);
  by("min-confidence-shown").textContent = value ? `${value} %` : "any";
  const chosen = document.querySelectorAll("#groups input:checked");
  const shown = [...chosen].map((one) => one.parentElement.textContent);
  shown[0] = `K ${shown[0]}`;
  if (value) shown.push(`at least ${value} %`);
  by("settings-shown").textContent = shown.join(" · ");
}

function busy(is) {
  const focused = document.activeElement;
  by("send").hidden = is;
  by("stop").hidden = !is;
  if (is && focused === by("send")) by("stop").focus();
  if (!is && focused === by("stop")) by("send").focus();
}
