// Line charts over steps or time (uPlot), with one cursor for all, zoom by dragging, and their numbers as text.

import { emptyText, h } from "./dom.js";
import { number } from "./format.js";

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const MIN_HEIGHT = 240;
const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
const FONT = "12px system-ui, sans-serif";
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
   * @param {object} options title, howToRead, unit (of the values), range ([low, high]; automatic without), x (what the
   *   horizontal axis counts; steps without).
   */
  constructor(options) {
    this.options = options;
    this.plot = null;
    this.key = "";
    const id = `chart-${options.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
    this.host = h("div", { class: "plot" });
    this.element = h("section", { class: "panel chart", "aria-labelledby": id },
      h("h2", { id }, options.title), h("p", { class: "how" }, options.howToRead), this.host);
    this.observer = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.observer.observe(this.host);
  }

  /** As wide as its place, and a third of the window high. */
  size() {
    return { width: Math.max(200, this.host.clientWidth), height: Math.max(MIN_HEIGHT, Math.round(innerHeight / 3)) };
  }

  get x() {
    return this.options.x ?? "step";
  }

  /**
   * Draw.
   *
   * @param {number[]} steps ascending.
   * @param {{label: string, values: (number|null)[], points?: boolean, dash?: number[], place?: number}[]} series
   *   `place`, or else that in this list, has its colour, with values or without.
   * @param {string} empty what is said without any value.
   */
  draw(steps, series, empty) {
    const known = series.map((one, at) => ({ ...one, colour: COLOURS[(one.place ?? at) % COLOURS.length] })).filter((one) => one.values.some((value) => value !== null && value !== undefined));
    if (!known.length) {
      this.destroy();
      this.host.removeAttribute("role");
      this.host.removeAttribute("aria-label");
      this.host.replaceChildren(emptyText(empty));
      return;
    }
    const data = [steps, ...known.map((one) => one.values.map((value) => value ?? null))];
    const key = [this.x, ...known.map((one) => one.label)].join("|");
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
    this.host.setAttribute("aria-label", known.map((one) => describe(one, steps, this.x)).join("; "));
  }

  isZoomed() {
    const { min, max } = this.plot.scales.x, xs = this.plot.data[0];
    return xs.length > 0 && (min > xs[0] || max < xs[xs.length - 1]);
  }

  plotOptions(series) {
    const grid = colour("--line"), text = colour("--quiet");
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: FONT, labelFont: FONT, labelSize: 20 };
    return {
      ...this.size(),
      cursor: { sync: { key: sync().key }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: this.options.range ? () => this.options.range : around } },
      axes: [{ ...axis, size: 36, label: this.x, incrs: this.x === "step" ? WHOLE : null }, { ...axis, size: 50, label: this.options.unit, values: (_, ticks) => ticks.map((tick) => number(tick, 2)) }],
      series: [
        { label: this.x, value: (plot, step) => number(step ?? plot.data[0].at(-1)) },
        ...series.map((one) => ({
          label: one.label,
          stroke: colour(one.colour),
          width: one.points ? 0 : 1.5,
          dash: one.dash,
          spanGaps: true,
          // a line of one point is none
          points: { show: (plot, at) => one.points || plot.data[at].filter((value) => value !== null).length === 1, size: 7, fill: colour(one.colour) },
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

/** The range of an axis: a constant curve lies in the middle of one unit, without values below 0 where it has none. */
function around(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low < 0 ? low - 0.5 : Math.max(0, low - 0.5), high + 0.5] : window.uPlot.rangeNum(low, high, 0.1, true);
}

function last(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function describe(one, steps, x) {
  const known = one.values.filter((value) => value !== null && value !== undefined);
  return `${one.label}: ${known.length} values from ${x} ${number(steps[0])} to ${number(steps[steps.length - 1])}, ` +
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

/** The exponential mean of values, as TensorBoard smooths them: 0 leaves them as they are. */
export function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
