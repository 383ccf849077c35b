// The key that an operator types in once. It lives as long as the tab.

import { byId, el, setText } from "./dom.js";

const NAME = "proofserve.key";

export const keyHeaders = (key = sessionStorage.getItem(NAME)) =>
  key ? { Authorization: `Bearer ${key}` } : {};

export const keepKey = (key) => sessionStorage.setItem(NAME, key);

export const keyInput = (id, label) => {
  const input = el("input", { id, type: "password", autocomplete: "off", spellcheck: "false", required: true });
  return [el("label", { class: "field", for: id }, el("span", {}, label), input), input];
};

// The dialog; `changed` is called after a key was typed in or forgotten.
export function keyDialog(changed) {
  const dialog = byId("key-dialog");
  const why = el("p", { class: "muted" });
  const [field, input] = keyInput("key-input", "Key");
  const use = (key) => {
    if (key) keepKey(key);
    else sessionStorage.removeItem(NAME);
    input.value = "";
    dialog.close();
    changed();
  };
  const form = el(
    "form",
    { onsubmit: (event) => { event.preventDefault(); use(input.value.trim()); } },
    el("h2", { id: "key-title" }, "Key"),
    why,
    field,
    el("div", { class: "buttons" },
      el("button", { type: "button", class: "quiet", onclick: () => use("") }, "Forget key"),
      el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      el("button", { type: "submit", class: "main" }, "Use key")),
  );
  dialog.append(form);
  return (reason) => {
    setText(why, reason || "A viewer's key shows everything; actions need an operator's key. The key stays in this tab.");
    if (!dialog.open) dialog.showModal();
    input.focus();
  };
}
