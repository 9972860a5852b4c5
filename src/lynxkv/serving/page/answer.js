// An answer as it grows: verified text that stays, and tentative text behind it that may be withdrawn.
// Offsets count characters as the server does: code points, not UTF-16 units.

const WITHDRAWN_MS = 2400;

export class Answer {
  #verified;
  #draft;
  #length = 0;
  #tentative = [];

  /** Show verified text in one element and tentative text in the other. */
  constructor(verified, draft) {
    this.#verified = verified;
    this.#draft = draft;
  }

  /** Characters of verified text. */
  get length() {
    return this.#length;
  }

  clear() {
    this.#length = 0;
    this.#tentative = [];
    this.#verified.replaceChildren();
    this.#show();
  }

  /** Text was drafted from character `index` on. */
  drafted(index, text) {
    const at = index - this.#length;
    if (at < 0) return; // verified meanwhile
    this.#tentative = [...this.#tentative.slice(0, at), ...text];
    this.#show();
  }

  /** Drafts from character `index` on are withdrawn. */
  retracted(index) {
    const at = Math.max(index - this.#length, 0);
    const wrong = this.#tentative.splice(at);
    this.#show();
    if (wrong.length > 0) this.#strike(wrong.join(""), at);
  }

  /** More text is certain. What was drafted just so becomes solid; what was drafted otherwise is withdrawn. */
  verified(text) {
    const points = [...text];
    let kept = 0;
    while (kept < points.length && points[kept] === this.#tentative[kept]) kept += 1;
    if (kept > 0) this.#append(points.slice(0, kept).join(""), "settled");
    this.#tentative.splice(0, kept);
    if (kept < points.length) {
      const wrong = this.#tentative.splice(0);
      if (wrong.length > 0) this.#strike(wrong.join(""), 0);
      this.#append(points.slice(kept).join(""), "");
    }
    this.#length += points.length;
    this.#show();
  }

  /** Nothing more comes: what was never verified is no part of the answer. */
  end() {
    this.retracted(this.#length);
  }

  #append(text, name) {
    const piece = document.createElement("span");
    piece.className = name;
    piece.textContent = text;
    this.#verified.append(piece);
  }

  #strike(text, at) {
    const piece = document.createElement("span");
    piece.className = "withdrawn";
    piece.setAttribute("aria-hidden", "true");
    piece.textContent = text;
    if (at === 0) this.#verified.append(piece);
    else this.#draft.after(piece);
    setTimeout(() => piece.remove(), WITHDRAWN_MS);
  }

  #show() {
    this.#draft.textContent = this.#tentative.join("");
  }
}
