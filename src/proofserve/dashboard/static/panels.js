// The panels below the table: a round, a gateway's load, waits and keys, distances, jobs.

import { Chart, bars, chartKey, timesOf } from "./charts.js";
import { byId, el, setAttribute, setText, show, sync } from "./dom.js";
import { factList } from "./facts.js";
import { dateAndTime, duration, exact, measured, number, timeOfDay } from "./format.js";
import { badge } from "./members.js";
import { newest } from "./sparkline.js";

const LEVEL_COLOUR = { bad: "--bad", warning: "--warning", idle: "--muted", good: "--muted" };

// The heading and the parts of a section, made once.
function panel(id, title, make) {
  const section = byId(id);
  if (!section.parts) {
    const heading = el("h2", { id: `${id}-title` }, title);
    const head = el("div", { class: "panel-head" }, heading);
    section.append(head);
    section.parts = make(section, head);
  }
  return section.parts;
}

const lowest = (values) => values.reduce((low, value) => (value != null && value < low ? value : low), Infinity);
const highest = (values) => values.reduce((high, value) => (value != null && value > high ? value : high), 0);

export function renderRound({ round, actions, kind, at }, buttons) {
  if (!show(byId("round"), round || (kind !== "gateway" && actions?.length))) return;
  const parts = panel("round", "Round", (section, head) => {
    const made = { state: badge(), tools: el("div", { class: "tools" }), facts: el("dl", { class: "facts" }), events: el("ol", { class: "events", reversed: true }), since: el("p", { class: "muted" }) };
    head.append(made.state, made.tools);
    made.chart = new Chart({
      series: [{ label: "nonces/s", colour: "--accent", filled: true }, { label: "usual", colour: "--muted", dashed: true }],
    });
    const aside = el("div", { class: "events-box" }, el("h3", {}, "What happened"), made.events);
    section.append(made.since, el("div", { class: "round-body" }, made.chart.node, aside), made.facts);
    return made;
  });
  buttons(parts.tools, actions);
  show(parts.state, round);
  setText(parts.since, round ? sinceText(round, at) : "No round has run since this server started.");
  for (const part of [parts.chart.node.parentNode, parts.facts]) show(part, round);
  if (!round) return;
  parts.state.tell(round.level, round.state);
  factList(parts.facts, round.facts);
  roundEvents(parts, round.events ?? []);
  roundChart(parts, round);
}

function sinceText({ started_at: began, ended_at: ended, id }, at) {
  const end = ended ? `ended ${dateAndTime(ended)} after ${duration(Math.round(ended - began))}` : `for ${duration(Math.round(at - began))}`;
  return `${id}, since ${dateAndTime(began)}, ${end}`;
}

function roundEvents(parts, events) {
  // The newest first; the key tells events of the same moment apart.
  sync(parts.events, [...events].reverse(), {
    key: ({ at, text }) => `${at} ${text}`,
    make: ({ at, text, level }) => el("li", { "data-level": level ?? "good" }, el("time", { datetime: new Date(at * 1000).toISOString(), title: dateAndTime(at) }, timeOfDay(at)), " ", text),
    update: () => {},
  });
}

function roundChart(parts, round) {
  const { rate } = round;
  if (!show(parts.chart.node, rate?.values.length > 1)) return;
  const times = timesOf(rate, round.rate_until);
  const marks = (round.events ?? []).map(({ at, level }) => ({ at, colour: LEVEL_COLOUR[level ?? "good"] }));
  const read = (index) => {
    const value = rate.values[index];
    return `${timeOfDay(times[index])}: ${value == null ? "no round" : `${number(value)} nonces/s`}${rate.baseline ? `, usually ${number(rate.baseline)}` : ""}`;
  };
  const known = rate.values.filter((value) => value != null);
  const words = known.length ? `now ${number(newest(rate))}, lowest ${number(lowest(known))}, highest ${number(highest(known))}` : "none measured";
  const usual = times.map(() => rate.baseline ?? null);
  parts.chart.set([times, rate.values, usual], `Nonces per second over ${duration(times.at(-1) - times[0])}: ${words}`, { read, marks });
}

