// Starts the page: takes snapshots from the connection and has each part show its share.

import { Actions } from "./actions.js";
import { Connection } from "./connection.js";
import { byId, el, setAttribute, setText, show, sync } from "./dom.js";
import { MemberDialog } from "./facts.js";
import { NONE, dateAndTime, duration, number, quantity, zone } from "./format.js";
import { keyDialog, keyHeaders } from "./key.js";
import { Members } from "./members.js";
import { renderDistances, renderFacts, renderGateway, renderJobs, renderRound } from "./panels.js";
import { sparkline } from "./sparkline.js";

// What is older than this many seconds is called old: two readings of the server.
const OLD_S = 6;
const MOST_ANNOUNCED = 3;
const STATES = { connecting: "Connecting", live: "Live", polling: "Asks every 5 s", lost: "Connection lost", refused: "No access" };

// A phone shows a member as a card, which is long.
const NARROW = matchMedia("(max-width: 760px)");
const view = { page: 1, limit: NARROW.matches ? 10 : 25, level: "", search: "" };
const shown = { snapshot: null, at: 0, state: "connecting", reason: "", problem: "" };

function query() {
  const given = Object.entries(view).filter(([, value]) => value);
  return new URLSearchParams(given);
}

const connection = new Connection({
  query,
  headers: () => keyHeaders(),
  on: {
    snapshot: (snapshot) => {
      fresh();
      render(snapshot);
    },
    same: ({ at }) => {
      fresh();
      if (at && shown.snapshot) setText(byId("as-of"), asOf(at));
    },
    problem: ({ detail }) => {
      shown.problem = detail;
      tick();
    },
    state: (state, reason = "", status = 0) => {
      if (state === "lost" && shown.state === "live") announce(`Connection lost: ${reason}`);
      if (["live", "polling"].includes(state) && shown.state === "lost") announce("The connection is back");
      Object.assign(shown, { state, reason });
      tick();
      if (status) askForKey(reason);
    },
  },
});

const askForKey = keyDialog(() => connection.restart());
const actions = new Actions((sentence) => {
  announce(sentence);
  connection.restart();
});
const dialog = new MemberDialog(actions);
const members = new Members(view, () => connection.restart(), (id) => dialog.open(id));

function fresh() {
  shown.at = performance.now();
  shown.problem = "";
  tick();
}

function render(snapshot) {
  tellChanges(shown.snapshot, snapshot);
  shown.snapshot = snapshot;
  setText(byId("kind"), snapshot.kind);
  setText(byId("title"), snapshot.title);
  document.title = `${snapshot.title}, ${snapshot.kind}`;
  setText(byId("version"), snapshot.version ?? "");
  setText(byId("note"), snapshot.note ?? "");
  show(byId("note"), snapshot.note);
  setText(byId("as-of"), asOf(snapshot.at));
  renderFigures(snapshot.figures ?? []);
  members.render(snapshot);
  dialog.render(snapshot);
  renderRound(snapshot, (parent, offers) => actions.buttons(parent, offers));
  renderGateway(snapshot);
  renderDistances(snapshot);
  renderJobs(snapshot);
  renderFacts(snapshot);
}

const asOf = (at) => `State of the server as of ${dateAndTime(at)}, by its clock.`;

function renderFigures(figures) {
  show(byId("figures"), figures.length);
  sync(byId("figures"), figures, {
    key: ({ label }) => label,
    make: () => {
      const parts = { label: el("h2"), value: el("b"), unit: el("span", { class: "unit" }), hint: el("small"), spark: sparkline() };
      const node = el("div", { class: "figure" }, parts.label, el("p", { class: "value" }, parts.value, parts.unit), parts.hint, parts.spark);
      return Object.assign(node, { parts });
    },
    update: (node, { label, value, unit, of, hint, level, trend }) => {
      const { parts } = node;
      const [text, named] = value == null ? [NONE, ""] : quantity(value, unit);
      setAttribute(node, "data-level", level ?? "good");
      setText(parts.label, label);
      setText(parts.value, text);
      setText(parts.unit, of == null ? named : `of ${number(of)}`);
      setText(parts.hint, hint ?? "");
      show(parts.spark, trend);
      if (trend) parts.spark.draw(trend);
    },
  });
}

// A screen reader hears what changed in kind, and no numbers.
function tellChanges(before, now) {
  if (!before) return;
  const old = new Map((before.members ?? []).map((each) => [each.id, each.state]));
  const changed = (now.members ?? []).filter(({ id, state }) => old.has(id) && old.get(id) !== state);
  const said = changed.slice(0, MOST_ANNOUNCED).map(({ name, state }) => `${name}: ${state}`);
  if (changed.length > MOST_ANNOUNCED) said.push(`and ${changed.length - MOST_ANNOUNCED} more changes`);
  if (before.round?.state !== now.round?.state && now.round) said.push(`round: ${now.round.state}`);
  if (said.length) announce(said.join("; "));
}

function announce(text) {
  setText(byId("live"), text);
}

// Once a second: how old is what the page shows, and why.
function tick() {
  const age = shown.at ? (performance.now() - shown.at) / 1000 : null;
  const old = age != null && age > OLD_S;
  const { state, reason, problem } = shown;
  const broken = ["lost", "refused"].includes(state) || problem || old;
  const label = problem && state === "live" ? "Server in trouble" : old && state === "live" ? "Live, but late" : STATES[state];
  setText(byId("connection-text"), label);
  setAttribute(byId("connection"), "data-state", problem || (old && state === "live") ? "late" : state);
  setAttribute(document.body, "data-old", broken && shown.at ? "true" : null);
  const what = age == null ? "Nothing could be shown yet." : `What you see is ${duration(Math.round(age))} old.`;
  const why = problem || reason;
  setText(byId("banner"), broken ? `${label}${why ? `: ${why}` : ""}. ${what}` : "");
  show(byId("banner"), broken);
}

byId("key-button").addEventListener("click", () => askForKey(""));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId(byId("members").hidden ? "main" : "members").focus();
});
setText(byId("zone"), zone());
setInterval(tick, 1000);
connection.restart();
