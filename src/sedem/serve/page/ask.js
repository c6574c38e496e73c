// The question, its settings, and the stream of its answer.

import { Card, showCards } from "./answers.js";
import { bankPath, events, getJson, postJson } from "./api.js";
import { announce, by, clearNotice, make, showProblem } from "./dom.js";
import { isQuoted } from "./reader.js";
import { confidenceWords, count } from "./text.js";

const BUDGETS = ["1", "2", "4", "8", "all", "auto"];
const CONDITIONS = [["memory", "Memory"], ["text", "Text"], ["both", "Both"]];
const SELECTIONS = [["states", "Meaning"], ["words", "Words"], ["both", "Both"]];
const ANSWERS = [["span", "Quote"], ["free", "Free"], ["auto", "Either"]];

export class Asking {
  constructor(reader) {
    this.reader = reader;
    this.bank = null;
    this.model = "";
    this.own = {};
    this.card = this.before = this.running = null;
    choices("k-choice", "k", BUDGETS.map((one) => [one, one]), "2");
    choices("condition-choice", "condition", CONDITIONS, "memory");
    choices("selection-choice", "selection", SELECTIONS, "states");
    choices("answer-choice", "answer", ANSWERS, "free");
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
    by("min-confidence").addEventListener("input", showLeast);
    showLeast(); // a browser may have kept its value
  }

  /** Learn the model's name and what it does by itself. */
  async start() {
    const { data } = await getJson("/v1/models");
    const model = data.find((one) => !one.id.includes("@")) ?? data[0];
    if (!model) return;
    this.model = model.id;
    by("model").textContent = model.id;
    const own = (this.own = model.sedem ?? {});
    check("k", String(own.k));
    for (const name of ["condition", "selection", "answer"]) check(name, own[name]);
    if (own.confidence === false) by("min-confidence").disabled = true;
  }

  /** Ask another bank from now on. */
  use(bank) {
    if (bank === this.bank) return;
    this.stop();
    this.bank = bank;
    by("asked-bank").textContent = bank;
    this.card = this.before = null;
    showCards();
  }

  settings() {
    const form = new FormData(by("ask"));
    const k = form.get("k");
    const least = Number(by("min-confidence").value) / 100;
    return {
      k: /^\d+$/.test(k) ? Number(k) : k,
      condition: form.get("condition"),
      // Left out where it is the model's own, which a bank without an index of words need not have.
      ...(form.get("selection") === this.own.selection
        ? {}
        : { selection: form.get("selection") }),
      answer: form.get("answer"),
      ...(least ? { min_confidence: least } : {}),
    };
  }

  async ask() {
    const question = by("question").value.trim();
    if (!question || this.running) return;
    clearNotice();
    const card = new Card(question, this.settings(), (one, citation) => this.light(one, citation));
    card.bank = this.bank;
    const controller = new AbortController();
    this.running = controller;
    this.place(card);
    busy(true);
    try {
      await this.stream(card, controller.signal);
      card.compare(this.before);
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

  /** Put a card first; the answer before it stays beside it. */
  place(card) {
    if (this.card?.citations.length) this.before = this.card;
    this.before?.retire();
    this.card = card;
    showCards(card, this.before);
    announce("Answering");
  }

  async stream(card, signal) {
    const { question, settings } = card;
    const body = {
      model: this.model,
      messages: [{ role: "user", content: question }],
      stream: true,
      bank: card.bank,
      ...settings,
    };
    const response = await postJson("/v1/chat/completions", body, signal);
    let last = {};
    for await (const { sedem, choices: [choice] = [] } of events(response)) {
      if (sedem) {
        last = { ...last, ...sedem };
        // Only once: a source that has the focus must stay.
        if (last.citations && !card.buttons) {
          card.sources(last);
          this.light(card);
        }
      }
      if (choice?.delta?.content) card.add(choice.delta.content);
    }
    card.finish(last);
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
  async light(card, citation = null) {
    if (card.bank !== this.bank) return;
    const other = this.lit !== card;
    this.lit = card;
    for (const one of [this.card, this.before]) one?.active(one === card);
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

function choices(into, name, options, chosen) {
  by(into).replaceChildren(
    ...options.map(([value, label]) =>
      make(
        "label",
        {},
        make("input", { type: "radio", name, value, checked: value === chosen }),
        make("span", {}, label),
      ),
    ),
  );
}

function check(name, value) {
  const found = document.querySelector(`input[name="${name}"][value="${CSS.escape(value)}"]`);
  if (found) found.checked = true;
}

function showLeast() {
  const value = Number(by("min-confidence").value);
  by("min-confidence-shown").textContent = value ? `${value} %` : "any";
}

function busy(is) {
  const focused = document.activeElement;
  by("send").hidden = is;
  by("stop").hidden = !is;
  if (is && focused === by("send")) by("stop").focus();
  if (!is && focused === by("stop")) by("send").focus();
}