const LOAD_COLOURS = ["--accent", "--warning", "--good", "--bad"];

export function renderGateway({ gateway }) {
  for (const id of ["load", "waits", "traffic", "keys"]) show(byId(id), gateway);
  if (!gateway) return;
  loadChart(gateway);
  waitChart(gateway);
  trafficTable(gateway);
  keyTable(gateway);
}

function loadChart({ load, load_until: until }) {
  const series = load.map(({ label, unit }, index) => ({ label: unit ? `${label}${unit}` : label, colour: LOAD_COLOURS[index], filled: index === 0 }));
  const parts = panel("load", "Load", (section, head) => {
    const chart = new Chart({ series });
    head.append(chartKey(series));
    section.append(chart.node);
    return { chart };
  });
  const times = timesOf(load[0].trend, until);
  const read = (index) => `${timeOfDay(times[index])}: ${load.map(({ label, unit, trend }) => `${label.toLowerCase()} ${measured(trend.values[index], unit)}`).join(", ")}`;
  const words = load.map(({ label, unit, trend }) => `${label} now ${measured(newest(trend), unit)}, highest ${number(highest(trend.values))}`);
  parts.chart.set([times, ...load.map(({ trend }) => trend.values)], words.join("; "), { read });
}

function waitChart({ wait_bounds: bounds, waits, waits_over_s: over }) {
  const label = (index) => (index < bounds.length ? `≤ ${duration(bounds[index])}` : `> ${duration(bounds.at(-1))}`);
  const minutes = `in the last ${duration(Math.round(over))}`;
  const total = waits.reduce((sum, count) => sum + count, 0);
  const parts = panel("waits", "Waits for a permit", (section) => {
    const chart = new Chart({ series: [{ label: "requests", colour: "--accent" }], time: false, paths: bars, places: [1, 2, 4] });
    section.append(chart.node);
    return { chart };
  });
  const x = (place) => (Number.isInteger(place) && place >= 0 && place < bounds.length ? duration(bounds[place]).replace(/ (ms|s)$/, "$1") : place === bounds.length ? "more" : "");
  const read = (index) => (index == null ? `${number(total)} requests ${minutes}` : `${label(index)}: ${number(waits[index])} of ${number(total)} requests ${minutes}`);
  const words = waits.map((count, index) => count && `${label(index)}: ${number(count)}`).filter(Boolean);
  parts.chart.set([waits.map((_, index) => index), waits], `Waits for a permit ${minutes}: ${words.join(", ") || "none"}`, { x, read });
}

// A table whose rows are `items`; `columns` are [heading, text of an item, whether a number, level].
function simpleTable(labelledby, columns) {
  const body = el("tbody");
  const head = el("tr", {}, columns.map(([text, , numeric]) => el("th", { scope: "col", class: numeric ? "number" : null }, text)));
  const box = el("div", { class: "scroll", role: "region", tabindex: 0, "aria-labelledby": labelledby },
    el("table", { class: "plain" }, el("thead", {}, head), body));
  const render = (items, key) =>
    sync(body, items, {
      key,
      make: () => el("tr", {}, columns.map(([, , numeric], index) => el(index ? "td" : "th", { scope: index ? null : "row", class: numeric ? "number" : null }))),
      update: (node, item) => columns.forEach(([, text, numeric, level], index) => {
        const cell = node.children[index];
        setText(cell, text(item));
        setAttribute(cell, "class", [numeric && "number", level?.(item)].filter(Boolean).join(" ") || null);
      }),
    });
  return { box, render };
}

