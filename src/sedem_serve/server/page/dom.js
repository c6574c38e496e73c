// Elements. Text from documents and answers is only ever set as text, never as markup.

/** The element with an id. */
export const by = (id) => document.getElementById(id);

/** Make an element: properties, then children, which are elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "on") for (const on in value) element.addEventListener(on, value[on]);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Tell people who hear the page what has happened. */
export function announce(text) {
  by("status").textContent = text;
}

let act = null;

/** Show a message above everything, with one thing that can be done about it. */
export function notice(text, label = "", action = null) {
  const button = by("notice-action");
  act = action;
  by("notice-text").textContent = text;
  button.textContent = label;
  button.hidden = !label;
  button.disabled = false;
  by("notice").hidden = false;
}

/** Take the message away. */
export function clearNotice() {
  by("notice").hidden = true;
  act = null;
}

/** Show what went wrong with a request, and how to go on. */
export function showProblem(error, again = null) {
  if (error.status === 401) {
    notice("The server does not accept your key any more.", "Sign in", () => location.reload());
    return;
  }
  notice(error.message, again ? "Try again" : "", again);
  if (again && error.retryAfter) wait(error.retryAfter);
}

/** Hold the button back until the server takes questions again. */
function wait(seconds, waiting = act) {
  if (act !== waiting) return;
  by("notice-action").disabled = seconds > 0;
  by("notice-action").textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  if (seconds > 0) setTimeout(wait, 1000, seconds - 1, waiting);
}

by("notice-close").addEventListener("click", clearNotice);
by("notice-action").addEventListener("click", () => {
  const action = act;
  clearNotice();
  action?.();
});

/** Ask before something is deleted; resolves to whether it is. */
export function confirmed(question) {
  const dialog = by("confirm");
  by("confirm-title").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
