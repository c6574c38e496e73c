// The list of banks, and the one that is chosen.

import { by, make } from "./dom.js";
import { count } from "./text.js";

const STATUS = { empty: "empty", building: "reading …", failed: "failed" };

/** What a bank holds, or what happens to it. */
const facts = (bank) =>
  STATUS[bank.status] ?? `${count(bank.documents, "document")} · ${count(bank.blocks, "block")}`;

/** Show the banks; `choose(name)` is called when another one is picked. */
export function showBanks(banks, chosen, choose) {
  by("bank-list").replaceChildren(
    ...banks.map((bank) => {
      const button = make(
        "button",
        { type: "button", class: `bank ${bank.status}`, on: { click: () => choose(bank.name) } },
        make("span", { class: "name" }, bank.name),
        make("span", { class: "facts" }, facts(bank)),
      );
      if (bank.name === chosen) button.setAttribute("aria-current", "true");
      return make("li", {}, button);
    }),
  );
  const select = by("bank-select");
  select.replaceChildren(...banks.map((bank) => make("option", { value: bank.name }, bank.name)));
  select.value = chosen;
  select.onchange = () => choose(select.value);
}

/** The bank in the address, which stays over a reload. */
export const bankInAddress = () => new URLSearchParams(location.hash.slice(1)).get("bank");

export function putInAddress(bank) {
  history.replaceState(null, "", bank ? `#${new URLSearchParams({ bank })}` : location.pathname);
}
