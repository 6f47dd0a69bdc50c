// The dialog that asks for a token.

import { hasToken, setToken } from "./api.js";
import { h } from "./dom.js";

let dialog = null;

/** Ask for a token, then call a function; one dialog at a time. */
export function signIn(then) {
  if (dialog) return;
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, size: "40" });
  dialog = h("dialog", { class: "signin", "aria-labelledby": "signin-title" },
    h("h2", { id: "signin-title" }, hasToken() ? "That token is unknown here" : "This page asks for a token"),
    h("p", {}, "A viewer's token shows everything; an operator's can also act. ", h("code", {}, "tba view"), " opens this page with a token."),
    h("form", { onsubmit: (event) => { event.preventDefault(); setToken(field.value); endSignIn(); then(); } },
      h("label", { for: "token" }, "Token "), field, " ", h("button", {}, "Sign in")));
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  // a browser lets a second Escape close it all the same
  dialog.addEventListener("close", () => dialog?.showModal());
  document.body.append(dialog);
  dialog.showModal();
}

/** Take the dialog away: there is a token now. */
export function endSignIn() {
  const open = dialog;
  dialog = null;
  open?.remove();
}
