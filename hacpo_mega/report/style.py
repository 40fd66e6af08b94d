"""The style sheet of the report page: system fonts, colours for light and dark, nothing loaded from elsewhere."""

STYLE = """
:root { --paper:#fff; --ink:#22262c; --faint:#6a717c; --line:#e4e7eb; --soft:#f6f7f9;
  --right:#1f9d6b; --wrong:#d14d5a; --partly:#c9912a; color-scheme:light dark }
@media (prefers-color-scheme:dark) {
  :root { --paper:#171a1f; --ink:#e3e6ea; --faint:#98a0ab; --line:#2b3037; --soft:#1e2228 }
}
* { box-sizing:border-box }
body { background:var(--paper); color:var(--ink); font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
  max-width:1080px; margin:0 auto; padding:40px 28px 80px }
h1 { font-size:27px; margin:0 0 2px; letter-spacing:-.01em; overflow-wrap:anywhere }
h2 { font-size:19px; margin:52px 0 2px; padding-top:18px; border-top:1px solid var(--line) }
h3 { font-size:15px; margin:28px 0 8px } h4 { font-size:13.5px; margin:0 0 8px }
small, .note, .sub { color:var(--faint); font-weight:400 } .note { margin:0 0 14px }
pre { font:12.5px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; white-space:pre-wrap;
  overflow-wrap:anywhere; margin:0 }
figure { margin:0; overflow-x:auto } figure svg { width:100%; min-width:560px; height:auto; display:block }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(230px,1fr)); gap:14px; margin:26px 0 0 }
.card { background:var(--soft); border-radius:10px; padding:16px 18px; border-top:3px solid var(--agent) }
.card .name { font-weight:650 }
.card .big { font-size:25px; font-weight:650; font-variant-numeric:tabular-nums; margin:4px 0 }
.card .big small { font-size:17px } .card .gain { font-size:14px; font-weight:600 }
.card .alone { font-size:13px; color:var(--wrong) }
.alert { margin:18px 0 0; padding:10px 16px; border-left:4px solid var(--wrong); background:var(--soft) }
.facts-grid { display:grid; grid-template-columns:fit-content(38%) 1fr; gap:3px 18px; margin:22px 0 0 }
.facts-grid dt { color:var(--faint) } .facts-grid dd { margin:0; overflow-wrap:anywhere }
.wide { overflow-x:auto }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; width:100% }
th { text-align:left; color:var(--faint); font-weight:500; font-size:13px }
th, td { padding:6px 14px 6px 0; border-bottom:1px solid var(--line); vertical-align:top }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align:right; white-space:nowrap }
article { margin:0 0 26px } .prompt { display:flex; gap:14px; align-items:baseline; flex-wrap:wrap; margin:0 0 8px }
.prompt pre { font-weight:650; max-height:14em; overflow:auto } .prompt .gold pre { display:inline }
.skill { font-size:12px; color:var(--faint); border:1px solid var(--line); border-radius:99px; padding:0 9px }
.gold { color:var(--faint); font-size:13px }
.columns { display:grid; grid-template-columns:repeat(var(--columns),minmax(200px,1fr)); gap:14px; overflow-x:auto }
.verdict { margin:0 0 4px; font-size:13.5px; padding-left:10px; border-left:3px solid var(--line) }
.verdict.good { border-color:var(--right) } .verdict.warn { border-color:var(--partly) }
.verdict.bad { border-color:var(--wrong) }
@media (max-width:560px) {
  body { padding:24px 14px 60px } .columns, .facts-grid { grid-template-columns:minmax(0,1fr) }
  .facts-grid dd { margin-bottom:6px } .numbers { font-size:12px } th, td { padding-right:8px }
  .numbers td:not(:first-child), .numbers th:not(:first-child) { white-space:normal }
  .numbers th { font-size:11px } figure svg { min-width:480px }
}
.message { margin:0 0 6px } .message small { display:block; font-size:11px }
.prompt .message.system pre { font-weight:400; color:var(--faint) }
.column { min-width:0 }
.answer { background:var(--soft); border-left:4px solid var(--faint); border-radius:0 8px 8px 0; padding:9px 12px;
  margin:0 0 8px }
.answer pre { max-height:15em; overflow:auto }
.answer.right { border-color:var(--right) } .answer.wrong { border-color:var(--wrong) }
.answer.partly { border-color:var(--partly) }
.facts { color:var(--faint); font-size:12px; margin-top:5px }
.right .facts { color:var(--right) } .wrong .facts { color:var(--wrong) } .partly .facts { color:var(--partly) }
.strip { font:12px/1.7 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; margin-top:6px;
  overflow-wrap:anywhere; max-height:15em; overflow:auto }
.strip span { white-space:pre-wrap; border-radius:3px; padding:1px 1px; margin-right:1px; background:var(--line) }
.strip.up span { background:color-mix(in srgb,var(--right) var(--depth),var(--paper)) }
.strip.down span { background:color-mix(in srgb,var(--wrong) var(--depth),var(--paper)) }
.strip .less { border-bottom:1px dotted currentColor } .strip .more { border-bottom:1px solid currentColor }
.strip .strong { border-bottom-width:3px }
.learners { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:12px; font-variant-numeric:tabular-nums }
.learner { color:var(--faint) } .learner b { font-weight:600; color:var(--ink) }
.up, .gain.up { color:var(--right) } .down, .gain.down { color:var(--wrong) }
details > summary { cursor:pointer; color:var(--faint); font-size:13px; margin:4px 0 8px }
"""
