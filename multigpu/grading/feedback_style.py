"""The style of a page of feedback."""

STYLE = """
:root { color-scheme: light dark; --soft: light-dark(#5c646d, #9aa4af); --line: #8c959f66; }
body {
  font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto;
  max-width: 60rem;
  overflow-wrap: anywhere;
  padding: 2rem 1.5rem 4rem;
}
h1, h2, ul, pre { margin: 0; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; }
h3 { color: var(--soft); font-size: 0.85rem; margin: 1rem 0 0.25rem; }
header, .head, .check { align-items: baseline; display: flex; gap: 1rem; }
header { border-bottom: 2px solid var(--line); }
h1, h2, .title { flex: 1; }
.score { font-variant-numeric: tabular-nums; font-weight: 600; }
.student, footer { color: var(--soft); }
section { border: 1px solid var(--line); margin-top: 1.25rem; padding: 1rem; }
ul { list-style: none; padding: 0; }
li { border-top: 1px solid var(--line); padding: 0.4rem 0; }
.verdict { flex: none; font-weight: 600; width: 7.5rem; }
.right { color: light-dark(#116329, #56d364); }
.wrong { color: light-dark(#b3261e, #ff8d85); }
.blocked { color: light-dark(#7d4e00, #e3b341); }
.tag { border: 1px solid var(--line); border-radius: 1em; padding: 0 0.5em; }
.note { border-left: 4px solid var(--line); padding-left: 0.75rem; }
pre {
  background: #8c959f1a;
  font: 0.85rem/1.45 ui-monospace, monospace;
  padding: 0.6rem 0.8rem;
  white-space: pre-wrap;
}
"""
