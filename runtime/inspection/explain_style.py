"""The style sheet of an explanation's page; colours follow the reader's light or dark setting."""

STYLE = """
:root { --page: #fbfbfa; --card: #fff; --ink: #1c2024; --soft: #667079; --line: #d9dde1; --good: #1a7f4b;
  --good-fill: #e3f5ea; --own: #8a4b00; --own-fill: #fdf0dc; --merge: #7a4fd0; --q: #3b82d6; --p: #e08a1e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --ink: #e8eaec; --soft: #98a2ab;
  --line: #363d44; --good: #54d08f; --good-fill: #143a27; --own: #f3b562; --own-fill: #3d2c12; --merge: #b79bff;
  --q: #6cabf2; --p: #f0a548; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .6rem; }
code, .text, .emitted, .token { font-family: ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: .7rem .9rem; max-height: 22rem; overflow: auto; margin: 0; }
.text .prompt { color: var(--soft); }
.text a { text-decoration: none; border-radius: 3px; }
.text a:hover { outline: 1px solid currentColor; }
.drafted { color: var(--good); background: var(--good-fill); }
.own { color: var(--own); background: var(--own-fill); }
.totals { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; margin: .9rem 0; }
.totals dt { color: var(--soft); font-size: .8rem; }
.totals dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.settings code { display: inline-block; background: var(--card); border: 1px solid var(--line); border-radius: 4px;
  padding: 0 .4rem; margin: 0 .2rem .3rem 0; font-size: .8rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; color: var(--soft); font-size: .82rem;
  align-items: center; }
.key { border: 1.5px solid var(--line); border-radius: 5px; padding: 0 .45rem; color: var(--ink); }
.key.accepted { border-color: var(--good); background: var(--good-fill); }
.key.rejected { opacity: .65; }
.key.not-sent { border-style: dotted; opacity: .6; }
.key.own { border-color: var(--own); background: var(--own-fill); }
.key.merge { border-style: dashed; border-color: var(--merge); }
.legend .bar { display: inline-block; width: 18px; height: 4px; margin-right: .35rem; vertical-align: middle; }
.legend .q { background: var(--q); }
.legend .p { background: var(--p); }
.scroll { overflow-x: auto; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: .7rem 0;
  padding: .5rem .8rem; scroll-margin-top: .5rem; }
details:target { border-color: var(--good); }
summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: .2rem .9rem; align-items: baseline; }
details[open] summary { margin-bottom: .5rem; }
.number { font-weight: 700; min-width: 1.6rem; text-align: right; color: var(--soft); }
.emitted b { font-weight: 500; border-radius: 3px; padding: 0 .2rem; margin-right: 2px; }
.facts, .times { color: var(--soft); font-size: .85rem; }
.times { margin-left: auto; font-variant-numeric: tabular-nums; }
svg { display: block; }
.stack { display: inline-block; margin-left: .6rem; border-radius: 3px; background: var(--line); }
.stack .draft { fill: var(--q); }
.stack .target { fill: var(--p); }
.stack .host { fill: var(--soft); }
.overview .hit { fill: transparent; }
.overview .drafted { fill: var(--line); }
.overview .accepted { fill: var(--good); }
.overview a:hover .drafted { fill: var(--soft); }
.edge { fill: none; stroke: var(--line); stroke-width: 1.5; }
.edge.accepted { stroke: var(--good); stroke-width: 2.5; }
.edge.not-sent { stroke-dasharray: 1 4; stroke-linecap: round; }
.edge.merge { stroke: var(--merge); stroke-dasharray: 6 4; opacity: .7; }
.edge.merge.accepted { stroke: var(--good); opacity: 1; }
.edge.own { background: none; stroke: var(--own); stroke-width: 2; }
.node { color: inherit; background: none; }
.node .box { fill: var(--card); stroke: var(--line); stroke-width: 1.5; }
.node .token { font-size: 12.5px; fill: var(--ink); white-space: pre; }
.node .probs { font-size: 10px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.node .bar { fill: var(--p); }
.node .bar.q { fill: var(--q); }
.node.root .box { fill: var(--line); }
.node.accepted .box { fill: var(--good-fill); stroke: var(--good); stroke-width: 2; }
.node.own .box { fill: var(--own-fill); stroke: var(--own); stroke-width: 2; }
.node.rejected { opacity: .65; }
.node.not-sent { opacity: .6; }
.node.not-sent .box { stroke-dasharray: 2 3; fill: none; }
.node:hover { opacity: 1; }
"""
