"""HTML of plans: a style for pages and notebooks, light and dark, and the parts they are made of.

What is hovered over is a `title` element. The script shows it at once and with its line breaks;
without the script, browsers show it themselves. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence

STYLE = """\
.autoshard { color-scheme: light dark; --ink: #1d2430; --soft: #5c6675; --paper: #ffffff;
  --line: #dde2ea; --card: #f5f7fa; --compute: #9aa7ba; --copies: #e3e8ef; --gather: #3b82c4;
  --reduce: #2f9e6b; --all-reduce: #8e5bb5; --exposed: #d9262f; --optimizer: #c08a2b;
  color: var(--ink); background: var(--paper); max-width: 1120px; padding: 16px 24px;
  box-sizing: border-box;
  font: 14px/1.45 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
@media (prefers-color-scheme: dark) { .autoshard { --ink: #e4e8ee; --soft: #9aa5b4;
  --paper: #14181f; --line: #2d3542; --card: #1d232d; --compute: #66738a; --copies: #2b3340;
  --gather: #5a9fe0; --reduce: #45b884; --all-reduce: #ab7bd1; --exposed: #ff5a5f;
  --optimizer: #d7a34a; } }
.autoshard h1 { font-size: 22px; margin: 4px 0; overflow-wrap: anywhere; }
.autoshard h2 { font-size: 16px; margin: 28px 0 6px; }
.autoshard p { margin: 4px 0; color: var(--soft); }
.autoshard pre { overflow-x: auto; background: none; color: inherit; font-size: 12px; }
.autoshard .cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.autoshard .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 14px; min-width: 108px; }
.autoshard .card b { display: block; font-size: 20px; font-weight: 600; }
.autoshard .card span { color: var(--soft); font-size: 12px; }
.autoshard .card.bad b { color: var(--exposed); }
.autoshard .legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12px; }
.autoshard .legend svg { display: inline-block; width: 12px; height: 12px; margin: 0 5px -1px 0; }
.autoshard svg { display: block; width: 100%; }
.autoshard svg text { font-size: 12px; fill: var(--soft); }
.autoshard svg .name { text-anchor: end; }
.autoshard svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.autoshard svg .middle { text-anchor: middle; }
.autoshard svg .inside { fill: var(--ink); pointer-events: none; }
.autoshard svg path { fill: none; }
.autoshard svg .grid { stroke: var(--line); stroke-width: 1; }
.autoshard svg .limit { stroke: var(--exposed); stroke-width: 1.2; stroke-dasharray: 5 4; }
.autoshard svg .way { stroke: var(--gather); stroke-width: 1.5; }
.autoshard svg .column { fill: var(--ink); fill-opacity: 0; }
.autoshard svg .column:hover { fill-opacity: 0.25; }
.autoshard svg rect:not(.column):hover, .autoshard svg circle:hover { opacity: 0.7; }
.autoshard .phase { fill: var(--card); stroke: var(--line); }
.autoshard .compute { fill: var(--compute); } .autoshard .copies { fill: var(--copies); }
.autoshard .gather { fill: var(--gather); } .autoshard .reduce { fill: var(--reduce); }
.autoshard .all_reduce { fill: var(--all-reduce); } .autoshard .exposed { fill: var(--exposed); }
.autoshard .optimizer-step { fill: var(--optimizer); }
.autoshard svg .parameters { fill: #4e79a7; } .autoshard svg .optimizer { fill: #76b7b2; }
.autoshard svg .gradients { fill: #59a14f; } .autoshard svg .activations { fill: #e2bd3f; }
.autoshard svg .gathered { fill: #9f6fc0; } .autoshard svg .unreduced { fill: #ef8432; }
.autoshard svg .temporaries { fill: #a3a9b1; } .autoshard svg .memory { fill: #4e79a7; }
.autoshard svg circle { stroke: var(--paper); stroke-width: 1; }
.autoshard .fits { fill: var(--compute); } .autoshard .front { fill: var(--gather); }
.autoshard svg .beyond { fill: var(--paper); stroke: var(--compute); stroke-width: 1.4; }
.autoshard .wide { overflow-x: auto; }
.autoshard table { border-collapse: collapse; font-size: 13px; margin: 6px 0;
  font-variant-numeric: tabular-nums; color: inherit; }
.autoshard th, .autoshard td { text-align: right; padding: 3px 10px; white-space: nowrap;
  border-bottom: 1px solid var(--line); background: none; }
.autoshard th { color: var(--soft); font-weight: 500; }
.autoshard th.words, .autoshard td.words { text-align: left; }
.autoshard tr.marked td { background: var(--card); font-weight: 600; }
.autoshard tr.faint td { color: var(--soft); }
.autoshard .columns { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: flex-start; }
.autoshard-says { position: fixed; z-index: 9999; pointer-events: none; white-space: pre-wrap;
  overflow-wrap: anywhere; max-width: min(640px, 92vw); max-height: 80vh; overflow: hidden;
  padding: 7px 10px; border-radius: 6px; background: #1d2430; color: #f2f4f7;
  font: 12px/1.4 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  box-shadow: 0 2px 10px #0006; }
.autoshard-says[hidden] { display: none; }
"""

SCRIPT = """\
(() => {
  if (window.autoshardSays) return;
  const box = window.autoshardSays = document.createElement("div");
  box.className = "autoshard-says";
  box.hidden = true;
  document.addEventListener("mousemove", event => {
    const mark = event.target.closest ? event.target.closest(".autoshard svg *") : null;
    const title = mark && mark.querySelector(":scope > title");
    if (title) {
      mark.autoshardSays = title.textContent;
      title.remove();
    }
    const words = mark && mark.autoshardSays;
    box.hidden = !words;
    if (!words) return;
    if (!box.isConnected) document.body.append(box);
    if (box.textContent !== words) box.textContent = words;
    const room = [innerWidth - box.offsetWidth - 8, innerHeight - box.offsetHeight - 8];
    box.style.left = Math.max(8, Math.min(event.clientX + 14, room[0])) + "px";
    box.style.top = Math.max(8, Math.min(event.clientY + 16, room[1])) + "px";
  });
})();
"""


def page(title: str, body: str) -> str:
    """Make a whole document of a `fragment`."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>"
        "<style>html { color-scheme: light dark } body { margin: 0 }"
        " body > .autoshard { margin: 0 auto }"
        " @media (prefers-color-scheme: dark) { body { background: #14181f } }</style>"
        f"</head>\n<body>\n{body}</body></html>\n"
    )


def fragment(parts: Iterable[str]) -> str:
    """Make a piece of a document, with its style and script, that any page or notebook can show."""
    inner = "\n".join(parts)
    return (
        f'<div class="autoshard"><style>\n{STYLE}</style>\n{inner}\n'
        f"<script>\n{SCRIPT}</script></div>\n"
    )


def tag(name: str, words: str) -> str:
    """Make an element of escaped text, `tag("h2", "Memory")`."""
    return f"<{name}>{html.escape(words)}</{name}>"


def cards(values: Mapping[str, str], bad: Collection[str] = ()) -> str:
    """Make a row of large values, each over its name; those that are `bad` are red."""
    found = (
        f'<div class="card{" bad" if name in bad else ""}">'
        f"<b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in values.items()
    )
    return f'<div class="cards">{"".join(found)}</div>'


def legend(names: Mapping[str, str]) -> str:
    """Make a legend of names by their colors, which are classes of `STYLE`."""
    found = (
        f'<span><svg viewBox="0 0 12 12"><rect class="{color}" width="12" height="12" rx="2"/>'
        f"</svg>{html.escape(name)}</span>"
        for color, name in names.items()
    )
    return f'<div class="legend">{"".join(found)}</div>'


def table(
    rows: Iterable[Sequence[str]], words: Collection[int], kinds: Mapping[int, str] | None = None
) -> str:
    """Make a table whose first row is its head.

    words: columns that are aligned to the left.
    kinds: classes of rows by their number, the first after the head being 0.
    """
    head, *body = rows
    lines = [f"<thead>{_row(head, 'th', words, '')}</thead><tbody>"]
    for number, row in enumerate(body):
        lines.append(_row(row, "td", words, (kinds or {}).get(number, "")))
    inner = "\n".join(lines)
    return f'<div class="wide"><table>{inner}</tbody></table></div>'


def _row(cells: Sequence[str], name: str, words: Collection[int], kind: str) -> str:
    inner = "".join(
        f'<{name} class="{"words" if number in words else "number"}">{html.escape(cell)}</{name}>'
        for number, cell in enumerate(cells)
    )
    return f'<tr class="{kind}">{inner}</tr>'
