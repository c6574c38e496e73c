// The page: which bank is chosen, and what is shown of it.

import { bankPath, getJson, send } from "./api.js";
import { Asking } from "./ask.js";
import { bankInAddress, putInAddress, showBanks } from "./banks.js";
import { announce, by, clearNotice, confirmed, notice, showProblem } from "./dom.js";
import { Reader } from "./reader.js";
import { acceptFiles, chooseBank, hideReading, offerEncodings, upload, watch } from "./upload.js";

const reader = new Reader();
const asking = new Asking(reader);
let banks = [];
let chosen; // its name; null if there is none to choose
let watching = null; // the bank whose reading is shown, and how to stop that
let writable = true; // whether the key may add and delete

const bank = (name = chosen) => banks.find((one) => one.name === name);

/** Get the banks anew, and show what has changed. */
async function refresh() {
  ({ data: banks, writable } = await getJson("/v1/banks"));
  if (!bank()) chosen = undefined;
  show();
}

function show() {
  showBanks(banks, chosen, choose);
  const there = bank();
  by("loading").hidden = true;
  by("work").hidden = !there?.documents;
  const full = there?.documents || there?.status === "building" || !by("reading").hidden;
  by("empty").hidden = Boolean(full);
  by("empty-title").textContent = there
    ? `${there.name} holds no document yet`
    : "Nothing has been read yet";
  by("empty-add").hidden = by("adding").hidden = !writable;
  by("empty-ask").hidden = writable;
  const own = writable && there && !there.read_only;
  by("delete-bank").hidden = !own;
  by("remove-document").hidden = !own || there.documents < 2;
}

/** Choose a bank: show its documents, and follow its reading if it is not read yet. */
async function choose(name) {
  const other = name !== chosen;
  if (other) {
    clearNotice();
    chosen = name;
    putInAddress(name);
    document.title = name ? `${name} · sedem` : "sedem";
  }
  asking.use(name);
  show();
  const there = bank();
  if (there?.status === "building") follow(name);
  if (there?.status === "failed") notice(failure(there));
  if (!there?.documents) return;
  await load(name);
  if (other) asking.light();
}

const load = (name) =>
  reader.load(name).catch((error) => showProblem(error, () => choose(name)));

/** What could not be read, one sentence a file. */
const failure = ({ failed = [], error }) =>
  [...new Set([...failed.map((one) => one.error), error])].filter(Boolean).join(". ") ||
  "Reading failed.";

function stopWatching() {
  watching?.controller.abort();
  watching = null;
  hideReading();
}

/** Show the reading into a bank, while this one or another is asked. */
async function follow(name) {
  if (watching?.name === name) return;
  stopWatching();
  const own = (watching = { name, controller: new AbortController() });
  const grown = () => refresh().then(() => name === chosen && load(name));
  try {
    const last = await watch(name, own.controller.signal, grown);
    if (watching !== own) return;
    stopWatching();
    await refresh();
    if (last.status === "ready") announce(`${name} is ready. You can ask now.`);
    const offered = offerEncodings(name, last, (file) => read(name, [file]));
    const notes = last.notes?.filter((note) => !offered.includes(note)).map((note) => `${note}.`);
    const told = last.error ? [failure(last)] : (notes ?? []);
    const asks = asking.running || document.activeElement === by("question");
    if (name !== chosen && bank()?.documents && asks) {
      if (last.status === "ready") told.unshift(`${name} is ready.`);
      notice(told.join(" "), "Show it", () => choose(name));
      return;
    }
    await choose(name);
    if (told.length) notice(told.join(" "));
    else if (document.activeElement === document.body) by("question").focus();
  } catch (error) {
    if (error.name === "AbortError" || watching !== own) return;
    stopWatching();
    showProblem(error, start);
  }
}

async function take(files) {
  if (!writable) {
    notice("Your key may ask, but it may not add documents.");
    return;
  }
  const name = await chooseBank(files, banks, chosen);
  if (name) await read(name, files);
}

async function read(name, files) {
  clearNotice();
  stopWatching();
  by("empty").hidden = by("encodings").hidden = true;
  try {
    await upload(name, files);
    await refresh();
    if (!bank()?.documents) await choose(name);
    await follow(name);
  } catch (error) {
    show();
    showProblem(error, error.status === 413 ? null : () => take(files));
  }
}

async function remove(question, path, removed = () => {}) {
  if (!(await confirmed(question))) return;
  try {
    await send(path, { method: "DELETE" });
    removed();
    await refresh();
    await choose(bank() ? chosen : (banks[0]?.name ?? null));
  } catch (error) {
    showProblem(error);
  }
}

async function start() {
  try {
    await Promise.all([refresh(), asking.start()]);
    const wanted = bank(bankInAddress()) ?? bank() ?? banks[0];
    if (wanted) await choose(wanted.name);
  } catch (error) {
    if (error.status === 503) {
      // The server has just been started, and opens its model.
      by("loading-text").textContent = error.message;
      setTimeout(start, 1000 * (error.retryAfter || 1));
      return;
    }
    by("loading").hidden = true;
    showProblem(error, start);
  }
}

acceptFiles(take);
addEventListener("hashchange", () => bank(bankInAddress()) && choose(bankInAddress()));
by("delete-bank").addEventListener("click", () => {
  const name = chosen;
  remove(`Delete the bank ${name}?`, bankPath(name), () => {
    asking.forget(name);
    if (watching?.name === name) stopWatching();
  });
});
by("remove-document").addEventListener("click", () => {
  const { name, index } = reader.current;
  const path = `${bankPath(chosen, "documents", index)}?${new URLSearchParams({ name })}`;
  remove(`Remove ${name} from ${chosen}?`, path);
});
start();
