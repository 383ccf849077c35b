// A small line of a number's newest values, with its usual value as a dashed line.

import { setAttribute, show, svg } from "./dom.js";

const [WIDTH, HEIGHT, MARGIN] = [96, 26, 2];

export function sparkline() {
  const usual = svg("line", { class: "usual", x1: 0, x2: WIDTH });
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const node = svg("svg", box, area, usual, line);
  node.draw = (trend) => {
    const values = trend?.values ?? [];
    const known = values.filter((value) => value != null);
    const top = Math.max(...known, trend?.baseline ?? 0, 1e-9) * 1.05;
    const y = (value) => HEIGHT - MARGIN - (value / top) * (HEIGHT - 2 * MARGIN);
    // Short histories begin at the right: the newest value is always at the same place.
    const step = WIDTH / Math.max(values.length - 1, 30);
    const left = WIDTH - step * (values.length - 1);
    let [path, shape, begun] = ["", "", null];
    values.forEach((value, index) => {
      const x = (left + index * step).toFixed(1);
      if (value == null) {
        if (begun) shape += `V${HEIGHT}H${begun}Z`;
        begun = null;
        return;
      }
      const height = y(value).toFixed(1);
      path += `${begun ? "L" : "M"}${x} ${height}`;
      shape += begun ? `L${x} ${height}` : `M${x} ${HEIGHT}V${height}`;
      begun ??= x;
    });
    if (begun) shape += `V${HEIGHT}H${begun}Z`;
    setAttribute(line, "d", path || "M0 0");
    setAttribute(area, "d", shape || "M0 0");
    const level = y(trend?.baseline ?? 0).toFixed(1);
    setAttribute(usual, "y1", level);
    setAttribute(usual, "y2", level);
    show(usual, trend?.baseline != null);
  };
  return node;
}

export const newest = (trend) => trend?.values?.at(-1) ?? null;
