"use strict";
// Sorting, copying, colours in sources; and the figures, drawn again when the page's width changes.

function sortKey(cell) {
  const text = (cell?.dataset.key ?? cell?.textContent ?? "").trim(),
    number = Number.parseFloat(text.replaceAll(",", ""));
  return /^[-+]?[\d.]/.test(text) && Number.isFinite(number)
    ? [0, number]
    : [text === "" || text === "–" ? 2 : 1, text];
}

function sortBy(table, heading, column) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: sortKey(row.cells[column]) }));
  rows.sort((one, other) => {
    const [kind, a] = one.key,
      [otherKind, b] = other.key;
    if (kind !== otherKind) return kind - otherKind;
    const order = kind === 0 ? a - b : a.localeCompare(b);
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows.map((entry) => entry.row));
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    const button = element("button", { type: "button" }, ...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sortBy(table, heading, column));
  });
}

function copyBySelection(text) {
  // where the page may not use the clipboard, as in some frames
  const area = element("textarea", { readonly: "", style: "position:fixed;opacity:0" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

for (const button of document.querySelectorAll("[data-copy], [data-copy-from]")) {
  button.addEventListener("click", async () => {
    const from = document.getElementById(button.dataset.copyFrom),
      text = from ? from.textContent : button.dataset.copy;
    const label = button.textContent;
    const done =
      (await navigator.clipboard?.writeText(text).then(
        () => true,
        () => false,
      )) || copyBySelection(text);
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  });
}

const WORDS =
  String.raw`alignas asm auto bool break case char class const constexpr continue default do double else enum
  extern false float for if inline int long namespace return short signed sizeof static static_assert struct switch
  template   true typename union unsigned using void volatile while __\w+__ u?int\d+_t`.replace(/\s+/g, "|");
const CUDA = new RegExp(
  [
    String.raw`(?<comment>//[^\n]*|/\*[^]*?\*/)`,
    String.raw`(?<directive>^[ \t]*#[^\n]*)`,
    String.raw`(?<text>"(?:[^"\\\n]|\\.)*")`,
    String.raw`(?<word>\b(?:${WORDS})\b)`,
  ].join("|"),
  "gm",
);
const DIFF = /(?<place>^(?:@@|---|\+\+\+)[^\n]*)|(?<added>^\+[^\n]*)|(?<removed>^-[^\n]*)/gm;

function highlight(block) {
  const text = block.textContent,
    parts = [];
  let end = 0;
  for (const match of text.matchAll(block.dataset.language === "diff" ? DIFF : CUDA)) {
    const [kind] = Object.entries(match.groups).find(([, found]) => found !== undefined);
    parts.push(text.slice(end, match.index), element("span", { class: kind }, match[0]));
    end = match.index + match[0].length;
  }
  block.replaceChildren(...parts, text.slice(end));
}

for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => details.querySelectorAll("pre[data-language]").forEach(highlight), {
    once: true,
  });
}

function drawAll() {
  drawProgress();
  drawParallel();
  drawSlices();
  drawLineage();
}

progressControls();
familyControls();
drawAll();
let drawnWidth = document.body.clientWidth,
  timer;
addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (document.body.clientWidth !== drawnWidth) {
      drawnWidth = document.body.clientWidth;
      drawAll();
    }
  }, 150);
});
