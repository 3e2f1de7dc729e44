"""The style of a page of feedback: light, dark, and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff;
  --card: #f6f8fa;
  --ink: #1f2328;
  --soft: #59636e;
  --line: #d1d9e0;
  --right: #116329;
  --wrong: #b3261e;
  --open: #7d4e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0d1117;
    --card: #161b22;
    --ink: #e6edf3;
    --soft: #9198a1;
    --line: #3d444d;
    --right: #56d364;
    --wrong: #ff8d85;
    --open: #e3b341;
  }
}
* { box-sizing: border-box; }
body {
  background: var(--back);
  color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto;
  max-width: 60rem;
  padding: 2rem 1.5rem 4rem;
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 0; }
h3 { color: var(--soft); font-size: 0.85rem; font-weight: 600; margin: 1rem 0 0.25rem; }
header, .head {
  align-items: baseline;
  display: flex;
  gap: 1rem;
  justify-content: space-between;
}
header { border-bottom: 2px solid var(--line); padding-bottom: 0.75rem; }
h1, h2 { overflow-wrap: anywhere; }
.score { flex: none; font-variant-numeric: tabular-nums; font-weight: 600; }
header .score { font-size: 1.5rem; }
.student { color: var(--soft); margin: 0.5rem 0 0; overflow-wrap: anywhere; }
section {
  border: 1px solid var(--line);
  border-radius: 8px;
  margin-top: 1.25rem;
  padding: 1rem 1.25rem;
}
ul { list-style: none; margin: 0.75rem 0 0; padding: 0; }
li { border-top: 1px solid var(--line); padding: 0.4rem 0; }
.check { display: flex; gap: 0.75rem; }
.check .title { flex: 1; overflow-wrap: anywhere; }
.verdict { flex: none; font-weight: 600; width: 6.5rem; }
.right { color: var(--right); }
.wrong { color: var(--wrong); }
.blocked { color: var(--open); }
.tag {
  border: 1px solid var(--line);
  border-radius: 1em;
  color: var(--soft);
  font-size: 0.8rem;
  padding: 0 0.5em;
}
.note {
  border-left: 4px solid var(--open);
  margin: 0.75rem 0 0;
  overflow-wrap: anywhere;
  padding-left: 0.75rem;
}
pre {
  background: var(--card);
  border-radius: 6px;
  font: 0.85rem/1.45 ui-monospace, monospace;
  margin: 0;
  overflow-wrap: anywhere;
  padding: 0.6rem 0.8rem;
  white-space: pre-wrap;
}
li .note { margin: 0.25rem 0 0.25rem 7.25rem; }
li pre { background: none; margin-left: 7.25rem; padding: 0.2rem 0; }
footer { color: var(--soft); font-size: 0.85rem; margin-top: 2rem; }
@media (max-width: 40rem) { li pre, li .note { margin-left: 0; } }
@media print {
  :root {
    --back: #ffffff;
    --card: #ffffff;
    --ink: #000000;
    --soft: #444444;
    --line: #999999;
    --right: #000000;
    --wrong: #000000;
    --open: #000000;
  }
  body { font-size: 10.5pt; max-width: none; padding: 0; }
  pre { border: 1px solid var(--line); }
  li pre { border: none; }
  li, .head, h3 { break-inside: avoid; }
  .head, h3 { break-after: avoid; }
}
"""
