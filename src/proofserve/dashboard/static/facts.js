// Lists of details, and the dialog with all that is known of one member.

import { byId, el, setAttribute, setText, show, sync } from "./dom.js";
import { against, dateAndTime, exact, measured, number } from "./format.js";
import { badge } from "./members.js";
import { newest, sparkline } from "./sparkline.js";

// Characters of a value that needs the place of two.
const LONG = 28;

export function factList(parent, facts = []) {
  sync(parent, facts, {
    key: ({ label }) => label,
    make: () => el("div", {}, el("dt"), el("dd")),
    update: (node, { label, value, unit }) => {
      setText(node.firstChild, label);
      setText(node.lastChild, measured(value, unit));
      setAttribute(node, "class", String(value).length > LONG ? "long" : null);
    },
  });
}

export class MemberDialog {
  constructor(actions) {
    this.actions = actions;
    this.dialog = byId("member-dialog");
    this.parts = {
      title: el("h2", { id: "member-title" }),
      state: badge(),
      reason: el("p", { class: "reason" }),
      spark: sparkline(),
      rate: el("p", { class: "muted" }),
      verdict: el("p"),
      facts: el("dl", { class: "facts" }),
      buttons: el("div", { class: "buttons left" }),
    };
    const { title, state, reason, spark, rate, verdict, facts, buttons } = this.parts;
    const close = el("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Close");
    this.dialog.append(el("div", { class: "dialog-head" }, title, state), reason, spark, rate, verdict, facts, buttons, el("div", { class: "buttons" }, close));
    this.dialog.addEventListener("close", () => (this.id = null));
  }

  open(id) {
    this.id = id;
    this.render(this.snapshot);
    this.dialog.showModal();
  }

  // A member that has left the page of the table keeps what was last known of it.
  render(snapshot) {
    this.snapshot = snapshot;
    const member = this.id && snapshot.members?.find((each) => each.id === this.id);
    if (!member) return;
    const { title, state, reason, spark, rate, verdict, facts, buttons } = this.parts;
    setText(title, member.name);
    state.tell(member.level, member.state);
    setText(reason, member.reason ?? "");
    show(reason, member.reason);
    spark.draw(member.rate);
    show(spark, member.rate);
    const now = newest(member.rate);
    const usual = member.rate?.baseline;
    setText(rate, [`now ${number(now)}/s`, usual && `usually ${number(usual)}/s`, usual && against(now, usual)].filter(Boolean).join(", "));
    show(rate, member.rate);
    setText(verdict, verdictText(member.verdict));
    show(verdict, member.verdict);
    factList(facts, [
      { label: "Model", value: member.model || "unknown" },
      ...(member.version ? [{ label: "vLLM", value: member.version }] : []),
      ...(member.facts ?? []),
    ]);
    this.actions.buttons(buttons, member.actions, member.name);
  }
}

function verdictText(verdict) {
  if (!verdict) return "";
  const parts = [`${verdict.verdict}, ${dateAndTime(verdict.at)}`];
  if (verdict.test) parts.push(`by the test ${verdict.test}`);
  if (verdict.nonces) parts.push(`${number(verdict.nonces)} nonces`);
  if (verdict.distance != null) parts.push(`distance ${exact(verdict.distance)}`);
  if (verdict.threshold != null) parts.push(`threshold ${exact(verdict.threshold)}`);
  return `Last verdict: ${parts.join(", ")}`;
}
