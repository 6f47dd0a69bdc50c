// Numbers, times and versions as people read them.

/** A number with few digits; "-" where it is unknown. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : Number(value.toPrecision(digits + 1)).toString();
}

/** A share as a percentage. */
export function percent(share) {
  return share === null || share === undefined ? "-" : `${(100 * share).toFixed(1)} %`;
}

/** Seconds as a short duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** Unix seconds as a local time. */
export function time(seconds) {
  if (!seconds) return "-";
  const at = new Date(1000 * seconds), two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** Bytes. */
export function bytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 1000 && at < units.length - 1; at++) value /= 1000;
  return `${at ? value.toPrecision(3) : value} ${units[at]}`;
}

/** The step of a version such as `1-250`. */
export function stepOf(version) {
  return version ? Number(version.split("-")[1]) : null;
}

/** Steps that a version is behind another one; "?" for one of another lineage, "-" where one is unknown. */
export function lag(version, newest) {
  if (!version || !newest) return "-";
  return version.split("-")[0] === newest.split("-")[0] ? number(stepOf(newest) - stepOf(version)) : "?";
}

/** A text in one line, shortened. */
export function oneLine(text, length = 120) {
  const line = text.replace(/\s+/g, " ");
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

const MARKER = String.raw`(?:<\|[^|<>\n]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?(?:start|end)_of_turn>|\[/?INST\]|</?s>|</?think>)`;
/** What begins the turn of the model. */
const MODEL = new RegExp(String.raw`${MARKER}\s*(?:assistant|model)\b|<[|｜](?:assistant|im_assistant|chatbot_token)[|｜]>|\[/INST\]`, "gi");
const ROLE = /^\s*(?:system|developer|user|human|tool)\s*(?:\n|$)/;

/** The last turn of a chat before the model's, found by the markers of chat templates; other texts, and one that is cut, as they are. */
export function lastTurn(text, isCut = false) {
  const turns = [...text.matchAll(MODEL)];
  if (!turns.length || isCut) return text;
  const pieces = text.slice(0, turns.at(-1).index).split(new RegExp(MARKER)).map((piece) => piece.replace(ROLE, "").trim());
  return pieces.findLast((piece) => piece) ?? text;
}

const GOLD = ["answer", "solution", "gold", "target", "label", "ground_truth", "expected", "reference"];

/** The gold answer in the data of a prompt as text; "" where no field has a usual name. */
export function gold(data) {
  const value = GOLD.map((name) => data?.[name]).find((one) => one !== null && one !== undefined) ?? "";
  return typeof value === "string" ? value : JSON.stringify(value);
}
