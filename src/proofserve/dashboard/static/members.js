// The table of members: worst first, a page at a time, with filters and a search by the server.

import { byId, el, setAttribute, setText, show, sync } from "./dom.js";
import { NONE, against, dateAndTime, duration, exact, number } from "./format.js";
import { newest, sparkline } from "./sparkline.js";

const LEVELS = { bad: "needs action", warning: "needs a look", idle: "idle", good: "well" };
const GLYPHS = { bad: "■", warning: "▲", idle: "○", good: "●" };
const STALLED_WARN_S = 10;
// Fewer members are all in view.
const SEARCHED = 10;

export function badge() {
  const glyph = el("span", { class: "glyph", "aria-hidden": "true" });
  const text = el("span");
  const node = el("span", { class: "badge" }, glyph, text);
  node.tell = (level = "good", words) => {
    setAttribute(node, "data-level", level);
    setText(glyph, GLYPHS[level]);
    setText(text, words);
  };
  return node;
}

const rateCell = {
  make: () => {
    const parts = { spark: sparkline(), now: el("b"), against: el("small") };
    const node = el("span", { class: "rate" }, parts.spark, el("span", { class: "stack" }, parts.now, parts.against));
    return Object.assign(node, { parts });
  },
  update: ({ parts }, { rate }) => {
    const now = newest(rate);
    parts.spark.draw(rate);
    setText(parts.now, now == null ? NONE : number(now));
    const words = against(now, rate?.baseline);
    setText(parts.against, words);
    setAttribute(parts.against, "class", words.startsWith("−") && parseInt(words.slice(1), 10) >= 25 ? "warning" : null);
  },
};

const verdictCell = {
  make: () => {
    const parts = { badge: badge(), by: el("small"), meter: el("meter", { min: 0, max: 2, high: 1, optimum: 0, low: 0.99 }) };
    return Object.assign(el("span", { class: "verdict" }, parts.badge, parts.meter, parts.by), { parts });
  },
  update: ({ parts }, { verdict }) => {
    const level = { fraud: "bad", honest: "good" }[verdict?.verdict] ?? "idle";
    parts.badge.tell(level, verdict?.verdict ?? "none yet");
    const known = verdict?.distance != null && verdict.threshold != null;
    show(parts.meter, known);
    if (known) {
      const share = verdict.distance / verdict.threshold;
      setAttribute(parts.meter, "value", Math.min(share, 2).toFixed(3));
      setAttribute(parts.meter, "aria-label", `distance ${exact(verdict.distance)} of the threshold ${exact(verdict.threshold)}`);
    }
    const of = known ? `${exact(verdict.distance)} of ${exact(verdict.threshold)}` : "";
    setText(parts.by, of);
    setAttribute(parts.by, "title", verdict && `${verdict.test ?? "verdict"}, ${dateAndTime(verdict.at)}`);
  },
};

const plain = (text, level) => ({
  make: () => el("span"),
  update: (node, member) => {
    setText(node, text(member));
    setAttribute(node, "class", level?.(member) || null);
  },
});

function stalled({ stalled_s: seconds }) {
  if (seconds == null) return NONE;
  return seconds < 1 ? "on time" : duration(Math.round(seconds));
}

// A long prefill takes long, too: whether it is a fault is for the server to say.
const stalledLevel = ({ stalled_s: seconds = 0, level }) =>
  seconds < STALLED_WARN_S ? null : level === "bad" ? "bad" : "warning";

// Fields of members: heading, whether it is a number, its cell.
const COLUMNS = {
  stalled_s: ["Since last step", true, plain(stalled, stalledLevel), "Seconds since the engine's last step while it has work"],
  rate: ["Nonces/s", true, rateCell, "The newest minutes; the dashed line is the member's usual rate"],
  chat_wait_s: ["Chat's longest wait", true, plain((m) => duration(m.chat_wait_s)), "Longest wait of a chat request for a proof"],
  held_back_by: ["Held back by", false, plain((m) => m.held_back_by || "nothing")],
  outbox_age_s: ["Outbox age", true, plain((m) => duration(m.outbox_age_s), (m) => (m.outbox_age_s > 60 ? "warning" : null)), "Age of the oldest callback that is not delivered"],
  in_flight: ["In flight", true, plain((m) => number(m.in_flight))],
  connections: ["Connections", true, plain((m) => number(m.connections))],
  faults: ["Faults", true, plain((m) => number(m.faults), (m) => (m.faults > 0 ? "warning" : null)), "Broken connections and answers of 500 and above, since the start"],
  verdict: ["Last verdict", false, verdictCell, "Distance against the threshold of the test"],
};

const NAMES = { node: ["Node", "member"], gateway: ["Backends", "backend"], fleet: ["Members", "member"] };

export class Members {
  // `view` is what the page asks for; `changed` is called when a person changes it.
  constructor(view, changed, open) {
    Object.assign(this, { view, changed, open, columns: null, body: null });
    let typing = 0;
    byId("search").addEventListener("input", ({ target }) => {
      clearTimeout(typing);
      typing = setTimeout(() => this.ask({ search: target.value.trim(), page: 1 }), 300);
    });
  }

