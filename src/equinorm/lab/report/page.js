"use strict";
// The filter: hides what does not match; the choice is kept in the address, so that it can be shared.
const form = document.querySelector("form"), fields = ["paper", "method", "verdict", "text"];
const sections = [...document.querySelectorAll("section")];
const words = new Map(sections.map(s => [s, s.textContent.toLowerCase()]));

function filter() {
  const want = Object.fromEntries(fields.map(f => [f, form.elements[f].value]));
  const text = want.text.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const section of sections) {
    const rows = [...section.querySelectorAll("[data-verdict]")];
    let hits = 0;
    for (const row of rows) {
      const hit = (!want.method || !("method" in row.dataset) || row.dataset.method === want.method)
        && (!want.verdict || row.dataset.verdict.split("|").includes(want.verdict));
      row.hidden = !hit;
      hits += hit && (!want.method || "method" in row.dataset);
    }
    const byRows = !(want.method || want.verdict) || hits > 0
      || (want.verdict === section.dataset.state && !want.method);
    const show = byRows && (!want.paper || section.dataset.paper === want.paper)
      && text.every(word => words.get(section).includes(word));
    section.hidden = !show;
    shown += show;
  }
  for (const head of document.querySelectorAll("h2[data-paper]"))
    head.hidden = !sections.some(s => s.dataset.paper === head.dataset.paper && !s.hidden);
  form.querySelector("output").textContent = `${shown} of ${sections.length}`;
}

function remember() {
  const kept = fields.filter(f => form.elements[f].value).map(f => [f, form.elements[f].value]);
  const hash = kept.length ? "#?" + new URLSearchParams(kept) : " ";
  try { history.replaceState(null, "", hash === " " ? location.pathname + location.search : hash); } catch { /* file: */ }
}

function recall() {
  if (!location.hash.startsWith("#?")) return;
  const kept = new URLSearchParams(location.hash.slice(2));
  for (const f of fields) form.elements[f].value = kept.get(f) || "";
}

form.addEventListener("input", () => { filter(); remember(); });
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => { filter(); remember(); }));
addEventListener("hashchange", () => { recall(); filter(); });
recall();
filter();

// A figure fills the window: wheel, buttons or + and - zoom, dragging moves, Escape or × closes.
const dialog = document.querySelector("dialog");
let view = null, whole = null, drag = null;

const svg = () => dialog.querySelector("svg");
const show = box => { view = box; svg().setAttribute("viewBox", box.join(" ")); };

function zoom(factor, x = 0.5, y = 0.5) {
  const [left, top, width, height] = view;
  const wide = Math.min(whole[2], Math.max(whole[2] / 20, width / factor)), high = wide * height / width;
  if (wide >= whole[2]) return show(whole);
  show([left + (width - wide) * x, top + (height - high) * y, wide, high]);
}

for (const button of document.querySelectorAll("figure button"))
  button.addEventListener("click", () => {
    svg()?.remove();
    dialog.prepend(button.querySelector("svg").cloneNode(true));
    whole = svg().getAttribute("viewBox").split(" ").map(Number);
    show(whole);
    dialog.showModal();
  });
dialog.addEventListener("click", event => {
  const act = event.target.dataset?.act;
  if (act === "close") dialog.close();
  else if (act) zoom(act === "in" ? 1.5 : 1 / 1.5);
});
dialog.addEventListener("keydown", event => {
  if (event.key === "+" || event.key === "=") zoom(1.5);
  if (event.key === "-") zoom(1 / 1.5);
});
dialog.addEventListener("wheel", event => {
  event.preventDefault();
  zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.clientX / innerWidth, event.clientY / innerHeight);
}, { passive: false });
dialog.addEventListener("pointerdown", event => { if (!event.target.dataset?.act) drag = [event.clientX, event.clientY]; });
addEventListener("pointerup", () => { drag = null; });
dialog.addEventListener("pointermove", event => {
  if (!drag || view === whole) return;
  const scale = Math.max(view[2] / innerWidth, view[3] / innerHeight);
  show([view[0] - (event.clientX - drag[0]) * scale, view[1] - (event.clientY - drag[1]) * scale, view[2], view[3]]);
  drag = [event.clientX, event.clientY];
});

// Folded parts are printed too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
