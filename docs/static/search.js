/* Search: an error message finds its row of "When it goes wrong", and files have excerpts, too. */
"use strict";
const words = (text) => splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word) && !/^\d+$/.test(word));
const isOfAnError = (word) => /error|exception|warning|_/.test(word);

/* The rows of TROUBLES ([symptom, remedy, anchor]) that a query names: the last one fits best. */
function troubles(query) {
  const asked = new Set(words(query));
  const phrase = query.trim().toLowerCase();
  const found = [];
  for (const [symptom, remedy, anchor] of TROUBLES) {
    // A message stands in backticks: most of its words are in a pasted one.
    const code = words(symptom.split("`").filter((_, place) => place % 2).join(" "));
    const all = words(symptom);
    const message = code.length > 1 || code.some(isOfAnError) ? code : all;
    const share = message.filter((word) => asked.has(word)).length / message.length;
    const text = symptom.replaceAll("`", "");
    const isIn = [...asked].every((word) => all.includes(word));
    if (
      share >= 0.6
      || (isIn && (asked.size > 1 || [...asked].some(isOfAnError)))
      || (phrase.includes(" ") && text.toLowerCase().includes(phrase))
    ) {
      const title = `When it goes wrong: ${text}`;
      const does = remedy.replaceAll("`", "");
      found.push(["lessons/troubles", title, anchor, does, share, "lessons/troubles.md", "text"]);
    }
  }
  return found.sort((one, other) => one[4] - other[4]).slice(-5);
}

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const perform = Search._performSearch;
  Search._performSearch = (query, ...terms) => {
    const pages = perform(query, ...terms);
    for (const page of pages) // a lesson's page and its notebook have one title
      if (page[0].startsWith("notebooks/")) page[1] += ` (notebook ${page[0].slice(10)})`;
    return [...pages, ...troubles(query)];
  };
  if (location.protocol !== "file:") return;
  // A browser reads no other files of a folder, but runs scripts of it.
  const script = document.head.appendChild(document.createElement("script"));
  const loaded = new Promise((done) => (script.onload = done));
  script.src = "_static/texts.js";
  const folder = new URL(".", location).href;
  window.fetch = async (address) => {
    await loaded;
    const page = new URL(address, location).href.slice(folder.length, -".html".length);
    return new Response(`<div role="main">${_escapeHTML(TEXTS[page])}</div>`);
  };
});