  ask(change) {
    Object.assign(this.view, change);
    this.changed();
  }

  render(snapshot) {
    const { kind, members = [], columns = [], paging } = snapshot;
    show(byId("members"), true);
    setText(byId("members-title"), NAMES[kind][0]);
    this.rateLabel = kind === "gateway" ? "Answers/s" : "Nonces/s";
    const many = paging.total > 1;
    show(byId("filters"), many);
    show(byId("search-label"), paging.total > SEARCHED || this.view.search);
    this.filters(paging);
    if (this.columns !== columns.join()) this.table(columns);
    sync(this.body, members, {
      key: (member) => member.id,
      make: () => this.row(columns),
      update: (node, member) => this.fill(node, member),
    });
    show(this.none, !members.length);
    setText(this.none, paging.total ? "No member fits the filter." : "There is no member yet.");
    this.pager(paging, NAMES[kind][1]);
  }

  table(columns) {
    this.columns = columns.join();
    const heads = columns.map((name) => {
      const [label, numeric, , hint] = COLUMNS[name];
      const shown = name === "rate" ? this.rateLabel : label;
      return el("th", { scope: "col", role: "columnheader", class: numeric ? "number" : null, title: hint }, shown);
    });
    const fixed = ["State", "Name", "Model"].map((text) => el("th", { scope: "col", role: "columnheader" }, text));
    this.body = el("tbody", { role: "rowgroup" });
    // The roles stay when a narrow page lays the rows out as cards.
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, fixed, heads));
    const table = el("table", { role: "table", "aria-labelledby": "members-title" }, head, this.body);
    this.none = el("p", { class: "muted none", hidden: true });
    byId("member-table").replaceChildren(table, this.none);
  }

  row(columns) {
    const state = badge();
    const reason = el("small", { class: "reason" });
    const name = el("button", { type: "button", class: "name" });
    const model = el("span");
    const version = el("small");
    const cells = columns.map((column) => ({ column, node: COLUMNS[column][2].make() }));
    const cell = (label, numeric, ...content) =>
      el("td", { role: "cell", class: numeric ? "number" : null, "data-label": label }, ...content);
    const node = el("tr", { role: "row" },
      el("td", { role: "cell", class: "state" }, el("span", { class: "stack" }, state, reason)),
      el("th", { role: "rowheader", scope: "row", class: "who" }, name),
      cell("Model", false, el("span", { class: "stack" }, model, version)),
      cells.map(({ column, node: content }) => cell(column === "rate" ? this.rateLabel : COLUMNS[column][0], COLUMNS[column][1], content)));
    name.addEventListener("click", () => this.open(node.member.id));
    return Object.assign(node, { parts: { state, reason, name, model, version, cells } });
  }

  fill(node, member) {
    node.member = member;
    const { state, reason, name, model, version, cells } = node.parts;
    state.tell(member.level, member.state);
    setText(reason, member.reason ?? "");
    setText(name, member.name);
    setAttribute(name, "aria-label", `${member.name}: details`);
    setText(model, member.model ?? "");
    setText(version, member.version ? `vLLM ${member.version}` : "");
    setAttribute(node, "data-level", member.level ?? "good");
    for (const { column, node: content } of cells) COLUMNS[column][2].update(content, member);
  }

  filters({ levels, total }) {
    const choices = [["", "All", total], ...Object.entries(LEVELS).map(([level, text]) => [level, text, levels[level] ?? 0])];
    sync(byId("filters"), choices, {
      key: ([level]) => level,
      make: ([level]) => el("button", { type: "button", class: "choice", onclick: () => this.ask({ level, page: 1 }) },
        level && el("span", { class: "glyph", "data-level": level, "aria-hidden": "true" }, GLYPHS[level]),
        el("span"), el("b")),
      update: (node, [level, text, count]) => {
        setText(node.lastChild.previousSibling, text);
        setText(node.lastChild, number(count));
        setAttribute(node, "aria-pressed", this.view.level === level ? "true" : "false");
      },
    });
  }

  pager({ page, pages, matching }, word) {
    const pager = byId("pager");
    if (!show(pager, pages > 1)) return;
    if (!pager.parts) {
      const step = (by) => () => this.ask({ page: this.page + by });
      const [back, on] = [["Previous", -1], ["Next", 1]].map(([text, by]) =>
        el("button", { type: "button", class: "quiet", onclick: step(by) }, text));
      const where = el("span");
      pager.append(back, where, on);
      pager.parts = { back, where, on };
    }
    this.page = page;
    setText(pager.parts.where, `Page ${number(page)} of ${number(pages)}, ${number(matching)} ${word}s, worst first`);
    // Not `disabled`: a button that loses the focus would send a keyboard's user to the top.
    setAttribute(pager.parts.back, "aria-disabled", page <= 1 ? "true" : null);
    setAttribute(pager.parts.on, "aria-disabled", page >= pages ? "true" : null);
    this.view.page = page;
  }
}
