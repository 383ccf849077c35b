// uPlot, drawn in the colours of the page, as wide as its place, with its values as text below.

import { el, setAttribute, setText } from "./dom.js";
import { hourMinute, timeOfDay } from "./format.js";

const HEIGHT = 200;
const dark = matchMedia("(prefers-color-scheme: dark)");
const contrast = matchMedia("(prefers-contrast: more)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tinted = (name) => `color-mix(in srgb, ${colour(name)} 18%, transparent)`;

// A chart in a figure. `series` has a label, a colour's name and, for `bars`, the kind. `places` are
// the distances of labels on an x axis that shows no time.
export class Chart {
  constructor({ series, time = true, paths, places }) {
    Object.assign(this, { series, time, paths, places, plot: null, data: null });
    this.place = el("div", { class: "chart", role: "img" });
    this.readout = el("figcaption", { class: "readout" });
    this.node = el("figure", {}, this.place, this.readout);
    new ResizeObserver(() => this.fit()).observe(this.place);
    for (const query of [dark, contrast]) query.addEventListener("change", () => this.restyle());
  }

  // `x` writes a place on the x axis, `read` the text below for one index. `marks` are vertical
  // lines, and `step` is the width of a bar.
  set(data, summary, { x = axisTime, read, marks = [], step = 1 }) {
    Object.assign(this, { data, x, read, marks, step });
    setAttribute(this.place, "aria-label", summary);
    if (!this.plot) this.fit();
    else this.plot.setData(data);
    this.tell(this.plot?.cursor.idx);
  }

  fit() {
    const width = Math.floor(this.place.clientWidth);
    if (!this.data || width < 40) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this.plot = new uPlot(this.options(width), this.data, this.place);
  }

  restyle() {
    this.plot?.destroy();
    this.plot = null;
    this.fit();
  }

  tell(index) {
    const last = (this.data?.[0].length ?? 0) - 1;
    setText(this.readout, last < 0 ? "" : this.read(index ?? (this.time ? last : null)));
  }

  options(width) {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `11px ${colour("--font")}`, gap: 6 };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: this.time ? undefined : (u, low, high) => [low - 0.6 * this.step, Math.max(high + 0.6 * this.step, ...this.marks.map(({ at }) => at * 1.02))] }, y: { range: (u, low, high) => [0, Math.max(high * 1.08, 1e-9)] } },
      axes: [
        { ...axis, size: 28, space: 64, incrs: this.time ? [5, 10, 30, 60, 120, 300, 600, 1800, 3600] : this.places, values: (u, places) => places.map((place) => this.x(place, places)), grid: { show: this.time, ...axis.grid } },
        { ...axis, size: 46, space: 36, values: (u, places) => places.map(short) },
      ],
      series: [{}, ...this.series.map((each) => this.line(each))],
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        draw: [(plot) => this.marks.forEach((mark) => drawMark(plot, mark))],
      },
    };
  }

  line({ label, colour: name, dashed, filled }) {
    const paths = this.paths?.();
    return {
      label,
      stroke: colour(name),
      width: dashed ? 1 : 1.5,
      dash: dashed ? [4, 4] : undefined,
      fill: filled || paths ? tinted(name) : undefined,
      paths,
      points: { show: false },
    };
  }
}

function drawMark(plot, { at, colour: name, text }) {
  const x = plot.valToPos(at, "x", true);
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour(name);
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, top + height);
  ctx.stroke();
  if (text) {
    ctx.font = `${11 * devicePixelRatio}px ${colour("--font")}`;
    ctx.textAlign = x > left + width * 0.7 ? "right" : "left";
    ctx.fillText(text, x + (ctx.textAlign === "left" ? 5 : -5) * devicePixelRatio, top + 12 * devicePixelRatio);
  }
  ctx.restore();
}

const short = (value) => (value >= 1000 ? `${+(value / 1000).toPrecision(3)}k` : `${+value.toPrecision(3)}`);

export const bars = () => uPlot.paths.bars({ size: [0.92, 60], radius: 0.12 });

// The times of a trend whose last value was measured at `until`, seconds.
export const timesOf = (trend, until) =>
  trend.values.map((_, index) => until - (trend.values.length - 1 - index) * trend.step_s);

const axisTime = (place, places) =>
  places.length > 1 && places[1] - places[0] < 60 ? timeOfDay(place) : hourMinute(place);

// The key of a chart with several lines: a sample of each, and its label.
export const chartKey = (series) =>
  el("ul", { class: "chart-key" }, series.map(({ label, colour: name, dashed }) =>
    el("li", {}, el("span", { class: `swatch ${name.slice(2)} ${dashed ? "dashed" : ""}`, "aria-hidden": "true" }), label)));
