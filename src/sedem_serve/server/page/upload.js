// Documents on their way into a bank: chosen or dropped, sent, and watched while they are read.

import { bankPath, events, send } from "./api.js";
import { announce, by, make } from "./dom.js";
import { SLUG, count, number, slug } from "./text.js";

const ENCODINGS =
  "windows-1252 windows-1250 windows-1251 koi8-r windows-1253 windows-1254 windows-1255 " +
  "windows-1256 shift_jis euc-jp gb18030 big5 euc-kr macintosh ibm866 utf-16le utf-16be";
const SAMPLE = 2 ** 16; // bytes that are looked at for words to show
const BATCH = 2 ** 25; // bytes of a request, unless one file is larger
const dialog = by("upload");
const sent = new Map(); // files by their banks and the names of their documents

/** Let people choose or drop files; `take(files)` is called with them. */
export function acceptFiles(take) {
  const input = by("files");
  for (const id of ["add", "add-first"]) by(id).addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = "";
    if (files.length) take(files);
  });
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  let inside = 0;
  const over = (by_) => {
    inside = Math.max(0, inside + by_);
    by("drop").hidden = !inside;
  };
  addEventListener("dragenter", (event) => hasFiles(event) && over(1));
  addEventListener("dragleave", (event) => hasFiles(event) && over(-1));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    over(-inside);
    const files = [...event.dataTransfer.files];
    if (files.length && !dialog.open) take(files);
  });
}

/** Ask into which bank files go; resolves to its name, or null. */
export function chooseBank(files, banks, present) {
  const own = banks.filter((bank) => !bank.read_only);
  const shown = files.slice(0, 6).map(nameAndSize);
  if (files.length > shown.length) shown.push(`and ${files.length - shown.length} more`);
  by("upload-files").replaceChildren(...shown.map((line) => make("li", {}, line)));
  by("upload-old").replaceChildren(
    ...own.map((one) => make("option", { value: one.name }, one.name)),
  );
  by("upload-old-line").hidden = !own.length;
  const old = own.some((one) => one.name === present);
  if (old) by("upload-old").value = present;
  dialog.querySelector(`input[value="${old ? "old" : "new"}"]`).checked = true;
  by("upload-new").value = free(slug(files[0].name), banks);
  by("upload-error").textContent = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue || null), { once: true });
  });
}

const nameAndSize = ({ name, size }) => `${name} (${number(Math.ceil(size / 1024))} kB)`;

/** A name that no bank has. */
function free(name, banks) {
  const taken = new Set(banks.map((bank) => bank.name));
  let [free_, next] = [name, 2];
  while (taken.has(free_)) free_ = `${name.slice(0, 60)}-${next++}`;
  return free_;
}

dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const isNew = dialog.querySelector("input[name=place]:checked").value === "new";
  const name = isNew ? by("upload-new").value.trim() : by("upload-old").value;
  if (isNew && !SLUG.test(name)) {
    by("upload-error").textContent =
      "Use lowercase letters, digits, - and _, and start with a letter or digit.";
    by("upload-new").focus();
    return;
  }
  dialog.close(name);
});
by("upload-cancel").addEventListener("click", () => dialog.close(""));
for (const [id, value] of [["upload-new", "new"], ["upload-old", "old"]]) {
  by(id).addEventListener("focus", () => {
    dialog.querySelector(`input[value="${value}"]`).checked = true;
  });
}

/** Send files to a bank. */
export async function upload(bank, files) {
  showReading(bank, { files: files.length }, "Sending");
  try {
    for (const body of forms(files)) {
      await send(bankPath(bank, "documents"), { method: "POST", body });
    }
    for (const file of files) sent.set(`${bank}/${file.name.normalize("NFC")}`, file);
  } catch (error) {
    hideReading();
    throw error;
  }
}

/** Files as the bodies of a few requests. */
function forms(files) {
  const found = [];
  let size = Infinity;
  for (const file of files) {
    if (size + file.size > BATCH) {
      found.push(new FormData());
      size = 0;
    }
    found.at(-1).append("file", file, file.name);
    size += file.size;
  }
  return found;
}

/** Follow a bank until everything in it is read; resolves to the last progress. */
export async function watch(bank, signal, grown) {
  let last = {};
  const response = await send(`${bankPath(bank, "progress")}?stream=true`, { signal });
  for await (const progress of events(response)) {
    const more = last.files_done !== undefined && progress.files_done > last.files_done;
    last = progress;
    showReading(bank, progress);
    if (more) grown();
  }
  return last;
}

function showReading(bank, progress, verb = "Reading") {
  const { files = 0, files_done: done = 0, blocks = 0 } = progress;
  const { characters = 0, characters_done: read = 0 } = progress;
  if (by("reading").hidden) announce(`${verb} ${count(files, "document")} into ${bank}`);
  by("reading").hidden = false;
  by("reading-title").textContent = `${verb} into ${bank}`;
  const bar = by("reading-bar");
  if (characters) bar.value = read / characters;
  else bar.removeAttribute("value");
  const parts = [files ? `${done} of ${count(files, "document")}` : "Preparing"];
  if (characters) parts.push(`${number(read)} of ${count(characters, "character")}`);
  if (blocks) parts.push(count(blocks, "block"));
  by("reading-text").textContent = parts.join(" · ");
}

export function hideReading() {
  by("reading").hidden = true;
}

/**
 * Offer encodings for files of which the server does not know it; `again(file)` is called with one
 * that is written again, as UTF-8. A file that was sent before a reload is not here any more.
 * Returns what the server said of these files.
 */
export function offerEncodings(bank, { notes = [], failed = [] }, again) {
  const UNSURE = /^'(.*?)' (does not say its encoding|holds binary data)/s;
  const file = (one) => sent.get(`${bank}/${one.match(UNSURE)?.[1]}`);
  const offered = [...notes, ...failed.map((one) => one.error)].filter(file);
  by("encoding-files").replaceChildren(
    ...offered.map((one) => encodingItem(file(one), one, again)),
  );
  by("encodings").hidden = !offered.length;
  return offered;
}

function encodingItem(file, told, again) {
  const guess = told.match(/read as cp(125\d)/)?.[1] ?? "1252";
  const select = make(
    "select",
    {},
    ...ENCODINGS.split(" ").map((name) => make("option", { selected: name.endsWith(guess) }, name)),
  );
  const words = make("output", { class: "hint" });
  const show = async () => {
    const text = await decoded(file.slice(0, SAMPLE), select.value);
    words.textContent = text.match(/.{0,60}[^\0-\x7f].{0,60}/u)?.[0] ?? text.slice(0, 120);
  };
  select.addEventListener("change", show);
  show();
  const read = async () => {
    again(new File([await decoded(file, select.value)], file.name));
  };
  return make(
    "li",
    { class: "line" },
    make("label", {}, `${told} `, select),
    make("button", { type: "button", on: { click: read } }, "Read again"),
    words,
  );
}

const decoded = async (file, encoding) => new TextDecoder(encoding).decode(await file.arrayBuffer());

by("encodings-close").addEventListener("click", () => (by("encodings").hidden = true));