function trafficTable({ backends = [] }) {
  const parts = panel("traffic", "Answers by backend", (section) => {
    const table = simpleTable("traffic-title", [
      ["Backend", (each) => each.backend],
      ["Answers", (each) => number(each.answers), true],
      ["Faults", (each) => number(each.faults), true, (each) => each.faults && "warning"],
      ["First byte, median", (each) => duration(each.first_byte_p50_s), true],
      ["95th percentile", (each) => duration(each.first_byte_p95_s), true],
      ["Tokens", (each) => number(each.tokens ?? 0), true],
    ]);
    section.append(table.box, el("p", { class: "muted small" }, "Since the start of the gateway."));
    return { table };
  });
  parts.table.render(backends, (each) => each.backend);
}

function keyTable({ keys = [], keys_left_out: left = 0 }) {
  const parts = panel("keys", "Requests by key", (section) => {
    const table = simpleTable("keys-title", [
      ["Key", (each) => each.key],
      ["In flight", (each) => number(each.in_flight), true],
      ["Requests", (each) => number(each.requests), true],
      ["Errors", (each) => number(each.errors), true, (each) => each.errors && "warning"],
      ["Errors by code", (each) => Object.entries(each.codes ?? {}).sort((a, b) => b[1] - a[1]).map(([code, count]) => `${code} ${number(count)}`).join(", ") || "none"],
    ]);
    const note = el("p", { class: "muted small" });
    section.append(table.box, note);
    return { table, note };
  });
  parts.table.render(keys, (each) => each.key);
  setText(parts.note, left ? `Since the start of the gateway. ${number(left)} keys with fewer errors are left out.` : "Since the start of the gateway.");
}

export function renderDistances({ distances }) {
  if (!show(byId("distances"), distances)) return;
  const { edges, counts, threshold, about } = distances;
  const parts = panel("distances", "Distances", (section) => {
    const made = { chart: new Chart({ series: [{ label: "nonces", colour: "--accent" }], time: false, paths: bars }), about: el("p", { class: "muted small" }) };
    section.append(made.chart.node, made.about);
    return made;
  });
  const centres = counts.map((_, index) => (edges[index] + edges[index + 1]) / 2);
  const beyond = threshold == null ? 0 : counts.reduce((sum, count, index) => (edges[index] >= threshold ? sum + count : sum), 0);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const words = `${number(total)} nonces${threshold == null ? "" : `, ${number(beyond)} beyond the threshold ${exact(threshold)}`}`;
  const read = (index) => (index == null ? words : `${exact(edges[index])} to ${exact(edges[index + 1])}: ${number(counts[index])} nonces`);
  const marks = threshold == null ? [] : [{ at: threshold, colour: "--bad", text: `threshold ${exact(threshold)}` }];
  parts.chart.set([centres, counts], `Distances of the last verifications: ${words}`, { x: exact, read, marks, step: edges[1] - edges[0] });
  setText(parts.about, about ?? "");
}

export function renderJobs({ jobs }) {
  if (!show(byId("jobs"), jobs)) return;
  const parts = panel("jobs", "Queue of jobs", (section) => {
    const made = { text: el("p"), meter: el("meter", { min: 0, "aria-label": "Queue" }), facts: el("dl", { class: "facts" }) };
    section.append(made.text, made.meter, made.facts);
    return made;
  });
  const of = jobs.limit == null ? "" : ` of ${number(jobs.limit)}`;
  const oldest = jobs.oldest_s ? `, the oldest for ${duration(jobs.oldest_s)}` : "";
  setText(parts.text, jobs.queued ? `${number(jobs.queued)}${of} ${jobs.unit} wait or run${oldest}` : `No ${jobs.unit} wait${of && `; there is room for ${number(jobs.limit)}`}`);
  if (show(parts.meter, jobs.limit)) {
    for (const [name, value] of [["max", jobs.limit], ["high", jobs.limit * 0.8], ["low", jobs.limit * 0.5], ["optimum", 0], ["value", jobs.queued]]) setAttribute(parts.meter, name, value);
  }
  factList(parts.facts, jobs.states);
}

// A single member has its details on the page itself.
export function renderFacts({ members, paging }) {
  const only = paging.total === 1 && members?.length === 1 ? members[0] : null;
  if (show(byId("only"), only?.facts?.length)) factList(byId("only"), only.facts);
}
