// What an operator may do. A snapshot offers each action with its method, path, body and a
// confirmation; the page asks, sends it with the key, and shows what the server answers.

import { refusal } from "./connection.js";
import { byId, el, setText, show, sync } from "./dom.js";
import { keepKey, keyHeaders, keyInput } from "./key.js";

let counter = 0;

export class Actions {
  // `done` is called with a sentence after an action has succeeded.
  constructor(done) {
    this.done = done;
    this.dialog = byId("action-dialog");
    this.offers = new Map();
  }

  // A row of buttons for `offers` about `subject`; buttons stay while their offer does.
  buttons(parent, offers = [], subject = "") {
    sync(parent, offers, {
      key: (offer) => offer.id,
      make: (offer) => {
        const node = el("button", { type: "button", class: offer.dangerous ? "danger" : "quiet" });
        node.addEventListener("click", () => this.ask(node.offer, node.subject));
        return node;
      },
      update: (node, offer) => {
        Object.assign(node, { offer, subject });
        setText(node, offer.label);
      },
    });
    show(parent, offers.length);
  }

  ask(offer, subject) {
    const fault = el("p", { class: "fault", role: "alert", hidden: true });
    const [keyField, keyValue] = keyInput("action-key", "Operator's key");
    keyField.hidden = true;
    keyValue.required = false;
    const inputs = (offer.fields ?? []).map((field) => input(field));
    const go = el("button", { type: "submit", class: offer.dangerous ? "danger" : "main" }, offer.label);
    const cancel = el("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Cancel");
    const form = el("form", {},
      el("h2", { id: "action-title" }, subject ? `${offer.label}: ${subject}` : offer.label),
      el("p", {}, offer.confirmation),
      inputs.length > 0 && el("div", { class: "inputs" }, inputs.map((each) => each.node)),
      keyField,
      fault,
      el("div", { class: "buttons" }, cancel, go));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      show(fault, false);
      const key = keyField.hidden ? undefined : keyValue.value.trim() || undefined;
      try {
        await send(offer, inputs, key);
        if (key) keepKey(key);
        this.dialog.close();
        this.done(`${offer.label}${subject ? ` of ${subject}` : ""}: done`);
      } catch (error) {
        setText(fault, error.status ? error.message : "The server did not answer. Look at its state before you try again.");
        show(fault, true);
        if ([401, 403].includes(error.status)) {
          keyField.hidden = false;
          keyValue.focus();
        }
      } finally {
        go.disabled = false;
      }
    });
    this.dialog.replaceChildren(form);
    this.dialog.showModal();
    // A dangerous action needs a second decision: Enter alone does not make it.
    (inputs[0]?.field ?? cancel).focus();
  }
}

function input({ name, label, kind = "text", value, required }) {
  const id = `field-${++counter}`;
  const type = kind === "text" ? "text" : "number";
  const field = el("input", { id, type, step: kind === "integer" ? 1 : "any", value, required, autocomplete: "off", spellcheck: "false" });
  const read = () => (field.value === "" ? undefined : kind === "text" ? field.value : Number(field.value));
  return { name, field, read, node: el("label", { class: "field", for: id }, el("span", {}, label), field) };
}

async function send(offer, inputs, key) {
  const body = structuredClone(offer.body ?? {});
  for (const { name, read } of inputs) {
    const value = read();
    if (value !== undefined) place(body, name.split("."), value);
  }
  const has = offer.body !== undefined || inputs.length > 0;
  // Below the folder of this page, which a proxy may have put behind a prefix.
  const url = new URL(offer.path.replace(/^\/+/, ""), new URL(".", document.baseURI));
  if (url.origin !== location.origin) throw new Error("another server");
  const response = await fetch(url, {
    method: offer.method ?? "POST",
    headers: { ...keyHeaders(key), ...(has ? { "Content-Type": "application/json" } : {}) },
    body: has ? JSON.stringify(body) : undefined,
  });
  if (!response.ok) throw await refusal(response);
}

function place(body, [first, ...rest], value) {
  if (rest.length) place((body[first] ??= {}), rest, value);
  else body[first] = value;
}
