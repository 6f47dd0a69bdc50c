// Line charts over steps (uPlot), with one cursor for all, zoom by dragging, and their numbers as text.

import { emptyText, h } from "./dom.js";
import { number } from "./format.js";

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const HEIGHT = 190;
const sync = () => window.uPlot.sync("steps");
const drawn = new Set();

// uPlot reads its colours once: when the reader's theme changes, every chart is made again
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of [...drawn]) {
    chart.destroy();
    chart.draw(...chart.last);
  }
});

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** One chart with a heading and a sentence on how to read it. */
export class Chart {
  /**
   * @param {object} options title, howToRead, range ([low, high] or null for automatic).
   */
  constructor(options) {
    this.options = options;
    this.plot = null;
    this.key = "";
    const id = `chart-${options.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
    this.host = h("div", { class: "plot" });
    this.element = h("section", { class: "panel chart", "aria-labelledby": id },
      h("h2", { id }, options.title), h("p", { class: "how" }, options.howToRead), this.host);
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT }));
    this.observer.observe(this.host);
  }

  width() {
    return Math.max(200, this.host.clientWidth);
  }

  /**
   * Draw.
   *
   * @param {number[]} steps ascending.
   * @param {{label: string, values: (number|null)[], points?: boolean, dash?: number[]}[]} series
   * @param {string} empty what is said without any value.
   */
  draw(steps, series, empty) {
    const known = series.filter((one) => one.values.some((value) => value !== null && value !== undefined));
    if (!known.length) {
      this.destroy();
      this.host.removeAttribute("role");
      this.host.removeAttribute("aria-label");
      this.host.replaceChildren(emptyText(empty));
      return;
    }
    const data = [steps, ...known.map((one) => one.values.map((value) => value ?? null))];
    const key = known.map((one) => one.label).join("|");
    if (this.plot && this.key === key) {
      const { min, max } = this.plot.scales.x, isZoomed = this.isZoomed();
      this.plot.setData(data, !isZoomed);
      // a zoom that a reader has made stays where it is; setting it again draws what is new in it
      if (isZoomed) this.plot.setScale("x", { min, max });
    } else {
      this.destroy();
      this.host.replaceChildren();
      this.key = key;
      this.plot = new window.uPlot(this.plotOptions(known), data, this.host);
      drawn.add(this);
    }
    this.last = [steps, series, empty];
    this.host.setAttribute("role", "img");
    this.host.setAttribute("aria-label", known.map((one) => describe(one, steps)).join("; "));
  }

  isZoomed() {
    const { min, max } = this.plot.scales.x, xs = this.plot.data[0];
    return xs.length > 0 && (min > xs[0] || max < xs[xs.length - 1]);
  }

  plotOptions(series) {
    const grid = colour("--line"), text = colour("--quiet");
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    return {
      width: this.width(),
      height: HEIGHT,
      cursor: { sync: { key: sync().key }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: this.options.range ? () => this.options.range : around } },
      axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => number(tick, 2)) }],
      series: [
        { label: "step", value: (plot, step) => number(step ?? plot.data[0].at(-1)) },
        ...series.map((one, at) => ({
          label: one.label,
          stroke: colour(COLOURS[at % COLOURS.length]),
          width: one.points ? 0 : 1.5,
          dash: one.dash,
          spanGaps: true,
          points: { show: Boolean(one.points), size: 7, fill: colour(COLOURS[at % COLOURS.length]) },
          // without a cursor the newest value; under it, what is there
          value: (plot, value, index) => number(value ?? (plot.cursor.idx === null ? last(plot.data[index]) : null)),
        })),
      ],
    };
  }

  destroy() {
    drawn.delete(this);
    this.plot?.destroy();
    this.plot = null;
    this.key = "";
  }
}

/** The range of an axis: a constant curve lies in the middle of one unit. */
function around(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : window.uPlot.rangeNum(low, high, 0.1, true);
}

function last(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function describe(one, steps) {
  const known = one.values.filter((value) => value !== null && value !== undefined);
  return `${one.label}: ${known.length} values from step ${steps[0]} to ${steps[steps.length - 1]}, ` +
    `lowest ${number(known.reduce((a, b) => Math.min(a, b)))}, highest ${number(known.reduce((a, b) => Math.max(a, b)))}, last ${number(last(known))}`;
}

/** Put series over several step axes onto one: returns [steps, series with null where a step is missing]. */
export function align(curves) {
  const steps = [...new Set(curves.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  return [steps, curves.map((one) => {
    const values = new Array(steps.length).fill(null);
    one.steps.forEach((step, at) => { values[place.get(step)] = one.values[at]; });
    return { ...one, values };
  })];
}
