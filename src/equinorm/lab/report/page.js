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
  for (const card of document.querySelectorAll(".card"))
    card.hidden = document.getElementById(card.dataset.for)?.hidden ?? false;
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

// Folded parts are printed too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));

// What a link leads to is shown, whatever the filter says.
addEventListener("hashchange", () => document.getElementById(location.hash.slice(1))?.removeAttribute("hidden"));
