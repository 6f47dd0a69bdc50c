// Requests to the buffer service. The token lives in this module's memory; on loopback a reload finds it again.

const kept = tabStorage();
let token = kept?.getItem("token") ?? "";
let received = 0;

/** What the browser keeps until the tab is closed; none beyond loopback, or where the browser allows none. */
function tabStorage() {
  try {
    return /^(localhost|127(\.\d+){3}|\[::1\])$/.test(location.hostname) ? sessionStorage : null;
  } catch {
    return null;
  }
}

/** An answer that is no success: the sentence of its problem document. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Take the token that `tba view` puts behind the `#`, which a browser never sends, and remove it from the address.
 * Returns whether there was one. */
export function takeToken() {
  const match = location.hash.match(/[#&]token=([^&]+)/);
  if (!match) return false;
  setToken(decoded(match[1]));
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  return true;
}

/** A part of an address as text; one that was cut or written by hand may be no valid encoding, and stays as it is. */
export function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** A link to another page of this server, which then need not ask for the token. */
export function withToken(href) {
  return token ? `${href}#token=${encodeURIComponent(token)}` : href;
}

export function setToken(text) {
  token = text.trim();
  kept?.setItem("token", token);
}

export function hasToken() {
  return token !== "";
}

/** Bytes of answers since the page was opened. */
export function bytesReceived() {
  return received;
}

/** The headers of a request. */
function headers(more = {}) {
  return token ? { authorization: `Bearer ${token}`, ...more } : more;
}

export async function get(path, query = {}) {
  return call("GET", address(path, query));
}

/** Return the body of an answer as a blob, which the browser may keep on disk. */
export async function getFile(path, query = {}) {
  const answer = await request("GET", address(path, query), {});
  return whole(() => answer.blob());
}

export async function send(method, path, body) {
  return call(method, path, { body: JSON.stringify(body), headers: { "content-type": "application/json" } });
}

/** A path with its query; values that are empty, null or undefined are left out. */
export function address(path, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return known.length ? `${path}?${new URLSearchParams(known)}` : path;
}

async function call(method, path, more = {}) {
  const answer = await request(method, path, more);
  return whole(async () => {
    const text = await answer.text();
    received += text.length;
    return text ? JSON.parse(text) : null;
  });
}

/** Read the body of an answer: the connection may end in its middle, and a proxy may answer with something else. */
async function whole(read) {
  try {
    return await read();
  } catch {
    throw new ApiError(0, "the answer of the buffer service was cut, or is not one of its own");
  }
}

async function request(method, path, more) {
  let answer;
  try {
    // relative to the page, so that a prefix of a reverse proxy stays in front
    answer = await fetch(path.replace(/^\//, ""), { method, cache: "no-store", ...more, headers: headers(more.headers) });
  } catch {
    throw new ApiError(0, "the buffer service does not answer");
  }
  if (answer.ok) return answer;
  let detail = `${answer.status} ${answer.statusText}`;
  try {
    detail = (await answer.json()).detail ?? detail;
  } catch {
    // the answer of something else, such as a proxy: its status has to do
  }
  throw new ApiError(answer.status, detail);
}
